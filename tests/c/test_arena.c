/* Arenas from inside the pool: who refers to one, and what is left when nobody does. */
#include "alloc/arena.h"
#include "pool_fixture.h"

static const mo_arena_id one = {1, 0}, two = {0, 2}, three = {7, 7};

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

static size_t retired(void)
{
    size_t count = 0;

    for (const mo_arena *arena = pool->retired; arena; arena = arena->next)
        count++;
    return count;
}

/* ---- references ---------------------------------------------------------------------------------------------------------- */

TEST(an_arena_is_there_while_it_is_referred_to_or_has_live_blocks)
{
    mo_address a;

    open_pool(128 * MIB, GRANULE, plain_settings);
    CHECK(!arena_of(one));
    CHECK_EQ(mo_pool_arena_release(pool, one, &said), MO_INVALID);
    retain(one);
    retain(one);
    retain(two);
    CHECK(arena_of(one) != arena_of(two) && arena_of(one)->number != arena_of(two)->number);
    release(one);
    a = get_in(one, 4 * MIB, A);
    release(one);
    CHECK(arena_of(one));
    CHECK_EQ(arena_of(one)->references, 0);
    CHECK_EQ(mo_pool_arena_release(pool, one, &said), MO_INVALID);
    put(a);
    CHECK(!arena_of(one));
    CHECK_EQ(retired(), 1);
    CHECK_EQ(pool->granules.spare_count, 2);
    release(two);
    CHECK_EQ(retired(), 2);
    CHECK(arena_of(GENERAL) == &pool->general && pool->arenas == &pool->general && !pool->general.next);
    CHECK_POOL();
    close_pool();
}

TEST(one_that_was_left_is_revived_with_its_blocks_by_a_new_reference)
{
    mo_address a;
    mo_arena *arena;

    open_pool(128 * MIB, GRANULE, plain_settings);
    retain(one);
    a = get_in(one, 4 * MIB, A);
    release(one);
    arena = arena_of(one);
    retain(one);
    CHECK(arena_of(one) == arena && arena->references == 1 && arena->live_blocks == 1);
    put(a);
    CHECK(arena_of(one) == arena);
    release(one);
    CHECK(!arena_of(one));
    close_pool();
}

TEST(a_retired_arena_serves_the_next_as_if_it_were_new)
{
    mo_arena *arena;
    uint64_t reserves;

    open_pool(128 * MIB, GRANULE, plain_settings);
    CHECK_OK(mo_pool_arena_retain(pool, one, true, 50 * MIB, &said));
    arena = arena_of(one);
    CHECK_OK(mo_pool_preallocate(pool, one, 6 * MIB, &said));
    put(get_in(one, 20 * MIB, A));
    release(one);
    reserves = device.calls[MO_MODEL_DEVICE_reserve];
    retain(two);
    CHECK(arena_of(two) == arena && !arena_of(one));
    CHECK(!arena->pinned && !arena->paused && !arena->unsettled);
    CHECK_EQ(arena->budget + arena->reserved + arena->peak_bytes + arena->live_blocks + mo_arena_held(arena),
             0);
    put(get_in(two, 20 * MIB, A));
    CHECK_EQ(device.calls[MO_MODEL_DEVICE_reserve], reserves); /* in the addresses of the first */
    CHECK_POOL();
    release(two);
    close_pool();
}

TEST(a_pinned_arena_is_let_go_only_when_the_device_is_done)
{
    mo_address a;
    size_t freed;

    open_pool(128 * MIB, GRANULE, plain_settings);
    CHECK_OK(mo_pool_arena_retain(pool, one, true, 0, &said));
    a = get_in(one, 4 * MIB, A);
    put(a);
    mo_model_device_fail(&device, MO_MODEL_DEVICE_synchronize, 0, 2, MO_DRIVER);
    release(one);
    CHECK(arena_of(one) && arena_of(one)->unsettled && arena_of(one)->pinned);
    CHECK_EQ(pool->granules.spare_count, 0);
    CHECK_OK(mo_pool_trim(pool, SIZE_MAX, &said, &freed)); /* fails once more */
    CHECK(arena_of(one));
    CHECK_POOL();
    CHECK_OK(mo_pool_trim(pool, SIZE_MAX, &said, &freed));
    CHECK(!arena_of(one));
    CHECK_EQ(pool->granules.spare_count, 2);
    CHECK_POOL();
    close_pool();
}

