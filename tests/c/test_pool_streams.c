#include "pool_fixture.h"

/* Several streams: a block, or its granules, pass from one to another only in order. The double judges each use
 * (mo_model_device_watch), whether the device is quick, slow, or stands still; luck does not count. */

typedef struct setting {
    size_t granularity;
    bool double_map, recall;
    size_t budget;
    size_t small_limit, huge_limit;
    enum { QUICK, RANDOM, STILL } pace;
} setting;

static void open_as(const setting *s, size_t capacity)
{
    open_pool(capacity, s->granularity,
              (mo_pool_settings){.budget = s->budget,
                                 .slack = 20,
                                 .double_map = s->double_map,
                                 .recall = s->recall,
                                 .small_limit = s->small_limit,
                                 .huge_limit = s->huge_limit});
}

/* ---- by hand ------------------------------------------------------------------------------------------- */

TEST(its_own_stream_gets_a_block_back_at_once_and_without_an_event)
{
    open_pool(1024 * MIB, GRANULE, plain_settings);
    for (size_t size = 700; size < 64 * MIB; size *= 3) {
        const mo_address a = get(size, A);
        put(a);
        CHECK_EQ(get(size, A), a);
        put(a);
    }
    CHECK_EQ(device.calls[MO_MODEL_DEVICE_event_record], 0);
    close_pool();
}

TEST(another_stream_that_gets_the_block_waits_on_the_device_and_the_host_does_not)
{
    mo_pool_settings settings = plain_settings;
    settings.budget = 8 * MIB;
    open_pool(64 * MIB, GRANULE, settings);
    const mo_address a = get(8 * MIB, A);
    put(a);
    CHECK(!mo_model_device_ordered(&device, A, B));
    get(8 * MIB, B); /* the device's verdict is in get() */
    CHECK(mo_model_device_ordered(&device, A, B));
    CHECK_EQ(stats_now().num_sync_all_streams, 0);
    CHECK_EQ(device.calls[MO_MODEL_DEVICE_synchronize], 0);
    close_pool();
}

TEST(a_stream_that_was_recorded_is_waited_for_as_well)
{
    for (int in_the_middle = 0; in_the_middle < 2; in_the_middle++) {
        mo_pool_settings settings = plain_settings;
        settings.budget = 8 * MIB;
        open_pool(64 * MIB, GRANULE, settings);
        const mo_address a = get(8 * MIB, A);
        mo_model_device_use(&device, B, a, 8 * MIB, model.blocks[0].owner);
        CHECK_OK(mo_pool_record_stream(pool, a + (in_the_middle ? 5 * MIB : 0), B, &said));
        put(a);
        get(8 * MIB, A); /* behind B now */
        CHECK(mo_model_device_ordered(&device, B, A));
        close_pool();
    }
}

TEST(what_is_not_recorded_is_not_waited_for_and_the_double_sees_it)
{
    mo_pool_settings settings = plain_settings;
    settings.budget = 8 * MIB;
    open_pool(64 * MIB, GRANULE, settings);
    const mo_address a = get(8 * MIB, A);
    mo_model_device_use(&device, B, a, 8 * MIB, model.blocks[0].owner);
    put(a); /* and record_stream was forgotten */
    mo_address again;
    CHECK_OK(mo_pool_alloc(pool, 8 * MIB, A, &said, &again));
    mo_model_device_use(&device, A, again, 8 * MIB, 99);
    CHECK(device.violations > 0); /* so these tests can fail */
    device.violations = 0;
    CHECK_OK(mo_pool_free(pool, again, &said));
    close_pool();
}

TEST(small_blocks_pass_between_streams_in_order_too)
{
    mo_pool_settings settings = plain_settings;
    settings.budget = 4 * MIB;
    open_pool(64 * MIB, GRANULE, settings);
    mo_address blocks[600];
    const mo_stream streams[] = {A, B, C};
    for (int round = 0; round < 12; round++) {
        for (int i = 0; i < 600; i++)
            blocks[i] = get(4000 + (size_t)i, streams[(round + i / 200) % 3]);
        for (int i = 0; i < 600; i += 3)
            use_on(blocks[i], streams[(round + i) % 3]);
        for (int i = 0; i < 600; i++)
            put(blocks[i]);
        CHECK_POOL();
    }
    close_pool();
}

