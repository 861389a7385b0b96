/* What is tried when memory runs out, and how it is given back, from inside the pool. */
#include "alloc/pool_parts.h"
#include "base/size.h"
#include "pool_fixture.h"

static mo_request request_of(size_t size, mo_stream stream)
{
    mo_request request = {.arena = &pool->general,
                          .zone = &pool->general.zones[MO_ZONE_LARGE],
                          .size = size,
                          .requested = size};

    CHECK_OK(mo_order_number(&pool->order, stream, &said, &request.stream));
    return request;
}

static mo_status climb_once(const mo_request *request, mo_ladder *ladder)
{
    mo_status status;

    mo_lock_take(&pool->lock);
    status = mo_ladder_climb(pool, request, ladder, &said);
    mo_lock_give(&pool->lock);
    return status;
}

/* Work that takes an hour. */
static void an_hour_passes(void)
{
    static int pauses;

    device.clock += UINT64_C(3600) * 1000000000 / 20000;
    if (++pauses == 20000)
        device.work_per_pause = 1000;
}

static void it_waits(void)
{
    TEST_FAIL("it waits");
}

/* Gives back, as a trim does. */
static mo_status shrink(size_t keep)
{
    mo_status status;

    mo_lock_take(&pool->lock);
    mo_pool_wait(pool, NULL);
    status = mo_pool_shrink(pool, keep, &said);
    mo_lock_give(&pool->lock);
    return status;
}

/* Rungs that say "search once more", and whether the ladder ends. */
static int climb(const mo_request *request)
{
    mo_ladder ladder = {0};
    mo_status status;
    int rungs = -1;

    do {
        status = climb_once(request, &ladder);
        rungs++;
        CHECK(rungs < 10);
    } while (!status);
    CHECK_EQ(status, MO_NO_DEVICE_MEMORY);
    CHECK_EQ(climb_once(request, &ladder), MO_NO_DEVICE_MEMORY); /* it stays at its end */
    return rungs;
}

TEST(with_nothing_in_use_there_is_nothing_to_wait_for)
{
    mo_request request;
    uint64_t before;

    open_pool(64 * MIB, GRANULE, plain_settings);
    request = request_of(4 * MIB, A);
    before = device.clock;
    CHECK_EQ(climb(&request), 0);
    get(4 * MIB, A);
    CHECK_EQ(climb(&request), 0); /* live memory is not waited for */
    CHECK_EQ(pool->order.synchronized, 0);
    CHECK(device.clock - before < 1000);
    put(model.blocks[0].address);
    close_pool();
}

TEST(what_is_over_is_seen_before_anything_is_waited_for)
{
    mo_ladder ladder = {0};
    mo_request request;
    mo_use use;

    open_pool(64 * MIB, GRANULE, plain_settings);
    get(4 * MIB, A);
    put(model.blocks[0].address);
    use = (mo_use){1, pool->order.tick};
    CHECK_OK(mo_order_mark(&pool->order, use.streams, use.tick, &said));
    finish(A);
    request = request_of(4 * MIB, B);
    CHECK_OK(climb_once(&request, &ladder));
    CHECK(mo_order_over(&pool->order, use));
    CHECK_EQ(pool->order.synchronized, 0);
    CHECK_EQ(climb_once(&request, &ladder), MO_NO_DEVICE_MEMORY);
    close_pool();
}

TEST(work_is_waited_for_however_long_it_takes)
{
    const uint64_t hour = 3600 * UINT64_C(1000000000);
    mo_ladder ladder = {0};
    mo_request request;
    uint64_t before;
    mo_use use;

    open_pool(64 * MIB, GRANULE, plain_settings);
    get(4 * MIB, A);
    put(model.blocks[0].address);
    use = (mo_use){1, pool->order.tick};
    request = request_of(4 * MIB, B);
    device.work_per_pause = 0;
    meanwhile = an_hour_passes;
    before = device.clock;
    CHECK_OK(climb_once(&request, &ladder));
    CHECK(!mo_order_over(&pool->order, use));
    CHECK_OK(climb_once(&request, &ladder));
    CHECK(mo_order_over(&pool->order, use));
    CHECK_EQ(pool->order.synchronized, 1);
    CHECK(device.clock - before >= hour);
    CHECK_EQ(climb_once(&request, &ladder), MO_NO_DEVICE_MEMORY);
    close_pool();
}

