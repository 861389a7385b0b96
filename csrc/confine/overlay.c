/* All file systems under overlays. A folder that holds a mount point cannot be the lower layer of one in a user
 * namespace, for that would uncover what is mounted over; so a tree of folders in memory stands in for those that lead
 * to mount points, and what is beside is put into it piece by piece:
 *
 *     /                in memory      /home    overlay         /etc    overlay
 *     /mnt             in memory      /mnt/a   overlay         /mnt/disk (mounted) overlay
 *     /proc /sys /dev  as they are    /dev/shm overlay         /notes.txt (a file) read-only
 *
 * Where no overlay can lie over a file system it is there read-only. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "confine/confine.h"

#ifndef SYS_mount_setattr
#define SYS_mount_setattr 442
#endif

/* Of <linux/mount.h>, which is newer than some systems' headers. */
struct mount_attributes {
    uint64_t set, clear, propagation, user_namespace;
};
enum { READ_ONLY = 0x1, ALL_BELOW = 0x8000 };

struct cover {
    const char *scratch;
    char *mounts; /* mount points, each ended by a zero, all by another */
    const char *options;
    unsigned overlays;
    mo_detail *detail;
};

/* A path as text; too long a one is cut, and then is not there. */
struct path {
    char text[4096];
};

static struct path joined(const char *one, const char *two, const char *three)
{
    struct path made;
    if (snprintf(made.text, sizeof made.text, "%s%s%s", one, two, three) >= (int)sizeof made.text)
        made.text[0] = 0;
    return made;
}

static mo_status refused(const struct cover *cover, const char *what, const char *path)
{
    return mo_fail(cover->detail, MO_UNSUPPORTED, errno, "%s %s: %s", what, path, strerror(errno));
}

/* ---- mount points ---------------------------------------------------------------------------------------------- */

/* In place: \ooo is a byte. */
static void unescape(char *text)
{
    char *to = text;
    while (*text) {
        if (text[0] == '\\' && text[1] && text[2] && text[3]) {
            *to++ = (char)((text[1] - '0') * 64 + (text[2] - '0') * 8 + (text[3] - '0'));
            text += 4;
        } else {
            *to++ = *text++;
        }
    }
    *to = 0;
}

/* The fifth word of each line of mountinfo. */
static mo_status read_mounts(struct cover *cover)
{
    FILE *file = fopen("/proc/self/mountinfo", "re");
    size_t used = 0, room = 0, line_room = 0;
    char *line = NULL;

    if (!file)
        return refused(cover, "reading", "/proc/self/mountinfo");
    while (getline(&line, &line_room, file) > 0) {
        char *rest = line, *word = NULL;
        for (int i = 0; i < 5; i++)
            word = strsep(&rest, " ");
        if (!word)
            continue;
        unescape(word);
        const size_t size = strlen(word) + 1;
        if (used + size + 1 > room) {
            char *more = realloc(cover->mounts, room = 2 * (used + size + 1));
            if (!more) {
                free(line);
                fclose(file);
                return mo_fail(cover->detail, MO_NO_HOST_MEMORY, 0, "no memory for the list of mounts");
            }
            cover->mounts = more;
        }
        memcpy(cover->mounts + used, word, size);
        used += size;
    }
    free(line);
    fclose(file);
    if (!used)
        return refused(cover, "finding a mount in", "/proc/self/mountinfo");
    cover->mounts[used] = 0;
    return MO_OK;
}

static bool holds_mounts(const struct cover *cover, const char *path)
{
    const size_t length = strlen(path);
    for (const char *mount = cover->mounts; *mount; mount += strlen(mount) + 1)
        if (!strncmp(mount, path, length) && mount[length] == '/' && mount[length + 1])
            return true;
    return false;
}

/* ---- one folder or file ---------------------------------------------------------------------------------------- */

/* All folders that lead to `path`, which begins below the folder `from`, and itself. */
static bool make_folders(const char *from, const char *path, struct path *made)
{
    *made = joined(from, path, "");
    for (char *slash = made->text + strlen(from); *slash; slash++)
        if (*slash == '/' && slash > made->text + strlen(from)) {
            *slash = 0;
            mkdir(made->text, 0700);
            *slash = '/';
        }
    return !mkdir(made->text, 0700) || errno == EEXIST;
}

static int open_folder(const char *path)
{
    return open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
}