TEST(what_pends_is_told_until_it_is_over)
{
    mo_fragmentation f;
    open_pool(1024 * MIB, GRANULE, plain_settings);
    const mo_address a = get(16 * MIB, A);
    use_on(a, B);
    put(a);
    CHECK(stats_now().of[MO_ACTIVE_BYTES][MO_STAT_ALL].current >= 16 * (int64_t)MIB);
    mo_pool_fragmentation(pool, &f);
    CHECK(f.pending_bytes >= 16 * MIB);
    CHECK_EQ(f.live_bytes, 0);
    finish(A), finish(B);
    finish(A);
    size_t freed;
    CHECK_OK(mo_pool_trim(pool, SIZE_MAX, &said, &freed));
    CHECK_EQ(freed, 0);
    put(get(512, A));
    mo_pool_fragmentation(pool, &f);
    CHECK_POOL();
    close_pool();
}

TEST(free_never_waits_and_never_touches_the_device)
{
    open_pool(1024 * MIB, GRANULE, plain_settings);
    mo_address blocks[40];
    for (int i = 0; i < 40; i++)
        blocks[i] = get((size_t)(i + 1) * 300 * KIB, i % 2 ? A : B);
    for (int i = 0; i < 40; i += 3)
        use_on(blocks[i], C);
    const uint64_t syncs = device.calls[MO_MODEL_DEVICE_synchronize], calls = memory_calls(),
                   clock = device.clock;
    for (int i = 0; i < 40; i++)
        put(blocks[i]);
    CHECK_EQ(device.calls[MO_MODEL_DEVICE_synchronize], syncs);
    CHECK_EQ(memory_calls(), calls);
    CHECK(device.clock - clock < 1000); /* no pause: a call is a nanosecond */
    CHECK_POOL();
    close_pool();
}

TEST(granules_that_move_to_another_stream_are_waited_for)
{
    for (int double_map = 0; double_map < 2; double_map++) {
        const setting s = {GRANULE, double_map, true, 64 * MIB, 0, 0, STILL};
        mo_address blocks[16];
        open_as(&s, 1024 * MIB);
        for (int i = 0; i < 16; i++)
            blocks[i] = get(4 * MIB, i % 2 ? A : B);
        for (int i = 0; i < 16; i += 4) /* of both */
            put(blocks[i]), put(blocks[i + 1]);
        get(32 * MIB, C);
        CHECK(double_map || device.maps_in_use == 0);
        CHECK_POOL();
        close_pool();
    }
}

TEST(many_streams_share_one_block_in_turn)
{
    mo_pool_settings settings = plain_settings;
    settings.budget = 4 * MIB;
    open_pool(64 * MIB, GRANULE, settings);
    mo_address a = get(4 * MIB, A);
    for (uintptr_t i = 0; i < 200; i++) {
        for (uintptr_t other = 0; other < 5; other++)
            use_on(a, (mo_stream)(0x100 + (i * 7 + other) % 40));
        put(a);
        a = get(4 * MIB, (mo_stream)(0x100 + i % 50));
    }
    CHECK_POOL();
    close_pool();
}

TEST(a_stream_with_live_memory_is_known_however_many_come_after_it)
{
    mo_pool_settings settings = plain_settings;
    settings.budget = 12 * MIB;
    open_pool(64 * MIB, GRANULE, settings);
    const mo_address a = get(8 * MIB, A);
    for (uintptr_t i = 0; i < 300; i++) {
        put(get(2 * MIB, (mo_stream)(0x1000 + i * 0x10)));
        CHECK_OK(device.table.synchronize(&device.table, NULL));
    }
    mo_model_device_use(&device, A, a, 8 * MIB, model_at(&model, a)->owner);
    put(a);
    get(12 * MIB, B); /* get() sees whether it waits for A */
    CHECK_POOL();
    close_pool();
}

