#include "driver/kernel_cache.h"

#include <errno.h>
#include <ftw.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/hostmem.h"
#include "test.h"

#define KEY   "memopt 1\nsource 0123456789abcdef\noptions --gpu-architecture=sm_80\nNVRTC 13.0\n"
#define IMAGE "the kernels' machine code, or so"

static char folder[64];

static const char *fresh_folder(void)
{
    strcpy(folder, "/tmp/memopt-cache-XXXXXX");
    CHECK(mkdtemp(folder));
    return folder;
}

static int remove_one(const char *path, const struct stat *about, int kind, struct FTW *where)
{
    (void)about, (void)kind, (void)where;
    return remove(path);
}

static void remove_folder(void)
{
    nftw(folder, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

static mo_cache_finding find(const char *directory, const char *key)
{
    mo_cache_finding finding;
    mo_detail detail = {0};
    void *image = NULL;
    size_t size = 0;

    CHECK_EQ(mo_cache_load(directory, key, &finding, &image, &size, &detail), MO_OK);
    CHECK_EQ(image != NULL, finding == MO_CACHE_HIT);
    if (image) {
        CHECK_EQ(size, sizeof IMAGE);
        CHECK(memcmp(image, IMAGE, size) == 0);
    }
    if (finding == MO_CACHE_DAMAGED || finding == MO_CACHE_UNREADABLE)
        CHECK(strstr(detail.text, directory) && strstr(detail.text, "rebuilt"));
    mo_host_free(image);
    return finding;
}

static void store(const char *directory)
{
    mo_detail detail;
    if (mo_cache_store(directory, KEY, IMAGE, sizeof IMAGE, &detail))
        TEST_FAIL("%.300s", detail.text);
}

static size_t read_file(const char *path, char *out, size_t capacity)
{
    FILE *file = fopen(path, "rb");
    size_t size;
    CHECK(file);
    size = fread(out, 1, capacity, file);
    fclose(file);
    return size;
}

static void write_file(const char *path, const char *bytes, size_t size)
{
    FILE *file = fopen(path, "wb");
    CHECK(file);
    CHECK_EQ(fwrite(bytes, 1, size, file), size);
    fclose(file);
}

static int entries(void)
{
    char command[128];
    FILE *listing;
    int count = 0, c;
    snprintf(command, sizeof command, "ls -A %s", folder);
    listing = popen(command, "r");
    CHECK(listing);
    while ((c = getc(listing)) != EOF)
        count += c == '\n';
    pclose(listing);
    return count;
}

TEST(what_was_stored_is_found_under_its_key_only)
{
    const char *directory = fresh_folder();

    CHECK_EQ(find(directory, KEY), MO_CACHE_MISSING);
    store(directory);
    CHECK_EQ(find(directory, KEY), MO_CACHE_HIT);
    CHECK_EQ(find(directory, KEY "x"), MO_CACHE_MISSING);
    store(directory); /* again: replaced */
    CHECK_EQ(find(directory, KEY), MO_CACHE_HIT);
    CHECK_EQ(entries(), 1); /* no temporary file stays */
    remove_folder();
}

TEST(no_directory_means_no_cache)
{
    CHECK_EQ(find(NULL, KEY), MO_CACHE_OFF);
    CHECK_EQ(find("", KEY), MO_CACHE_OFF);
}

TEST(a_file_cut_at_any_length_is_damaged_and_replaced)
{
    const char *directory = fresh_folder();
    char path[MO_CACHE_PATH_MAX], bytes[1024];
    size_t size;

    CHECK_EQ(mo_cache_path(directory, KEY, path, NULL), MO_OK);
    store(directory);
    size = read_file(path, bytes, sizeof bytes);
    CHECK_EQ(size, MO_CACHE_HEADER_SIZE + strlen(KEY) + sizeof IMAGE);
    for (size_t cut = 0; cut < size; cut++) {
        write_file(path, bytes, cut);
        CHECK_EQ(find(directory, KEY), MO_CACHE_DAMAGED);
    }
    bytes[size] = 'x'; /* and one byte too long */
    write_file(path, bytes, size + 1);
    CHECK_EQ(find(directory, KEY), MO_CACHE_DAMAGED);
    store(directory);
    CHECK_EQ(find(directory, KEY), MO_CACHE_HIT);
    remove_folder();
}

TEST(a_file_with_any_one_bit_flipped_is_damaged)
{
    const char *directory = fresh_folder();
    char path[MO_CACHE_PATH_MAX], bytes[1024];
    size_t size;

    CHECK_EQ(mo_cache_path(directory, KEY, path, NULL), MO_OK);
    store(directory);
    size = read_file(path, bytes, sizeof bytes);
    for (size_t bit = 0; bit < 8 * size; bit++) {
        bytes[bit / 8] ^= (char)(1 << bit % 8);
        write_file(path, bytes, size);
        CHECK_EQ(find(directory, KEY), MO_CACHE_DAMAGED);
        bytes[bit / 8] ^= (char)(1 << bit % 8);
    }
    remove_folder();
}

TEST(another_keys_file_under_this_keys_name_is_damaged)
{
    const char *directory = fresh_folder();
    char mine[MO_CACHE_PATH_MAX], other[MO_CACHE_PATH_MAX];

    store(directory);
    CHECK_EQ(mo_cache_path(directory, KEY, mine, NULL), MO_OK);
    CHECK_EQ(mo_cache_path(directory, "another", other, NULL), MO_OK);
    CHECK_EQ(rename(mine, other), 0);
    CHECK_EQ(find(directory, "another"), MO_CACHE_DAMAGED);
    remove_folder();
}

TEST(a_directory_or_a_pipe_in_the_files_place_is_unreadable_and_does_not_block)
{
    const char *directory = fresh_folder();
    char path[MO_CACHE_PATH_MAX];
    mo_detail detail;

    CHECK_EQ(mo_cache_path(directory, KEY, path, NULL), MO_OK);
    CHECK_EQ(mkfifo(path, 0600), 0);
    CHECK_EQ(find(directory, KEY), MO_CACHE_UNREADABLE);
    store(directory); /* a rename replaces a pipe, */
    CHECK_EQ(find(directory, KEY), MO_CACHE_HIT);
    CHECK_EQ(remove(path), 0);
    CHECK_EQ(mkdir(path, 0700), 0);
    CHECK_EQ(find(directory, KEY), MO_CACHE_UNREADABLE);
    CHECK_EQ(mo_cache_store(directory, KEY, IMAGE, sizeof IMAGE, &detail), MO_IO); /* but not a directory */
    CHECK_EQ(detail.code, EISDIR);
    CHECK_EQ(entries(), 1); /* the temporary file is gone */
    remove_folder();
}

TEST(directories_are_made_private)
{
    char deep[128];
    struct stat about;

    fresh_folder();
    snprintf(deep, sizeof deep, "%s/a/b//c/", folder);
    store(deep);
    CHECK_EQ(find(deep, KEY), MO_CACHE_HIT);
    CHECK_EQ(stat(deep, &about), 0);
    CHECK_EQ(about.st_mode & 0777, 0700);
    remove_folder();
}

/* What lies in the directory is whole, and is not used; the reason says so. */
static void is_refused(const char *directory, const char *because)
{
    mo_cache_finding finding;
    mo_detail detail = {0};
    void *image = NULL;
    size_t size = 0;

    CHECK_EQ(mo_cache_load(directory, KEY, &finding, &image, &size, &detail), MO_OK);
    CHECK_EQ(finding, MO_CACHE_UNREADABLE);
    CHECK(!image);
    if (!strstr(detail.text, because) || !strstr(detail.text, directory))
        TEST_FAIL("%.300s", detail.text);
}

TEST(a_link_in_the_files_place_is_not_followed_and_is_replaced)
{
    const char *directory = fresh_folder();
    char path[MO_CACHE_PATH_MAX], aside[MO_CACHE_PATH_MAX + 8], before[1024], after[1024];

    CHECK_EQ(mo_cache_path(directory, KEY, path, NULL), MO_OK);
    store(directory);
    snprintf(aside, sizeof aside, "%s.aside", path);
    CHECK_EQ(rename(path, aside), 0);
    CHECK_EQ(symlink(aside, path), 0);
    const size_t size = read_file(aside, before, sizeof before);
    is_refused(directory, "symbolic link");
    store(directory);
    CHECK_EQ(find(directory, KEY), MO_CACHE_HIT);
    CHECK_EQ(read_file(aside, after, sizeof after), size); /* what it pointed to is not written to */
    CHECK(memcmp(before, after, size) == 0);
    remove_folder();
}

TEST(a_link_in_the_directorys_place_is_not_followed)
{
    char real[128], link[128];
    mo_detail detail;

    fresh_folder();
    snprintf(real, sizeof real, "%s/real", folder);
    snprintf(link, sizeof link, "%s/link", folder);
    store(real);
    CHECK_EQ(symlink(real, link), 0);
    is_refused(link, "symbolic link");
    CHECK_EQ(mo_cache_store(link, KEY, IMAGE, sizeof IMAGE, &detail), MO_IO);
    CHECK(strstr(detail.text, "symbolic link"));
    CHECK_EQ(find(real, KEY), MO_CACHE_HIT);
    remove_folder();
}

TEST(a_file_that_others_may_write_to_is_not_used_and_is_replaced)
{
    static const mode_t modes[] = {0620, 0602, 0666};
    const char *directory = fresh_folder();
    char path[MO_CACHE_PATH_MAX];

    CHECK_EQ(mo_cache_path(directory, KEY, path, NULL), MO_OK);
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        store(directory);
        CHECK_EQ(chmod(path, modes[i]), 0);
        is_refused(directory, "writable by others");
    }
    store(directory);
    CHECK_EQ(chmod(path, 0644), 0); /* to read is no harm */
    CHECK_EQ(find(directory, KEY), MO_CACHE_HIT);
    remove_folder();
}

TEST(a_directory_that_others_may_write_to_is_not_used)
{
    const char *directory = fresh_folder();
    mo_detail detail;

    store(directory);
    CHECK_EQ(chmod(directory, 01777), 0);
    is_refused(directory, "writable by others");
    CHECK_EQ(mo_cache_store(directory, KEY, IMAGE, sizeof IMAGE, &detail), MO_IO);
    CHECK(strstr(detail.text, "writable by others") && strstr(detail.text, "XDG_CACHE_HOME"));
    CHECK_EQ(chmod(directory, 0755), 0);
    CHECK_EQ(find(directory, KEY), MO_CACHE_HIT);
    CHECK_EQ(entries(), 1);
    remove_folder();
}

TEST(what_belongs_to_another_user_is_not_used)
{
    const char *directory = fresh_folder();
    char path[MO_CACHE_PATH_MAX];
    mo_detail detail;

    if (geteuid() != 0) {
        remove_folder();
        TEST_SKIP("only root gives a file away");
    }
    CHECK_EQ(mo_cache_path(directory, KEY, path, NULL), MO_OK);
    store(directory);
    CHECK_EQ(chown(path, 1, 1), 0);
    is_refused(directory, "another user");
    store(directory); /* replaced */
    CHECK_EQ(find(directory, KEY), MO_CACHE_HIT);
    CHECK_EQ(chown(directory, 1, 1), 0);
    is_refused(directory, "another user");
    CHECK_EQ(mo_cache_store(directory, KEY, IMAGE, sizeof IMAGE, &detail), MO_IO);
    CHECK(strstr(detail.text, "another user"));
    remove_folder();
}

TEST(what_a_process_that_died_has_left_is_in_nobodys_way)
{
    const char *directory = fresh_folder();
    char path[MO_CACHE_PATH_MAX], left[MO_CACHE_PATH_MAX + 32];

    CHECK_EQ(mo_cache_path(directory, KEY, path, NULL), MO_OK);
    snprintf(left, sizeof left, "%s.%ld-0", path, (long)getpid());
    write_file(left, "cut", 3);
    store(directory);
    CHECK_EQ(find(directory, KEY), MO_CACHE_HIT);
    CHECK_EQ(entries(), 2);
    remove_folder();
}

TEST(a_directory_that_cannot_be_made_is_an_io_error_that_names_it)
{
    char below[128];
    mo_detail detail = {0};

    fresh_folder();
    snprintf(below, sizeof below, "%s/file", folder);
    write_file(below, "", 0);
    strcat(below, "/kernels");
    CHECK_EQ(find(below, KEY), MO_CACHE_MISSING);
    CHECK_EQ(mo_cache_store(below, KEY, IMAGE, sizeof IMAGE, &detail), MO_IO);
    CHECK_EQ(detail.code, ENOTDIR);
    CHECK(strstr(detail.text, below) && strstr(detail.text, "XDG_CACHE_HOME"));
    CHECK_EQ(mo_cache_store("/proc/memopt", KEY, IMAGE, sizeof IMAGE, &detail),
             MO_IO); /* not even root may */
    remove_folder();
}

TEST(keys_and_paths_that_are_too_long_and_images_of_no_bytes_are_refused)
{
    char *key = malloc(MO_CACHE_KEY_MAX + 2), *directory = malloc(MO_CACHE_PATH_MAX + 1);
    mo_cache_finding finding;
    size_t size;
    void *image;

    memset(key, 'k', MO_CACHE_KEY_MAX + 1);
    key[MO_CACHE_KEY_MAX + 1] = 0;
    CHECK_EQ(mo_cache_load("/tmp", key, &finding, &image, &size, NULL), MO_INVALID);
    CHECK_EQ(mo_cache_store("/tmp", key, IMAGE, sizeof IMAGE, NULL), MO_INVALID);
    memset(directory, '/', MO_CACHE_PATH_MAX);
    directory[MO_CACHE_PATH_MAX - 20] = 0;
    CHECK_EQ(mo_cache_load(directory, KEY, &finding, &image, &size, NULL), MO_INVALID);
    CHECK_EQ(mo_cache_store(directory, KEY, IMAGE, sizeof IMAGE, NULL), MO_INVALID);
    CHECK_EQ(mo_cache_store("/tmp", KEY, IMAGE, 0, NULL), MO_INVALID);
    free(key);
    free(directory);
}

TEST(a_load_without_host_memory_fails_and_leaks_nothing)
{
    const char *directory = fresh_folder();
    const size_t before = mo_host_live();
    mo_cache_finding finding;
    size_t size = 1;
    void *image = &size;

    store(directory);
    mo_host_fail_after(0);
    CHECK_EQ(mo_cache_load(directory, KEY, &finding, &image, &size, NULL), MO_NO_HOST_MEMORY);
    mo_host_fail_never();
    CHECK(!image);
    CHECK_EQ(mo_host_live(), before);
    remove_folder();
}

/* Each of several processes stores and loads at once: a load finds the image or nothing, never a part of it.
 */
TEST(processes_at_once_see_a_whole_file_or_none)
{
    const char *directory = fresh_folder();
    const int rounds = test_rounds(60, 3000);
    pid_t children[4];

    for (int c = 0; c < 4; c++) {
        children[c] = fork();
        CHECK(children[c] >= 0);
        if (children[c] == 0) {
            for (int i = 0; i < rounds; i++) {
                mo_cache_finding finding = MO_CACHE_OFF;
                void *image = NULL;
                size_t size = 0;
                if (mo_cache_load(directory, KEY, &finding, &image, &size, NULL) != MO_OK ||
                    (finding != MO_CACHE_HIT && finding != MO_CACHE_MISSING) ||
                    (i > 0 && finding != MO_CACHE_HIT) ||
                    mo_cache_store(directory, KEY, IMAGE, sizeof IMAGE, NULL) != MO_OK)
                    _exit(1);
                mo_host_free(image);
            }
            _exit(0);
        }
    }
    for (int c = 0; c < 4; c++) {
        int status = -1;
        CHECK_EQ(waitpid(children[c], &status, 0), children[c]);
        CHECK_EQ(status, 0);
    }
    CHECK_EQ(entries(), 1);
    remove_folder();
}

TEST_MAIN
