#include "alloc/supply.h"

#include "base/size.h"

#define SLACK_FLOOR ((size_t)8 << 20) /* bytes of slack where the live peak is small */
#define NEAR        50                /* thousandths of the live peak: a limit this close is used in full */
#define VICTIMS     64                /* free blocks that are compared by how long they have been free */

/* ---- what may go where ---------------------------------------------------------------------------------------- */

bool mo_supply_may_have(const mo_pool *pool, const mo_request *request, mo_last_use use, bool join)
{
    if (!pool->settings.double_map || request->captured)
        return mo_stream_order_over(&pool->order, use);
    return join || !mo_stream_order_missing(&pool->order, request->stream, false, use);
}

size_t mo_supply_may_leave(const mo_pool *pool, const mo_arena *arena)
{
    size_t held = mo_arena_held(arena);

    if (arena->pinned || arena->paused || held <= arena->reserved)
        return 0;
    return (held - arena->reserved) / pool->granules.size;
}

size_t mo_supply_may_enter(const mo_pool *pool, const mo_arena *arena)
{
    size_t held = mo_arena_held(arena);

    if (!arena->budget)
        return SIZE_MAX;
    return held >= arena->budget ? 0 : (arena->budget - held) / pool->granules.size;
}

/* ---- new and spare ones --------------------------------------------------------------------------------------- */

mo_status mo_supply_create(mo_pool *pool, mo_detail *detail)
{
    mo_status status;

    if (pool->settings.budget && mo_pool_held(pool) + pool->granules.size > pool->settings.budget)
        return mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "the memory budget is exhausted");
    status = mo_granule_create(&pool->granules, detail);
    if (!status) {
        pool->stats.num_device_alloc++;
        if (pool->held_peak < mo_pool_held(pool))
            pool->held_peak = mo_pool_held(pool);
    }
    return status;
}

/* How many granules may be created for a request before any is moved. Who sets a budget permits its use, and where the
 * live peak comes near the end of the device nothing is saved for others: with more room less is moved. */
static size_t within_slack(const mo_pool *pool, const mo_request *request)
{
    size_t live = (size_t)pool->stats.of[MO_REQUESTED_BYTES][MO_STAT_ALL].current + request->requested;
    size_t peak = live > pool->peak ? live : pool->peak, held = mo_pool_held(pool), limit, slack;

    slack = peak / 1000 * pool->settings.slack;
    if (slack < SLACK_FLOOR)
        slack = SLACK_FLOOR;
    limit = peak + slack;
    if (pool->settings.budget)
        limit = pool->settings.budget;
    else if (peak + peak / 1000 * NEAR >= pool->device_bytes)
        limit = SIZE_MAX; /* the device knows its end */
    return limit > held ? (limit - held) / pool->granules.size : 0;
}

static bool spare_may_go(const mo_pool *pool, const mo_request *request, const mo_granule *granule, bool join)
{
    if (request->captured)
        return mo_stream_order_over(&pool->order, granule->last_use);
    return join || !mo_stream_order_missing(&pool->order, request->stream, false, granule->last_use);
}

mo_granule *mo_supply_spare(const mo_pool *pool, const mo_request *request, bool join)
{
    mo_granule *granule = pool->granules.spare;

    while (granule && !spare_may_go(pool, request, granule, join))
        granule = granule->next;
    return granule;
}

static size_t count_spare(const mo_pool *pool, const mo_request *request, bool join, size_t enough)
{
    size_t count = 0;

    for (const mo_granule *g = pool->granules.spare; g && count < enough; g = g->next)
        count += spare_may_go(pool, request, g, join);
    return count;
}

/* ---- those of free blocks ------------------------------------------------------------------------------------- */

/* The next VICTIMS blocks of at least a granule, from *block down to smaller ones, where *block then is; the one that has
 * been free longest first, of equals the smaller. What was used lately is wanted again soon, and its old mapping is in use.
 * Without double_map only what is over is moved, and it is unmapped: then the largest first, so that a step that repeats
 * moves nothing back. */
static size_t next_victims(const mo_pool *pool, const mo_zone *zone, mo_block **block, mo_block **victims)
{
    size_t count = 0, i;

    for (; *block && count < VICTIMS && (*block)->size >= pool->granules.size;
         *block = mo_free_set_before(&zone->free, *block)) {
        for (i = count++;
             i && pool->settings.double_map && victims[i - 1]->last_use.tick >= (*block)->last_use.tick; i--)
            victims[i] = victims[i - 1];
        victims[i] = *block;
    }
    return count;
}

/* Whole slots of a free block that are not the site's: those behind it, where the block is part of it. Those before it, which
 * may be needed next, only with `before`: rather than that a stream waits for it or the request is refused. */
static void slots_outside(const mo_block *block, const mo_request *request, const mo_site *site, bool before,
                          size_t *low, size_t *high)
{
    size_t first, behind;

    mo_block_slots(block, low, high);
    if (block->span != site->span || block->address >= site->at + request->size ||
        block->address + block->size <= site->at)
        return;
    first = mo_span_slot(block->span, site->at);
    behind = mo_span_slot(block->span, site->at + request->size - 1) + 1;
    if (before && behind >= *high)
        *high = mo_size_min(*high, first);
    else
        *low = *low > behind ? *low : behind;
}

/* Makes up to `want` granules of a free block spare, from its end, so that its head stays joined to what it lies beside. With
 * `count_only` nothing is changed. Returns how many, 0 where there is no host memory. */
