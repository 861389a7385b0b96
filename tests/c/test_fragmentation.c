/* How free memory lies, against what the device and the list of blocks say. */
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

TEST_MAIN
