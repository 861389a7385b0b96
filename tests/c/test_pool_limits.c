#include "pool_fixture.h"

/* What a pool does at its limits, and how it gives back. */

/* ---- limits -------------------------------------------------------------------------------------------- */

TEST(a_budget_is_used_to_its_last_granule_and_never_passed)
{
    mo_pool_settings settings = plain_settings;
    mo_address blocks[32], address = 0;
    settings.budget = 64 * MIB;
    open_pool(1024 * MIB, GRANULE, settings);
    put(get(64 * MIB, A));
    for (int i = 0; i < 32; i++)
        blocks[i] = get(2 * MIB, A);
    CHECK_EQ(held(), 64 * MIB);
    CHECK_OUT_OF_MEMORY(mo_pool_alloc(pool, 2 * MIB, A, &said, &address));
    CHECK_EQ(stats_now().num_ooms, 1);
    check_stats();
    put(blocks[13]);
    put(get(2 * MIB, A));
    for (int i = 0; i < 32; i += 2)
        if (i != 13)
            put(blocks[i]);
    get(34 * MIB, A); /* 16 even ones and the 13th: everything that is free, in one piece */
    CHECK_EQ(held(), 64 * MIB);
    CHECK_POOL();
    check_stats();
    close_pool();
}

TEST(the_devices_own_end_is_out_of_memory_too_and_one_recovers)
{
    mo_address blocks[16], address = 0;
    open_pool(32 * MIB, GRANULE, plain_settings);
    for (int i = 0; i < 16; i++)
        blocks[i] = get(2 * MIB, A);
    CHECK_OUT_OF_MEMORY(mo_pool_alloc(pool, 512, A, &said, &address));
    put(blocks[3]);
    put(blocks[9]);
    get(4 * MIB, A);
    CHECK_POOL();
    close_pool();
}

TEST(memory_that_is_pending_on_another_stream_is_waited_for_before_giving_up)
{
    for (int double_map = 0; double_map < 2; double_map++) {
        mo_pool_settings settings = plain_settings;
        settings.double_map = double_map;
        settings.budget = 32 * MIB;
        open_pool(1024 * MIB, GRANULE, settings);
        device.work_per_pause = 1;
        const mo_address a = get(16 * MIB, A), b = get(16 * MIB, B);
        put(a);
        put(b);
        get(32 * MIB, C);
        CHECK_POOL();
        close_pool();
    }
}

TEST(a_lower_limit_leaves_what_is_held_and_trim_brings_it_down)
{
    size_t freed = 0;
    open_pool(1024 * MIB, GRANULE, plain_settings);
    const mo_address a = get(64 * MIB, A), b = get(8 * MIB, A);
    CHECK(b);
    put(a);
    finish(A);
    mo_pool_limit(pool, 32 * MIB);
    CHECK(held() >= 72 * MIB);
    CHECK_POOL();
    CHECK_OK(mo_pool_trim(pool, 0, &said, &freed));
    CHECK(held() <= 32 * MIB);
    get(22 * MIB, A);
    mo_address address;
    CHECK_OUT_OF_MEMORY(mo_pool_alloc(pool, 8 * MIB, A, &said, &address));
    mo_pool_limit(pool, 0);
    get(8 * MIB, A);
    CHECK_POOL();
    close_pool();
}

TEST(trim_gives_back_all_that_is_free_and_says_how_much)
{
    for (int lazy = 0; lazy < 2; lazy++) {
        size_t freed = 77;
        open_pool(1024 * MIB, GRANULE, plain_settings);
        device.work_per_pause = 1;
        mo_address blocks[20];
        for (int i = 0; i < 20; i++)
            blocks[i] = get(6 * MIB, i % 2 ? A : B);
        for (int i = 0; i < 200; i++)
            get(700, A);
        if (!lazy)
            CHECK_OK(device.table.synchronize(&device.table, NULL));
        for (int i = 0; i < 20; i += 3)
            put(blocks[i]);
        const size_t before = held();
        CHECK_OK(mo_pool_trim(pool, 0, &said, &freed));
        CHECK_EQ(before - held(), freed);
        CHECK(freed >= 7 * 4 * MIB); /* of 6 MiB wherever they lie, 4 are whole granules */
        CHECK_EQ(held(), model_touched(&model, GRANULE));
        check_stats();
        CHECK_POOL();
        CHECK_OK(mo_pool_trim(pool, 0, &said, &freed));
        CHECK_EQ(freed, 0);
        close_pool();
    }
}

