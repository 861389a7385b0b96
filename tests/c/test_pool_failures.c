#include "pool_fixture.h"

/* Every call of the driver and every request for host memory fails once, or from some point on, at every position of a
 * session. After each the pool is whole, what it gave is still good, and the next request is served; at the end nothing
 * is left, but what the driver itself refused to take. */

static const mo_arena_id graph = {7, 0}, mine = {0, 3};

static char position[100]; /* where the session is made to fail */

/* A request that may fail; what it gives is noted. */
static bool try_get(mo_arena_id arena, size_t size, mo_stream stream)
{
    mo_address address = 77;
    const mo_status status = mo_pool_alloc_in(pool, arena, size, stream, &said, &address);
    if (status) {
        CHECK(said.text[0] && said.status == status);
        CHECK_EQ(address, 77);
        return false;
    }
    const size_t rounded = (size + MO_ALIGNMENT - 1) / MO_ALIGNMENT * MO_ALIGNMENT;
    mo_model_device_use(&device, stream, address, size,
                        model_add(&model, address, rounded, size, stream)->owner);
    return true;
}

static void free_some(size_t step)
{
    for (size_t i = model.count; i-- > 0;)
        if (i % step == 0)
            put(model.blocks[i].address);
}

/* Another stream's use. The events are the test's own: they are made without the plan. */
static void share(size_t i, mo_stream stream)
{
    if (i >= model.count)
        return;
    const model_block *block = &model.blocks[i];
    if (mo_pool_record_stream(pool, block->address, stream, &said) == MO_OK)
        mo_model_device_use(&device, stream, block->address, block->requested, block->owner);
}

/* Everything a pool does, on every path: small and large, growth, moving, another stream's memory, recorded streams, a
 * budget, an arena, a reserve, pause and resume, trim. Any of it may fail. */
static void session(void)
{
    size_t freed;
    for (size_t i = 0; i < 8; i++)
        try_get(GENERAL, i % 3 ? 5 * MIB + i * 512 : 3000, i % 2 ? A : B);
    share(1, C);
    share(2, B);
    free_some(2);
    try_get(GENERAL, 18 * MIB, C);
    CHECK_POOL();
    if (mo_pool_arena_retain(pool, mine, false, 0, &said) == MO_OK) {
        (void)mo_pool_preallocate(pool, mine, 6 * MIB, &said);
        try_get(mine, 4 * MIB, A);
        try_get(mine, 900, A);
        if (mo_pool_pause(pool, mine, &said) == MO_OK) {
            CHECK_POOL();
            for (int i = 0; mo_pool_resume(pool, mine, &said) != MO_OK; i++)
                CHECK(i < 10); /* it can be tried again */
        }
        CHECK_POOL();
        CHECK_OK(mo_pool_arena_release(pool, mine, &said));
    }
    if (mo_pool_arena_retain(pool, graph, true, 0, &said) == MO_OK) {
        if (mo_pool_route(pool, graph, (mo_route){NULL, NULL, NULL}, &said) == MO_OK) {
            mo_address address;
            if (mo_pool_alloc(pool, 3 * MIB, B, &said, &address) == MO_OK)
                mo_model_device_use(&device, B, address, 3 * MIB,
                                    model_add(&model, address, 3 * MIB, 3 * MIB, B)->owner);
            CHECK_OK(mo_pool_unroute(pool, graph, &said));
        }
        CHECK_OK(mo_pool_arena_release(pool, graph, &said));
    }
    CHECK_POOL();
    free_some(3);
    (void)mo_pool_trim(pool, 8 * MIB, &said, &freed);
    try_get(GENERAL, 25 * MIB, A);
    CHECK_POOL();
    for (int step = 0; step < 3; step++) {
        for (size_t i = 0; i < 6; i++)
            try_get(GENERAL, (i + 1) * 900 * KIB, A);
        free_some(1);
    }
    mo_block_view *blocks;
    size_t count;
    if (mo_pool_blocks(pool, &said, &blocks, &count) == MO_OK)
        mo_host_free(blocks);
    CHECK_POOL();
}

static mo_pool_settings settings_number(int number)
{
    return (mo_pool_settings){
        .budget = 48 * MIB, .slack = number & 2 ? 0 : 20, .double_map = number & 1, .recall = true};
}

/* What a pool that nothing fails any more must do. */
static void is_well(void)
{
    CHECK_POOL();
    mo_model_device_fail_never(&device);
    mo_host_fail_never();
    for (size_t i = 0; i < model.count; i++)
        CHECK(mo_model_device_usable(&device, model.blocks[i].address, model.blocks[i].size));
    free_some(1);
    if (!try_get(GENERAL, 40 * MIB, B) || !try_get(GENERAL, 700, A))
        TEST_FAIL("%s: a pool that nothing fails any more says: %s", position, said.text);
    CHECK_POOL();
}

