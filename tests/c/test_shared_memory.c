#include "shared_fixture.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

static mo_shared_writer opened(mo_shared_budget *budget)
{
    mo_shared_writer w;
    mo_detail detail = {.text = ""};

    if (mo_shared_writer_open(budget, &detail, &w))
        TEST_FAIL("%s", detail.text);
    return w;
}

TEST(what_is_written_in_pieces_of_any_size_is_read_back)
{
    static uint8_t bytes[4 * MO_SHARED_BUFFER], back[sizeof bytes];
    static const size_t sizes[] = {
        1, 7, 0, MO_SHARED_BUFFER - 8, 1, MO_SHARED_BUFFER + 3, 100, MO_SHARED_BUFFER - 1};
    mo_shared_writer w = opened(NULL);
    mo_shared_mapping mapping;
    uint64_t random = test_seed();
    size_t at = 0;
    int fd;

    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)test_random(&random);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; at += sizes[i++]) {
        CHECK_EQ(mo_shared_write(&w, bytes + at, sizes[i], NULL), MO_OK);
        CHECK_EQ(mo_shared_writer_size(&w), at + sizes[i]);
        CHECK_EQ(w.capacity, MO_SHARED_BUFFER);
    }
    CHECK_EQ(mo_shared_flush(&w, NULL), MO_OK);
    CHECK_EQ(mo_shared_read_back(&w, 0, back, at, NULL), MO_OK);
    CHECK(memcmp(back, bytes, at) == 0);
    CHECK_EQ(mo_shared_seal(&w, NULL, &fd), MO_OK);
    CHECK_EQ(mo_shared_map(fd, false, NULL, &mapping), MO_OK);
    CHECK_EQ(mapping.size, at);
    CHECK(memcmp(mapping.bytes, bytes, at) == 0);
    mo_shared_unmap(&mapping);
    close(fd);
}

TEST(sealed_memory_cannot_be_changed_or_shortened)
{
    mo_shared_writer w = opened(NULL);
    int fd;

    CHECK_EQ(mo_shared_write(&w, "abc", 3, NULL), MO_OK);
    CHECK_EQ(mo_shared_seal(&w, NULL, &fd), MO_OK);
    CHECK(pwrite(fd, "x", 1, 0) < 0 && ftruncate(fd, 1) < 0 && ftruncate(fd, 100) < 0);
    CHECK(mmap(NULL, 3, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
    close(fd);
}

TEST(a_private_mapping_keeps_what_is_written_to_itself)
{
    mo_shared_writer w = opened(NULL);
    mo_shared_mapping mine, shared;
    int fd;

    CHECK_EQ(mo_shared_write(&w, "abc", 3, NULL), MO_OK);
    CHECK_EQ(mo_shared_seal(&w, NULL, &fd), MO_OK);
    CHECK_EQ(mo_shared_map(fd, true, NULL, &mine), MO_OK);
    CHECK_EQ(mo_shared_map(fd, false, NULL, &shared), MO_OK);
    mine.bytes[0] = 'x';
    CHECK(shared.bytes[0] == 'a');
    mo_shared_unmap(&mine);
    mo_shared_unmap(&shared);
    close(fd);
}

TEST(what_is_not_sealed_is_refused)
{
    mo_shared_mapping mapping;
    mo_detail detail;
    int fd = memfd_create("other", MFD_ALLOW_SEALING);

    CHECK_EQ(ftruncate(fd, 4096), 0);
    CHECK_EQ(mo_shared_map(fd, false, &detail, &mapping), MO_CORRUPT);
    CHECK(strstr(detail.text, "not sealed memory"));
    CHECK_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    CHECK_EQ(mo_shared_map(fd, false, NULL, &mapping), MO_CORRUPT);
    close(fd);
    CHECK_EQ(mo_shared_map(fd, false, NULL, &mapping), MO_IO);
    fd = open("/dev/null", O_RDONLY);
    CHECK_EQ(mo_shared_map(fd, false, NULL, &mapping), MO_CORRUPT);
    close(fd);
    fd = memfd_create("empty", MFD_ALLOW_SEALING);
    CHECK_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE), 0);
    CHECK_EQ(mo_shared_map(fd, false, NULL, &mapping), MO_CORRUPT);
    close(fd);
}

