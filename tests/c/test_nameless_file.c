#include "transfer/nameless_file.h"

#include <dirent.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "child.h"
#include "failing_files.h"

enum { SIZE = 8 * MO_FILE_ALIGNMENT };

static char out[SIZE] __attribute__((aligned(MO_FILE_ALIGNMENT)));
static char back[SIZE] __attribute__((aligned(MO_FILE_ALIGNMENT)));
static char directory[64];
static mo_file file;

static void start(void)
{
    strcpy(directory, "/tmp/memopt-test-XXXXXX");
    CHECK(mkdtemp(directory));
    fail_nothing();
    CHECK_EQ(mo_file_open(directory, &failing_files, &file, NULL), MO_OK);
    for (size_t i = 0; i < SIZE; i++)
        out[i] = (char)(i * 7 + i / 256);
    memset(back, 0, SIZE);
}

static void finish(void)
{
    mo_file_close(&file);
    CHECK_EQ(failing.open, 0);
    CHECK_EQ(rmdir(directory), 0); /* nothing was left in it */
}

static void there_and_back(void)
{
    mo_detail detail;
    if (mo_file_write(&file, out, SIZE, SIZE, &detail) || mo_file_read(&file, back, SIZE, SIZE, &detail))
        TEST_FAIL("%s", detail.text);
    CHECK(memcmp(out, back, SIZE) == 0);
}

TEST(what_is_read_is_what_was_written_and_the_file_has_no_name)
{
    start();
    there_and_back();
    DIR *open = opendir(directory);
    int names = 0;
    for (struct dirent *entry; (entry = readdir(open));)
        names += entry->d_name[0] != '.';
    closedir(open);
    CHECK_EQ(names, 0);
    finish();
}

TEST(what_a_call_leaves_undone_is_done_by_the_next)
{
    static const size_t most[] = {MO_FILE_ALIGNMENT, 3 * MO_FILE_ALIGNMENT, 2 * MO_FILE_ALIGNMENT + 5,
                                  SIZE - 1};
    for (size_t i = 0; i < sizeof most / sizeof *most; i++) {
        start();
        failing.at_most = most[i];
        there_and_back();
        finish();
    }
    start();
    file.direct = false; /* in steps of any size, then */
    CHECK_EQ(mo_system_files.set_direct(file.descriptor, false), 0);
    failing.at_most = 1001;
    there_and_back();
    finish();
}

TEST(room_is_taken_before_anything_is_written)
{
    mo_detail detail;
    struct stat seen;

    start();
    fail_after(FAIL_RESERVE, 0, EINTR, true);
    CHECK_EQ(mo_file_reserve(&file, 0, SIZE, NULL), MO_OK);
    CHECK_EQ(fstat(file.descriptor, &seen), 0);
    CHECK_EQ(seen.st_size, SIZE);
    there_and_back();
    fail_after(FAIL_RESERVE, 0, ENOSPC, true);
    CHECK_EQ(mo_file_reserve(&file, SIZE, SIZE, &detail), MO_IO);
    CHECK(strstr(detail.text, directory) && strstr(detail.text, "reserving 32768 bytes"));
    CHECK(strstr(detail.text, "give a directory with more space"));
    fail_after(FAIL_RESERVE, 0, EOPNOTSUPP, true); /* by a file system that cannot */
    CHECK_EQ(mo_file_reserve(&file, SIZE, SIZE, NULL), MO_OK);
    finish();
}

TEST(an_interrupted_call_is_made_again)
{
    start();
    fail_after(FAIL_WRITE, 0, EINTR, true);
    CHECK_EQ(mo_file_write(&file, out, SIZE, 0, NULL), MO_OK);
    fail_after(FAIL_READ, 0, EINTR, true);
    CHECK_EQ(mo_file_read(&file, back, SIZE, 0, NULL), MO_OK);
    CHECK(memcmp(out, back, SIZE) == 0);
    finish();
    start();
    mo_file other;
    fail_after(FAIL_OPEN, 0, EINTR, true);
    CHECK_EQ(mo_file_open(directory, &failing_files, &other, NULL), MO_OK);
    mo_file_close(&other);
    finish();
}

