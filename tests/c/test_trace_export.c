/* What a ring kept, as a trace: what is in it, what was before it, and a pool's own events, replayed. */
#include "alloc/replay.h"
#include "alloc/trace_export.h"
#include "base/hostmem.h"
#include "driver/model_device.h"
#include "test.h"

#define MIB ((size_t)1 << 20)

static mo_detail why;
static const mo_stream s = (mo_stream)0x5500, t = (mo_stream)0x7700;

static mo_trace_record record(mo_trace_op op, uint64_t serial, size_t size, mo_stream stream)
{
    return (mo_trace_record){.op = (uint16_t)op, .serial = serial, .size = size, .stream = stream};
}

static void gives(const mo_trace_record *records, size_t count, const mo_block_view *live, size_t live_count,
                  const char *text)
{
    const size_t before = mo_host_live();
    mo_trace_text trace;
    char *written;
    size_t length;

    CHECK_EQ(mo_trace_export(records, count, live, live_count, &why, &trace), MO_OK);
    CHECK_EQ(mo_trace_text_write(&trace, &why, &written, &length), MO_OK);
    CHECK_STR(written, text);
    mo_trace_text_clear(&trace);
    /* What is exported is a trace. */
    if (mo_trace_text_parse(written, length, &why, &trace))
        TEST_FAIL("%s", why.text);
    mo_trace_text_clear(&trace);
    mo_host_free(written);
    CHECK_EQ(mo_host_live(), before);
}

TEST(events_become_lines)
{
    const mo_trace_record records[] = {
        record(MO_TRACE_ALLOC, 4, 100, NULL),
        record(MO_TRACE_MAP, 0, 2 * MIB, NULL),
        record(MO_TRACE_ALLOC, 5, 200, s),
        record(MO_TRACE_RECORD_STREAM, 4, 100, t),
        record(MO_TRACE_WAIT, 0, 0, s),
        record(MO_TRACE_FREE, 4, 100, NULL),
        record(MO_TRACE_STEP, 0, 0, NULL),
        record(MO_TRACE_OOM, 0, 77, NULL),
        record(MO_TRACE_RECORD_STREAM, 5, 200, s),
        record(MO_TRACE_UNMAP, 0, 2 * MIB, NULL),
        record(MO_TRACE_FREE, 5, 200, s),
    };

    gives(records, 11, NULL, 0, "a 4 100 0\na 5 200 1\nr 4 2\nf 4 0\ns\nr 5 1\nf 5 1\n");
    gives(records, 0, NULL, 0, "");
}

TEST(devices_and_arenas_have_their_numbers)
{
    mo_trace_record records[4];

    for (int i = 0; i < 4; i++) {
        records[i] = record(MO_TRACE_ALLOC, (uint64_t)i, 1, NULL);
        records[i].device = 3;
    }
    records[1].arena = (mo_arena_id){5, 0};
    records[2].arena = (mo_arena_id){0, 5};
    records[3].arena = (mo_arena_id){5, 0};
    gives(records, 4, NULL, 0, "a 0 1 0 3\na 1 1 0 3 1\na 2 1 0 3 2\na 3 1 0 3 1\n");
}

TEST(what_was_before_the_ring_begins_the_trace)
{
    const mo_trace_record records[] = {
        record(MO_TRACE_RECORD_STREAM, 8, 0, t), /* its free says more of it */
        record(MO_TRACE_ALLOC, 20, 9, NULL),      record(MO_TRACE_FREE, 8, 80, s),
        record(MO_TRACE_RECORD_STREAM, 7, 70, s), /* the pool says more of it */
        record(MO_TRACE_FREE, 20, 9, NULL),
    };
    const mo_block_view live[] = {
        {.state = MO_BLOCK_LIVE, .serial = 20, .requested = 9},
        {.state = MO_BLOCK_FREE, .serial = 3, .requested = 0},
        {.state = MO_BLOCK_PENDING, .serial = 2, .requested = 0},
        {.state = MO_BLOCK_LIVE, .serial = 11, .requested = 110, .stream = t},
        {.state = MO_BLOCK_LIVE, .serial = 7, .requested = 70},
    };

    gives(records, 5, live, 5, "a 7 70 0\na 8 80 1\na 11 110 2\nr 8 2\na 20 9 0\nf 8 1\nr 7 1\nf 20 0\n");
}