TEST(what_is_being_captured_is_not_waited_for)
{
    mo_request request;

    open_pool(64 * MIB, GRANULE, plain_settings);
    get(4 * MIB, A);
    put(model.blocks[0].address);
    mo_double_capture(&device, A, 7);
    request = request_of(4 * MIB, B);
    meanwhile = it_waits;
    CHECK_EQ(climb(&request), 2); /* looked at twice, and left out */
    CHECK_EQ(pool->order.synchronized + device.calls[MO_DOUBLE_synchronize], 0);
    close_pool();
}

/* Such as of a stream that was destroyed, which no event can be recorded on. */
TEST(what_events_do_not_tell_the_whole_device_is_waited_for_unless_that_would_end_a_capture)
{
    for (int captures = 0; captures < 2; captures++) {
        mo_ladder ladder = {.rung = 1};
        mo_request request;
        mo_use use;

        open_pool(64 * MIB, GRANULE, plain_settings);
        get(4 * MIB, A);
        put(model.blocks[0].address);
        use = (mo_use){1, pool->order.tick};
        request = request_of(4 * MIB, B);
        mo_double_capture(&device, B, (uint64_t)captures);
        mo_double_fail(&device, MO_DOUBLE_event_record, 0, 1, MO_DRIVER);
        CHECK_EQ(climb_once(&request, &ladder), captures ? MO_DRIVER : MO_OK);
        CHECK_EQ(mo_order_over(&pool->order, use), !captures);
        CHECK_EQ(device.calls[MO_DOUBLE_synchronize], !captures);
        close_pool();
    }
}

TEST(free_segments_go_for_one_of_another_size_but_not_while_a_graph_is_captured)
{
    mo_request request;

    open_pool(64 * MIB, 0, plain_settings);
    get(20 * MIB, A);
    get(20 * MIB, A);
    put(model.blocks[0].address);
    finish(A);
    mo_order_probe(&pool->order);
    request = request_of(30 * MIB, A);
    request.captured = true;
    CHECK_EQ(climb(&request), 0);
    CHECK_EQ(device.used, 40 * MIB);
    request.captured = false;
    CHECK_EQ(climb(&request), 1);
    CHECK_EQ(device.used, 20 * MIB);
    get(30 * MIB, A);
    CHECK_EQ(stats_now().num_alloc_retries, 0);
    put(model.blocks[0].address);
    get(34 * MIB, A); /* by the ladder itself */
    CHECK_EQ(stats_now().num_alloc_retries, 1);
    while (model.count)
        put(model.blocks[0].address);
    close_pool();
}

/* ---- giving back ------------------------------------------------------------------------------------------------------- */

static const mo_arena_id kept = {1, 0}, pinned = {0, 2};

/* Granules that nobody lives on or has reserved. */
static size_t releasable(void)
{
    size_t all = pool->granules.spare_count;

    for (mo_arena *arena = pool->arenas; arena; arena = arena->next) {
        size_t here = 0;

        if (arena->pinned || arena->paused)
            continue;
        MO_EACH_ZONE (zone, arena)
            for (mo_span *span = zone->spans; span; span = span->next)
                for (size_t i = 0; i < span->fresh; i++)
                    if (mo_slot_owned(&span->slots[i])) {
                        bool lived_on = false;

                        for (size_t k = 0; k < model.count; k++)
                            lived_on |=
                                model.blocks[k].address < mo_slot_address(span, i + 1) &&
                                model.blocks[k].address + model.blocks[k].size > mo_slot_address(span, i);
                        here += !lived_on;
                    }
        all += here < (mo_arena_held(arena) - mo_size_min(mo_arena_held(arena), arena->reserved)) / GRANULE
                   ? here
                   : (mo_arena_held(arena) - mo_size_min(mo_arena_held(arena), arena->reserved)) / GRANULE;
    }
    return all;
}

static void churn(uint64_t *random, int operations)
{
    const mo_arena_id arenas[] = {GENERAL, GENERAL, kept, pinned};

    while (operations--) {
        const uint64_t r = test_random(random);

        if (model.count && r % 40 < 12 + model.count)
            put(model.blocks[(r >> 8) % model.count].address);
        else
            get_in(arenas[(r >> 40) % 4], 300000 + (r >> 8) % (9 * MIB), r & 128 ? A : B);
    }
}

