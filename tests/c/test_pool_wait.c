/* What the host waits for, and that the rest of the program goes on meanwhile. The fixture fails a wait under the lock. */
#include <pthread.h>

#include "pool_fixture.h"

static const mo_arena_id graph = {0, 7}, other = {0, 8};

static void never(void)
{
    TEST_FAIL("it waits");
}

/* ---- work that takes long --------------------------------------------------------------------------------------- */

static int pauses;

/* Ten minutes by the device's clock. */
static void ten_minutes_pass(void)
{
    device.clock += UINT64_C(6000000000);
    device.work_per_pause = ++pauses < 100 ? 0 : 1000;
}

/* Eight granules, all that there are, every other one free; several streams are to use those for long. */
static void every_other_granule(mo_pool_settings settings, bool several)
{
    static const mo_stream streams[] = {A, B, C};
    mo_address blocks[8];

    open_pool(16 * MIB, GRANULE, settings);
    for (int i = 0; i < 8; i++)
        blocks[i] = get(GRANULE, A);
    for (int i = 1; i < 8; i += 2) {
        if (several)
            use_on(blocks[i], streams[i / 2 % 3]);
        put(blocks[i]);
    }
}

TEST(a_request_is_served_however_long_the_work_takes_that_its_memory_is_used_by)
{
    for (int several = 0; several < 2; several++) {
        every_other_granule((mo_pool_settings){.slack = 20, .recall = true}, several);
        for (int n = 0; n < 3; n++) { /* and again when the same is wanted again */
            const mo_stream stream = several && n % 2 ? C : A;
            mo_address a, b;

            pauses = 0;
            meanwhile = ten_minutes_pass;
            a = get(4 * MIB, stream);
            b = get(4 * MIB, stream);
            put(a);
            put(b);
            CHECK_POOL();
        }
        CHECK(device.clock > UINT64_C(600000000000));
        CHECK_EQ(stats_now().num_ooms, 0);
        close_pool();
    }
}

TEST(with_double_mapping_it_need_not_be_waited_for)
{
    every_other_granule(plain_settings, false);
    meanwhile = never;
    get(4 * MIB, A);
    CHECK_POOL();
    close_pool();
}

TEST(what_does_not_exist_is_refused_after_one_wait)
{
    mo_address address;

    every_other_granule((mo_pool_settings){.slack = 20}, true);
    pauses = 0;
    meanwhile = ten_minutes_pass;
    CHECK_OUT_OF_MEMORY(mo_pool_alloc(pool, 10 * MIB, A, &said, &address));
    CHECK_EQ(stats_now().num_sync_all_streams, 1);
    meanwhile = never;
    CHECK_OUT_OF_MEMORY(mo_pool_alloc(pool, 10 * MIB, A, &said, &address));
    CHECK_OUT_OF_MEMORY(mo_pool_alloc(pool, (size_t)1 << 60, A, &said, &address));
    close_pool();
}

/* ---- what others do meanwhile ----------------------------------------------------------------------------------- */

static bool gone_on;

static void *another_thread(void *unused)
{
    mo_address a = 0, victim = model.blocks[0].address;
    size_t freed;

    (void)unused;
    gone_on = mo_pool_alloc(pool, 1000, B, NULL, &a) == MO_OK &&
              mo_pool_record_stream(pool, a, C, NULL) == MO_OK && mo_pool_free(pool, a, NULL) == MO_OK &&
              mo_pool_free(pool, victim, NULL) == MO_OK &&
              mo_pool_trim(pool, SIZE_MAX, NULL, &freed) == MO_OK;
    model_remove(&model, victim);
    return NULL;
}

static void another_thread_goes_on(void)
{
    pthread_t thread;

    meanwhile = NULL;
    device.work_per_pause = 1000;
    if (pthread_create(&thread, NULL, another_thread, NULL) || pthread_join(thread, NULL))
        TEST_FAIL("no thread");
}

/* What it freed is waited for like the rest: else the request would fail for want of that. */
TEST(another_thread_goes_on_while_one_waits_and_what_it_frees_serves_too)
{
    every_other_granule((mo_pool_settings){.slack = 20}, false);
    put(model.blocks[3].address);
    device.work_per_pause = 0;
    gone_on = false;
    meanwhile = another_thread_goes_on;
    get(12 * MIB - 4096, A);
    CHECK(gone_on);
    CHECK_POOL();
    close_pool();
}

