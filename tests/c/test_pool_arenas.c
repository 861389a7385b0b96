#include "pool_fixture.h"

/* Memory that is kept apart: arenas, the routes into them, pinning, reserves, pause and resume. */

static const mo_arena_id graph = {7, 0}, mine = {0, 3}, nobodys = {9, 9};

static mo_arena_info info_of(mo_arena_id id)
{
    mo_arena_info info;
    CHECK_OK(mo_pool_arena_info(pool, id, &said, &info));
    CHECK(info.id.first == id.first && info.id.second == id.second);
    CHECK(info.free_bytes + info.live_bytes <= info.held_bytes || info.paused);
    CHECK(info.requested_bytes <= info.live_bytes && info.live_bytes <= info.peak_bytes);
    return info;
}

static bool is_open(mo_arena_id id)
{
    mo_arena_info info;
    return mo_pool_arena_info(pool, id, &said, &info) == MO_OK;
}

/* ---- open and closed ----------------------------------------------------------------------------------- */

TEST(the_general_arena_is_always_there)
{
    open_pool(256 * MIB, GRANULE, plain_settings);
    CHECK_EQ(info_of(GENERAL).live_blocks, 0);
    const mo_address a = get_in(GENERAL, 5 * MIB, A);
    CHECK_EQ(info_of(GENERAL).live_bytes, 5 * MIB);
    CHECK_EQ(info_of(GENERAL).live_blocks, 1);
    CHECK(info_of(GENERAL).held_bytes >= 5 * MIB);
    put(a);
    CHECK_EQ(info_of(GENERAL).live_bytes, 0);
    CHECK_EQ(info_of(GENERAL).peak_bytes, 5 * MIB);
    close_pool();
}

TEST(an_arena_that_is_not_open_is_refused_everywhere)
{
    mo_address address;
    mo_arena_info info;
    open_pool(256 * MIB, GRANULE, plain_settings);
    CHECK_EQ(mo_pool_alloc_in(pool, nobodys, MIB, A, &said, &address), MO_INVALID);
    CHECK(said.text[0]);
    CHECK_EQ(mo_pool_arena_info(pool, nobodys, &said, &info), MO_INVALID);
    CHECK_EQ(mo_pool_arena_release(pool, nobodys, &said), MO_INVALID);
    CHECK_EQ(mo_pool_unroute(pool, nobodys, &said), MO_INVALID);
    CHECK_EQ(mo_pool_pause(pool, nobodys, &said), MO_INVALID);
    CHECK_EQ(mo_pool_resume(pool, nobodys, &said), MO_INVALID);
    CHECK_EQ(mo_pool_preallocate(pool, nobodys, MIB, &said), MO_INVALID);
    CHECK_POOL();
    close_pool();
}

TEST(an_arena_lasts_until_its_last_reference_and_its_last_block)
{
    open_pool(256 * MIB, GRANULE, plain_settings);
    CHECK_OK(mo_pool_arena_retain(pool, mine, false, 0, &said));
    CHECK_OK(mo_pool_arena_retain(pool, mine, false, 0, &said));
    CHECK_EQ(info_of(mine).references, 2);
    const mo_address a = get_in(mine, 6 * MIB, A), b = get_in(mine, 700, A);
    CHECK_OK(mo_pool_arena_release(pool, mine, &said));
    CHECK_EQ(info_of(mine).references, 1);
    put(get_in(mine, 6 * MIB, A));
    CHECK_OK(mo_pool_arena_release(pool, mine, &said));
    CHECK_EQ(info_of(mine).live_blocks, 2); /* still there */
    CHECK_POOL();
    put(a);
    CHECK_EQ(info_of(mine).live_blocks, 1);
    put(b);
    CHECK(!is_open(mine));
    CHECK_POOL();
    CHECK_OK(mo_pool_arena_retain(pool, mine, false, 0, &said)); /* the number may come back */
    CHECK_EQ(info_of(mine).live_blocks, 0);
    CHECK_EQ(info_of(mine).peak_bytes, 0);
    CHECK_OK(mo_pool_arena_release(pool, mine, &said));
    CHECK(!is_open(mine));
    close_pool();
}

