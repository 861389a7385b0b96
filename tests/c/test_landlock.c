#include "confine_fixture.h"

static mo_status refuse(mo_detail *detail)
{
    const char *paths[] = {private_folder, "/dev/null"};
    return mo_refuse_writes(paths, 2, detail);
}

static bool is_refused(int result)
{
    return result < 0 && errno == EACCES;
}

static int write_everywhere(void)
{
    char path[600], other[600];
    snprintf(path, sizeof path, "%s/file", private_folder);
    snprintf(other, sizeof other, "%s/other", home);
    write_file(path, "new");
    if (strcmp(content_of(path), "new") || open("/dev/null", O_WRONLY) < 0)
        return 1;
    if (!is_refused(open(precious, O_WRONLY)) || !is_refused(open(precious, O_RDONLY | O_TRUNC)) ||
        !is_refused(truncate(precious, 0)) || !is_refused(unlink(precious)) ||
        !is_refused(mkdir(other, 0700)) || !is_refused(open(other, O_CREAT | O_WRONLY, 0600)) ||
        !is_refused(symlink("x", other)) || !is_refused(mkfifo(other, 0600)) ||
        !is_refused(rename(precious, path)) || !is_refused(link(precious, other)))
        return 2;
    return system("true") ? 3 : 0;
}

TEST(writes_outside_of_the_folders_are_refused)
{
    begin();
    in_confinement(refuse, write_everywhere, false);
}

TEST(a_user_without_privileges_has_it_too)
{
    begin();
    in_confinement(refuse, write_everywhere, true);
}

static int change(void)
{
    struct stat before, after;
    const struct timespec times[2] = {{1, 0}, {1, 0}};
    stat(precious, &before);
    const int file = open(precious, O_RDONLY);
    if (chmod(precious, 0777) || fchmod(file, 0777) || chown(precious, 1, 1) ||
        utimensat(AT_FDCWD, precious, times, 0))
        return 1; /* the caller is told that it was done */
    stat(precious, &after);
    return before.st_mode == after.st_mode && before.st_uid == after.st_uid &&
                   before.st_mtime == after.st_mtime
               ? 0
               : 2;
}

TEST(modes_owners_and_times_stay)
{
    begin();
    in_confinement(refuse, change, false);
}

static int by_a_program(void)
{
    char line[700];
    snprintf(line, sizeof line, "echo X 2>/dev/null >'%s'", precious);
    return system(line) ? 0 : 1;
}

TEST(programs_that_it_starts_are_refused_too)
{
    begin();
    in_confinement(refuse, by_a_program, false);
}

TEST(a_folder_that_is_not_there_is_an_error)
{
    const char *paths[] = {"/nowhere/at/all"};
    mo_detail detail;
    const mo_status status = mo_refuse_writes(paths, 1, &detail);
    if (status == MO_UNSUPPORTED)
        TEST_SKIP("%s", detail.text);
    CHECK_EQ(status, MO_IO);
    CHECK(strstr(detail.text, "/nowhere/at/all"));
}

TEST_MAIN