static int taken;

/* It takes what is over, uses it and frees it: what was waited for is in use again. */
static void another_is_first(void)
{
    mo_address blocks[4];

    device.work_per_pause = ++taken > 20;
    if (taken > 20)
        return;
    finish(A);
    finish(B);
    for (int i = 0; i < 4; i++)
        blocks[i] = get(GRANULE, B);
    for (int i = 0; i < 4; i++)
        put(blocks[i]);
}

/* At each of these moments enough was free, and only in use. */
TEST(a_request_outlasts_another_thread_that_is_always_first)
{
    every_other_granule((mo_pool_settings){.slack = 20}, false);
    taken = 0;
    meanwhile = another_is_first;
    get(8 * MIB, A);
    CHECK(taken > 10);
    CHECK_POOL();
    close_pool();
}

static uint64_t seed;
static int depth;

/* Anything: blocks die, arenas go and come, streams get each other's numbers, memory is given back. */
static void anything_happens(void)
{
    static const mo_arena_id arenas[] = {{0, 0}, {0, 7}, {0, 8}};
    const uint64_t r = test_random(&seed);
    const mo_stream stream = (mo_stream)(uintptr_t)(0x10 * (1 + (r >> 8) % 70));
    const mo_arena_id id = arenas[(r >> 20) % 3];
    mo_address address;
    size_t freed;

    if (depth > 1)
        return;
    depth++;
    switch (r % 8) {
    case 0:
    case 1:
        if (model.count)
            put(model.blocks[(r >> 8) % model.count].address);
        break;
    case 2:
    case 3:
        if (mo_pool_alloc(pool, 1 + (r >> 30) % (3 * MIB), stream, &said, &address) == MO_OK)
            take_in(address, 1 + (r >> 30) % (3 * MIB), stream);
        break;
    case 4:
        if (id.second && mo_pool_arena_retain(pool, id, r >> 40 & 1, 0, &said) == MO_OK &&
            mo_pool_alloc_in(pool, id, MIB, stream, &said, &address) == MO_OK)
            take_in(address, MIB, stream);
        break;
    case 5:
        if (id.second)
            (void)mo_pool_arena_release(pool, id, &said);
        break;
    case 6:
        (void)mo_pool_trim(pool, (r >> 30) % (20 * MIB), &said, &freed);
        break;
    case 7:
        if (id.second && mo_pool_pause(pool, id, &said) == MO_OK)
            (void)mo_pool_resume(pool, id, &said);
    }
    depth--;
}

TEST(whatever_happens_meanwhile_no_memory_is_used_out_of_order)
{
    seed = test_seed();
    for (int round = 0; round < test_rounds(40, 4000); round++) {
        open_pool((16 + (size_t)round % 3 * 16) * MIB, round % 5 ? GRANULE : 0,
                  (mo_pool_settings){.slack = 20, .double_map = round % 2, .recall = round % 3});
        for (int n = 0; n < 300; n++) {
            device.work_per_pause = 1 + test_random(&seed) % 3;
            meanwhile = anything_happens;
            anything_happens();
            CHECK_POOL();
        }
        meanwhile = NULL;
        device.work_per_pause = 1000;
        while (model.count)
            put(model.blocks[0].address);
        close_pool();
    }
}

/* ---- captures ------------------------------------------------------------------------------------------------------ */

TEST(giving_back_does_not_wait_for_a_capture_and_what_it_uses_is_given_back_after_it)
{
    mo_address a;
    size_t freed;

    open_pool(64 * MIB, GRANULE, plain_settings);
    a = get(20 * MIB, A);
    get(2 * MIB, A); /* between them */
    put(get(10 * MIB, A));
    mo_model_device_capture(&device, B, 5);
    CHECK_OK(
        mo_pool_record_stream(pool, a, B, &said)); /* what the capture does with it runs at each replay */
    put(a);
    finish(A);
    meanwhile = never;
    CHECK_OK(mo_pool_trim(pool, 0, &said, &freed));
    CHECK_EQ(freed, 10 * MIB);
    CHECK_OUT_OF_MEMORY(mo_pool_alloc(pool, 60 * MIB, A, &said, &a));
    CHECK_EQ(stats_now().num_sync_all_streams, 0);
    mo_model_device_capture(&device, B, 0);
    CHECK_OK(mo_pool_trim(pool, 0, &said, &freed));
    CHECK_EQ(held(), 2 * MIB);
    CHECK_POOL();
    close_pool();
}

