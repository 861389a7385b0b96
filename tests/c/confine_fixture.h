/* A folder with files that are to stay what they are, and a process that is confined, in which a test does its worst. */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "confine/confine.h"
#include "test.h"

enum { OTHER_USER = 12345, NOT_HERE = 99 };

static char home[256], private_folder[512], precious[512];

static void write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    if (!file)
        TEST_FAIL("%s: %s", path, strerror(errno));
    fputs(text, file);
    fclose(file);
}

static const char *content_of(const char *path)
{
    static char text[256];
    FILE *file = fopen(path, "r");
    if (!file)
        return NULL;
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    return text;
}

/* Names with all that a mount's options would misread. */
static void begin(void)
{
    strcpy(home, "/tmp/memopt confine,a:b\\c-XXXXXX");
    if (!mkdtemp(home))
        TEST_FAIL("%s: %s", home, strerror(errno));
    snprintf(private_folder, sizeof private_folder, "%s/private", home);
    snprintf(precious, sizeof precious, "%s/precious", home);
    mkdir(private_folder, 0700);
    write_file(precious, "precious");
}

static void end(void)
{
    char line[600];
    snprintf(line, sizeof line, "rm -rf '%s'", home);
    if (system(line))
        TEST_FAIL("%s", line);
}

/* What `confined` returns from a process of its own, after `confine`: 0 is success, NOT_HERE where the kernel does not
 * allow it. As another user where this one is root and that is asked for. */
static void in_confinement(mo_status (*confine)(mo_detail *), int (*confined)(void), bool as_other_user)
{
    if (as_other_user && geteuid())
        TEST_SKIP("only root can be another user");
    if (as_other_user &&
        (chown(home, OTHER_USER, OTHER_USER) || chown(private_folder, OTHER_USER, OTHER_USER) ||
         chown(precious, OTHER_USER, OTHER_USER)))
        TEST_FAIL("giving the files away: %s", strerror(errno));
    const pid_t pid = fork();
    if (!pid) {
        mo_detail detail;
        if (as_other_user && (setgroups(0, NULL) || setgid(OTHER_USER) || setuid(OTHER_USER) ||
                              prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)))
            _exit(98);
        const mo_status status = confine(&detail);
        if (status)
            fprintf(stderr, "%s\n", detail.text);
        _exit(status == MO_UNSUPPORTED ? NOT_HERE : status ? 97 : confined());
    }
    int status;
    waitpid(pid, &status, 0);
    const bool same = content_of(precious) && !strcmp(content_of(precious), "precious");
    end();
    if (WIFEXITED(status) && WEXITSTATUS(status) == NOT_HERE)
        TEST_SKIP("this kernel, or what it runs in, does not allow it");
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
    CHECK(same);
}