TEST(a_release_too_many_is_refused)
{
    open_pool(256 * MIB, GRANULE, plain_settings);
    CHECK_OK(mo_pool_arena_retain(pool, mine, false, 0, &said));
    const mo_address a = get_in(mine, 6 * MIB, A);
    CHECK_OK(mo_pool_arena_release(pool, mine, &said));
    CHECK_EQ(mo_pool_arena_release(pool, mine, &said), MO_INVALID);
    CHECK_POOL();
    put(a);
    CHECK(!is_open(mine));
    close_pool();
}

TEST(arenas_open_and_close_thousands_of_times_and_leave_nothing)
{
    size_t reservations = 0, host = 0;
    open_pool(256 * MIB, GRANULE, plain_settings);
    for (int i = 0, n = test_rounds(300, 20000); i < n; i++) {
        const mo_arena_id id = {0, (unsigned long long)i + 100};
        CHECK_OK(mo_pool_arena_retain(pool, id, i % 2, 0, &said));
        const mo_address a = get_in(id, 6 * MIB, A), b = get_in(id, 3000, A);
        if (i % 3)
            put(a), put(b);
        CHECK_OK(mo_pool_arena_release(pool, id, &said));
        if (i % 3 == 0)
            put(b), put(a);
        CHECK(!is_open(id));
        if (i == 100)
            reservations = device.blocks[MO_MODEL_DEVICE_RESERVATION].live, host = mo_host_live();
        if (i > 100) {
            CHECK(device.blocks[MO_MODEL_DEVICE_RESERVATION].live <= reservations);
            CHECK(mo_host_live() <= host + 8);
        }
        CHECK(held() <= 64 * MIB);
    }
    CHECK_POOL();
    close_pool();
}

TEST(memory_of_a_closed_arena_is_anyones_at_once)
{
    for (int pinned = 0; pinned < 2; pinned++) {
        mo_pool_settings settings = plain_settings;
        settings.budget = 32 * MIB;
        open_pool(256 * MIB, GRANULE, settings);
        CHECK_OK(mo_pool_arena_retain(pool, graph, pinned, 0, &said));
        mo_address blocks[4];
        for (int i = 0; i < 4; i++)
            blocks[i] = get_in(graph, 8 * MIB, A);
        for (int i = 0; i < 4; i++)
            put(blocks[i]);
        CHECK_OK(mo_pool_arena_release(pool, graph, &said));
        get(32 * MIB, A);
        CHECK_POOL();
        close_pool();
    }
}

TEST(a_live_block_of_a_closed_arena_keeps_its_memory_and_no_more)
{
    mo_pool_settings settings = plain_settings;
    settings.budget = 32 * MIB;
    open_pool(256 * MIB, GRANULE, settings);
    CHECK_OK(mo_pool_arena_retain(pool, graph, true, 0, &said));
    const mo_address a = get_in(graph, 8 * MIB, A), b = get_in(graph, 8 * MIB, A);
    put(get_in(graph, 16 * MIB, A));
    put(b);
    CHECK_OK(mo_pool_arena_release(pool, graph, &said));
    get(24 * MIB, A);
    CHECK(mo_model_device_usable(&device, a, 8 * MIB));
    CHECK_POOL();
    put(a);
    get(8 * MIB, A);
    CHECK_POOL();
    close_pool();
}

/* ---- apart --------------------------------------------------------------------------------------------- */

/* Whether an address lies in one of the arena's blocks, as mo_pool_blocks() lists them. */
static bool lies_in(mo_arena_id id, mo_address address)
{
    mo_block_view *blocks = NULL;
    size_t count = 0;
    bool found = false;
    CHECK_OK(mo_pool_blocks(pool, &said, &blocks, &count));
    for (size_t i = 0; i < count; i++)
        found |= blocks[i].arena.first == id.first && blocks[i].arena.second == id.second &&
                 blocks[i].address <= address && address < blocks[i].address + blocks[i].size;
    mo_host_free(blocks);
    return found;
}