TEST(what_no_pool_records_is_refused)
{
    const mo_trace_record twice[] = {record(MO_TRACE_ALLOC, 1, 1, s), record(MO_TRACE_FREE, 1, 1, s),
                                     record(MO_TRACE_FREE, 1, 1, s)};
    mo_trace_text trace;
    const size_t live = mo_host_live();

    CHECK_EQ(mo_trace_export(twice, 3, NULL, 0, &why, &trace), MO_INVALID);
    CHECK_STR(why.text, "block 1 is used after it was freed");
    CHECK_EQ(mo_host_live(), live);
}

TEST(want_of_host_memory_is_an_error_and_leaks_nothing)
{
    const mo_trace_record records[] = {record(MO_TRACE_ALLOC, 1, 1, s), record(MO_TRACE_FREE, 1, 1, s)};
    const size_t live = mo_host_live();
    mo_status status = MO_NO_HOST_MEMORY;
    mo_trace_text trace;

    for (uint64_t n = 0; status; n++) {
        mo_host_fail_after(n);
        status = mo_trace_export(records, 2, NULL, 0, &why, &trace);
        mo_host_fail_never();
        CHECK(!status || status == MO_NO_HOST_MEMORY);
        CHECK(n < 20);
        if (!status)
            mo_trace_text_clear(&trace);
        CHECK_EQ(mo_host_live(), live);
    }
}

/* A random program on a pool whose ring is too small for all of it: the exported trace has the live peak of what the ring
 * covers, and replays. */
TEST(a_pools_events_are_replayed)
{
    enum { SLOTS = 40, OPERATIONS = 1500, KEPT = 700 };
    static mo_trace_record records[KEPT];
    uint64_t seed = test_seed(), first;

    for (int round = test_rounds(20, 1000); round; round--) {
        mo_pool_settings settings = {.slack = 20, .recall = true};
        mo_address address[SLOTS] = {0};
        mo_model_device device;
        mo_pool *pool;
        mo_trace *ring;
        mo_block_view *live;
        mo_trace_text trace;
        mo_replay_options options = mo_replay_defaults();
        mo_replay_result result;
        size_t live_count;

        mo_model_device_open(&device, 1u << 30, 2 * MIB);
        CHECK_EQ(mo_pool_open(&device.table, &settings, &why, &pool), MO_OK);
        CHECK_EQ(mo_trace_open(KEPT, &why, &ring), MO_OK);
        mo_pool_trace(pool, ring);
        for (int i = 0; i < OPERATIONS; i++) {
            const uint64_t r = test_random(&seed);
            mo_address *a = &address[r % SLOTS];
            const mo_stream streams[] = {NULL, s, t};
            if (!*a)
                CHECK_EQ(mo_pool_alloc(pool, r >> 32 & 1 ? r >> 40 & 0xFFF : r >> 40 & 0x7FFFFF,
                                       streams[r >> 20 & 1], &why, a),
                         MO_OK);
            else if (r >> 60 < 3)
                CHECK_EQ(mo_pool_record_stream(pool, *a, streams[r >> 21 & 1 ? 2 : 1], &why), MO_OK);
            else {
                CHECK_EQ(mo_pool_free(pool, *a, &why), MO_OK);
                *a = 0;
            }
        }
        CHECK_EQ(mo_pool_blocks(pool, &why, &live, &live_count), MO_OK);
        const size_t count = mo_trace_read(ring, 0, records, KEPT, &first);
        CHECK_EQ(count, KEPT);
        if (mo_trace_export(records, count, live, live_count, &why, &trace))
            TEST_FAIL("%s", why.text);
        size_t at_end = 0, requested = 0;
        for (uint32_t b = 0; b < trace.block_count; b++)
            at_end += trace.blocks[b].died == MO_TRACE_NEVER ? trace.blocks[b].size : 0;
        for (size_t b = 0; b < live_count; b++)
            requested += live[b].requested;
        CHECK_EQ(at_end, requested);
        options.check = true;
        if (mo_replay_run(&trace, &options, &why, &result))
            TEST_FAIL("%s", why.text);
        CHECK(result.completed);
        mo_replay_clear(&result);
        mo_trace_text_clear(&trace);
        mo_host_free(live);
        CHECK_EQ(mo_pool_close(pool, &why), MO_OK);
        mo_trace_close(ring);
        mo_model_device_close(&device);
    }
}

TEST_MAIN
