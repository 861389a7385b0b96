/* The plain form of a trace: what it says, what it refuses and how it says so; random traces come back as they were
 * written. */
#include "alloc/trace_text.h"
#include "base/hostmem.h"
#include "test.h"

static mo_detail why;

static mo_status parse(const char *text, mo_trace_text *out)
{
    why.text[0] = 0;
    return mo_trace_text_parse(text, strlen(text), &why, out);
}

static void refused(const char *text, const char *words)
{
    mo_trace_text t = {.steps = 77};
    const size_t live = mo_host_live();

    CHECK_EQ(parse(text, &t), MO_INVALID);
    CHECK_STR(why.text, words);
    CHECK_EQ(why.status, MO_INVALID);
    CHECK_EQ(t.steps, 77);
    CHECK_EQ(mo_host_live(), live);
    CHECK_EQ(mo_trace_text_parse(text, strlen(text), NULL, &t), MO_INVALID);
}

TEST(every_kind_of_line_is_understood)
{
    mo_trace_text t;

    CHECK_EQ(parse("# a model\n"
                   "a 7 1024 0\n"
                   "a 3 0 5 1\t# a tensor of no bytes\n"
                   "\n"
                   "  r 7 5\r\n"
                   "w 5 0\n"
                   "a 12 9223372036854774783 18446744073709551615 63 18446744073709551615\n"
                   "f 7 5\n"
                   "s#the end\n"
                   "f 3 5",
                   &t),
             MO_OK);
    CHECK_EQ(t.event_count, 8);
    CHECK_EQ(t.block_count, 3);
    CHECK_EQ(t.stream_count, 3);
    CHECK_EQ(t.steps, 1);
    CHECK_EQ(t.streams[0], 0);
    CHECK_EQ(t.streams[1], 5);
    CHECK(t.streams[2] == UINT64_MAX);

    const uint8_t ops[] = {MO_TRACE_ALLOC, MO_TRACE_ALLOC, MO_TRACE_RECORD_STREAM, MO_TRACE_WAIT,
                           MO_TRACE_ALLOC, MO_TRACE_FREE,  MO_TRACE_STEP,          MO_TRACE_FREE};
    const uint32_t lines[] = {2, 3, 5, 6, 7, 8, 9, 10};
    for (int i = 0; i < 8; i++) {
        CHECK_EQ(t.events[i].op, ops[i]);
        CHECK_EQ(t.events[i].line, lines[i]);
    }
    CHECK_EQ(t.events[2].block, 0);
    CHECK_EQ(t.events[2].stream, 1);
    CHECK_EQ(t.events[3].stream, 1);
    CHECK_EQ(t.events[3].other, 0);

    CHECK_EQ(t.blocks[0].id, 7);
    CHECK_EQ(t.blocks[0].size, 1024);
    CHECK_EQ(t.blocks[0].born, 0);
    CHECK_EQ(t.blocks[0].died, 5);
    CHECK_EQ(t.blocks[1].device, 1);
    CHECK_EQ(t.blocks[1].stream, 1);
    CHECK_EQ(t.blocks[1].died, 7);
    CHECK_EQ(t.blocks[2].size, INT64_MAX - 1024);
    CHECK_EQ(t.blocks[2].device, 63);
    CHECK(t.blocks[2].pool == UINT64_MAX);
    CHECK_EQ(t.blocks[2].died, MO_TRACE_NEVER);
    mo_trace_text_clear(&t);
}

TEST(a_trace_may_be_empty)
{
    mo_trace_text t;
    char *text;
    size_t length;

    CHECK_EQ(parse("", &t), MO_OK);
    CHECK_EQ(t.event_count, 0);
    CHECK_EQ(mo_trace_text_write(&t, &why, &text, &length), MO_OK);
    CHECK_STR(text, "");
    CHECK_EQ(length, 0);
    mo_host_free(text);
    mo_trace_text_clear(&t);
    CHECK_EQ(parse("# nothing\n\n   \n\r\n", &t), MO_OK);
    CHECK_EQ(t.event_count, 0);
    mo_trace_text_clear(&t);
}