TEST(events_of_many_streams_are_all_given_back)
{
    enum { STREAMS = 50 };
    open_pool(1024 * MIB, GRANULE, plain_settings);
    for (uintptr_t round = 0; round < 5; round++)
        for (uintptr_t i = 0; i < STREAMS; i++) {
            const mo_address a = get(3 * MIB, (mo_stream)(0x1000 + i * 0x10));
            use_on(a, (mo_stream)(0x1000 + (i + 1 + round) % STREAMS * 0x10));
            put(a); /* nothing is over: an event each, on both */
        }
    CHECK(device.blocks[MO_MODEL_DEVICE_EVENT].live > 2 * STREAMS);
    size_t freed;
    CHECK_OK(mo_pool_trim(pool, 0, &said, &freed));
    CHECK_EQ(held(), 0);
    CHECK_POOL();
    close_pool();
}

TEST(more_streams_with_live_memory_than_can_be_told_apart_are_refused_in_words)
{
    mo_address address = 0;
    mo_status status = MO_OK;
    uintptr_t streams = 0;
    open_pool(1024 * MIB, GRANULE, plain_settings);
    while (streams < 1000) {
        status = mo_pool_alloc(pool, MIB, (mo_stream)(0x1000 + streams * 0x10), &said, &address);
        if (status)
            break;
        take_in(address, MIB, (mo_stream)(0x1000 + streams++ * 0x10));
    }
    if (status) { /* or there is no such limit */
        CHECK_EQ(status, MO_UNSUPPORTED);
        CHECK(streams >= 32 && said.text[0]);
    }
    CHECK_POOL();
    put(model.blocks[7].address);
    get(MIB, B); /* one is free now */
    CHECK_POOL();
    close_pool();
}

/* Under one name it is another in each thread: what one freed would be given to the next without order. */
TEST(the_stream_that_each_thread_has_of_its_own_is_refused_in_words)
{
    mo_address address = 0;
    open_pool(64 * MIB, GRANULE, plain_settings);
    CHECK_EQ(mo_pool_alloc(pool, MIB, MO_STREAM_PER_THREAD, &said, &address), MO_UNSUPPORTED);
    CHECK(strstr(said.text, "CU_STREAM_PER_THREAD") && strstr(said.text, "use a created stream"));
    CHECK_POOL();
    close_pool();
}

/* ---- captures ------------------------------------------------------------------------------------------ */

TEST(what_a_capture_used_is_not_given_to_another_stream_while_it_lasts)
{
    open_pool(1024 * MIB, GRANULE, plain_settings);
    const mo_arena_id graph = {7, 0};
    CHECK_OK(mo_pool_arena_retain(pool, graph, true, 0, &said));
    mo_model_device_capture(&device, A, 5);
    const mo_address a = get_in(graph, 6 * MIB, A);
    const uint64_t events =
        device.calls[MO_MODEL_DEVICE_event_record] + device.calls[MO_MODEL_DEVICE_stream_wait];
    put(a);
    const mo_address again = get_in(graph, 6 * MIB, A); /* the capture itself is in order */
    CHECK_EQ(again, a);
    put(again);
    const mo_address other = get_in(graph, 6 * MIB, B);
    CHECK(other + 6 * MIB <= a || a + 6 * MIB <= other);
    CHECK_EQ(device.calls[MO_MODEL_DEVICE_event_record] + device.calls[MO_MODEL_DEVICE_stream_wait], events);
    put(other);
    mo_model_device_capture(&device, A, 0);
    CHECK_POOL();
    CHECK_OK(mo_pool_arena_release(pool, graph, &said));
    close_pool();
}

TEST(a_stream_recorded_in_a_capture_is_waited_for_only_after_it)
{
    open_pool(1024 * MIB, GRANULE, plain_settings);
    const mo_address a = get(6 * MIB, A);
    use_on(a, B);
    mo_model_device_capture(&device, B, 9);
    put(a);
    const mo_address b = get(6 * MIB, A); /* B cannot be marked now: so not a */
    CHECK(b + 6 * MIB <= a || a + 6 * MIB <= b);
    mo_model_device_capture(&device, B, 0);
    put(b);
    CHECK_POOL();
    close_pool();
}