TEST(free_blocks_of_an_arena_are_its_own)
{
    open_pool(256 * MIB, GRANULE, plain_settings);
    CHECK_OK(mo_pool_arena_retain(pool, graph, true, 0, &said));
    const mo_address a = get_in(graph, 8 * MIB, A);
    CHECK(lies_in(graph, a));
    put(a);
    const mo_address b = get(8 * MIB, A);
    CHECK(b + 8 * MIB <= a || a + 8 * MIB <= b);
    CHECK(lies_in(GENERAL, b));
    CHECK_EQ(get_in(graph, 8 * MIB, A), a);
    CHECK_OK(mo_pool_arena_release(pool, graph, &said));
    close_pool();
}

TEST(granules_of_a_pinned_arena_never_move)
{
    mo_pool_settings settings = plain_settings;
    settings.budget = 64 * MIB;
    open_pool(256 * MIB, GRANULE, settings);
    CHECK_OK(mo_pool_arena_retain(pool, graph, true, 0, &said));
    mo_address blocks[4], address;
    mo_physical behind[16];
    for (int i = 0; i < 4; i++)
        blocks[i] = get_in(graph, 8 * MIB, A);
    for (size_t i = 0; i < 16; i++)
        behind[i] = mo_model_device_behind(&device, blocks[i / 4] + i % 4 * GRANULE);
    for (int i = 0; i < 4; i++)
        put(blocks[i]);
    finish(A);
    const mo_address rest = get(32 * MIB, A);
    CHECK_OUT_OF_MEMORY(mo_pool_alloc(pool, 8 * MIB, A, &said, &address)); /* rather than take the graph's */
    size_t freed = 0;
    CHECK_OK(mo_pool_trim(pool, 0, &said, &freed));
    put(rest);
    put(get(24 * MIB, A));
    CHECK_OK(mo_pool_trim(pool, 0, &said, &freed));
    for (size_t i = 0; i < 16; i++) {
        CHECK(mo_model_device_usable(&device, blocks[i / 4] + i % 4 * GRANULE, GRANULE));
        CHECK_EQ(mo_model_device_behind(&device, blocks[i / 4] + i % 4 * GRANULE), behind[i]);
    }
    CHECK_POOL();
    CHECK_OK(mo_pool_arena_release(pool, graph, &said));
    get(64 * MIB, A);
    CHECK_POOL();
    close_pool();
}

TEST(granules_of_a_pinned_arena_do_not_move_within_it_either)
{
    mo_pool_settings settings = plain_settings;
    settings.budget = 32 * MIB;
    open_pool(256 * MIB, GRANULE, settings);
    CHECK_OK(mo_pool_arena_retain(pool, graph, true, 0, &said));
    mo_address blocks[8], address;
    mo_physical behind[8];
    for (size_t i = 0; i < 8; i++) {
        blocks[i] = get_in(graph, 4 * MIB, A);
        behind[i] = mo_model_device_behind(&device, blocks[i]);
    }
    for (size_t i = 0; i < 8; i += 2)
        put(blocks[i]);
    CHECK_OUT_OF_MEMORY(mo_pool_alloc_in(pool, graph, 16 * MIB, A, &said, &address));
    for (size_t i = 0; i < 8; i++)
        CHECK_EQ(mo_model_device_behind(&device, blocks[i]), behind[i]);
    CHECK_POOL();
    close_pool();
}

TEST(granules_of_an_arena_that_is_not_pinned_may_move_to_another)
{
    mo_pool_settings settings = plain_settings;
    settings.budget = 64 * MIB;
    open_pool(256 * MIB, GRANULE, settings);
    CHECK_OK(mo_pool_arena_retain(pool, mine, false, 0, &said));
    put(get_in(mine, 48 * MIB, A));
    const mo_address a = get(64 * MIB, A);
    CHECK_POOL();
    put(a);
    put(get_in(mine, 64 * MIB, A));
    CHECK_EQ(held(), 64 * MIB);
    CHECK_OK(mo_pool_arena_release(pool, mine, &said));
    close_pool();
}

