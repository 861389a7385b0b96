/* What is tried before a request fails, a step at a time. */
#include "alloc/pool_wait.h"

#include "pool_fixture.h"

static mo_request request_of(size_t size, mo_stream stream)
{
    mo_request request = {.arena = &pool->general,
                          .zone = &pool->general.zones[MO_ZONE_LARGE],
                          .size = size,
                          .requested = size};

    CHECK_OK(mo_stream_order_number(&pool->order, stream, &said, &request.stream));
    return request;
}

static mo_status climb_once(const mo_request *request, mo_oom_retry *retry)
{
    mo_status status;

    mo_lock_take(&pool->lock);
    status = mo_oom_retry_next(pool, request, retry, &said);
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

/* Steps that say "search once more", and whether the retries end. */
static int climb(const mo_request *request)
{
    mo_oom_retry retry = {0};
    mo_status status;
    int steps = -1;

    do {
        status = climb_once(request, &retry);
        steps++;
        CHECK(steps < 10);
    } while (!status);
    CHECK_EQ(status, MO_NO_DEVICE_MEMORY);
    CHECK_EQ(climb_once(request, &retry), MO_NO_DEVICE_MEMORY); /* it stays at its end */
    return steps;
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
    mo_oom_retry retry = {0};
    mo_request request;
    mo_last_use use;

    open_pool(64 * MIB, GRANULE, plain_settings);
    get(4 * MIB, A);
    put(model.blocks[0].address);
    use = (mo_last_use){1, pool->order.tick};
    CHECK_OK(mo_stream_order_mark(&pool->order, use.streams, use.tick, &said));
    finish(A);
    request = request_of(4 * MIB, B);
    CHECK_OK(climb_once(&request, &retry));
    CHECK(mo_stream_order_over(&pool->order, use));
    CHECK_EQ(pool->order.synchronized, 0);
    CHECK_EQ(climb_once(&request, &retry), MO_NO_DEVICE_MEMORY);
    close_pool();
}

TEST(work_is_waited_for_however_long_it_takes)
{
    const uint64_t hour = 3600 * UINT64_C(1000000000);
    mo_oom_retry retry = {0};
    mo_request request;
    uint64_t before;
    mo_last_use use;

    open_pool(64 * MIB, GRANULE, plain_settings);
    get(4 * MIB, A);
    put(model.blocks[0].address);
    use = (mo_last_use){1, pool->order.tick};
    request = request_of(4 * MIB, B);
    device.work_per_pause = 0;
    meanwhile = an_hour_passes;
    before = device.clock;
    CHECK_OK(climb_once(&request, &retry));
    CHECK(!mo_stream_order_over(&pool->order, use));
    CHECK_OK(climb_once(&request, &retry));
    CHECK(mo_stream_order_over(&pool->order, use));
    CHECK_EQ(pool->order.synchronized, 1);
    CHECK(device.clock - before >= hour);
    CHECK_EQ(climb_once(&request, &retry), MO_NO_DEVICE_MEMORY);
    close_pool();
}

TEST(what_is_being_captured_is_not_waited_for)
{
    mo_request request;

    open_pool(64 * MIB, GRANULE, plain_settings);
    get(4 * MIB, A);
    put(model.blocks[0].address);
    mo_model_device_capture(&device, A, 7);
    request = request_of(4 * MIB, B);
    meanwhile = it_waits;
    CHECK_EQ(climb(&request), 2); /* looked at twice, and left out */
    CHECK_EQ(pool->order.synchronized + device.calls[MO_MODEL_DEVICE_synchronize], 0);
    close_pool();
}

/* Such as of a stream that was destroyed, which no event can be recorded on. */
TEST(what_events_do_not_tell_the_whole_device_is_waited_for_unless_that_would_end_a_capture)
{
    for (int captures = 0; captures < 2; captures++) {
        mo_oom_retry retry = {.step = 1};
        mo_request request;
        mo_last_use use;

        open_pool(64 * MIB, GRANULE, plain_settings);
        get(4 * MIB, A);
        put(model.blocks[0].address);
        use = (mo_last_use){1, pool->order.tick};
        request = request_of(4 * MIB, B);
        mo_model_device_capture(&device, B, (uint64_t)captures);
        mo_model_device_fail(&device, MO_MODEL_DEVICE_event_record, 0, 1, MO_DRIVER);
        CHECK_EQ(climb_once(&request, &retry), captures ? MO_DRIVER : MO_OK);
        CHECK_EQ(mo_stream_order_over(&pool->order, use), !captures);
        CHECK_EQ(device.calls[MO_MODEL_DEVICE_synchronize], !captures);
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
    mo_stream_order_probe(&pool->order, 0);
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
    get(34 * MIB, A); /* by the retries themselves */
    CHECK_EQ(stats_now().num_alloc_retries, 1);
    while (model.count)
        put(model.blocks[0].address);
    close_pool();
}

TEST_MAIN
