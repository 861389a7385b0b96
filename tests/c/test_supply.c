/* Granules for a request, from inside the pool: what can be had is counted slot by slot, and what is done is what was
 * planned. */
#include "alloc/arena.h"
#include "alloc/supply.h"
#include "base/size.h"
#include "alloc/remap.h"
#include "pool_fixture.h"

#define UNIT ((size_t)1 << 19) /* bytes of a granule here */

static mo_arena *arena_of(mo_arena_id id)
{
    mo_arena *arena = mo_arena_find(pool, id);

    CHECK(arena);
    return arena;
}

static mo_request request_of(mo_arena *arena, size_t size, mo_stream stream)
{
    mo_request request = {
        .arena = arena, .zone = &arena->zones[MO_ZONE_LARGE], .size = size, .requested = size};

    CHECK_OK(mo_stream_order_number(&pool->order, stream, &said, &request.stream));
    return request;
}

/* Whether the request may have memory of this use, moved. */
static bool may_have(const mo_request *request, mo_last_use use, bool join)
{
    if (request->captured || !pool->settings.double_map)
        return mo_stream_order_over(&pool->order, use);
    return join || !mo_stream_order_missing(&pool->order, request->stream, false, use);
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* How many granules the request's arena may get beside its own. */
static size_t may_enter(const mo_request *request)
{
    const mo_arena *own = request->arena;

    return own->budget ? (own->budget - smaller(own->budget, mo_arena_held(own))) / UNIT : SIZE_MAX;
}

/* Whether a slot that begins at `at` may leave a block which overlaps the site: it lies behind the site, or (join) before it,
 * where the block has none behind. */
static bool leaves(const mo_request *request, const mo_site *site, const mo_block *block, mo_address at,
                   bool join)
{
    const mo_address end = site->at + request->size;
    const size_t last = mo_span_slot(site->span, end - 1), first = mo_span_slot(site->span, site->at);

    if (at >= end)
        return true;
    return join && mo_span_slot(site->span, at) < first &&
           block->address + block->size < mo_slot_address(site->span, last + 2);
}

/* Whole free granules outside the site that can become spare for the request, `enter` of them at most from other arenas. */
static size_t stealable(const mo_request *request, const mo_site *site, bool join, size_t enter)
{
    const mo_arena *own = request->arena;
    size_t inside = 0, outside = 0;

    for (mo_arena *arena = pool->arenas; arena; arena = arena->next) {
        size_t here = 0, held = mo_arena_held(arena);

        if (arena->pinned || arena->paused)
            continue;
        MO_EACH_ZONE (zone, arena)
            for (mo_span *span = zone->spans; span; span = span->next)
                for (size_t i = 0; i < span->fresh; i++) {
                    const mo_address at = mo_slot_address(span, i);
                    mo_block *block = mo_span_block_at(span, at);
                    const bool beside = block->address < site->at + request->size && /* overlaps the site */
                                        block->address + block->size > site->at && span == site->span;

                    here += mo_slot_owned(&span->slots[i]) && block->state == MO_BLOCK_FREE &&
                            block->address + block->size >= at + UNIT && block->address <= at &&
                            may_have(request, block->last_use, join) &&
                            (!beside || leaves(request, site, block, at, join));
                }
        if (arena == own)
            inside += here;
        else
            outside += smaller(here, held > arena->reserved ? (held - arena->reserved) / UNIT : 0);
    }
    return inside + smaller(outside, enter);
}

static size_t owned_granules(void)
{
    size_t count = 0;

    for (mo_arena *arena = pool->arenas; arena; arena = arena->next)
        MO_EACH_ZONE (zone, arena)
            count += zone->owned;
    return count;
}

static size_t usable_spare(const mo_request *request, bool join)
{
    size_t count = 0;

    for (const mo_granule *g = pool->granules.spare; g; g = g->next)
        count += request->captured
                     ? mo_stream_order_over(&pool->order, g->last_use)
                     : join || !mo_stream_order_missing(&pool->order, request->stream, false, g->last_use);
    return count;
}

/* Blocks come and go in three arenas on two streams. */
static const mo_arena_id arenas[] = {{0, 0}, {1, 0}, {0, 2}};

static void churn(uint64_t *random, int operations)
{
    while (operations--) {
        const uint64_t r = test_random(random);
        const mo_stream stream = r & 64 ? A : B;

        if (model.count && r % 50 < 15 + model.count)
            put(model.blocks[(r >> 8) % model.count].address);
        else {
            const size_t size = (1 + (r >> 8) % 60) * 200000;
            mo_address address;

            if (!mo_pool_alloc_in(pool, arenas[(r >> 30) % 3], size, stream, &said, &address))
                take_in(address, size, stream);
        }
        if (r >> 59 == 0) {
            finish(stream);
            mo_stream_order_poll(&pool->order);
        }
    }
}

/* A place that holds no live block, where the first one for the request would be. */
static mo_site some_site(const mo_request *request, uint64_t *random)
{
    mo_span *span = request->zone->spans;
    mo_site site = {.span = span};
    mo_block *block;

    if (!span)
        return site;
    block = mo_span_block_at(span, span->base + test_random(random) % (span->fresh * UNIT + 1));
    while (block->state == MO_BLOCK_LIVE)
        block = block->next;
    site.at = block->address;
    return site;
}

static void open_arenas(uint64_t r)
{
    open_pool(1024 * MIB, UNIT, (mo_pool_settings){.slack = r % 3 * 10, .double_map = r & 4});
    CHECK_OK(mo_pool_arena_retain(pool, arenas[1], r & 8, (r & 48) == 48 ? 40 * MIB : 0, &said));
    CHECK_OK(mo_pool_arena_retain(pool, arenas[2], false, r & 64 ? 60 * MIB : 0, &said));
    if (r & 128)
        CHECK_OK(mo_pool_preallocate(pool, arenas[2], 20 * MIB, &said));
}

static void close_arenas(void)
{
    while (model.count)
        put(model.blocks[0].address);
    CHECK_OK(mo_pool_arena_release(pool, arenas[1], &said));
    CHECK_OK(mo_pool_arena_release(pool, arenas[2], &said));
    close_pool();
}

TEST(a_plan_is_made_where_there_is_enough_and_takes_what_it_says)
{
    uint64_t random = test_seed();
    size_t taken = 0, refused = 0, created = 0;

    for (int round = 0; round < test_rounds(60, 3000); round++) {
        open_arenas(test_random(&random));
        for (int n = 0; n < 40; n++) {
            const uint64_t r = test_random(&random);
            mo_request request;
            const mo_effort effort = (mo_effort)(r % 4);
            size_t need = 1 + (r >> 8) % 60, create = 99, take = 99, can, spare, count, owned, own, enter;
            const bool join = effort >= MO_EFFORT_JOIN;
            mo_site site;
            bool planned;

            churn(&random, 10);
            request = request_of(arena_of(arenas[r >> 60 & 1 ? 0 : 2]), need * UNIT, r & 16 ? A : B);
            request.captured = r % 11 == 0;
            site = some_site(&request, &random);
            if (!site.span)
                continue;
            enter = may_enter(&request);
            can = stealable(&request, &site, join, enter);
            own = stealable(&request, &site, join, 0);
            spare = usable_spare(&request, join);
            count = pool->granules.count;
            owned = owned_granules();
            planned = mo_supply_plan(pool, &request, &site, need, effort, &create, &take);
            CHECK_EQ(pool->granules.count, count); /* a plan changes nothing */
            CHECK_EQ(can, stealable(&request, &site, join, enter));
            if (!planned) {
                refused++;
                CHECK(effort < MO_EFFORT_CREATE || need - smaller(need, own) > enter);
                if (effort == MO_EFFORT_MOVE || effort == MO_EFFORT_JOIN)
                    CHECK(can < need);
                continue;
            }
            CHECK(create + take <= need && need - create - take <= spare);
            CHECK(take <= can && need - smaller(take, own) <= enter); /* its arena's budget holds */
            CHECK(effort >= MO_EFFORT_MOVE || !take);
            if (effort < MO_EFFORT_CREATE &&
                create) { /* within the slack: two hundredths of the peak, or 8 MiB */
                const size_t live =
                    (size_t)pool->stats.of[MO_REQUESTED_BYTES][MO_STAT_ALL].current + request.size;
                const size_t peak = live > pool->peak ? live : pool->peak;

                CHECK(mo_pool_held(pool) + create * UNIT <= peak + 8 * MIB + peak / 50);
            }
            if (mo_supply_collect(pool, &request, &site, effort, create, take, &said))
                continue;
            CHECK_EQ(pool->granules.count, count + create);
            CHECK(usable_spare(&request, join) >= need);
            CHECK_EQ(owned - owned_granules(), take);
            CHECK_POOL();
            taken += take;
            created += create;
        }
        close_arenas();
    }
    CHECK(taken > 100 && refused > 100 && created > 100);
}

TEST(more_effort_never_gets_less)
{
    uint64_t random = test_seed() + 1;

    for (int round = 0; round < test_rounds(40, 2000); round++) {
        open_arenas(test_random(&random));
        for (int n = 0; n < 30; n++) {
            const size_t need = 1 + test_random(&random) % 80;
            bool before = false;
            size_t create, take;
            mo_request request;
            mo_site site;

            churn(&random, 10);
            request = request_of(arena_of(arenas[n % 3]), need * UNIT, n & 1 ? A : B);
            site = some_site(&request, &random);
            for (mo_effort effort = MO_EFFORT_SWITCH; site.span && effort <= MO_EFFORT_CREATE; effort++) {
                const bool planned = mo_supply_plan(pool, &request, &site, need, effort, &create, &take);

                CHECK(planned || !before);
                before = planned;
            }
        }
        close_arenas();
    }
}

/* ---- whose memory --------------------------------------------------------------------------------------------------------- */

static size_t can_take(mo_arena_id id, mo_stream stream, mo_effort effort, bool captured)
{
    mo_request request = request_of(arena_of(id), 400 * MIB, stream);
    const mo_site nowhere = {.at = 512};
    size_t create = 0, take = 0, most = 0;

    request.captured = captured;
    pool->settings.budget = mo_pool_held(pool) ? mo_pool_held(pool) : 1; /* nothing can be created */
    for (size_t need = 1; need <= 400; need++)
        if (mo_supply_plan(pool, &request, &nowhere, need, effort, &create, &take))
            most = need;
    pool->settings.budget = 0;
    return most;
}

TEST(free_memory_goes_to_whom_its_streams_allow)
{
    mo_address a;

    for (int twice = 0; twice < 2; twice++) {
        open_pool(1024 * MIB, UNIT, (mo_pool_settings){.double_map = twice});
        a = get(10 * MIB, A);
        get(UNIT, B);
        CHECK_EQ(can_take(GENERAL, A, MO_EFFORT_JOIN, false), 0);
        put(a);
        CHECK_EQ(can_take(GENERAL, A, MO_EFFORT_SWITCH, false), 0);
        CHECK_EQ(can_take(GENERAL, A, MO_EFFORT_MOVE, false), twice ? 20 : 0); /* its own, but mapped twice */
        CHECK_EQ(can_take(GENERAL, B, MO_EFFORT_MOVE, false), 0);
        CHECK_EQ(can_take(GENERAL, B, MO_EFFORT_JOIN, false), twice ? 20 : 0);
        CHECK_EQ(can_take(GENERAL, A, MO_EFFORT_JOIN, true), 0);
        CHECK_OK(
            mo_stream_order_mark(&pool->order, ~0ull >> (64 - pool->order.count), pool->order.tick, &said));
        finish(A);
        mo_stream_order_poll(&pool->order);
        CHECK_EQ(can_take(GENERAL, B, MO_EFFORT_MOVE, false), 20);
        CHECK_EQ(can_take(GENERAL, B, MO_EFFORT_MOVE, true), 20);
        put(model.blocks[0].address);
        close_pool();
    }
}

TEST(an_arena_lets_go_of_what_it_has_not_reserved_and_takes_in_what_its_budget_allows)
{
    const mo_arena_id kept = {1, 0}, bounded = {0, 2};
    mo_address a;

    open_pool(1024 * MIB, UNIT, (mo_pool_settings){.double_map = true});
    CHECK_OK(mo_pool_arena_retain(pool, kept, false, 0, &said));
    CHECK_OK(mo_pool_arena_retain(pool, bounded, false, 6 * UNIT, &said));
    a = get_in(kept, 20 * UNIT, A);
    put(a);
    CHECK_EQ(can_take(GENERAL, A, MO_EFFORT_MOVE, false), 20);
    CHECK_EQ(can_take(bounded, A, MO_EFFORT_MOVE, false), 6);
    arena_of(kept)->reserved = 15 * UNIT;
    CHECK_EQ(can_take(GENERAL, A, MO_EFFORT_MOVE, false), 5);
    CHECK_EQ(can_take(kept, A, MO_EFFORT_MOVE, false), 20); /* its own */
    arena_of(kept)->reserved = 0;
    arena_of(kept)->pinned = true;
    CHECK_EQ(can_take(GENERAL, A, MO_EFFORT_JOIN, false), 0);
    CHECK_EQ(can_take(kept, A, MO_EFFORT_JOIN, false), 0);
    arena_of(kept)->pinned = false;
    CHECK_OK(mo_pool_pause(pool, kept, &said));
    CHECK_EQ(can_take(GENERAL, A, MO_EFFORT_JOIN, false), 0);
    CHECK_OK(mo_pool_resume(pool, kept, &said));
    CHECK_EQ(can_take(GENERAL, A, MO_EFFORT_MOVE, false), 20);
    CHECK_OK(mo_pool_arena_release(pool, kept, &said));
    CHECK_OK(mo_pool_arena_release(pool, bounded, &said));
    close_pool();
}

/* Free in two zones, it would lose each zone's share of what it need not keep, counted zone by zone. */
TEST(what_an_arena_has_reserved_is_counted_once_for_all_its_zones)
{
    const mo_arena_id kept = {1, 0};
    mo_address address, a[3];

    open_pool(64 * MIB, GRANULE, (mo_pool_settings){.double_map = true});
    CHECK_OK(mo_pool_arena_retain(pool, kept, false, 0, &said));
    a[0] = get_in(kept, 10 * MIB, A);
    a[1] = get_in(kept, MIB, A);
    a[2] = get_in(kept, MIB, A);
    for (int i = 0; i < 3; i++)
        put(a[i]);
    CHECK_OK(mo_pool_preallocate(pool, kept, 10 * MIB, &said));
    mo_pool_limit(pool, 12 * MIB);
    CHECK_OUT_OF_MEMORY(mo_pool_alloc(pool, 4 * MIB, A, &said, &address));
    CHECK_EQ(arena_of(kept)->zones[MO_ZONE_LARGE].owned + arena_of(kept)->zones[MO_ZONE_SMALL].owned, 6);
    get(2 * MIB, A);
    CHECK_EQ(arena_of(kept)->zones[MO_ZONE_LARGE].owned + arena_of(kept)->zones[MO_ZONE_SMALL].owned, 5);
    put(model.blocks[0].address);
    CHECK_OK(mo_pool_arena_release(pool, kept, &said));
    close_pool();
}

TEST(the_block_that_is_free_longest_gives_first_and_from_its_end)
{
    const mo_site nowhere = {.at = 512};
    mo_request request;
    mo_address blocks[6];
    mo_span *span;

    open_pool(1024 * MIB, UNIT, (mo_pool_settings){.double_map = true});
    for (int i = 0; i < 6; i++)
        blocks[i] = get((i == 2 ? 9 : i == 4 ? 12 : 5) * UNIT, A);
    put(blocks[2]);
    put(blocks[4]);
    request = request_of(&pool->general, 15 * UNIT, A);
    span = request.zone->spans;
    CHECK_OK(mo_supply_collect(pool, &request, &nowhere, MO_EFFORT_MOVE, 0, 5, &said));
    CHECK_EQ(mo_span_block_at(span, blocks[2])->size, 4 * UNIT);
    CHECK_EQ(mo_span_block_at(span, blocks[4])->size, 12 * UNIT);
    CHECK_OK(mo_supply_collect(pool, &request, &nowhere, MO_EFFORT_MOVE, 0, 11, &said));
    CHECK_EQ(mo_span_block_at(span, blocks[2])->state, MO_BLOCK_HOLE);
    CHECK_EQ(mo_span_block_at(span, blocks[4])->size, 5 * UNIT);
    CHECK_EQ(pool->stats.granules_moved, 16);
    CHECK_EQ(pool->stats.stitches, 2);
    for (int i = 0; i < 6; i++)
        if (i != 2 && i != 4)
            put(blocks[i]);
    close_pool();
}

/* More than are compared at a time: the large ones come first, though the small ones have been free longer. */
TEST(of_many_blocks_only_the_largest_are_compared)
{
    enum { FEW = 64 };
    const mo_site nowhere = {.at = 512};
    mo_address small[FEW], large[FEW], between[2 * FEW];
    mo_request request;
    mo_span *span;

    open_pool(2048 * MIB, UNIT, (mo_pool_settings){.double_map = true});
    for (int i = 0; i < FEW; i++) {
        small[i] = get(3 * UNIT, A);
        between[2 * i] = get(5 * UNIT, A);
        large[i] = get(4 * UNIT, A);
        between[2 * i + 1] = get(5 * UNIT, A);
    }
    for (int i = 0; i < FEW; i++)
        put(small[i]);
    for (int i = 0; i < FEW; i++)
        put(large[i]);
    request = request_of(&pool->general, 15 * UNIT, A);
    span = request.zone->spans;
    CHECK_OK(mo_supply_collect(pool, &request, &nowhere, MO_EFFORT_MOVE, 0, 4 * FEW + 3, &said));
    for (int i = 0; i < FEW; i++) {
        CHECK_EQ(mo_span_block_at(span, large[i])->state, MO_BLOCK_HOLE);
        CHECK_EQ(mo_span_block_at(span, small[i])->state, i ? MO_BLOCK_FREE : MO_BLOCK_HOLE);
    }
    for (int i = 0; i < 2 * FEW; i++)
        put(between[i]);
    close_pool();
}

/* ---- failures --------------------------------------------------------------------------------------------------------------- */

TEST(what_cannot_be_created_is_undone_unless_it_can_be_taken)
{
    const mo_site nowhere = {.at = 512};
    mo_request request;
    mo_address a;
    size_t count;

    open_pool(1024 * MIB, UNIT, (mo_pool_settings){.double_map = true});
    a = get(8 * UNIT, A);
    get(UNIT, A);
    put(a);
    request = request_of(&pool->general, 30 * UNIT, A);
    count = pool->granules.count;
    mo_model_device_fail(&device, MO_MODEL_DEVICE_create, 5, 1, MO_NO_DEVICE_MEMORY);
    CHECK_EQ(mo_supply_collect(pool, &request, &nowhere, MO_EFFORT_MOVE, 20, 3, &said), MO_NO_DEVICE_MEMORY);
    CHECK_EQ(pool->granules.count, count);
    CHECK_EQ(pool->granules.spare_count, 0);
    CHECK_POOL();
    mo_model_device_fail(&device, MO_MODEL_DEVICE_create, 5, 1, MO_DRIVER);
    CHECK_EQ(mo_supply_collect(pool, &request, &nowhere, MO_EFFORT_CREATE, 20, 0, &said), MO_DRIVER);
    CHECK_EQ(pool->granules.count, count);
    mo_model_device_fail(&device, MO_MODEL_DEVICE_create, 5, 1, MO_NO_DEVICE_MEMORY);
    CHECK_OK(mo_supply_collect(pool, &request, &nowhere, MO_EFFORT_MOVE, 10, 3,
                               &said)); /* 5 created, 3 + 5 taken */
    CHECK_EQ(pool->granules.count, count + 5);
    CHECK_EQ(pool->granules.spare_count, 13);
    CHECK_POOL();
    check_stats();
    put(model.blocks[0].address);
    close_pool();
}

TEST(a_budget_is_never_exceeded_by_creation)
{
    open_pool(1024 * MIB, UNIT, (mo_pool_settings){.double_map = true, .budget = 3 * UNIT});
    for (int i = 0; i < 3; i++)
        CHECK_OK(mo_supply_create(pool, &said));
    CHECK_EQ(mo_supply_create(pool, &said), MO_NO_DEVICE_MEMORY);
    CHECK(strstr(said.text, "budget"));
    CHECK_EQ(device.used, 3 * UNIT);
    CHECK_EQ(pool->held_peak, 3 * UNIT);
    CHECK_EQ(pool->stats.num_device_alloc, 3);
    close_pool();
}

/*      0                 8       11  granules
 *      | free      |site . . . . |             five whole ones lie before it, three are needed behind */
TEST(what_lies_before_a_site_in_its_own_block_is_taken_where_nothing_else_is)
{
    size_t create, take;
    mo_request request;
    mo_address block;
    mo_site site;

    open_pool(1024 * MIB, GRANULE, (mo_pool_settings){.budget = 8 * GRANULE});
    block = get(8 * GRANULE, A);
    put(block);
    finish(A);
    mo_stream_order_probe(&pool->order, 0);
    request = request_of(&pool->general, 11 * MIB, A);
    site = (mo_site){.span = request.zone->spans, .at = block + 11 * MIB, .need = 3};
    site.slot = mo_span_slot(site.span, block) + 8;
    site.count = 3;
    CHECK(!mo_supply_plan(pool, &request, &site, 3, MO_EFFORT_MOVE, &create, &take));
    CHECK(!mo_supply_plan(pool, &request, &site, 6, MO_EFFORT_JOIN, &create, &take));
    CHECK(mo_supply_plan(pool, &request, &site, 3, MO_EFFORT_JOIN, &create, &take));
    CHECK_EQ(create, 0);
    CHECK_EQ(take, 3);
    CHECK_OK(mo_remap_site(pool, &request, &site, MO_EFFORT_JOIN, &said));
    for (size_t i = 0; i < 11; i++)
        CHECK_EQ(mo_slot_owned(&site.span->slots[site.slot - 8 + i]), i < 2 || i > 4);
    CHECK(mo_span_block_at(site.span, site.at)->state == MO_BLOCK_FREE);
    CHECK_POOL();
    close_pool();
}

TEST_MAIN
