/* How free memory lies, against what the device and the list of blocks say. */
#include "alloc/fragmentation.h"

#include "pool_fixture.h"

static const mo_arena_id mine = {0, 3};

TEST(fragmentation_knows_what_pends_on_whichever_stream_and_what_cannot_move)
{
    mo_fragmentation f;
    mo_pool_settings settings = plain_settings;
    settings.budget = 64 * MIB;
    open_pool(1024 * MIB, GRANULE, settings);
    CHECK_OK(mo_pool_arena_retain(pool, mine, true, 0, &said)); /* pinned: its granules stay */
    const mo_address a = get(10 * MIB, A);
    get(2 * MIB, A);
    const mo_address b = get(4 * MIB, A);
    const mo_address fixed = get_in(mine, 6 * MIB, A);
    use_on(b, B);
    put(a), put(b);
    put(fixed);
    mo_pool_fragmentation(pool, &f);
    CHECK_EQ(f.held_bytes, 22 * MIB);
    CHECK_EQ(f.live_bytes, 2 * MIB);
    CHECK_EQ(f.free_bytes, 20 * MIB);
    CHECK_EQ(f.largest_free, 10 * MIB);
    CHECK_EQ(f.largest_allocatable,
             (14 + 42) * MIB); /* what is free elsewhere, and what may be created yet */
    CHECK_EQ(f.pending_bytes, 20 * MIB);
    size_t freed;
    finish(A), finish(B), finish(A);
    CHECK_OK(mo_pool_trim(pool, 20 * MIB, &said, &freed)); /* asks what is over */
    mo_pool_fragmentation(pool, &f);
    CHECK(freed == 2 * MIB && f.pending_bytes == 0 && f.live_bytes == 2 * MIB && f.internal == 0);
    CHECK(f.unused_at_peak > -1e-9 && f.unused_at_peak < 1e-9);
    close_pool();
}

/* The facts, told apart by their sizes. */
TEST(an_out_of_memory_says_how_much_is_where_and_who_still_uses_it)
{
    mo_pool_settings settings = plain_settings;
    mo_address address, blocks[3];
    mo_stream streams[3] = {A, B, C};
    settings.budget = 40 * MIB;
    open_pool(64 * MIB, GRANULE, settings);
    CHECK_OK(mo_pool_arena_retain(pool, mine, false, 16 * MIB, &said));
    for (int i = 0; i < 3; i++) {
        blocks[i] = get((size_t)(i + 1) * 2 * MIB, streams[i]);
        get(4 * MIB - 100, A);
    }
    for (int i = 0; i < 3; i++)
        put(blocks[i]);
    mo_lock_take(&pool->lock);
    mo_pool_describe_oom(pool, &pool->general, 50 * MIB, &said);
    mo_lock_give(&pool->lock);
    CHECK_EQ(said.status, MO_NO_DEVICE_MEMORY);
    CHECK(strstr(said.text, "Tried to allocate 50.00 MiB. GPU 0 has a total capacity of 64.00 MiB of which "
                            "40.00 MiB is free. 40.00 MiB allowed."));
    CHECK(strstr(said.text, "memopt holds 24.00 MiB: 12.00 MiB in live tensors (12.00 MiB requested) and "
                            "12.00 MiB free, of which the largest run is 6.00 MiB, or 28.00 MiB after"));
    CHECK(strstr(said.text, "12.00 MiB is freed but may still be used by queued work: 6.00 MiB on stream "
                            "0x30, 4.00 MiB on stream 0x20, 2.00 MiB on stream 0x10."));
    CHECK_OUT_OF_MEMORY(mo_pool_alloc_in(pool, mine, 18 * MIB, A, &said, &address));
    CHECK(strstr(said.text, "16.00 MiB allowed.")); /* the tighter of two budgets is the one that counts */
    close_pool();
}

TEST_MAIN