TEST(an_arena_keeps_to_its_own_budget)
{
    mo_address address;
    open_pool(256 * MIB, GRANULE, plain_settings);
    CHECK_OK(mo_pool_arena_retain(pool, mine, false, 16 * MIB, &said));
    CHECK_EQ(info_of(mine).budget, 16 * MIB);
    const mo_address a = get_in(mine, 8 * MIB, A), b = get_in(mine, 8 * MIB, A);
    CHECK_OUT_OF_MEMORY(mo_pool_alloc_in(pool, mine, 2 * MIB, A, &said, &address));
    get(32 * MIB, A); /* the general one has none */
    put(a);
    put(b);
    put(get_in(mine, 16 * MIB, A));
    CHECK(info_of(mine).held_bytes <= 16 * MIB);
    CHECK_POOL();
    CHECK_OK(mo_pool_arena_release(pool, mine, &said));
    close_pool();
}

/* ---- routes -------------------------------------------------------------------------------------------- */

typedef struct watcher {
    mo_stream only;
    int asked, dropped;
} watcher;

static bool accepts_only(void *user, mo_stream stream)
{
    watcher *w = user;
    w->asked++;
    return stream == w->only;
}

static void note_drop(void *user)
{
    ((watcher *)user)->dropped++;
}

TEST(a_route_takes_the_requests_it_accepts_and_drops_at_its_end)
{
    watcher w = {.only = B};
    open_pool(256 * MIB, GRANULE, plain_settings);
    CHECK_OK(mo_pool_arena_retain(pool, graph, true, 0, &said));
    CHECK_OK(mo_pool_route(pool, graph, (mo_route){accepts_only, note_drop, &w}, &said));
    CHECK_EQ(info_of(graph).references, 2);
    const mo_address a = get(6 * MIB, A), b = get(6 * MIB, B);
    CHECK(w.asked >= 2);
    CHECK(lies_in(GENERAL, a) && lies_in(graph, b));
    CHECK(lies_in(GENERAL, get_in(GENERAL, 6 * MIB, B))); /* a named arena is not routed */
    CHECK_EQ(w.dropped, 0);
    CHECK_OK(mo_pool_unroute(pool, graph, &said));
    CHECK_EQ(w.dropped, 1);
    CHECK_EQ(info_of(graph).references, 1);
    CHECK(lies_in(GENERAL, get(6 * MIB, B)));
    CHECK_EQ(mo_pool_unroute(pool, graph, &said), MO_INVALID);
    CHECK_OK(mo_pool_arena_release(pool, graph, &said));
    CHECK_EQ(w.dropped, 1);
    close_pool();
}

TEST(the_newest_route_that_accepts_wins)
{
    watcher first = {.only = A}, second = {.only = A};
    open_pool(256 * MIB, GRANULE, plain_settings);
    CHECK_OK(mo_pool_arena_retain(pool, graph, true, 0, &said));
    CHECK_OK(mo_pool_arena_retain(pool, mine, false, 0, &said));
    CHECK_OK(mo_pool_route(pool, graph, (mo_route){accepts_only, note_drop, &first}, &said));
    CHECK_OK(mo_pool_route(pool, mine, (mo_route){accepts_only, note_drop, &second}, &said));
    CHECK(lies_in(mine, get(MIB, A)));
    CHECK_EQ(first.asked, 0);
    CHECK(lies_in(GENERAL, get(MIB, B)));
    CHECK_EQ(first.asked, 1);
    CHECK_OK(mo_pool_unroute(pool, mine, &said));
    CHECK(first.dropped == 0 && second.dropped == 1);
    CHECK(lies_in(graph, get(MIB, A)));
    CHECK_OK(mo_pool_route(pool, graph, (mo_route){NULL, NULL, NULL}, &said)); /* all, and nothing to drop */
    CHECK(lies_in(graph, get(MIB, C)));
    CHECK_OK(mo_pool_unroute(pool, graph, &said));
    CHECK(lies_in(GENERAL, get(MIB, C)));
    CHECK_OK(mo_pool_unroute(pool, graph, &said));
    CHECK_EQ(first.dropped, 1);
    CHECK_OK(mo_pool_arena_release(pool, mine, &said));
    CHECK_OK(mo_pool_arena_release(pool, graph, &said));
    close_pool();
}