TEST(an_error_names_its_line)
{
    refused("a 1 2 3\nx 1 2\n", "line 2: a line must begin with a, f, r, w or s, or with # for a comment");
    refused("alloc 1 2 3\n", "line 1: a line must begin with a, f, r, w or s, or with # for a comment");
    refused("a 1 2\n", "line 1: the stream is missing");
    refused("\n\na 1\n", "line 3: the number of bytes is missing");
    refused("a\n", "line 1: the id is missing");
    refused("a 1 2 3 # device\na 2 1 # 0\n", "line 2: the stream is missing");
    refused("a -1 2 3\n", "line 1: the id is not a decimal integer");
    refused("a 0x1 2 3\n", "line 1: the id is not a decimal integer");
    refused("a 1 2.5 3\n", "line 1: the number of bytes is not a decimal integer");
    refused("a 1 2 3 4 5 6\n", "line 1: more fields than a line that begins with 'a' has");
    refused("a 1 2 3\nf 1 3 0\n", "line 2: more fields than a line that begins with 'f' has");
    refused("s 1\n", "line 1: more fields than a line that begins with 's' has");
    refused("w 1\n", "line 1: the stream is missing");
    refused("a 1 9223372036854775808 0\n", "line 1: the number of bytes exceeds 9223372036854775807");
    refused("a 18446744073709551616 1 0\n", "line 1: the id exceeds 18446744073709551615");
    refused("a 1 1 0 64\n", "line 1: the device exceeds 63");
    refused("a 1 9223372036854775807 0\na 2 1 0\n",
            "line 2: more than 2**63 - 1 bytes would be live at once");
}

TEST(an_id_names_one_block_for_ever)
{
    refused("a 1 2 3\nf 2 3\n", "line 2: there is no block 2: no earlier line allocated it");
    refused("f 0 0\n", "line 1: there is no block 0: no earlier line allocated it");
    refused("a 1 2 3\n# live\na 1 2 3\n",
            "line 3: id 1 was already used in line 1: give every block its own id");
    refused("a 1 2 3\nf 1 3\na 1 2 3\n",
            "line 3: id 1 was already used in line 1: give every block its own id");
    refused("a 1 2 3\n\nf 1 3\nf 1 3\n", "line 4: block 1 is no longer live: line 3 freed it");
    refused("a 1 2 3\nf 1 3\nr 1 4\n", "line 3: block 1 is no longer live: line 2 freed it");
}

TEST(a_byte_of_zero_is_no_end_of_the_text)
{
    mo_trace_text t;

    CHECK_EQ(mo_trace_text_parse("s\n\0\ns\n", 6, &why, &t), MO_INVALID);
    CHECK_STR(why.text, "line 2: a line must begin with a, f, r, w or s, or with # for a comment");
    /* Nor is there one behind it: the parser stops at the length alone. */
    CHECK_EQ(mo_trace_text_parse("a 1 2 345", 7, &why, &t), MO_OK);
    CHECK_EQ(t.streams[0], 3);
    mo_trace_text_clear(&t);
}

TEST(streams_are_bounded)
{
    static char text[MO_TRACE_MAX_STREAMS * 24 + 24];
    mo_trace_text t;
    int at = 0;

    for (int i = 0; i < MO_TRACE_MAX_STREAMS; i += 2)
        at += sprintf(text + at, "w %d %d\n", i, i + 1);
    CHECK_EQ(parse(text, &t), MO_OK);
    CHECK_EQ(t.stream_count, MO_TRACE_MAX_STREAMS);
    mo_trace_text_clear(&t);
    sprintf(text + at, "w 1 70000\n");
    refused(text, "line 2049: more than 4096 streams in one trace");
}

