/* Writes that are refused. Landlock is asked by its numbers: its header is newer than some systems' headers. */
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "confine/confine.h"

/* The same on all architectures; of <linux/landlock.h>. */
enum { CREATE_RULESET = 444, ADD_RULE = 445, RESTRICT_SELF = 446 };
enum { VERSION = 1, PATH_BENEATH = 1, GUARDS_TRUNCATION = 3 };
enum {
    WRITE_FILE = 1 << 1,
    REMOVE_DIR = 1 << 4,
    REMOVE_FILE = 1 << 5,
    MAKE_ALL = 0x7f << 6, /* devices, folders, files, sockets, pipes, links */
    MOVE = 1 << 13,
    TRUNCATE = 1 << 14,
    OF_FILES = WRITE_FILE | TRUNCATE,
    ALL = OF_FILES | REMOVE_DIR | REMOVE_FILE | MAKE_ALL | MOVE
};

struct ruleset {
    uint64_t handled;
};

struct beneath {
    uint64_t allowed;
    int32_t folder;
} __attribute__((packed));

static mo_status refused(mo_detail *detail, const char *what, const char *path)
{
    return mo_fail(detail, MO_UNSUPPORTED, errno, "%s %s: %s", what, path, strerror(errno));
}

static mo_status allow(int ruleset, const char *path, mo_detail *detail)
{
    struct beneath rule = {.allowed = ALL, .folder = open(path, O_PATH | O_CLOEXEC)};
    struct stat of;
    mo_status status = MO_OK;

    if (rule.folder < 0 || fstat(rule.folder, &of))
        status = mo_fail(detail, MO_IO, errno, "opening %s: %s", path, strerror(errno));
    else {
        if (!S_ISDIR(of.st_mode))
            rule.allowed = OF_FILES;
        if (syscall(ADD_RULE, ruleset, PATH_BENEATH, &rule, 0))
            status = refused(detail, "allowing writes to", path);
    }
    if (rule.folder >= 0)
        close(rule.folder);
    return status;
}

/* ---- what Landlock does not know ---------------------------------------------------------------------------------- */

#if defined(__x86_64__)
#define ARCHITECTURE  AUDIT_ARCH_X86_64
#define OTHER_NUMBERS 0x40000000 /* from here on, those of x32 */
#elif defined(__aarch64__)
#define ARCHITECTURE  AUDIT_ARCH_AARCH64
#define OTHER_NUMBERS 0x7fffffff
#endif

/* Modes, owners, times and attributes. Those newer than some systems' headers, by their numbers. */
static const uint32_t CHANGES[] = {
#ifdef SYS_chmod
    SYS_chmod,     SYS_chown,     SYS_lchown,      SYS_utime,        SYS_utimes,       SYS_futimesat,
#endif
    SYS_fchmod,    SYS_fchmodat,  SYS_fchown,      SYS_fchownat,     SYS_utimensat,    SYS_setxattr,
    SYS_lsetxattr, SYS_fsetxattr, SYS_removexattr, SYS_lremovexattr, SYS_fremovexattr, 452, /* fchmodat2 */
    463,                                                                                    /* setxattrat */
    466, /* removexattrat */
    469, /* file_setattr */
};
enum { CHANGE_COUNT = sizeof CHANGES / sizeof CHANGES[0], IO_URING_SETUP = 425 };

/* Of <linux/fs.h>, which does not go with <sys/mount.h> in some systems' headers: chattr's. */
#define SET_FLAGS      0x40086602u
#define SET_ATTRIBUTES 0x401c5820u

/* Each is answered with success and not done: a copy of a file that keeps its mode and its times, say, is made without.
 * io_uring, whose requests no filter sees, is not there. */
static mo_status ignore_changes(mo_detail *detail)
{
#ifndef ARCHITECTURE
    return mo_fail(detail, MO_UNSUPPORTED, 0, "the system call filter does not support this processor");
#else
    enum { IOCTL = 5 + CHANGE_COUNT, ALLOW = IOCTL + 4, SUCCEED, NOT_THERE, LENGTH };
    struct sock_filter program[LENGTH];
    const struct sock_fprog filter = {.filter = program, .len = LENGTH};
    unsigned n = 0;

#define LOAD(field)                                                                                          \
    program[n++] =                                                                                           \
        (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define JUMP(test, value, yes, no)                                                                           \
    program[n] = (struct sock_filter)BPF_JUMP(BPF_JMP | (test) | BPF_K, value, (uint8_t)((yes)-n - 1),       \
                                              (uint8_t)((no)-n - 1));                                        \
    n++
#define RETURN(value) program[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, value)

    LOAD(arch);
    JUMP(BPF_JEQ, ARCHITECTURE, n + 1, NOT_THERE);
    LOAD(nr);
    JUMP(BPF_JGE, OTHER_NUMBERS, NOT_THERE, n + 1);
    JUMP(BPF_JEQ, IO_URING_SETUP, NOT_THERE, n + 1);
    for (unsigned i = 0; i < CHANGE_COUNT; i++) {
        JUMP(BPF_JEQ, CHANGES[i], SUCCEED, n + 1);
    }
    JUMP(BPF_JEQ, SYS_ioctl, n + 1, ALLOW);
    LOAD(args[1]); /* its lower half, on these processors */
    JUMP(BPF_JEQ, SET_FLAGS, SUCCEED, n + 1);
    JUMP(BPF_JEQ, SET_ATTRIBUTES, SUCCEED, n + 1);
    RETURN(SECCOMP_RET_ALLOW);
    RETURN(SECCOMP_RET_ERRNO | 0);
    RETURN(SECCOMP_RET_ERRNO | ENOSYS);
#undef LOAD
#undef JUMP
#undef RETURN
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter))
        return refused(detail, "filtering", "system calls");
    return MO_OK;
#endif
}

/* ------------------------------------------------------------------------------------------------------------------- */

mo_status mo_refuse_writes(const char *const *writable, size_t count, mo_detail *detail)
{
    const long version = syscall(CREATE_RULESET, NULL, 0, VERSION);
    const struct ruleset handled = {.handled = ALL};
    mo_status status = MO_OK;

    if (version < 0)
        return refused(detail, "asking for", "Landlock");
    if (version < GUARDS_TRUNCATION)
        return mo_fail(
            detail, MO_UNSUPPORTED, 0,
            "this kernel's Landlock does not protect files from truncation: Linux 6.2 or later is needed");
    const int ruleset = (int)syscall(CREATE_RULESET, &handled, sizeof handled, 0);
    if (ruleset < 0)
        return refused(detail, "making", "a Landlock ruleset");
    for (size_t i = 0; !status && i < count; i++)
        status = allow(ruleset, writable[i], detail);
    if (!status && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        status = refused(detail, "giving up", "new privileges");
    if (!status && syscall(RESTRICT_SELF, ruleset, 0))
        status = refused(detail, "applying", "a Landlock ruleset");
    close(ruleset);
    return status ? status : ignore_changes(detail);
}