TEST(as_much_is_given_back_as_was_said_and_no_more)
{
    uint64_t random = test_seed();
    size_t released = 0;

    for (int round = 0; round < test_rounds(60, 3000); round++) {
        open_pool(1024 * MIB, GRANULE, (mo_pool_settings){.double_map = round % 2});
        CHECK_OK(mo_pool_arena_retain(pool, kept, false, 0, &said));
        CHECK_OK(mo_pool_arena_retain(pool, pinned, true, 0, &said));
        if (round % 3)
            CHECK_OK(mo_pool_preallocate(pool, kept, 10 * MIB, &said));
        for (int n = 0; n < 15; n++) {
            const size_t keep = test_random(&random) % 3 ? test_random(&random) % (150 * MIB) : 0;
            size_t before, can, want;

            churn(&random, 12);
            before = mo_pool_held(pool);
            can = releasable();
            want = before > keep ? mo_ceil_div(before - keep, GRANULE) : 0;
            CHECK_OK(shrink(keep));
            CHECK_EQ(before - mo_pool_held(pool), mo_size_min(can, want) * GRANULE);
            CHECK_EQ(device.used, mo_pool_held(pool));
            CHECK_POOL();
            if (keep == 0)
                CHECK_EQ(pool->granules.spare_count, 0);
            released += mo_size_min(can, want);
        }
        while (model.count)
            put(model.blocks[0].address);
        CHECK_OK(mo_pool_arena_release(pool, kept, &said));
        CHECK_OK(mo_pool_arena_release(pool, pinned, &said));
        close_pool();
    }
    CHECK(released > 1000);
}

TEST(what_is_still_in_use_stays_and_is_no_failure)
{
    mo_address a, b;

    open_pool(256 * MIB, GRANULE, plain_settings);
    a = get(20 * MIB, A);
    get(2 * MIB, A);
    b = get(30 * MIB, B);
    put(a);
    put(b);
    finish(B);
    device.work_per_pause = 0;
    mo_double_capture(&device, A, 5); /* it cannot be waited for */
    CHECK_OK(shrink(0));
    CHECK_EQ(mo_pool_held(pool), 22 * MIB);
    mo_double_capture(&device, A, 0);
    device.work_per_pause = 1000;
    CHECK_OK(shrink(0));
    CHECK_EQ(mo_pool_held(pool), 2 * MIB);
    CHECK_POOL();
    put(model.blocks[0].address);
    close_pool();
}

TEST(a_driver_that_takes_nothing_back_is_reported_and_the_pool_stays_sound)
{
    static const mo_double_call kinds[] = {MO_DOUBLE_unmap, MO_DOUBLE_release};

    for (int kind = 0; kind < 2; kind++)
        for (uint64_t after = 0; after < 12; after++) {
            open_pool(256 * MIB, GRANULE, plain_settings);
            get(20 * MIB, A);
            put(model.blocks[0].address);
            mo_double_fail(&device, kinds[kind], after, 1, MO_DRIVER);
            CHECK_EQ(shrink(0), after < 10 ? MO_DRIVER : MO_OK);
            mo_double_fail_never(&device);
            CHECK_POOL();
            CHECK_EQ(pool->stats.failed_releases, kind && after < 10);
            CHECK_OK(shrink(0));
            CHECK_EQ(mo_pool_held(pool), 0);
            CHECK_EQ(device.used, kind && after < 10 ? GRANULE : 0); /* lost to the driver */
            CHECK_OK(mo_pool_close(pool, &said));
            mo_double_close(&device);
        }
}

TEST(stale_views_go_with_the_granule)
{
    mo_address a;

    open_pool(256 * MIB, GRANULE, (mo_pool_settings){.double_map = true});
    for (int n = 0; n < 6; n++) {
        a = get((size_t)(n % 2 ? 20 : 30) * MIB, A);
        get(MIB + MIB / 2, A);
        put(a);
    }
    while (model.count)
        put(model.blocks[0].address);
    CHECK_OK(shrink(0));
    CHECK_EQ(pool->granules.stale_count, 0);
    CHECK_EQ(device.blocks[MO_DOUBLE_MAPPING].live + device.blocks[MO_DOUBLE_HANDLE].live, 0);
    CHECK_POOL();
    close_pool();
}

TEST_MAIN
