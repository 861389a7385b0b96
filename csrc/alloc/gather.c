#include "alloc/gather.h"

#include "base/size.h"

#define SLACK_FLOOR ((size_t)8 << 20) /* bytes of slack where the live peak is small */
#define NEAR        50                /* thousandths of the live peak: a limit this close is used in full */
#define VICTIMS     64                /* free blocks that are compared by how long they have been free */

/* ---- granules elsewhere ----------------------------------------------------------------------------------- */

/* Whether memory of this use may go to the request: for a graph, whose replays come in any order, only what is over; and
 * without double_map what is unmapped must be over. */
static bool may_have(const mo_pool *pool, const mo_request *request, mo_use use, bool join)
{
    if (!pool->settings.double_map || request->captured)
        return mo_order_over(&pool->order, use);
    return join || !mo_order_missing(&pool->order, request->stream, false, use);
}

/* How many granules may leave an arena. */
static size_t may_leave(const mo_pool *pool, const mo_arena *arena)
{
    size_t held = mo_arena_held(arena);

    if (arena->pinned || arena->paused || held <= arena->reserved)
        return 0;
    return (held - arena->reserved) / pool->granules.size;
}

/* How many granules may come into the request's arena. */
static size_t may_enter(const mo_pool *pool, const mo_arena *arena)
{
    size_t held = mo_arena_held(arena);

    if (!arena->budget)
        return SIZE_MAX;
    return held >= arena->budget ? 0 : (arena->budget - held) / pool->granules.size;
}

/* The free block that owns all of a granule which may go to the request, and lies outside its site; else NULL. */
static mo_block *owner_block(const mo_pool *pool, const mo_request *request, const mo_site *site,
                             const mo_granule *granule)
{
    mo_slot *owner = granule->owner;
    mo_span *span = owner->span;
    mo_address address = mo_slot_address(span, (size_t)(owner - span->slots));
    mo_block *block;

    if (address < site->at + request->size && address + pool->granules.size > site->at)
        return NULL;
    if (span->zone->arena != request->arena &&
        (!may_leave(pool, span->zone->arena) || !may_enter(pool, request->arena)))
        return NULL;
    if (span->zone->arena->pinned)
        return NULL;
    block = mo_span_block_at(span, address);
    if (block->state != MO_BLOCK_FREE || block->address > address ||
        block->address + block->size < address + pool->granules.size)
        return NULL;
    return may_have(pool, request, block->use, false) ? block : NULL;
}

bool mo_switchable(const mo_pool *pool, const mo_request *request, const mo_site *site, const mo_slot *slot,
                   mo_block **block)
{
    const mo_granule *granule = slot->granule;

    *block = NULL;
    if (!granule || !slot->granted || mo_slot_owned(slot))
        return false;
    if (!granule->owner)
        return may_have(pool, request, granule->use, false) && may_enter(pool, request->arena);
    *block = owner_block(pool, request, site, granule);
    return *block != NULL;
}

/* ---- granules for it ----------------------------------------------------------------------------------------- */

mo_status mo_pool_create_granule(mo_pool *pool, mo_detail *detail)
{
    mo_status status;

    if (pool->settings.budget && mo_pool_held(pool) + pool->granules.size > pool->settings.budget)
        return mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "the memory budget is used up");
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

static bool may_have_spare(const mo_pool *pool, const mo_request *request, const mo_granule *granule,
                           bool join)
{
    if (request->captured)
        return mo_order_over(&pool->order, granule->use);
    return join || !mo_order_missing(&pool->order, request->stream, false, granule->use);
}

mo_granule *mo_usable_spare(const mo_pool *pool, const mo_request *request, bool join)
{
    mo_granule *granule = pool->granules.spare;

    while (granule && !may_have_spare(pool, request, granule, join))
        granule = granule->next;
    return granule;
}

static size_t count_spare(const mo_pool *pool, const mo_request *request, bool join, size_t enough)
{
    size_t count = 0;

    for (const mo_granule *g = pool->granules.spare; g && count < enough; g = g->next)
        count += may_have_spare(pool, request, g, join);
    return count;
}

/* The next VICTIMS blocks of at least a granule, from *block down to smaller ones, where *block then is; the one that has
 * been free longest first, of equals the smaller. What was used lately is wanted again soon, and its old mapping is in use. */