TEST(trim_keeps_what_it_is_told_to_keep)
{
    size_t freed = 77;
    open_pool(1024 * MIB, GRANULE, plain_settings);
    mo_address a = get(64 * MIB, A);
    get(2 * MIB, A);
    put(a);
    CHECK_OK(mo_pool_trim(pool, 100 * MIB, &said, &freed));
    CHECK_EQ(freed, 0);
    CHECK_EQ(held(), 66 * MIB);
    CHECK_OK(mo_pool_trim(pool, 31 * MIB, &said, &freed));
    CHECK_EQ(held(), 30 * MIB);
    CHECK_EQ(freed, 36 * MIB);
    CHECK_OK(mo_pool_trim(pool, 0, &said, &freed));
    CHECK_EQ(held(), 2 * MIB);
    CHECK_POOL();
    close_pool();
}

TEST(after_a_trim_no_stale_mapping_keeps_memory)
{
    size_t freed;
    mo_address blocks[16];
    mo_fragmentation f;
    open_pool(1024 * MIB, GRANULE, plain_settings);
    for (int i = 0; i < 16; i++)
        blocks[i] = get(4 * MIB, A);
    for (int i = 0; i < 16; i += 2)
        put(blocks[i]);
    const mo_address stitched = get(32 * MIB, A);
    mo_pool_fragmentation(pool, &f);
    CHECK(f.stale_bytes > 0);
    put(stitched);
    CHECK_OK(mo_pool_trim(pool, 0, &said, &freed));
    CHECK_EQ(device.used, 32 * MIB);
    mo_pool_fragmentation(pool, &f);
    CHECK_EQ(f.stale_bytes, 0);
    CHECK_EQ(device.blocks[MO_MODEL_DEVICE_MAPPING].live, 16);
    CHECK_POOL();
    close_pool();
}

TEST(an_arena_never_holds_more_than_its_own_budget_whatever_lies_free_elsewhere)
{
    uint64_t random = test_seed();
    for (int round = 0, rounds = test_rounds(20, 500); round < rounds; round++) {
        const mo_arena_id arenas[] = {GENERAL, {0, 1}, {0, 2}};
        const size_t budgets[] = {0, 16 * MIB, 10 * MIB + 77};
        mo_pool_settings settings = plain_settings;
        int refused = 0;
        settings.budget = round % 2 ? 40 * MIB : 0;
        settings.double_map = round % 4 < 2;
        open_pool(64 * MIB, round % 5 == 4 ? 0 : GRANULE, settings);
        for (int i = 1; i < 3; i++)
            CHECK_OK(mo_pool_arena_retain(pool, arenas[i], false, budgets[i], &said));
        for (int i = 0; i < 300; i++) {
            const int which = (int)(test_random(&random) % 3);
            const size_t size = 1 + test_random(&random) % (9 * MIB);
            mo_address address = 0;
            if (model.count && test_random(&random) % 5 < 2)
                put(model.blocks[test_random(&random) % model.count].address);
            else if (mo_pool_alloc_in(pool, arenas[which], size, A, &said, &address) == MO_OK)
                take_in(address, size, A);
            else
                refused++;
            for (int k = 1; k < 3; k++) {
                mo_arena_info info;
                CHECK_OK(mo_pool_arena_info(pool, arenas[k], &said, &info));
                CHECK(info.held_bytes <= budgets[k]);
            }
            finish(A);
        }
        CHECK(refused);
        CHECK_POOL();
        close_pool();
    }
}

TEST_MAIN