TEST(a_file_system_that_refuses_direct_transfers_gets_others)
{
    for (int late = 0; late < 3; late++) {
        strcpy(directory, "/tmp/memopt-test-XXXXXX");
        CHECK(mkdtemp(directory));
        fail_nothing();
        if (!late)
            fail_after(FAIL_DIRECT, 0, EINVAL, true);
        CHECK_EQ(mo_file_open(directory, &failing_files, &file, NULL), MO_OK);
        CHECK(late || !file.direct);
        file.direct = late; /* wherever the test runs */
        if (late)
            fail_after(late == 1 ? FAIL_WRITE : FAIL_READ, 0, EINVAL, true);
        there_and_back();
        CHECK(!file.direct);
        finish();
    }
}

TEST(an_error_names_the_directory_the_place_and_the_mend)
{
    static const struct {
        int code;
        const char *mend;
    } errors[] = {
        {ENOSPC, "a directory with more space"}, {EFBIG, "ulimit -f"}, {EIO, "the disk or its file system"}};
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        start();
        mo_detail detail;
        fail_after(FAIL_WRITE, 0, errors[i].code, false);
        CHECK_EQ(mo_file_write(&file, out, SIZE, 4096, &detail), MO_IO);
        CHECK_EQ(detail.code, errors[i].code);
        CHECK(strstr(detail.text, directory) && strstr(detail.text, "bytes at 4096") &&
              strstr(detail.text, errors[i].mend));
        fail_after(FAIL_READ, 0, errors[i].code, false);
        CHECK_EQ(mo_file_read(&file, back, SIZE, 4096, &detail), MO_IO);
        CHECK_EQ(detail.code, errors[i].code);
        finish();
    }
}

TEST(a_full_disk_is_told_also_where_it_takes_a_part_first)
{
    start();
    mo_detail detail;
    failing.room = 3 * MO_FILE_ALIGNMENT;
    CHECK_EQ(mo_file_write(&file, out, SIZE, 0, &detail), MO_IO);
    CHECK_EQ(detail.code, ENOSPC);
    failing.room = SIZE_MAX;
    fail_after(FAIL_WRITE, 0, 0, false); /* takes nothing, and does not say why */
    CHECK_EQ(mo_file_write(&file, out, SIZE, 0, &detail), MO_IO);
    CHECK_EQ(detail.code, ENOSPC);
    finish();
}

TEST(what_was_never_written_or_was_cut_off_is_not_made_up)
{
    start();
    mo_detail detail;
    CHECK_EQ(mo_file_read(&file, back, SIZE, 0, &detail), MO_IO);
    CHECK_EQ(detail.code, EIO);
    CHECK_EQ(mo_file_write(&file, out, SIZE, 0, NULL), MO_OK);
    CHECK_EQ(ftruncate(file.descriptor, SIZE - MO_FILE_ALIGNMENT), 0);
    CHECK_EQ(mo_file_read(&file, back, SIZE, 0, &detail), MO_IO);
    CHECK(strstr(detail.text, "it ends before the bytes that were written there"));
    finish();
}

TEST(a_directory_that_goes_takes_nothing_away)
{
    start();
    CHECK_EQ(mo_file_write(&file, out, SIZE, 0, NULL), MO_OK);
    CHECK_EQ(rmdir(directory), 0);
    CHECK_EQ(mo_file_read(&file, back, SIZE, 0, NULL), MO_OK);
    CHECK(memcmp(out, back, SIZE) == 0);
    there_and_back();
    mo_detail detail;
    mo_file other;
    CHECK_EQ(mo_file_open(directory, &failing_files, &other, &detail), MO_IO);
    CHECK(detail.code == ENOENT && strstr(detail.text, directory) && strstr(detail.text, "that exists"));
    mo_file_close(&file);
}

TEST(a_name_that_is_too_long_is_refused)
{
    char name[600];
    mo_file other;
    memset(name, 'x', sizeof name);
    name[sizeof name - 1] = 0;
    CHECK_EQ(mo_file_open(name, &mo_system_files, &other, NULL), MO_INVALID);
}

static void beyond_the_limit(void)
{
    const struct rlimit limit = {SIZE, SIZE};
    mo_detail detail;
    signal(SIGXFSZ, SIG_IGN); /* as Python does */
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    CHECK_EQ(mo_file_write(&file, out, SIZE, 0, NULL), MO_OK);
    CHECK_EQ(mo_file_write(&file, out, SIZE, SIZE, &detail), MO_IO);
    CHECK(detail.code == EFBIG && strstr(detail.text, "ulimit -f"));
}

TEST(a_limit_of_the_system_is_told_as_such)
{
    start();
    CHECK_CHILD(beyond_the_limit);
    finish();
}

TEST_MAIN