/* The end: what the driver has refused to take may be left, nothing else. */
static void ends(size_t refused)
{
    const mo_status status = mo_pool_close(pool, &said);
    if (mo_model_device_live(&device) > 3 * refused) /* a handle, its mapping, and its reservation */
        TEST_FAIL("%zu things are left on the device: %zu reservations, %zu handles, %zu mappings, %zu "
                  "segments, %zu "
                  "events",
                  mo_model_device_live(&device), device.blocks[MO_MODEL_DEVICE_RESERVATION].live,
                  device.blocks[MO_MODEL_DEVICE_HANDLE].live, device.blocks[MO_MODEL_DEVICE_MAPPING].live,
                  device.blocks[MO_MODEL_DEVICE_SEGMENT].live, device.blocks[MO_MODEL_DEVICE_EVENT].live);
    CHECK(refused || status == MO_OK);
    CHECK_EQ(mo_host_live(), host_before);
    CHECK_CLEAN();
}

static bool gives_back(mo_model_device_call call)
{
    return call == MO_MODEL_DEVICE_release || call == MO_MODEL_DEVICE_unmap ||
           call == MO_MODEL_DEVICE_unreserve || call == MO_MODEL_DEVICE_segment_free ||
           call == MO_MODEL_DEVICE_event_destroy || call == MO_MODEL_DEVICE_synchronize;
}

/* One failure of `call` at every position of the session, then `count` of them. */
static void survives(mo_model_device_call call, size_t granularity, mo_status failure, uint64_t count)
{
    for (int number = 0; number < 4; number++)
        for (uint64_t after = 0;; after += count == 1 ? 1 : 3) {
            snprintf(position, sizeof position, "%s fails %" PRIu64 " times after %" PRIu64 ", settings %d",
                     mo_model_device_call_name(call), count, after, number);
            open_pool(256 * MIB, granularity, settings_number(number));
            mo_model_device_fail(&device, call, after, count, failure);
            session();
            const bool reached = device.plan[call].count < count;
            is_well();
            ends(reached && gives_back(call) ? count : 0);
            if (!reached)
                break;
        }
}

TEST(any_reserve_may_fail)
{
    survives(MO_MODEL_DEVICE_reserve, GRANULE, MO_DRIVER, 1);
    survives(MO_MODEL_DEVICE_reserve, GRANULE, MO_NO_DEVICE_MEMORY, 2);
}

TEST(any_create_may_fail)
{
    survives(MO_MODEL_DEVICE_create, GRANULE, MO_DRIVER, 1);
    survives(MO_MODEL_DEVICE_create, GRANULE, MO_DRIVER, 4);
}

TEST(any_create_may_find_the_device_full)
{
    survives(MO_MODEL_DEVICE_create, GRANULE, MO_NO_DEVICE_MEMORY, 1);
    survives(MO_MODEL_DEVICE_create, GRANULE, MO_NO_DEVICE_MEMORY, 9);
}

TEST(any_map_may_fail)
{
    survives(MO_MODEL_DEVICE_map, GRANULE, MO_DRIVER, 1);
    survives(MO_MODEL_DEVICE_map, GRANULE, MO_DRIVER, 4);
}

TEST(any_grant_may_fail)
{
    survives(MO_MODEL_DEVICE_grant, GRANULE, MO_DRIVER, 1);
    survives(MO_MODEL_DEVICE_grant, GRANULE, MO_DRIVER, 4);
}

TEST(any_unmap_may_fail)
{
    survives(MO_MODEL_DEVICE_unmap, GRANULE, MO_DRIVER, 1);
    survives(MO_MODEL_DEVICE_unmap, GRANULE, MO_DRIVER, 4);
}

TEST(any_release_may_fail)
{
    survives(MO_MODEL_DEVICE_release, GRANULE, MO_DRIVER, 1);
    survives(MO_MODEL_DEVICE_release, GRANULE, MO_DRIVER, 4);
}

TEST(any_event_create_may_fail)
{
    survives(MO_MODEL_DEVICE_event_create, GRANULE, MO_DRIVER, 1);
    survives(MO_MODEL_DEVICE_event_create, GRANULE, MO_DRIVER, 4);
}

TEST(any_event_record_may_fail)
{
    survives(MO_MODEL_DEVICE_event_record, GRANULE, MO_DRIVER, 1);
    survives(MO_MODEL_DEVICE_event_record, GRANULE, MO_DRIVER, 4);
}

TEST(any_event_query_may_fail)
{
    survives(MO_MODEL_DEVICE_event_query, GRANULE, MO_DRIVER, 1);
    survives(MO_MODEL_DEVICE_event_query, GRANULE, MO_DRIVER, 4);
}

