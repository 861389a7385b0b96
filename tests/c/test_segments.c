/* Devices without virtual memory, from inside the pool. */
#include "alloc/arena.h"
#include "alloc/placement.h"
#include "alloc/segments.h"
#include "pool_fixture.h"

static const mo_pool_settings settings = {.slack = 20};

static mo_zone *large(void)
{
    return &pool->general.zones[MO_ZONE_LARGE];
}

static size_t span_count(const mo_zone *zone)
{
    size_t count = 0;

    for (const mo_span *span = zone->spans; span; span = span->next)
        count++;
    return count;
}

static void check_held(void)
{
    size_t bytes = 0;

    for (mo_arena *arena = pool->arenas; arena; arena = arena->next)
        MO_EACH_ZONE (zone, arena)
            for (const mo_span *span = zone->spans; span; span = span->next)
                bytes += span->size;
    CHECK_EQ(pool->segment_bytes, bytes);
    CHECK_EQ(mo_pool_held(pool), bytes);
    CHECK_EQ(device.used, bytes);
    CHECK_EQ(pool->stats.num_device_alloc - pool->stats.num_device_free,
             device.blocks[MO_MODEL_DEVICE_SEGMENT].live);
    CHECK_EQ(pool->granules.calls,
             device.calls[MO_MODEL_DEVICE_segment_alloc] + device.calls[MO_MODEL_DEVICE_segment_free]);
    CHECK_POOL();
}

TEST(a_segment_holds_the_request_in_whole_steps_and_is_free)
{
    static const size_t sizes[] = {512, MO_SEGMENT_STEP - 512, MO_SEGMENT_STEP, MO_SEGMENT_STEP + 512,
                                   37 * MIB};

    open_pool(256 * MIB, 0, settings);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const size_t expected = (sizes[i] + MO_SEGMENT_STEP - 1) / MO_SEGMENT_STEP * MO_SEGMENT_STEP;
        mo_block *block;

        CHECK_OK(mo_segment_add(pool, large(), sizes[i], &said, &block));
        CHECK_EQ(block->state, MO_BLOCK_FREE);
        CHECK_EQ(block->size, expected);
        CHECK(mo_model_device_usable(&device, block->address, block->size));
        CHECK_EQ(span_count(large()), i + 1);
        check_held();
    }
    CHECK_EQ(pool->held_peak, mo_pool_held(pool));
    close_pool();
}

TEST(no_budget_is_exceeded_and_nothing_is_asked_of_the_device_then)
{
    const mo_arena_id bounded = {1, 0};
    mo_block *block;
    mo_arena *arena;

    open_pool(256 * MIB, 0, (mo_pool_settings){.budget = 10 * MIB});
    CHECK_OK(mo_pool_arena_retain(pool, bounded, false, 6 * MIB, &said));
    arena = mo_arena_find(pool, bounded);
    CHECK_EQ(mo_segment_add(pool, &arena->zones[MO_ZONE_LARGE], 7 * MIB, &said, &block), MO_NO_DEVICE_MEMORY);
    CHECK_OK(mo_segment_add(pool, &arena->zones[MO_ZONE_LARGE], 4 * MIB, &said, &block));
    CHECK_EQ(mo_segment_add(pool, &arena->zones[MO_ZONE_SMALL], 3 * MIB, &said, &block), MO_NO_DEVICE_MEMORY);
    CHECK_OK(mo_segment_add(pool, &arena->zones[MO_ZONE_SMALL], 2 * MIB, &said, &block));
    CHECK_EQ(mo_segment_add(pool, large(), 5 * MIB, &said, &block), MO_NO_DEVICE_MEMORY);
    CHECK(strstr(said.text, "budget"));
    CHECK_OK(mo_segment_add(pool, large(), 4 * MIB, &said, &block));
    CHECK_EQ(device.calls[MO_MODEL_DEVICE_segment_alloc], 3);
    check_held();
    CHECK_EQ(mo_segment_add(pool, large(), SIZE_MAX - 5, &said, &block), MO_NO_DEVICE_MEMORY);
    CHECK_OK(mo_pool_arena_release(pool, bounded, &said));
    check_held();
    close_pool();
}