TEST(a_route_keeps_its_arena_open)
{
    watcher w = {.only = A};
    open_pool(256 * MIB, GRANULE, plain_settings);
    CHECK_OK(mo_pool_arena_retain(pool, mine, false, 0, &said));
    CHECK_OK(mo_pool_route(pool, mine, (mo_route){accepts_only, note_drop, &w}, &said));
    CHECK_OK(mo_pool_arena_release(pool, mine, &said));
    CHECK_EQ(info_of(mine).references, 1);
    put(get(MIB, A));
    CHECK_OK(mo_pool_unroute(pool, mine, &said));
    CHECK(!is_open(mine));
    close_pool();
}

TEST(a_pool_that_closes_drops_the_routes_that_are_left)
{
    watcher w = {.only = A};
    open_pool(256 * MIB, GRANULE, plain_settings);
    CHECK_OK(mo_pool_arena_retain(pool, mine, false, 0, &said));
    CHECK_OK(mo_pool_route(pool, mine, (mo_route){accepts_only, note_drop, &w}, &said));
    get(6 * MIB, A);
    close_pool();
    CHECK_EQ(w.dropped, 1);
}

/* ---- reserves ------------------------------------------------------------------------------------------ */

TEST(what_is_preallocated_is_held_at_once_and_costs_no_call_later)
{
    size_t freed;
    open_pool(256 * MIB, GRANULE, plain_settings);
    CHECK_OK(mo_pool_preallocate(pool, GENERAL, 63 * MIB, &said));
    CHECK_EQ(held(), 64 * MIB);
    const uint64_t then = memory_calls();
    put(get(63 * MIB, A));
    for (int i = 0; i < 7; i++)
        get(8 * MIB + 512, i % 2 ? A : B);
    CHECK_EQ(memory_calls(), then);
    CHECK_OK(mo_pool_preallocate(pool, GENERAL, 10 * MIB, &said)); /* it has that */
    CHECK_EQ(memory_calls(), then);
    CHECK_POOL();
    while (model.count)
        put(model.blocks[0].address);
    CHECK_OK(mo_pool_trim(pool, 0, &said, &freed));
    CHECK(held() >= 10 * MIB);
    CHECK_POOL();
    close_pool();
}

TEST(what_is_preallocated_without_virtual_memory_costs_no_call_later_either)
{
    open_pool(256 * MIB, 0, plain_settings);
    CHECK_OK(mo_pool_preallocate(pool, GENERAL, 64 * MIB, &said));
    CHECK(held() >= 64 * MIB);
    const uint64_t then = memory_calls();
    for (int i = 0; i < 7; i++)
        get(8 * MIB + 512, A);
    CHECK_EQ(memory_calls(), then);
    CHECK_POOL();
    close_pool();
}

TEST(a_preallocation_stays_in_its_arena)
{
    size_t freed;
    mo_address address;
    mo_pool_settings settings = plain_settings;
    settings.budget = 64 * MIB;
    open_pool(256 * MIB, GRANULE, settings);
    CHECK_OK(mo_pool_arena_retain(pool, mine, false, 0, &said));
    CHECK_OK(mo_pool_preallocate(pool, mine, 32 * MIB, &said));
    CHECK_EQ(info_of(mine).held_bytes, 32 * MIB);
    CHECK_EQ(info_of(mine).free_bytes, 32 * MIB);
    get(32 * MIB, A);
    CHECK_OUT_OF_MEMORY(mo_pool_alloc(pool, 4 * MIB, A, &said, &address));
    CHECK_OK(mo_pool_trim(pool, 0, &said, &freed));
    CHECK_EQ(info_of(mine).held_bytes, 32 * MIB);
    put(get_in(mine, 32 * MIB, A));
    CHECK_OK(mo_pool_arena_release(pool, mine, &said));
    get(32 * MIB, A); /* it is anyone's now */
    CHECK_POOL();
    close_pool();
}