static size_t next_victims(const mo_pool *pool, const mo_zone *zone, mo_block **block, mo_block **victims)
{
    size_t count = 0, i;

    for (; *block && count < VICTIMS && (*block)->size >= pool->granules.size;
         *block = mo_free_set_before(&zone->free, *block)) {
        for (i = count++; i && victims[i - 1]->use.tick >= (*block)->use.tick; i--)
            victims[i] = victims[i - 1];
        victims[i] = *block;
    }
    return count;
}

/* Whole slots of a free block: those behind the site, where the block is part of it; what lies before may be needed. */
static void slots_outside(const mo_block *block, const mo_request *request, const mo_site *site, size_t *low,
                          size_t *high)
{
    mo_block_slots(block, low, high);
    if (block->span == site->span && block->address < site->at + request->size &&
        block->address + block->size > site->at) {
        size_t behind = mo_span_slot(block->span, site->at + request->size - 1) + 1;

        *low = *low > behind ? *low : behind;
    }
}

/* Makes up to `want` granules of a free block spare, from its end, so that its head stays joined to what it lies beside. With
 * `count_only` nothing is changed. Returns how many, 0 where there is no host memory. */
static size_t steal_of(mo_pool *pool, const mo_request *request, mo_block *block, const mo_site *site,
                       bool join, bool count_only, size_t want)
{
    size_t low, high, count;

    slots_outside(block, request, site, &low, &high);
    mo_order_settle(&pool->order, &block->use);
    if (low >= high || !may_have(pool, request, block->use, join))
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
        leave = may_leave(pool, arena);
        if (want - own > *enter)
            want = own + *enter;
        for (int kind = MO_ZONES - 1; kind >= 0; kind--)
            got += steal_from(pool, request, &arena->zones[kind], site, join, count_only, want - got, &leave);
        *enter -= *enter == SIZE_MAX ? 0 : got - own;
    }
    return got;
}

bool mo_gather_plan(mo_pool *pool, const mo_request *request, const mo_site *site, size_t need,
                    mo_effort effort, size_t *create, size_t *take)
{
    bool join = mo_joins(request, effort);
    size_t enter = may_enter(pool, request->arena), spare = count_spare(pool, request, join, need), more;

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
    size_t enter = may_enter(pool, request->arena), need = 0;

    for (size_t i = site->slot; i < site->slot + site->count; i++)
        need += !mo_slot_owned(&site->span->slots[i]);
    return enter == SIZE_MAX || need <= take ? enter : enter - mo_size_min(enter, need - take);
}

mo_status mo_gather(mo_pool *pool, const mo_request *request, const mo_site *site, mo_effort effort,
                    size_t create, size_t take, mo_detail *detail)
{
    bool join = mo_joins(request, effort);
    size_t created = 0, enter;
    mo_status status = MO_OK;

    while (created < create && !status) {
        status = mo_pool_create_granule(pool, detail);
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

/* ---- for devices that came later ---------------------------------------------------------------------------- */

static mo_status grant_zone(mo_pool *pool, mo_zone *zone, mo_detail *detail)
{
    mo_status status = MO_OK;

    for (mo_span *span = zone->spans; span; span = span->next)
        for (size_t i = 0, end; i < span->fresh && !status; i = end + 1) {
            for (end = i; end < span->fresh && span->slots[end].granule && span->slots[end].granule->handle &&
                          span->slots[end].granted;)
                end++;
            if (end > i)
                status = mo_granules_grant(&pool->granules, &span->slots[i], mo_slot_address(span, i),
                                           end - i, detail);
        }
    return status;
}

mo_status mo_pool_grant_again(mo_pool *pool, mo_detail *detail)
{
    enum { LISTS = 2 };
    mo_arena *lists[LISTS];
    mo_status status = MO_OK;

    mo_lock_take(&pool->lock);
    lists[0] = pool->arenas;
    lists[1] = pool->retired;
    for (size_t i = 0; i < LISTS; i++)
        for (mo_arena *arena = lists[i]; arena; arena = arena->next)
            MO_EACH_ZONE (zone, arena)
                if (!status)
                    status = grant_zone(pool, zone, detail);
    mo_lock_give(&pool->lock);
    return status;
}