TEST(the_live_peak_is_of_one_device)
{
    mo_trace_text t;
    uint64_t devices;

    CHECK_EQ(parse("a 1 100 0\na 2 50 0 3\na 3 20 0\nf 1 0\na 4 90 0\nf 4 0\na 5 1 0 3\n", &t), MO_OK);
    CHECK_EQ(mo_trace_text_live_peak(&t, 0, &devices), 120);
    CHECK_EQ(devices, 0x9);
    CHECK_EQ(mo_trace_text_live_peak(&t, 3, NULL), 51);
    CHECK_EQ(mo_trace_text_live_peak(&t, 1, NULL), 0);
    mo_trace_text_clear(&t);
}

/* A trace that is right, as text in the writer's own manner. */
static size_t random_trace(uint64_t *seed, char *out, int lines)
{
    static uint64_t live[4096];
    uint64_t next = test_random(seed) % 100;
    size_t live_count = 0, at = 0;

    for (int i = 0; i < lines; i++) {
        const uint64_t r = test_random(seed), stream = r >> 32 & 3;
        if (r % 8 < 4 || !live_count) {
            const unsigned device = r >> 40 & 1;
            const uint64_t pool = r >> 41 & 3;
            next += 1 + test_random(seed) % 1000000007;
            at += (size_t)sprintf(out + at, "a %" PRIu64 " %" PRIu64 " %" PRIu64, next, r >> 24, stream);
            if (device || pool)
                at += (size_t)sprintf(out + at, " %u", device);
            if (pool)
                at += (size_t)sprintf(out + at, " %" PRIu64, pool);
            at += (size_t)sprintf(out + at, "\n");
            live[live_count++] = next;
        } else if (r % 8 < 6) {
            const size_t which = test_random(seed) % live_count;
            at += (size_t)sprintf(out + at, "f %" PRIu64 " %" PRIu64 "\n", live[which], stream);
            live[which] = live[--live_count];
        } else if (r % 8 == 6) {
            at += (size_t)sprintf(out + at, "r %" PRIu64 " %" PRIu64 "\n",
                                  live[r >> 8 & 0xFFFF ? 0 : live_count - 1], stream);
        } else if (r >> 50 & 1) {
            at += (size_t)sprintf(out + at, "w %" PRIu64 " %" PRIu64 "\n", stream, r >> 34 & 3);
        } else {
            at += (size_t)sprintf(out + at, "s\n");
        }
    }
    return at;
}

TEST(what_is_written_is_what_was_read)
{
    static char text[4096 * 80];
    uint64_t seed = test_seed();

    for (int round = test_rounds(50, 2000); round; round--) {
        const size_t length = random_trace(&seed, text, (int)(test_random(&seed) % 4000));
        mo_trace_text t;
        char *written;
        size_t written_length;

        CHECK_EQ(mo_trace_text_parse(text, length, &why, &t), MO_OK);
        CHECK_EQ(mo_trace_text_write(&t, &why, &written, &written_length), MO_OK);
        CHECK_EQ(written_length, length);
        CHECK_EQ(memcmp(written, text, length), 0);
        mo_host_free(written);
        mo_trace_text_clear(&t);
    }
}

TEST(want_of_host_memory_is_an_error_and_leaks_nothing)
{
    static char text[4096 * 80];
    uint64_t seed = 5;
    const size_t length = random_trace(&seed, text, 2000), live = mo_host_live();
    mo_status status = MO_NO_HOST_MEMORY;
    int failures = 0;

    for (; status; failures++) {
        mo_trace_text t;
        char *written;
        size_t written_length;

        mo_host_fail_after((uint64_t)failures);
        status = mo_trace_text_parse(text, length, &why, &t);
        if (!status) {
            status = mo_trace_text_write(&t, &why, &written, &written_length);
            if (!status)
                mo_host_free(written);
            mo_trace_text_clear(&t);
        }
        mo_host_fail_never();
        CHECK(!status || (status == MO_NO_HOST_MEMORY && strstr(why.text, "no host memory")));
        CHECK_EQ(mo_host_live(), live);
    }
    CHECK(failures > 10);
}

TEST_MAIN