TEST(a_preallocation_that_does_not_fit_changes_nothing)
{
    mo_pool_settings settings = plain_settings;
    settings.budget = 32 * MIB;
    open_pool(256 * MIB, GRANULE, settings);
    get(8 * MIB, A);
    const size_t then = held();
    CHECK_EQ(mo_pool_preallocate(pool, GENERAL, 40 * MIB, &said), MO_NO_DEVICE_MEMORY);
    CHECK(said.text[0]);
    CHECK_EQ(held(), then);
    CHECK_POOL();
    put(get(24 * MIB, A));
    CHECK_EQ(mo_pool_preallocate(pool, GENERAL, SIZE_MAX, &said), MO_NO_DEVICE_MEMORY);
    CHECK_POOL();
    close_pool();
}

/* ---- pause --------------------------------------------------------------------------------------------- */

TEST(a_pause_gives_the_memory_back_and_keeps_the_addresses)
{
    for (int pinned = 0; pinned < 2; pinned++) {
        mo_address blocks[6], address;
        open_pool(256 * MIB, GRANULE, plain_settings);
        CHECK_OK(mo_pool_arena_retain(pool, mine, pinned, 0, &said));
        const mo_address other = get(10 * MIB, A);
        for (size_t i = 0; i < 6; i++)
            blocks[i] = get_in(mine, i % 2 ? 6 * MIB : 5000, A);
        put(blocks[3]);
        CHECK_OK(mo_pool_pause(pool, mine, &said)); /* work was pending: it waits */
        CHECK(info_of(mine).paused);
        CHECK_EQ(info_of(mine).live_blocks, 5);
        CHECK_EQ(info_of(mine).held_bytes, 0);
        CHECK_EQ(device.used, 10 * MIB);
        CHECK_EQ(held(), 10 * MIB);
        for (size_t i = 0; i < 6; i++)
            CHECK(!mo_model_device_usable(&device, blocks[i], 1));
        CHECK(mo_model_device_usable(&device, other, 10 * MIB));
        CHECK(mo_pool_alloc_in(pool, mine, MIB, A, &said, &address) != MO_OK);
        CHECK(said.text[0]);
        CHECK_POOL();
        get(40 * MIB, B); /* and no address of the arena is given away */
        put(blocks[4]);   /* a tensor may die meanwhile */
        CHECK_POOL();
        CHECK_OK(mo_pool_resume(pool, mine, &said));
        CHECK(!info_of(mine).paused);
        CHECK_EQ(info_of(mine).live_blocks, 4);
        for (size_t i = 0; i < model.count; i++) {
            CHECK(mo_model_device_usable(&device, model.blocks[i].address, model.blocks[i].size));
            mo_model_device_use(&device, model.blocks[i].stream, model.blocks[i].address,
                                model.blocks[i].size, model.blocks[i].owner);
        }
        CHECK_POOL();
        get_in(mine, 6 * MIB, A);
        check_stats();
        CHECK_OK(mo_pool_arena_release(pool, mine, &said));
        while (model.count)
            put(model.blocks[0].address);
        CHECK(!is_open(mine));
        close_pool();
    }
}

TEST(pausing_twice_and_resuming_what_runs_do_no_harm)
{
    open_pool(256 * MIB, GRANULE, plain_settings);
    CHECK_OK(mo_pool_arena_retain(pool, mine, false, 0, &said));
    const mo_address a = get_in(mine, 6 * MIB, A);
    (void)mo_pool_resume(pool, mine, &said); /* whatever it answers */
    CHECK(mo_model_device_usable(&device, a, 6 * MIB));
    CHECK_OK(mo_pool_pause(pool, mine, &said));
    (void)mo_pool_pause(pool, mine, &said);
    CHECK_EQ(device.used, 0);
    CHECK_POOL();
    CHECK_OK(mo_pool_resume(pool, mine, &said));
    CHECK(mo_model_device_usable(&device, a, 6 * MIB));
    (void)mo_pool_resume(pool, mine, &said);
    CHECK_EQ(device.used, held());
    CHECK_POOL();
    CHECK_OK(mo_pool_arena_release(pool, mine, &said));
    close_pool();
}