TEST(a_budget_is_kept_and_named)
{
    static const uint8_t bytes[MO_SHARED_BUFFER];
    mo_shared_budget budget = {.limit = 2 * MO_SHARED_BUFFER};
    mo_shared_writer w = opened(&budget);
    mo_detail detail;

    for (int i = 0; i < 3; i++) /* the third stays in the buffer */
        CHECK_EQ(mo_shared_write(&w, bytes, sizeof bytes, NULL), MO_OK);
    CHECK_EQ(mo_shared_flush(&w, &detail), MO_IO);
    CHECK_EQ(detail.code, ENOSPC);
    CHECK(strstr(detail.text, "2.00 MiB"));
    CHECK_EQ(mo_shared_extend(&w, 1, NULL), MO_IO);
    mo_shared_writer_close(&w);
}

TEST(padding_goes_to_a_multiple)
{
    mo_shared_writer w;

    mo_shared_writer_local(&w);
    for (size_t alignment = 1; alignment <= 64; alignment *= 2) {
        CHECK_EQ(mo_shared_write(&w, "x", 1, NULL), MO_OK);
        CHECK_EQ(mo_shared_write_padding(&w, alignment, NULL), MO_OK);
        CHECK_EQ(mo_shared_writer_size(&w) % alignment, 0);
    }
    mo_shared_writer_close(&w);
}

TEST(forgotten_pages_take_no_memory)
{
    static uint8_t bytes[64 * 4096];
    mo_shared_writer w = opened(NULL);
    struct stat file;

    memset(bytes, 1, sizeof bytes);
    CHECK_EQ(mo_shared_write(&w, bytes, sizeof bytes, NULL), MO_OK);
    CHECK_EQ(mo_shared_flush(&w, NULL), MO_OK);
    mo_shared_forget(&w, 60 * 4096 + 5);
    CHECK_EQ(fstat(w.fd, &file), 0);
    CHECK_EQ(file.st_blocks * 512, 4 * 4096);
    mo_shared_writer_close(&w);
}

TEST(a_child_of_a_fork_cannot_go_on_writing)
{
    mo_shared_writer w = opened(NULL);
    mo_detail detail = {.text = ""};
    int status;

    CHECK_EQ(mo_shared_write(&w, "abc", 3, NULL), MO_OK);
    const pid_t child = fork();
    if (!child)
        _exit(mo_shared_flush(&w, &detail) != MO_IO || detail.code != ECHILD ||
              mo_shared_extend(&w, 9, NULL) != MO_IO);
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    CHECK_EQ(mo_shared_flush(&w, NULL), MO_OK);
    mo_shared_writer_close(&w);
}

TEST(messages_name_what_failed_and_the_mend)
{
    static const struct {
        int code;
        const char *words;
    } cases[] = {{ENOSPC, "container's memory limit"}, {EFBIG, "ulimit -f"}, {EIO, "Input/output"}};
    mo_detail detail;

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mo_shared_writer w = opened(NULL);
        CHECK_EQ(mo_shared_write(&w, "abc", 3, NULL), MO_OK);
        mo_shared_fail_after(0, cases[i].code);
        const mo_status status = mo_shared_flush(&w, &detail);
        mo_shared_fail_never();
        CHECK_EQ(status, MO_IO);
        CHECK_EQ(detail.code, cases[i].code);
        CHECK(strstr(detail.text, cases[i].words));
        CHECK_EQ(mo_shared_flush(&w, NULL), MO_OK); /* nothing was lost */
        mo_shared_writer_close(&w);
    }
    mo_shared_fail_after(0, EMFILE);
    mo_shared_writer w;
    const mo_status status = mo_shared_writer_open(NULL, &detail, &w);
    mo_shared_fail_never();
    CHECK_EQ(status, MO_IO);
    CHECK(strstr(detail.text, "ulimit -n"));
}

TEST_MAIN