TEST(a_capture_itself_waits_for_others_and_neither_records_nor_synchronises)
{
    mo_address a;

    every_other_granule((mo_pool_settings){.slack = 20}, true);
    CHECK_OK(mo_pool_arena_retain(pool, graph, true, 0, &said));
    mo_model_device_capture(&device, (mo_stream)0x40, 9);
    pauses = 0;
    meanwhile = ten_minutes_pass;
    CHECK_OK(mo_pool_alloc_in(pool, graph, 6 * MIB, (mo_stream)0x40, &said, &a));
    CHECK(mo_model_device_idle(&device, a, 6 * MIB));
    CHECK_OUT_OF_MEMORY(mo_pool_alloc_in(pool, graph, 6 * MIB, (mo_stream)0x40, &said, &a));
    CHECK_EQ(device.calls[MO_MODEL_DEVICE_synchronize], 0);
    CHECK_POOL(); /* an event call on the captured stream would be a violation */
    mo_model_device_capture(&device, (mo_stream)0x40, 0);
    close_pool();
}

TEST(a_graph_that_goes_during_another_capture_is_let_go_after_that)
{
    mo_address a;
    size_t freed;

    open_pool(16 * MIB, GRANULE, plain_settings);
    put(get(MIB, B));
    CHECK_OK(mo_pool_arena_retain(pool, graph, true, 0, &said));
    a = get_in(graph, 12 * MIB, A);
    put(a);
    mo_model_device_capture(&device, B, 5);
    CHECK_OK(mo_pool_arena_release(pool, graph, &said));
    CHECK_OK(mo_pool_trim(pool, 0, &said, &freed));
    CHECK_EQ(device.calls[MO_MODEL_DEVICE_synchronize], 0);
    CHECK(held() >= 12 * MIB);
    mo_model_device_capture(&device, B, 0);
    get(14 * MIB, A); /* by the last wait before it would fail */
    CHECK_POOL();
    close_pool();
}

TEST(an_arena_that_is_wanted_again_before_the_device_was_waited_for_stays_pinned)
{
    mo_address a;
    size_t freed;

    open_pool(16 * MIB, GRANULE, plain_settings);
    CHECK_OK(mo_pool_arena_retain(pool, graph, true, 0, &said));
    put(get_in(graph, 12 * MIB, A));
    mo_model_device_fail(&device, MO_MODEL_DEVICE_synchronize, 0, 1, MO_DRIVER);
    CHECK_OK(mo_pool_arena_release(pool, graph, &said));
    CHECK_OK(mo_pool_arena_retain(pool, graph, false, 0, &said));
    CHECK_OK(mo_pool_trim(pool, 0, &said, &freed));
    CHECK_EQ(freed, 0);
    CHECK_OUT_OF_MEMORY(mo_pool_alloc(pool, 14 * MIB, A, &said, &a)); /* its memory is nobody else's */
    CHECK_OK(mo_pool_arena_release(pool, graph, &said));
    get(14 * MIB, A);
    close_pool();
}

/* ---- streams, and a driver that fails --------------------------------------------------------------------------------- */

TEST(a_stream_that_was_destroyed_is_waited_for_with_the_whole_device)
{
    size_t freed;

    open_pool(64 * MIB, GRANULE, plain_settings);
    put(get(20 * MIB, A));
    mo_model_device_fail(&device, MO_MODEL_DEVICE_capture_id, 0, 1, MO_DRIVER); /* it cannot be asked */
    CHECK_OK(mo_pool_trim(pool, 0, &said, &freed));
    CHECK_EQ(freed, 20 * MIB);
    CHECK_EQ(device.calls[MO_MODEL_DEVICE_synchronize], 1);
    close_pool();
}

TEST(the_streams_whose_numbers_are_wanted_are_waited_for)
{
    open_pool(1024 * MIB, GRANULE, plain_settings);
    for (uintptr_t i = 0; i < 3 * MO_STREAMS; i++)
        put(get(1000, (mo_stream)(0x1000 + i * 0x10)));
    CHECK(stats_now().num_sync_all_streams > 0);
    CHECK_POOL();
    close_pool();
}