/* With what is written in base/files/…; the folders are named by their descriptors, for which no path is too long and
 * no character special. volatile: nobody waits for a disk, at the end of a mount either. */
static bool lay_over(struct cover *cover, const char *base, const char *path, const char *target)
{
    char options[256], number[32];
    struct path upper, work;
    struct stat like;
    bool done = false;

    snprintf(number, sizeof number, "/%u", cover->overlays++);
    if (stat(path, &like) || !make_folders(joined(base, "/files", "").text, path, &upper) ||
        !make_folders(joined(base, "/work", "").text, number, &work))
        return false;
    /* The folder is what its upper layer is. A user other than root may own what is another's: it is a scratch folder. */
    if (chown(upper.text, like.st_uid, like.st_gid))
        errno = 0;
    if (chmod(upper.text, like.st_mode & 07777))
        return false;
    int folders[] = {open_folder(path), open_folder(upper.text), open_folder(work.text)};
    snprintf(options, sizeof options,
             "lowerdir=/proc/self/fd/%d,upperdir=/proc/self/fd/%d,workdir=/proc/self/fd/%d,volatile%s",
             folders[0], folders[1], folders[2], cover->options);
    if (folders[0] >= 0 && folders[1] >= 0 && folders[2] >= 0)
        done = !mount("memopt", target, "overlay", 0, options);
    for (int i = 0; i < 3; i++)
        if (folders[i] >= 0)
            close(folders[i]);
    return done;
}

static bool bind_to(const char *path, const char *target, bool read_only)
{
    const struct mount_attributes attributes = {.set = READ_ONLY};
    return !mount(path, target, NULL, MS_BIND | MS_REC, NULL) &&
           (!read_only ||
            !syscall(SYS_mount_setattr, AT_FDCWD, target, ALL_BELOW, &attributes, sizeof attributes));
}

/* A folder without mount points in it. */
static mo_status cover_folder(struct cover *cover, const char *path, const char *target)
{
    const struct path ram = joined(cover->scratch, "/ram", "");
    const bool shared_memory = !strcmp(path, "/dev/shm");

    if (!shared_memory && lay_over(cover, cover->scratch, path, target))
        return MO_OK;
    if (lay_over(cover, ram.text, path, target) || bind_to(path, target, true))
        return MO_OK;
    return refused(cover, "covering", path);
}

/* What is neither a folder nor a link. One that cannot be bound is left out: it cannot be written to either. */
static void cover_file(const char *path, const char *target)
{
    const int made = open(target, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
    if (made >= 0) {
        close(made);
        if (!bind_to(path, target, true))
            unlink(target);
    }
}

static void cover_link(const char *path, const char *target)
{
    char to[4096];
    const ssize_t length = readlink(path, to, sizeof to - 1);
    if (length > 0) {
        to[length] = 0;
        if (symlink(to, target))
            errno = 0; /* the name is not there, then */
    }
}

/* ---- the tree -------------------------------------------------------------------------------------------------- */

static bool stays(const char *path)
{
    return !strcmp(path, "/proc") || !strcmp(path, "/sys") || !strcmp(path, "/dev");
}

static mo_status cover_tree(struct cover *cover, const char *path);

static mo_status cover_entry(struct cover *cover, const char *path)
{
    const struct path target = joined(cover->scratch, "/ram/root", path);
    struct stat like;

    if (lstat(path, &like))
        return MO_OK; /* it may be gone again */
    if (S_ISLNK(like.st_mode)) {
        cover_link(path, target.text);
        return MO_OK;
    }
    if (!S_ISDIR(like.st_mode)) {
        cover_file(path, target.text);
        return MO_OK;
    }
    if (mkdir(target.text, 0700) || chmod(target.text, like.st_mode & 07777))
        return refused(cover, "creating a folder for", path);
    if (chown(target.text, like.st_uid, like.st_gid))
        errno = 0; /* as in lay_over() */
    if (stays(path))
        return bind_to(path, target.text, false) ? MO_OK : refused(cover, "binding", path);
    return holds_mounts(cover, path) ? cover_tree(cover, path) : cover_folder(cover, path, target.text);
}

/* `path`: "" for the root. */
static mo_status cover_tree(struct cover *cover, const char *path)
{
    DIR *folder = opendir(*path ? path : "/");
    mo_status status = MO_OK;

    if (!folder) /* whoever may not look into it has no business with what is mounted there */
        return MO_OK;
    for (struct dirent *entry; !status && (entry = readdir(folder));)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            status = cover_entry(cover, joined(path, "/", entry->d_name).text);
    closedir(folder);
    return status;
}

/* ---- namespaces ------------------------------------------------------------------------------------------------ */

static bool write_text(const char *path, const char *text)
{
    const int file = open(path, O_WRONLY | O_CLOEXEC);
    const bool done = file >= 0 && write(file, text, strlen(text)) == (ssize_t)strlen(text);
    if (file >= 0)
        close(file);
    return done;
}

/* Mounts of this process's own: by what it may do, else in a user namespace in which it is who it was. */
static mo_status own_mounts(struct cover *cover)
{
    char user[64], group[64];

    snprintf(user, sizeof user, "%u %u 1", getuid(), getuid());
    snprintf(group, sizeof group, "%u %u 1", getgid(), getgid());
    cover->options = "";
    if (unshare(CLONE_NEWNS)) {
        if (unshare(CLONE_NEWUSER | CLONE_NEWNS))
            return refused(cover, "making", "a user namespace");
        cover->options = ",userxattr";
        if (!write_text("/proc/self/setgroups", "deny") || !write_text("/proc/self/uid_map", user) ||
            !write_text("/proc/self/gid_map", group))
            return refused(cover, "mapping", "this user into a namespace");
    }
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
        return refused(cover, "making private the mounts on", "/");
    return MO_OK;
}

static mo_status drop_capabilities(const struct cover *cover)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct none[2] = {{0}};
    return syscall(SYS_capset, &header, none) ? refused(cover, "giving up", "a namespace's capabilities")
                                              : MO_OK;
}