TEST(a_resume_without_room_fails_and_can_be_tried_again)
{
    open_pool(64 * MIB, GRANULE, plain_settings);
    CHECK_OK(mo_pool_arena_retain(pool, mine, false, 0, &said));
    const mo_address a = get_in(mine, 40 * MIB, A);
    CHECK_OK(mo_pool_pause(pool, mine, &said));
    const mo_address b = get(50 * MIB, A);
    CHECK_EQ(mo_pool_resume(pool, mine, &said), MO_NO_DEVICE_MEMORY);
    CHECK(info_of(mine).paused);
    CHECK_EQ(device.used, held());
    CHECK_POOL();
    put(b);
    CHECK_OK(mo_pool_resume(pool, mine, &said));
    CHECK(mo_model_device_usable(&device, a, 40 * MIB));
    CHECK_POOL();
    CHECK_OK(mo_pool_arena_release(pool, mine, &said));
    close_pool();
}

TEST(a_paused_arena_may_be_released_and_the_pool_closed)
{
    open_pool(256 * MIB, GRANULE, plain_settings);
    CHECK_OK(mo_pool_arena_retain(pool, mine, false, 0, &said));
    CHECK_OK(mo_pool_arena_retain(pool, graph, true, 0, &said));
    const mo_address a = get_in(mine, 6 * MIB, A);
    get_in(graph, 6 * MIB, A);
    CHECK_OK(mo_pool_pause(pool, mine, &said));
    CHECK_OK(mo_pool_pause(pool, graph, &said));
    CHECK_OK(mo_pool_arena_release(pool, mine, &said));
    put(a);
    CHECK_POOL();
    close_pool(); /* graph is paused, and its block live */
}

TEST(random_arenas_stay_apart_and_whole)
{
    uint64_t random = test_seed();
    for (int round = 0, rounds = test_rounds(6, 200); round < rounds; round++) {
        mo_pool_settings settings = plain_settings;
        settings.budget = 128 * MIB;
        settings.double_map = round % 2;
        bool paused[4] = {false};
        open_pool(1024 * MIB, GRANULE, settings);
        for (unsigned long long k = 1; k < 4; k++)
            CHECK_OK(mo_pool_arena_retain(pool, (mo_arena_id){k, 0}, k == 2, 0, &said));
        for (int i = 0; i < 500; i++) {
            const unsigned long long k = test_random(&random) % 4;
            const mo_arena_id id = {k, 0};
            const uint64_t what = test_random(&random) % 100;
            if (what < 50 && !paused[k]) {
                const size_t size =
                    1 + test_random(&random) % ((size_t)1 << (10 + test_random(&random) % 13));
                const mo_stream stream = test_random(&random) % 3 ? A : B;
                mo_address address;
                const mo_status status = mo_pool_alloc_in(pool, id, size, stream, &said, &address);
                CHECK(status == MO_OK || status == MO_NO_DEVICE_MEMORY);
                if (!status) {
                    take_in(address, size, stream);
                    CHECK(lies_in(id, address));
                }
            } else if (what < 95 && model.count) {
                put(model.blocks[test_random(&random) % model.count].address);
            } else if (what == 98 && k && paused[k]) {
                const mo_status status = mo_pool_resume(pool, id, &said);
                CHECK(status == MO_OK || status == MO_NO_DEVICE_MEMORY);
                paused[k] = status != MO_OK;
                paused_arenas -= !status;
            } else if (what == 99 && k && !paused[k]) {
                CHECK_OK(mo_pool_pause(pool, id, &said));
                paused[k] = true;
                paused_arenas++;
            }
            CHECK_POOL();
            check_stats();
        }
        close_pool();
    }
}

TEST_MAIN