TEST(streams_under_capture_keep_their_numbers_and_one_more_is_refused)
{
    mo_address a;

    open_pool(1024 * MIB, GRANULE, plain_settings);
    for (uintptr_t i = 0; i < MO_STREAMS; i++) {
        put(get(1000, (mo_stream)(0x1000 + i * 0x10)));
        mo_model_device_capture(&device, (mo_stream)(0x1000 + i * 0x10), i + 1);
    }
    meanwhile = never;
    CHECK_EQ(mo_pool_alloc(pool, 1000, A, &said, &a), MO_UNSUPPORTED);
    CHECK(strstr(said.text, "64 streams") && strstr(said.text, "captured"));
    mo_model_device_capture(&device, (mo_stream)0x1000, 0);
    meanwhile = NULL;
    get(1000, A);
    close_pool();
}

TEST(a_driver_whose_events_fail_is_asked_for_the_whole_device_and_its_error_is_the_requests)
{
    static const mo_model_device_call calls[] = {MO_MODEL_DEVICE_event_create, MO_MODEL_DEVICE_event_record,
                                                 MO_MODEL_DEVICE_event_query};

    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        for (int all = 0; all < 2; all++) {
            mo_address a = 0;
            size_t freed = 0;

            every_other_granule((mo_pool_settings){.slack = 20}, false);
            mo_model_device_fail(&device, calls[i], 0, 1000000, MO_DRIVER);
            if (all)
                mo_model_device_fail(&device, MO_MODEL_DEVICE_synchronize, 0, 1000000, MO_DRIVER);
            CHECK_EQ(mo_pool_alloc(pool, 4 * MIB, A, &said, &a), all ? MO_DRIVER : MO_OK);
            CHECK_OK(mo_pool_trim(pool, 0, &said, &freed));
            CHECK_EQ(freed, all ? 0 : 4 * MIB);
            mo_model_device_fail_never(&device);
            CHECK_POOL();
            close_pool();
        }
}

/* ---- pausing ------------------------------------------------------------------------------------------------------------ */

static void the_arenas_first_block_dies(void)
{
    meanwhile = NULL;
    put(model.blocks[0].address); /* just used */
}

TEST(what_is_freed_while_a_pause_waits_is_waited_for_too)
{
    open_pool(64 * MIB, GRANULE, plain_settings);
    CHECK_OK(mo_pool_arena_retain(pool, other, false, 0, &said));
    get_in(other, 6 * MIB, A);
    get_in(other, 6 * MIB, A);
    mo_model_device_use(&device, A, model.blocks[0].address, 6 * MIB, model.blocks[0].owner);
    meanwhile = the_arenas_first_block_dies;
    CHECK_OK(mo_pool_pause(pool, other, &said));
    CHECK_EQ(device.calls[MO_MODEL_DEVICE_synchronize], 2);
    CHECK_POOL();
    CHECK_OK(mo_pool_resume(pool, other, &said));
    close_pool();
}

static void the_arena_is_left(void)
{
    mo_address a;

    meanwhile = NULL;
    CHECK_EQ(mo_pool_alloc_in(pool, other, MIB, A, &said, &a), MO_INVALID); /* nobody may use it any more */
    CHECK_EQ(mo_pool_pause(pool, other, &said), MO_INVALID);
    CHECK_OK(mo_pool_arena_release(pool, other, &said));
    put(model.blocks[0].address);
}

TEST(an_arena_that_is_left_while_a_pause_waits_goes_after_the_pause)
{
    mo_address a;

    open_pool(64 * MIB, GRANULE, plain_settings);
    CHECK_OK(mo_pool_arena_retain(pool, other, false, 0, &said));
    get_in(other, 6 * MIB, A);
    meanwhile = the_arena_is_left;
    CHECK_OK(mo_pool_pause(pool, other, &said));
    CHECK_EQ(mo_pool_alloc_in(pool, other, MIB, A, &said, &a), MO_INVALID); /* it is gone */
    CHECK_EQ(pool->arenas->next == NULL, true);
    CHECK_POOL();
    close_pool();
}

TEST_MAIN