TEST(without_host_memory_nothing_is_opened_or_routed)
{
    open_pool(128 * MIB, GRANULE, plain_settings);
    mo_host_fail_after(0);
    CHECK_EQ(mo_pool_arena_retain(pool, one, false, 0, &said), MO_NO_HOST_MEMORY);
    CHECK(!arena_of(one));
    CHECK_EQ(mo_pool_route(pool, GENERAL, (mo_route){0}, &said), MO_NO_HOST_MEMORY);
    mo_host_fail_never();
    CHECK(!pool->routes && pool->general.references == 1);
    close_pool();
}

/* ---- routes -------------------------------------------------------------------------------------------------------------- */

static int asked, dropped;

static bool accepts_stream(void *user, mo_stream stream)
{
    asked++;
    return user == stream;
}

static void note_drop(void *user)
{
    (void)user;
    dropped++;
}

static mo_arena_id routed(mo_stream stream)
{
    return mo_arena_routed(pool, stream)->id;
}

TEST(the_newest_route_that_accepts_decides)
{
    open_pool(128 * MIB, GRANULE, plain_settings);
    asked = dropped = 0;
    retain(one);
    retain(two);
    CHECK_EQ(routed(A).first, 0);
    CHECK_OK(mo_pool_route(pool, one, (mo_route){accepts_stream, note_drop, A}, &said));
    CHECK_EQ(routed(A).first, 1);
    CHECK_EQ(routed(B).first, 0);
    CHECK_OK(mo_pool_route(pool, two, (mo_route){NULL, note_drop, NULL}, &said));
    asked = 0;
    CHECK_EQ(routed(A).second, 2);
    CHECK_EQ(asked, 0);
    CHECK_OK(mo_pool_route(pool, one, (mo_route){accepts_stream, note_drop, B}, &said));
    CHECK_EQ(routed(B).first, 1);
    CHECK_EQ(routed(A).second, 2);
    CHECK_EQ(arena_of(one)->references, 3);
    CHECK_OK(mo_pool_unroute(pool, one, &said)); /* its newest */
    CHECK_EQ(dropped, 1);
    CHECK_EQ(routed(B).second, 2);
    CHECK_OK(mo_pool_unroute(pool, two, &said));
    CHECK_EQ(routed(B).first + routed(B).second, 0);
    CHECK_EQ(routed(A).first, 1);
    release(one);
    CHECK_EQ(routed(A).first, 1); /* the route refers to it */
    CHECK_OK(mo_pool_unroute(pool, one, &said));
    CHECK_EQ(routed(A).first, 0);
    CHECK(!arena_of(one));
    CHECK_EQ(mo_pool_unroute(pool, one, &said), MO_INVALID);
    CHECK_EQ(mo_pool_route(pool, three, (mo_route){NULL, note_drop, NULL}, &said), MO_INVALID);
    CHECK_EQ(dropped, 3);
    release(two);
    close_pool();
}

TEST(routes_that_are_left_are_dropped_with_the_pool)
{
    open_pool(128 * MIB, GRANULE, plain_settings);
    dropped = 0;
    retain(one);
    CHECK_OK(mo_pool_route(pool, one, (mo_route){NULL, note_drop, NULL}, &said));
    CHECK_OK(mo_pool_route(pool, one, (mo_route){NULL, NULL, NULL}, &said));
    close_pool();
    CHECK_EQ(dropped, 1);
}

/* ---- the end --------------------------------------------------------------------------------------------------------------- */

TEST(closing_gives_all_back_and_reports_the_first_refusal)
{
    static const mo_model_device_call kinds[] = {MO_MODEL_DEVICE_unmap, MO_MODEL_DEVICE_release,
                                                 MO_MODEL_DEVICE_unreserve, MO_MODEL_DEVICE_segment_free};

    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        open_pool(128 * MIB, kind == 3 ? 0 : GRANULE, plain_settings);
        retain(one);
        get_in(one, 6 * MIB, A);
        get(12 * MIB, B);
        put(get(20 * MIB, B));
        mo_model_device_fail(&device, kinds[kind], 1, 1, MO_DRIVER);
        CHECK_EQ(mo_pool_close(pool, &said), MO_DRIVER);
        CHECK_EQ(mo_host_live(), host_before);
        mo_model_device_close(&device);
    }
}

TEST_MAIN