TEST(a_call_that_fails_leaves_no_segment)
{
    mo_block *block;

    open_pool(256 * MIB, 0, settings);
    mo_model_device_fail(&device, MO_MODEL_DEVICE_segment_alloc, 0, 1, MO_NO_DEVICE_MEMORY);
    CHECK_EQ(mo_segment_add(pool, large(), 4 * MIB, &said, &block), MO_NO_DEVICE_MEMORY);
    check_held();
    for (uint64_t after = 0; after < 2; after++) {
        mo_host_fail_after(after);
        CHECK_EQ(mo_segment_add(pool, large(), 4 * MIB, &said, &block), MO_NO_HOST_MEMORY);
        mo_host_fail_never();
        CHECK_EQ(device.used, 0);
        check_held();
    }
    CHECK_OK(mo_segment_add(pool, large(), 4 * MIB, &said, &block));
    check_held();
    mo_model_device_fail(&device, MO_MODEL_DEVICE_segment_free, 0, 1, MO_DRIVER);
    CHECK_EQ(mo_segments_free(pool, large(), 0, &said), MO_DRIVER);
    check_held();
    CHECK_EQ(span_count(large()), 1);
    CHECK_OK(mo_segments_free(pool, large(), 0, &said));
    CHECK_EQ(span_count(large()), 0);
    check_held();
    close_pool();
}

/* The segments in the order of the list: each that is free as a whole goes, while more than `keep` is held. */
TEST(free_segments_go_back_until_no_more_is_held_than_was_said)
{
    uint64_t random = test_seed();
    size_t freed = 0;

    for (int round = 0; round < test_rounds(100, 5000); round++) {
        open_pool(512 * MIB, 0, settings);
        for (int n = 0; n < 20; n++) {
            size_t keep = test_random(&random) % 3 ? test_random(&random) % (200 * MIB) : 0;
            size_t expected = mo_pool_held(pool), live = 0;
            const size_t reserved = test_random(&random) % 4 ? 0 : test_random(&random) % (40 * MIB);

            for (int i = 0; i < 12; i++)
                if (model.count && test_random(&random) % 50 < 15 + model.count)
                    put(model.blocks[test_random(&random) % model.count].address);
                else
                    get(MIB + test_random(&random) % (9 * MIB), test_random(&random) & 1 ? A : B);
            expected = mo_pool_held(pool);
            pool->general.reserved = reserved;
            for (const mo_span *span = large()->spans; span; span = span->next) {
                const model_block *inside = NULL;

                for (size_t i = 0; i < model.count; i++)
                    if (model.blocks[i].address - span->base < span->size)
                        inside = &model.blocks[i];
                if (inside)
                    live += span->size;
                else if (expected > keep && expected >= reserved + span->size)
                    expected -= span->size;
            }
            freed += mo_pool_held(pool) - expected;
            CHECK_OK(mo_segments_free(pool, large(), keep, &said));
            CHECK_EQ(mo_pool_held(pool), expected);
            CHECK(mo_pool_held(pool) >= live);
            check_held();
            pool->general.reserved = 0;
        }
        close_pool();
    }
    CHECK(freed > 100 * MIB);
}

TEST(segments_neither_join_nor_are_cut_apart_for_good)
{
    mo_address a, b;

    open_pool(256 * MIB, 0, settings);
    a = get(10 * MIB, A);
    b = get(10 * MIB, A);
    put(a);
    put(b);
    CHECK_EQ(large()->free.count, 2);
    a = get(3 * MIB, A);
    CHECK_EQ(span_count(large()), 2);
    get(7 * MIB, A);
    CHECK_EQ(span_count(large()), 2);
    CHECK_EQ(large()->free.count, 1);
    put(a);
    put(model.blocks[0].address);
    CHECK_EQ(large()->free.count, 2);
    check_held();
    close_pool();
}

TEST_MAIN
