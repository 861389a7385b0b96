/* The text of an out-of-memory error: torch's words first, then what is true of the numbers, then what would help. */
#include "alloc/out_of_memory.h"

#include "test.h"

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)

static const char *size_of(size_t bytes)
{
    static char text[MO_TORCH_SIZE_TEXT];
    return mo_torch_size(bytes, text);
}

TEST(sizes_are_written_as_torch_writes_them)
{
    CHECK_STR(size_of(0), "0 bytes");
    CHECK_STR(size_of(1024), "1024 bytes");
    CHECK_STR(size_of(1025), "1.00 KiB");
    CHECK_STR(size_of(1536), "1.50 KiB");
    CHECK_STR(size_of(MIB), "1024.00 KiB");
    CHECK_STR(size_of(600 * MIB), "600.00 MiB");
    CHECK_STR(size_of(GIB), "1024.00 MiB");
    CHECK_STR(size_of(GIB + GIB / 2), "1.50 GiB");
    CHECK_STR(size_of(GIB << 10), "1024.00 GiB");
    CHECK_STR(size_of(SIZE_MAX), "17179869184.00 GiB");
}

/* A device of 1 GiB of which 400 MiB are free and 600 MiB ours, all live. */
static mo_out_of_memory full(void)
{
    return (mo_out_of_memory){.device = 0,
                              .wanted = 600 * MIB,
                              .total_bytes = GIB,
                              .free_bytes = 424 * MIB,
                              .held = 600 * MIB,
                              .live = 600 * MIB,
                              .requested = 599 * MIB,
                              .largest_allocatable = 424 * MIB};
}

static const char *text_of(mo_out_of_memory facts)
{
    static char text[1024];
    memset(text, 'x', sizeof text);
    mo_out_of_memory_text(text, sizeof text, &facts);
    CHECK(memchr(text, '\0', sizeof text));
    return text;
}

#define CHECK_SAYS(text, words)                                                                              \
    do {                                                                                                     \
        test_checks++;                                                                                       \
        if (!strstr(text, words))                                                                            \
            TEST_FAIL("not \"%s\" in: %s", words, text);                                                     \
    } while (0)

TEST(the_first_words_are_torchs)
{
    const char *begins = "CUDA out of memory. Tried to allocate 600.00 MiB. GPU 0 has a total capacity of "
                         "1024.00 MiB of which 424.00 MiB is free. ";
    CHECK(!strncmp(text_of(full()), begins, strlen(begins)));
}

TEST(what_is_held_is_told_apart)
{
    mo_out_of_memory f = full();
    f.held = 610 * MIB;
    f.free_bytes = 400 * MIB;
    f.largest_free = 6 * MIB;
    f.largest_allocatable = 10 * MIB;
    f.external = 0.4;
    f.internal = 0.0123;
    const char *text = text_of(f);
    CHECK_SAYS(
        text,
        "memopt holds 610.00 MiB: 600.00 MiB in live tensors (599.00 MiB requested) and 10.00 MiB free, "
        "of which the largest run is 6.00 MiB, or 10.00 MiB after moving memory together");
    CHECK_SAYS(text, "(fragmentation: external 40.0%, internal 1.2%)");
    CHECK_SAYS(text, "14.00 MiB of the device is held by the CUDA context");
    CHECK(!strstr(text, "allowed") && !strstr(text, "queued work") && !strstr(text, "unmapped"));
}

TEST(a_device_that_does_not_answer_is_no_device_of_zero_bytes)
{
    mo_out_of_memory f = full();
    f.total_bytes = f.free_bytes = 0;
    const char *text = text_of(f);
    CHECK_SAYS(text, "Tried to allocate 600.00 MiB. GPU 0 did not report its capacity.");
    CHECK(!strstr(text, "total capacity") && !strstr(text, "the CUDA context"));
}

TEST(pending_work_is_told_by_stream)
{
    mo_out_of_memory f = full();
    f.pending_bytes = 300 * MIB;
    f.pending_streams = 2;
    f.pending[0] = (mo_pending){(mo_stream)0x55aa10, 200 * MIB};
    f.pending[1] = (mo_pending){NULL, 100 * MIB};
    const char *text = text_of(f);
    CHECK_SAYS(text,
               "300.00 MiB is freed but may still be used by queued work: 200.00 MiB on stream 0x55aa10, "
               "100.00 MiB on stream 0.");
    CHECK_SAYS(text, "What would help: waiting for that work (torch.cuda.synchronize())");
    f.pending_streams = 100; /* only those there are */
    CHECK_SAYS(text_of(f), "100.00 MiB on stream 0, 0 bytes on stream 0, 0 bytes on stream 0.");
}

TEST(advice_follows_the_reason)
{
    mo_out_of_memory f = full();
    CHECK_SAYS(text_of(f), "What would help: using 176.00 MiB less: a smaller batch");
    f.wanted = 2 * GIB;
    CHECK_SAYS(text_of(f), "What would help: a smaller tensor, since this one is larger than the device.");
    f = full();
    f.budget = 590 * MIB;
    CHECK_SAYS(text_of(f), "590.00 MiB allowed.");
    CHECK_SAYS(text_of(f),
               "What would help: a larger memory_budget or memory fraction, since this tensor alone");
    f.budget = 700 * MIB;
    f.wanted = 200 * MIB;
    f.largest_allocatable = 100 * MIB;
    CHECK_SAYS(text_of(f),
               "What would help: a larger memory_budget or memory fraction: the device has 424.00 MiB free.");
    f = full();
    f.wanted = 100 * MIB; /* enough is free, and none of it can be moved */
    f.held = 1000 * MIB;
    f.live = 800 * MIB;
    f.free_bytes = 0;
    f.largest_allocatable = 10 * MIB;
    CHECK_SAYS(text_of(f), "What would help: contiguous free memory: ");
}

/* The longest that there can be, and any cut of it. */
TEST(any_numbers_fit_a_detail_and_any_buffer_ends)
{
    mo_out_of_memory f;
    char text[1024], cut[1024];

    memset(&f, 0xff, sizeof f);
    f.device = 63;
    f.external = f.internal = 1;
    f.held -= 1;
    f.largest_free -= 1;
    mo_out_of_memory_text(text, sizeof text, &f);
    CHECK(strlen(text) < sizeof text - 1);
    CHECK_EQ(text[strlen(text) - 1], '.');
    for (size_t capacity = 1; capacity < sizeof cut; capacity++) {
        memset(cut, 'x', sizeof cut);
        mo_out_of_memory_text(cut, capacity, &f);
        CHECK(strlen(cut) < capacity && !strncmp(cut, text, strlen(cut)));
        CHECK(cut[capacity] == 'x');
    }
}

TEST_MAIN