/* ---- at random ----------------------------------------------------------------------------------------- */

static mo_stream stream_number(uint64_t n)
{
    return (mo_stream)((uintptr_t)n * 0x10); /* the first is the legacy stream */
}

static size_t random_size(uint64_t *random)
{
    const uint64_t kind = test_random(random) % 100;
    if (kind < 45)
        return 1 + test_random(random) % ((size_t)1 << (9 + test_random(random) % 12));
    if (kind < 98)
        return 1 + test_random(random) % (9 * MIB);
    return 1 + test_random(random) % (40 * MIB);
}

static void random_wait(uint64_t *random, uint64_t streams)
{
    mo_driver *m = &device.table;
    mo_event *e;
    CHECK_OK(m->event_create(m, &said, &e));
    CHECK_OK(m->event_record(m, e, stream_number(test_random(random) % streams), &said));
    if (test_random(random) % 2)
        CHECK_OK(m->stream_wait(m, stream_number(test_random(random) % streams), e, &said));
    else
        CHECK(m->event_query(m, e, &said) != MO_INVALID);
    CHECK_OK(m->event_destroy(m, e, &said));
}

/* Random requests of a correct program. An out-of-memory error must have a reason: with all that is free moved together,
 * there would still be no room. */
static void churn(uint64_t *random, const setting *s, uint64_t streams, int operations)
{
    const size_t most_live = s->budget ? s->budget : 256 * MIB;
    for (int i = 0; i < operations; i++) {
        const uint64_t what = test_random(random) % 100;
        model_block *any = model.count ? &model.blocks[test_random(random) % model.count] : NULL;
        if (what < 46) {
            const size_t size = random_size(random);
            const mo_stream stream = stream_number(test_random(random) % streams);
            mo_address address = 0;
            if (!s->budget && model.live + size > most_live)
                continue;
            const mo_status status = mo_pool_alloc(pool, size, stream, &said, &address);
            if (status == MO_OK) {
                take_in(address, size, stream);
            } else {
                CHECK_EQ(status, MO_NO_DEVICE_MEMORY);
                CHECK(s->budget);
                if (s->granularity && model_touched(&model, GRANULE) + size + 2 * GRANULE <= s->budget)
                    TEST_FAIL("%zu KiB are refused, with %zu KiB live on granules of %zu KiB, of %zu: %s",
                              size / KIB, model.live / KIB, model_touched(&model, GRANULE) / KIB,
                              s->budget / KIB, said.text);
            }
        } else if (what < 86) {
            if (any)
                put(any->address);
        } else if (what < 91) {
            if (any)
                use_on(any->address, stream_number(test_random(random) % streams));
        } else if (what < 94) {
            if (any)
                mo_model_device_use(&device, any->stream, any->address, any->requested, any->owner);
        } else if (what < 96) {
            random_wait(random, streams);
        } else if (s->pace == RANDOM) {
            mo_model_device_complete(&device, stream_number(test_random(random) % streams),
                                     test_random(random) % 20);
        }
        if (s->pace == QUICK)
            for (uint64_t k = 0; k < 2 * streams; k++)
                finish(stream_number(k % streams));
        if (test_random(random) % 5000 == 0) {
            size_t freed;
            CHECK_OK(mo_pool_trim(pool, test_random(random) % most_live, &said, &freed));
        }
        if (i < 300 || i % 97 == 0)
            CHECK_POOL();
        if (i % 97 == 0)
            check_stats();
        CHECK_CLEAN();
    }
}

static void never_violated(setting s, uint64_t seed)
{
    uint64_t random = seed;
    const int operations = test_rounds(300, 10000);
    for (uint64_t streams = 1; streams <= 4; streams++) {
        for (int pace = QUICK; pace <= STILL; pace++) {
            s.pace = pace;
            open_as(&s, 1024 * MIB);
            churn(&random, &s, streams, operations);
            while (model.count)
                put(model.blocks[test_random(&random) % model.count].address);
            CHECK_POOL();
            close_pool();
        }
    }
}

TEST(random_programs_see_no_violation_with_double_mapping)
{
    never_violated((setting){GRANULE, true, true, 0, 0, 0, QUICK}, 4711);
    never_violated((setting){GRANULE, true, true, 0, 0, 0, QUICK}, test_seed());
}