/* The scratch folder's own tmpfs, with the root that is to be. */
static mo_status make_root(const struct cover *cover)
{
    const struct path ram = joined(cover->scratch, "/ram", "");

    if (mkdir(ram.text, 0700) || mount("memopt", ram.text, "tmpfs", 0, "mode=755") ||
        mkdir(joined(ram.text, "/root", "").text, 0755) || mkdir(joined(ram.text, "/files", "").text, 0755) ||
        mkdir(joined(ram.text, "/work", "").text, 0755) ||
        mkdir(joined(cover->scratch, "/files", "").text, 0755) ||
        mkdir(joined(cover->scratch, "/work", "").text, 0755))
        return refused(cover, "creating a root in", cover->scratch);
    return MO_OK;
}

static mo_status cover_all(struct cover *cover, const char *const *shared, size_t count)
{
    const struct path root = joined(cover->scratch, "/ram/root", ""),
                      ram = joined(cover->scratch, "/ram", "");
    struct stat there;
    mo_status status;

    if ((status = cover_tree(cover, "")))
        return status;
    const struct path memory = joined(root.text, "/dev/shm", "");
    if (!stat(memory.text, &there) && S_ISDIR(there.st_mode) &&
        (status = cover_folder(cover, "/dev/shm", memory.text)))
        return status;
    for (size_t i = 0; i < count; i++)
        if (mount(shared[i], joined(root.text, shared[i], "").text, NULL, MS_BIND, NULL))
            return refused(cover, "sharing", shared[i]);
    if (mount(cover->scratch, joined(root.text, cover->scratch, "").text, NULL, MS_BIND, NULL) ||
        mount(ram.text, joined(root.text, ram.text, "").text, NULL, MS_BIND, NULL))
        return refused(cover, "sharing", cover->scratch);
    return MO_OK;
}

mo_status mo_overlay_files(const char *scratch, const char *const *shared, size_t count, mo_detail *detail)
{
    struct cover cover = {.scratch = scratch, .detail = detail};
    char *here = getcwd(NULL, 0);
    mo_status status;

    if (scratch[0] != '/')
        status =
            mo_fail(detail, MO_INVALID, 0, "the scratch folder's path must be absolute, not %s", scratch);
    else if (!(status = own_mounts(&cover)) && !(status = read_mounts(&cover)) &&
             !(status = make_root(&cover)) && !(status = cover_all(&cover, shared, count))) {
        /* From here on a failure would leave a process between two roots: there is none that is not a bug. */
        if (chroot(joined(scratch, "/ram/root", "").text))
            status = refused(&cover, "entering", "the covered root");
        else if ((!here || chdir(here)) && chdir("/"))
            status = refused(&cover, "entering", "the covered root");
        else if (*cover.options)
            status = drop_capabilities(&cover);
    }
    free(cover.mounts);
    free(here);
    return status;
}
