/* Arenas from inside the pool: who refers to one, what is left when nobody does, and pausing that fails half way. */
#include "alloc/pool_parts.h"
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
    reserves = device.calls[MO_DOUBLE_reserve];
    retain(two);
    CHECK(arena_of(two) == arena && !arena_of(one));
    CHECK(!arena->pinned && !arena->paused && !arena->unsettled);
    CHECK_EQ(arena->budget + arena->reserved + arena->peak_bytes + arena->live_blocks + mo_arena_held(arena),
             0);
    put(get_in(two, 20 * MIB, A));
    CHECK_EQ(device.calls[MO_DOUBLE_reserve], reserves); /* in the addresses of the first */
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
    mo_double_fail(&device, MO_DOUBLE_synchronize, 0, 2, MO_DRIVER);
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

/* ---- pausing ------------------------------------------------------------------------------------------------------------- */

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
    CHECK(!mo_double_usable(&device, a, 512));
    CHECK_EQ(mo_pool_pause(pool, one, &said), MO_INVALID);
    CHECK_EQ(mo_pool_alloc_in(pool, one, 4 * MIB, A, &said, &(mo_address){0}), MO_INVALID);
    CHECK_OK(mo_pool_resume(pool, one, &said));
    CHECK_EQ(device.used, used);
    CHECK(mo_double_usable(&device, a, 10 * MIB));
    CHECK_EQ(mo_pool_resume(pool, one, &said), MO_INVALID);
    CHECK_EQ(mo_pool_pause(pool, three, &said), MO_INVALID);
    CHECK_POOL();
    empty();
}

TEST(whichever_call_fails_an_arena_is_paused_whole_or_not_at_all)
{
    static const mo_double_call kinds[] = {MO_DOUBLE_synchronize, MO_DOUBLE_unmap, MO_DOUBLE_release};
    size_t failures = 0;

    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++)
        for (uint64_t after = 0; after < 25; after++) {
            const mo_address a = fill((mo_pool_settings){.double_map = true, .slack = 20});
            const size_t used = device.used;
            mo_status status;

            mo_double_fail(&device, kinds[kind], after, 1, MO_DRIVER);
            status = mo_pool_pause(pool, one, &said);
            mo_double_fail_never(&device);
            CHECK_POOL();
            if (status) {
                failures++;
                CHECK_EQ(status, MO_DRIVER);
                CHECK(!arena_of(one)->paused);
                CHECK_EQ(device.used, used);
                CHECK(mo_double_usable(&device, a, 10 * MIB));
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
    static const mo_double_call kinds[] = {MO_DOUBLE_create, MO_DOUBLE_map, MO_DOUBLE_grant};
    size_t failures = 0;

    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++)
        for (uint64_t after = 0; after < 15; after++) {
            const mo_address a = fill(plain_settings);
            const size_t used = device.used;
            size_t paused;
            mo_status status;

            CHECK_OK(mo_pool_pause(pool, one, &said));
            paused = device.used;
            mo_double_fail(&device, kinds[kind], after, 1, MO_DRIVER);
            status = mo_pool_resume(pool, one, &said);
            mo_double_fail_never(&device);
            CHECK_POOL();
            if (status) {
                failures++;
                CHECK_EQ(status, MO_DRIVER);
                CHECK(arena_of(one)->paused);
                CHECK_EQ(device.used, paused);
                CHECK_OK(mo_pool_resume(pool, one, &said));
            }
            CHECK_EQ(device.used, used);
            CHECK(mo_double_usable(&device, a, 10 * MIB));
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
        mo_double_fail(&device, MO_DOUBLE_release, after, 1, MO_DRIVER);
        CHECK_EQ(mo_pool_pause(pool, one, &said), MO_DRIVER);
        mo_double_fail_never(&device);
        CHECK_EQ(device.used, used);
        CHECK(mo_double_usable(&device, a, 10 * MIB));
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

/* ---- the end --------------------------------------------------------------------------------------------------------------- */

TEST(closing_gives_all_back_and_reports_the_first_refusal)
{
    static const mo_double_call kinds[] = {MO_DOUBLE_unmap, MO_DOUBLE_release, MO_DOUBLE_unreserve,
                                           MO_DOUBLE_segment_free};

    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        open_pool(128 * MIB, kind == 3 ? 0 : GRANULE, plain_settings);
        retain(one);
        get_in(one, 6 * MIB, A);
        get(12 * MIB, B);
        put(get(20 * MIB, B));
        mo_double_fail(&device, kinds[kind], 1, 1, MO_DRIVER);
        CHECK_EQ(mo_pool_close(pool, &said), MO_DRIVER);
        CHECK_EQ(mo_host_live(), host_before);
        mo_double_close(&device);
    }
}

TEST_MAIN