TEST(random_programs_see_no_violation_without_double_mapping)
{
    never_violated((setting){GRANULE, false, true, 0, 0, 0, QUICK}, 4711);
    never_violated((setting){GRANULE, false, true, 0, 0, 0, QUICK}, test_seed());
}

TEST(random_programs_at_a_budget_see_no_violation_and_no_needless_out_of_memory)
{
    never_violated((setting){GRANULE, true, true, 96 * MIB, 0, 0, QUICK}, 4711);
    never_violated((setting){GRANULE, true, false, 96 * MIB, 64 * KIB, 5 * MIB, QUICK}, test_seed());
}

TEST(random_programs_at_a_budget_see_no_violation_without_double_mapping)
{
    never_violated((setting){GRANULE, false, true, 96 * MIB, 0, 0, QUICK}, 4711);
    never_violated((setting){GRANULE, false, false, 96 * MIB, 4 * MIB, 8 * MIB, QUICK}, test_seed());
}

TEST(random_programs_see_no_violation_without_virtual_memory)
{
    never_violated((setting){0, false, true, 0, 0, 0, QUICK}, 4711);
    never_violated((setting){0, false, true, 160 * MIB, 0, 0, QUICK}, test_seed());
}

/* Now and then a stream is captured: then its program is quiet, or works in the graph's own arena. */
static void captures_beside_work(uint64_t seed, bool double_map)
{
    const mo_arena_id graph = {5, 0};
    const mo_stream captured = stream_number(3);
    uint64_t random = seed, captures = 0;
    bool capturing = false;
    mo_address in_graph[16];
    size_t graph_blocks = 0;
    open_pool(1024 * MIB, GRANULE, (mo_pool_settings){.slack = 20, .double_map = double_map, .recall = true});
    CHECK_OK(mo_pool_arena_retain(pool, graph, true, 0, &said));
    for (int i = 0, n = test_rounds(2000, 50000); i < n; i++) {
        const uint64_t what = test_random(&random) % 100;
        const mo_stream stream = stream_number(test_random(&random) % (capturing ? 3 : 4));
        model_block *any = model.count ? &model.blocks[test_random(&random) % model.count] : NULL;
        if (what < 45 && model.live < 200 * MIB) {
            get(random_size(&random), stream);
        } else if (what < 80 && any) {
            put(any->address); /* recorded on the captured stream, perhaps */
        } else if (what < 90 && any && !(capturing && any->stream == captured)) {
            use_on(any->address, stream);
        } else if (what < 96) {
            mo_model_device_complete(&device, stream_number(test_random(&random) % 4),
                                     test_random(&random) % 30);
        } else if (what < 98 && capturing && graph_blocks < 16) {
            mo_address address;
            const size_t size = random_size(&random) % (4 * MIB) + 1;
            CHECK_OK(mo_pool_alloc_in(pool, graph, size, captured, &said, &address));
            for (size_t k = 0; k < model.count; k++)
                CHECK(model.blocks[k].address != address);
            CHECK(
                mo_model_device_idle(&device, address, size)); /* replays come after nothing in particular */
            in_graph[graph_blocks++] = address;
        } else if (what >= 98) {
            capturing = !capturing;
            mo_model_device_capture(&device, captured, capturing ? ++captures : 0);
            while (!capturing && graph_blocks)
                CHECK_OK(mo_pool_free(pool, in_graph[--graph_blocks], &said));
        }
        CHECK_POOL();
    }
    CHECK(captures > 5);
    mo_model_device_capture(&device, captured, 0);
    while (graph_blocks)
        CHECK_OK(mo_pool_free(pool, in_graph[--graph_blocks], &said));
    CHECK_OK(mo_pool_arena_release(pool, graph, &said));
    close_pool();
}

TEST(captures_beside_random_programs_see_no_violation_and_no_refusal)
{
    captures_beside_work(4711, true);
    captures_beside_work(test_seed(), true);
    captures_beside_work(test_seed() + 1, false);
}

TEST_MAIN
