/* Pausing from inside the pool, and pausing that fails half way. */
#include "alloc/arena.h"
#include "pool_fixture.h"

static const mo_arena_id one = {1, 0}, three = {7, 7};

static mo_arena *arena_of(mo_arena_id id)
{
    return mo_arena_find(pool, id);
}

static void retain(mo_arena_id id)
{
    CHECK_OK(mo_pool_arena_retain(pool, id, false, 0, &said));
}

static void release(mo_arena_id id)
{
    CHECK_OK(mo_pool_arena_release(pool, id, &said));
}

/* An arena with live blocks, free memory and old mappings elsewhere. */
static mo_address fill(mo_pool_settings settings)
{
    mo_address a, b;

    open_pool(256 * MIB, GRANULE, settings);
    retain(one);
    a = get_in(one, 10 * MIB, A);
    get_in(one, 500 * KIB, A);
    b = get_in(one, 6 * MIB, A);
    put(b);
    get(5 * MIB, B);
    put(get(30 * MIB, A));
    return a;
}

static void empty(void)
{
    while (model.count)
        put(model.blocks[0].address);
    release(one);
    close_pool();
}

static size_t owned_by(mo_arena *arena)
{
    size_t count = 0;

    MO_EACH_ZONE (zone, arena)
        count += zone->owned;
    return count;
}

TEST(a_paused_arena_holds_nothing_and_keeps_its_addresses)
{
    const mo_address a = fill(plain_settings);
    const size_t used = device.used, slots = owned_by(arena_of(one));

    CHECK_OK(mo_pool_pause(pool, one, &said));
    CHECK_EQ(used - device.used, slots * GRANULE);
    CHECK(!mo_model_device_usable(&device, a, 512));
    CHECK_EQ(mo_pool_pause(pool, one, &said), MO_INVALID);
    CHECK_EQ(mo_pool_alloc_in(pool, one, 4 * MIB, A, &said, &(mo_address){0}), MO_INVALID);
    CHECK_OK(mo_pool_resume(pool, one, &said));
    CHECK_EQ(device.used, used);
    CHECK(mo_model_device_usable(&device, a, 10 * MIB));
    CHECK_EQ(mo_pool_resume(pool, one, &said), MO_INVALID);
    CHECK_EQ(mo_pool_pause(pool, three, &said), MO_INVALID);
    CHECK_POOL();
    empty();
}

TEST(whichever_call_fails_an_arena_is_paused_whole_or_not_at_all)
{
    static const mo_model_device_call kinds[] = {MO_MODEL_DEVICE_synchronize, MO_MODEL_DEVICE_unmap,
                                                 MO_MODEL_DEVICE_release};
    size_t failures = 0;

    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++)
        for (uint64_t after = 0; after < 25; after++) {
            const mo_address a = fill((mo_pool_settings){.double_map = true, .slack = 20});
            const size_t used = device.used;
            mo_status status;

            mo_model_device_fail(&device, kinds[kind], after, 1, MO_DRIVER);
            status = mo_pool_pause(pool, one, &said);
            mo_model_device_fail_never(&device);
            CHECK_POOL();
            if (status) {
                failures++;
                CHECK_EQ(status, MO_DRIVER);
                CHECK(!arena_of(one)->paused);
                CHECK_EQ(device.used, used);
                CHECK(mo_model_device_usable(&device, a, 10 * MIB));
                put(get_in(one, 3 * MIB, A));
                CHECK_OK(mo_pool_pause(pool, one, &said));
            }
            CHECK_OK(mo_pool_resume(pool, one, &said));
            empty();
        }
    CHECK(failures > 15);
}

TEST(whichever_call_fails_an_arena_is_resumed_whole_or_not_at_all)
{
    static const mo_model_device_call kinds[] = {MO_MODEL_DEVICE_create, MO_MODEL_DEVICE_map,
                                                 MO_MODEL_DEVICE_grant};
    size_t failures = 0;

    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++)
        for (uint64_t after = 0; after < 15; after++) {
            const mo_address a = fill(plain_settings);
            const size_t used = device.used;
            size_t paused;
            mo_status status;

            CHECK_OK(mo_pool_pause(pool, one, &said));
            paused = device.used;
            mo_model_device_fail(&device, kinds[kind], after, 1, MO_DRIVER);
            status = mo_pool_resume(pool, one, &said);
            mo_model_device_fail_never(&device);
            CHECK_POOL();
            if (status) {
                failures++;
                CHECK_EQ(status, MO_DRIVER);
                CHECK(arena_of(one)->paused);
                CHECK_EQ(device.used, paused);
                CHECK_OK(mo_pool_resume(pool, one, &said));
            }
            CHECK_EQ(device.used, used);
            CHECK(mo_model_device_usable(&device, a, 10 * MIB));
            empty();
        }
    CHECK(failures > 15);
}

/* A budget that was lowered below what is held keeps nobody from getting back what he had. */
TEST(a_pause_that_fails_gives_back_what_it_took_whatever_the_budget_is_now)
{
    for (uint64_t after = 0; after < 8; after++) {
        const mo_address a = fill(plain_settings);
        const size_t used = device.used;

        mo_pool_limit(pool, 2 * MIB);
        mo_model_device_fail(&device, MO_MODEL_DEVICE_release, after, 1, MO_DRIVER);
        CHECK_EQ(mo_pool_pause(pool, one, &said), MO_DRIVER);
        mo_model_device_fail_never(&device);
        CHECK_EQ(device.used, used);
        CHECK(mo_model_device_usable(&device, a, 10 * MIB));
        CHECK_POOL();
        empty();
    }
}

TEST(resuming_beyond_the_budget_is_refused)
{
    fill(plain_settings);
    CHECK_OK(mo_pool_pause(pool, one, &said));
    mo_pool_limit(pool, 10 * MIB);
    CHECK_EQ(mo_pool_resume(pool, one, &said), MO_NO_DEVICE_MEMORY);
    CHECK(strstr(said.text, "budget"));
    CHECK_POOL();
    mo_pool_limit(pool, 0);
    CHECK_OK(mo_pool_resume(pool, one, &said));
    empty();
}

TEST(blocks_of_a_paused_arena_can_be_freed_and_the_arena_released)
{
    fill(plain_settings);
    CHECK_OK(mo_pool_pause(pool, one, &said));
    release(one);
    while (model.count)
        put(model.blocks[0].address);
    CHECK(!arena_of(one));
    CHECK_POOL();
    close_pool();
}

TEST(where_addresses_cannot_be_kept_pausing_is_refused)
{
    open_pool(128 * MIB, 0, plain_settings);
    retain(one);
    CHECK_EQ(mo_pool_pause(pool, one, &said), MO_UNSUPPORTED);
    release(one);
    close_pool();
}

TEST_MAIN
