#include "confine_fixture.h"

static char beside[600], shared[600];

static mo_status overlay(mo_detail *detail)
{
    const char *paths[] = {shared};
    return mo_overlay_files(private_folder, paths, 1, detail);
}

static void prepare(void)
{
    begin();
    snprintf(beside, sizeof beside, "%s/beside", home);
    snprintf(shared, sizeof shared, "%s/shared", home);
    mkdir(shared, 0777);
    chmod(shared, 0777);
}

static int write_over(void)
{
    struct stat there;
    write_file(precious, "lost");
    write_file(beside, "new");
    if (strcmp(content_of(precious), "lost") || strcmp(content_of(beside), "new"))
        return 1;
    return unlink(precious) || !stat(precious, &there) || errno != ENOENT ? 2 : 0;
}

TEST(what_is_written_reads_back_and_was_never_there)
{
    prepare();
    in_confinement(overlay, write_over, false);
}

TEST(a_user_without_privileges_has_it_too)
{
    prepare();
    in_confinement(overlay, write_over, true);
}

static int of_a_program(void)
{
    char line[2000];
    snprintf(line, sizeof line,
             "cd '%s' && rm precious && mkdir precious && echo X >/dev/shm/memopt-test-X &&"
             " test -e /dev/shm/memopt-test-X && echo X >/dev/null",
             home);
    return system(line) ? 1 : 0;
}

TEST(programs_that_it_starts_write_there_too)
{
    prepare();
    in_confinement(overlay, of_a_program, false);
    CHECK(!content_of("/dev/shm/memopt-test-X"));
}

static int to_shared(void)
{
    char path[700], kept[1000];
    snprintf(path, sizeof path, "%s/file", shared);
    write_file(path, "kept");
    snprintf(kept, sizeof kept, "%s/files%s", private_folder, home);
    write_file(beside, "new");
    return access(kept, F_OK) ? 1 : 0; /* what was written lies in the scratch folder, and is seen there */
}

TEST(a_shared_folder_stays_what_it_is)
{
    char path[700];
    prepare();
    snprintf(path, sizeof path, "%s/file", shared);
    const pid_t pid = fork();
    if (!pid) {
        mo_detail detail;
        const mo_status status = overlay(&detail);
        _exit(status == MO_UNSUPPORTED ? NOT_HERE : status ? 97 : to_shared());
    }
    int status;
    waitpid(pid, &status, 0);
    const bool kept = content_of(path) && !strcmp(content_of(path), "kept");
    const bool gone = !content_of(beside);
    end();
    if (WEXITSTATUS(status) == NOT_HERE)
        TEST_SKIP("this kernel, or what it runs in, does not allow it");
    CHECK_EQ(WEXITSTATUS(status), 0);
    CHECK(kept);
    CHECK(gone);
}

static int where(void)
{
    char now[600];
    return getcwd(now, sizeof now) && !strcmp(now, home) && !access("precious", R_OK) ? 0 : 1;
}

static mo_status overlay_from_home(mo_detail *detail)
{
    if (chdir(home))
        return mo_fail(detail, MO_IO, errno, "%s", strerror(errno));
    return overlay(detail);
}

TEST(the_current_folder_is_the_same_one)
{
    prepare();
    in_confinement(overlay_from_home, where, false);
}

TEST(a_relative_scratch_folder_is_refused)
{
    mo_detail detail;
    CHECK_EQ(mo_overlay_files("scratch", NULL, 0, &detail), MO_INVALID);
    CHECK(strstr(detail.text, "scratch"));
}

TEST_MAIN