TEST(any_stream_wait_may_fail)
{
    survives(MO_MODEL_DEVICE_stream_wait, GRANULE, MO_DRIVER, 1);
    survives(MO_MODEL_DEVICE_stream_wait, GRANULE, MO_DRIVER, 4);
}

TEST(any_capture_id_may_fail)
{
    survives(MO_MODEL_DEVICE_capture_id, GRANULE, MO_DRIVER, 1);
    survives(MO_MODEL_DEVICE_capture_id, GRANULE, MO_DRIVER, 4);
}

TEST(any_synchronize_may_fail)
{
    survives(MO_MODEL_DEVICE_synchronize, GRANULE, MO_DRIVER, 1);
}

TEST(any_memory_info_may_fail)
{
    survives(MO_MODEL_DEVICE_memory_info, GRANULE, MO_DRIVER, 1);
    survives(MO_MODEL_DEVICE_memory_info, GRANULE, MO_DRIVER, 4);
}

TEST(any_segment_alloc_may_fail)
{
    survives(MO_MODEL_DEVICE_segment_alloc, 0, MO_DRIVER, 1);
    survives(MO_MODEL_DEVICE_segment_alloc, 0, MO_NO_DEVICE_MEMORY, 3);
}

TEST(any_segment_free_may_fail)
{
    survives(MO_MODEL_DEVICE_segment_free, 0, MO_DRIVER, 1);
    survives(MO_MODEL_DEVICE_segment_free, 0, MO_DRIVER, 3);
}

TEST(host_memory_may_end_anywhere)
{
    for (int number = 0; number < 4; number++)
        for (uint64_t after = 0;; after++) {
            open_pool(256 * MIB, GRANULE, settings_number(number));
            const size_t opened = mo_host_live();
            CHECK(opened);
            mo_host_fail_after(after);
            session();
            /* Whether it was reached shows in what is asked now. */
            void *probe = mo_host_alloc(1);
            mo_host_free(probe);
            is_well();
            ends(0);
            if (probe)
                break;
        }
}

TEST(host_memory_may_end_while_a_pool_is_opened)
{
    const mo_pool_settings settings = settings_number(0);
    for (uint64_t after = 0;; after++) {
        mo_model_device_close(&device);
        mo_model_device_open(&device, 256 * MIB, GRANULE);
        const size_t before = mo_host_live();
        mo_host_fail_after(after);
        const mo_status status = mo_pool_open(&device.table, &settings, &said, &pool);
        mo_host_fail_never();
        if (status) {
            CHECK_EQ(status, MO_NO_HOST_MEMORY);
            CHECK_EQ(mo_host_live(), before);
            CHECK_EQ(mo_model_device_live(&device), 0);
            continue;
        }
        CHECK_OK(mo_pool_close(pool, &said));
        CHECK_EQ(mo_host_live(), before);
        if (after > 8)
            break;
    }
}

/* ---- the very end ------------------------------------------------------------------------------------------ */

TEST(closing_goes_on_where_the_driver_refuses_and_says_so)
{
    for (int call = 0; call < MO_MODEL_DEVICE_CALL_COUNT; call++) {
        if (!gives_back((mo_model_device_call)call))
            continue;
        for (uint64_t after = 0; after < 40; after++) {
            open_pool(256 * MIB, GRANULE, plain_settings);
            for (size_t i = 0; i < 6; i++)
                get(5 * MIB, i % 2 ? A : B);
            use_on(model.blocks[0].address, B);
            put(model.blocks[0].address);
            get(20 * MIB, A);
            mo_model_device_fail(&device, (mo_model_device_call)call, after, 1, MO_DRIVER);
            const mo_status status = mo_pool_close(pool, &said);
            const bool reached = !device.plan[call].count;
            if (reached && call != MO_MODEL_DEVICE_event_destroy)
                CHECK_EQ(status, MO_DRIVER);
            CHECK(mo_model_device_live(&device) <= (reached ? 3 : 0));
            CHECK_EQ(mo_host_live(), host_before);
            if (!reached)
                break;
        }
    }
}

TEST(a_driver_that_is_gone_takes_everything_back_with_success)
{
    open_pool(256 * MIB, GRANULE, plain_settings);
    get(5 * MIB, A);
    mo_model_device_fail(&device, MO_MODEL_DEVICE_create, 0, UINT64_MAX, MO_DRIVER);
    mo_model_device_fail(&device, MO_MODEL_DEVICE_event_record, 0, UINT64_MAX, MO_DRIVER);
    mo_model_device_fail(&device, MO_MODEL_DEVICE_map, 0, UINT64_MAX, MO_DRIVER);
    mo_address address;
    CHECK(mo_pool_alloc(pool, 9 * MIB, A, &said, &address) != MO_OK);
    CHECK(said.text[0]);
    put(model.blocks[0].address);
    CHECK_POOL();
    mo_model_device_fail_never(&device);
    close_pool();
}

TEST_MAIN