static size_t steal_of(mo_pool *pool, const mo_request *request, mo_block *block, const mo_site *site,
                       bool join, bool count_only, size_t want)
{
    size_t low, high, count;

    slots_outside(block, request, site, join, &low, &high);
    mo_stream_order_settle(&pool->order, &block->last_use);
    if (low >= high || !mo_supply_may_have(pool, request, block->last_use, join))
        return 0;
    count = mo_size_min(high - low, want);
    if (count_only)
        return count;
    if (mo_blocks_reserve(&pool->blocks, 4, NULL))
        return 0;
    mo_pool_tell_slots(pool, MO_TRACE_UNMAP, block->span, high - count, count, NULL);
    mo_zone_disown(block->span->zone, block, high - count, count);
    return count;
}

/* The same of a zone: VICTIMS blocks at a time, the largest ones' first. `leave`, how many may go, falls by as many. */
static size_t steal_from(mo_pool *pool, const mo_request *request, mo_zone *zone, const mo_site *site,
                         bool join, bool count_only, size_t want, size_t *leave)
{
    mo_block *victims[VICTIMS], *block = mo_free_set_last(&zone->free);
    size_t got = 0, here, count;

    if (zone->arena->pinned || zone->arena->paused)
        return 0;
    while (got < want && *leave && (count = next_victims(pool, zone, &block, victims)) > 0)
        for (size_t i = 0; i < count && got < want && *leave; i++) {
            here =
                steal_of(pool, request, victims[i], site, join, count_only, mo_size_min(want - got, *leave));
            got += here;
            *leave -= here;
        }
    return got;
}

/* `enter`, how many may come into the arena, falls by those that do: what lies free in the arena itself is in it. */
static size_t steal(mo_pool *pool, const mo_request *request, const mo_site *site, bool join, bool count_only,
                    size_t want, size_t *enter)
{
    size_t leave = SIZE_MAX, own, got = 0;

    for (int kind = MO_ZONES - 1; kind >= 0; kind--)
        got += steal_from(pool, request, &request->arena->zones[kind], site, join, count_only, want - got,
                          &leave);
    for (mo_arena *arena = pool->arenas; arena && got < want; arena = arena->next) {
        if (arena == request->arena)
            continue;
        own = got;
        leave = mo_supply_may_leave(pool, arena);
        if (want - own > *enter)
            want = own + *enter;
        for (int kind = MO_ZONES - 1; kind >= 0; kind--)
            got += steal_from(pool, request, &arena->zones[kind], site, join, count_only, want - got, &leave);
        *enter -= *enter == SIZE_MAX ? 0 : got - own;
    }
    return got;
}

/* ---- in all --------------------------------------------------------------------------------------------------- */

bool mo_supply_plan(mo_pool *pool, const mo_request *request, const mo_site *site, size_t need,
                    mo_effort effort, size_t *create, size_t *take)
{
    bool join = mo_joins(request, effort);
    size_t enter = mo_supply_may_enter(pool, request->arena), spare = count_spare(pool, request, join, need),
           more;

    spare = spare < enter ? spare : enter;
    *create = within_slack(pool, request);
    *create = *create < need - spare ? *create : need - spare;
    *create = *create < enter - spare ? *create : enter - spare;
    *take = need - spare - *create;
    if (!*take)
        return true;
    if (effort < MO_EFFORT_MOVE)
        return false;
    enter -= spare + *create;
    more = *take - steal(pool, request, site, join, true, *take, &enter);
    if (!more)
        return true;
    if (effort < MO_EFFORT_CREATE || more > enter)
        return false;
    *create += more;
    *take -= more;
    return true;
}

/* The last `count` that were created, which are the first of the spare ones, go back. */
static void undo_creation(mo_pool *pool, size_t count)
{
    for (; count; count--) {
        pool->stats.num_device_free++;
        if (mo_granule_release(&pool->granules, pool->granules.spare, NULL))
            pool->stats.failed_releases++;
    }
}

/* How many may come into the request's arena beside those that are spare by now and meant for the site. */
static size_t may_enter_beside(const mo_pool *pool, const mo_request *request, const mo_site *site,
                               size_t take)
{
    size_t enter = mo_supply_may_enter(pool, request->arena), need = 0;

    for (size_t i = site->slot; i < site->slot + site->count; i++)
        need += !mo_slot_owned(&site->span->slots[i]);
    return enter == SIZE_MAX || need <= take ? enter : enter - mo_size_min(enter, need - take);
}

mo_status mo_supply_collect(mo_pool *pool, const mo_request *request, const mo_site *site, mo_effort effort,
                            size_t create, size_t take, mo_detail *detail)
{
    bool join = mo_joins(request, effort);
    size_t created = 0, enter;
    mo_status status = MO_OK;

    while (created < create && !status) {
        status = mo_supply_create(pool, detail);
        created += !status;
    }
    if (status == MO_NO_DEVICE_MEMORY && effort >= MO_EFFORT_MOVE) { /* less than the plan assumed */
        take += create - created;
        enter = may_enter_beside(pool, request, site, take);
        if (steal(pool, request, site, join, true, take, &enter) == take)
            status = MO_OK;
    }
    enter = may_enter_beside(pool, request, site, take);
    if (!status && take && steal(pool, request, site, join, false, take, &enter) < take)
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory to move granules");
    if (status) {
        undo_creation(pool, created);
        return status;
    }
    if (take) {
        pool->stats.stitches++;
        pool->stats.granules_moved += take;
    }
    return MO_OK;
}
