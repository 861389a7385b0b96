#include "alloc/trim.h"

#include "alloc/pool_wait.h"
#include "base/size.h"
#include "pool_fixture.h"

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
    mo_model_device_capture(&device, A, 5); /* it cannot be waited for */
    CHECK_OK(shrink(0));
    CHECK_EQ(mo_pool_held(pool), 22 * MIB);
    mo_model_device_capture(&device, A, 0);
    device.work_per_pause = 1000;
    CHECK_OK(shrink(0));
    CHECK_EQ(mo_pool_held(pool), 2 * MIB);
    CHECK_POOL();
    put(model.blocks[0].address);
    close_pool();
}

TEST(a_driver_that_takes_nothing_back_is_reported_and_the_pool_stays_sound)
{
    static const mo_model_device_call kinds[] = {MO_MODEL_DEVICE_unmap, MO_MODEL_DEVICE_release};

    for (int kind = 0; kind < 2; kind++)
        for (uint64_t after = 0; after < 12; after++) {
            open_pool(256 * MIB, GRANULE, plain_settings);
            get(20 * MIB, A);
            put(model.blocks[0].address);
            mo_model_device_fail(&device, kinds[kind], after, 1, MO_DRIVER);
            CHECK_EQ(shrink(0), after < 10 ? MO_DRIVER : MO_OK);
            mo_model_device_fail_never(&device);
            CHECK_POOL();
            CHECK_EQ(pool->stats.failed_releases, kind && after < 10);
            CHECK_OK(shrink(0));
            CHECK_EQ(mo_pool_held(pool), 0);
            CHECK_EQ(device.used, kind && after < 10 ? GRANULE : 0); /* lost to the driver */
            CHECK_OK(mo_pool_close(pool, &said));
            mo_model_device_close(&device);
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
    CHECK_EQ(device.blocks[MO_MODEL_DEVICE_MAPPING].live + device.blocks[MO_MODEL_DEVICE_HANDLE].live, 0);
    CHECK_POOL();
    close_pool();
}

TEST_MAIN
