#include "alloc/remap.h"

#include "alloc/supply.h"

#define STALE_FACTOR   4    /* stale views a granule, on average, that a step that repeats may keep */
#define STALE_LIMIT    8    /* stale views a granule, on average, before any are unmapped for their number */
#define STALE_FLOOR    4096 /* and this many more */
#define UNMAP_SLOTS    4096 /* looked at for one request */
#define UNMAP_CALLS    32
#define REPEATED_UNMAP 16 /* price, in calls, of unmapping what the same step may want again */

/* ---- switching back ------------------------------------------------------------------------------------------- */

/* The free block that owns all of a granule which may go to the request, and lies outside its site; else NULL. */
static mo_block *owner_block(const mo_pool *pool, const mo_request *request, const mo_site *site,
                             const mo_granule *granule)
{
    mo_slot *owner = granule->owner;
    mo_span *span = owner->span;
    mo_address address = mo_view_address(owner);
    mo_block *block;

    if (address < site->at + request->size && address + pool->granules.size > site->at)
        return NULL;
    if (span->zone->arena != request->arena &&
        (!mo_supply_may_leave(pool, span->zone->arena) || !mo_supply_may_enter(pool, request->arena)))
        return NULL;
    if (span->zone->arena->pinned)
        return NULL;
    block = mo_span_block_at(span, address);
    if (block->state != MO_BLOCK_FREE || block->address > address ||
        block->address + block->size < address + pool->granules.size)
        return NULL;
    return mo_supply_may_have(pool, request, block->last_use, false) ? block : NULL;
}

bool mo_remap_switchable(const mo_pool *pool, const mo_request *request, const mo_site *site,
                         const mo_slot *slot, mo_block **block)
{
    const mo_granule *granule = slot->granule;

    *block = NULL;
    if (!granule || !slot->granted || mo_slot_owned(slot))
        return false;
    if (!granule->owner)
        return mo_supply_may_have(pool, request, granule->last_use, false) &&
               mo_supply_may_enter(pool, request->arena);
    *block = owner_block(pool, request, site, granule);
    return *block != NULL;
}

int mo_remap_price(const mo_pool *pool, const mo_request *request, const mo_site *site, const mo_slot *slot)
{
    mo_block *elsewhere;

    if (!slot->granule)
        return 1;
    if (mo_remap_switchable(pool, request, site, slot, &elsewhere))
        return 0;
    if (!mo_stream_order_over(&pool->order, slot->last_use))
        return -1;
    return request->predicted && pool->granules.stale_count < STALE_FACTOR * pool->granules.count
               ? REPEATED_UNMAP
               : 2;
}

/* The stale slots of a site get their granules back where that costs nothing. */
static mo_status switch_back(mo_pool *pool, const mo_request *request, const mo_site *p, mo_detail *detail)
{
    for (size_t i = p->slot; i < p->slot + p->count; i++) {
        mo_slot *slot = &p->span->slots[i];
        mo_block *elsewhere;
        mo_status status;

        if (!mo_remap_switchable(pool, request, p, slot, &elsewhere))
            continue;
        status = mo_blocks_reserve(&pool->blocks, 4, detail);
        if (status)
            return status;
        if (elsewhere) {
            mo_slot *owner = slot->granule->owner;
            size_t there = (size_t)(owner - owner->span->slots);

            mo_pool_tell_slots(pool, MO_TRACE_UNMAP, owner->span, there, 1, NULL);
            mo_zone_disown(owner->span->zone, elsewhere, there, 1);
        }
        mo_granule_own(&pool->granules, slot);
        mo_zone_own(request->zone, p->span, i, 1);
        mo_pool_tell_slots(pool, MO_TRACE_MAP, p->span, i, 1, pool->order.streams[request->stream].handle);
        pool->stats.granules_switched++;
    }
    return MO_OK;
}

/* ---- unmapping ------------------------------------------------------------------------------------------------ */

mo_status mo_unmap_stale(mo_pool *pool, mo_slot *slot, mo_detail *detail)
{
    if (!mo_stream_order_over(&pool->order, slot->last_use))
        return mo_fail(detail, MO_NOT_READY, 0, "an address is still mapped for unfinished work");
    return mo_granule_unmap(&pool->granules, slot, mo_view_address(slot), detail);
}

mo_status mo_unmap_views(mo_pool *pool, mo_granule *granule, mo_detail *detail)
{
    while (granule->views) {
        mo_status status = mo_unmap_stale(pool, granule->views, detail);

        if (status)
            return status;
    }
    return MO_OK;
}

void mo_unmap_some_stale(mo_pool *pool, mo_zone *zone)
{
    const size_t limit = STALE_LIMIT * pool->granules.count + STALE_FLOOR;
    size_t looked_at = 0, unmapped = 0;

    if (pool->granules.stale_count <= limit)
        return;
    for (mo_span *span = zone->spans; span; span = span->next)
        for (size_t i = 0; i < span->fresh && looked_at < UNMAP_SLOTS; i++, looked_at++) {
            size_t at = span->stale_search++ % span->fresh;
            mo_slot *slot = &span->slots[at];

            if (pool->granules.stale_count <= limit || unmapped == UNMAP_CALLS)
                return;
            if (slot->granule && !mo_slot_owned(slot) && mo_stream_order_over(&pool->order, slot->last_use))
                unmapped += mo_unmap_stale(pool, slot, NULL) == MO_OK;
        }
}

/* ---- mapping -------------------------------------------------------------------------------------------------- */

/* Undoes map_run: those slots' granules are spare again and, since nobody may use what was not granted, unmapped. */
static void unmap_run(mo_pool *pool, mo_span *span, size_t slot, size_t count)
{
    for (size_t i = slot; i < slot + count; i++) {
        if (!mo_slot_owned(&span->slots[i]))
            continue;
        mo_granule_disown(&pool->granules, &span->slots[i], span->slots[i].granule->last_use);
        if (mo_granule_unmap(&pool->granules, &span->slots[i], mo_slot_address(span, i), NULL))
            pool->stats.failed_releases++; /* stale and not granted: never switched to */
    }
}

/* Slots [slot, slot + count) of a hole get spare granules, and become free memory. The granule that became spare last, the
 * highest of those that moved together, is the first one: without double_map it gets the highest slot, so that what lies in
 * a row goes on to (mo_remap_follow). With it they are switched back, and of a row the lowest is wanted again first. */
static mo_status map_run(mo_pool *pool, const mo_request *request, mo_span *span, size_t slot, size_t count,
                         bool join, mo_detail *detail)
{
    mo_status status = mo_blocks_reserve(&pool->blocks, 4, detail);

    for (size_t i = 0; i < count && !status; i++) {
        const size_t at = slot + (pool->settings.double_map ? i : count - 1 - i);
        mo_granule *granule = mo_supply_spare(pool, request, join);

        if (!granule)
            status = mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "no granule is free");
        else if (span->slots[at].granule)
            status = mo_unmap_stale(pool, &span->slots[at], detail);
        if (!status && !pool->settings.double_map)
            status = mo_unmap_views(pool, granule, detail);
        if (!status)
            status = mo_granule_map(&pool->granules, granule, span, &span->slots[at],
                                    mo_slot_address(span, at), detail);
        if (status)
            break;
        mo_granule_own(&pool->granules, &span->slots[at]);
        if (span->fresh <= at)
            span->fresh = at + 1;
    }
    if (!status)
        status = mo_granules_grant(&pool->granules, &span->slots[slot], mo_slot_address(span, slot), count,
                                   detail);
    if (status) {
        unmap_run(pool, span, slot, count);
        return status;
    }
    mo_zone_own(request->zone, span, slot, count);
    mo_pool_tell_slots(pool, MO_TRACE_MAP, span, slot, count, pool->order.streams[request->stream].handle);
    return MO_OK;
}

/* Slots of a site that lack a granule; `after_switching`: that still will when the others have theirs back. */
static size_t lacking(const mo_pool *pool, const mo_request *request, const mo_site *p, bool after_switching)
{
    size_t count = 0;

    for (size_t i = p->slot; i < p->slot + p->count; i++) {
        const mo_slot *slot = &p->span->slots[i];
        mo_block *elsewhere;

        if (!mo_slot_owned(slot))
            count += !after_switching || !mo_remap_switchable(pool, request, p, slot, &elsewhere);
    }
    return count;
}

/* Spare granules for all slots of a site that lack one. */
static mo_status collect(mo_pool *pool, const mo_request *request, const mo_site *p, mo_effort effort,
                         mo_detail *detail)
{
    const size_t need = lacking(pool, request, p, false);
    size_t create = 0, take = 0;

    if (!mo_supply_plan(pool, request, p, need, effort, &create, &take))
        return mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "%zu granules are not available", need);
    return mo_supply_collect(pool, request, p, effort, create, take, detail);
}

mo_status mo_remap_site(mo_pool *pool, const mo_request *request, const mo_site *p, mo_effort effort,
                        mo_detail *detail)
{
    const size_t end = p->slot + p->count, need = lacking(pool, request, p, true);
    size_t create = 0, take = 0;
    mo_status status;

    if (!mo_supply_plan(pool, request, p, need, effort, &create, &take)) /* before anything has changed */
        return mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "%zu granules are not available", need);
    status = switch_back(pool, request, p, detail);
    if (!status)
        status = collect(pool, request, p, effort, detail);
    for (size_t i = p->slot, run; i < end && !status; i = run) {
        for (run = i; run < end && mo_slot_owned(&p->span->slots[run]) == mo_slot_owned(&p->span->slots[i]);)
            run++;
        if (!mo_slot_owned(&p->span->slots[i]))
            status = map_run(pool, request, p->span, i, run - i, mo_joins(request, effort), detail);
    }
    return status;
}

/* ---- a site that is given ------------------------------------------------------------------------------------- */

/* Whether every byte is free, or in a slot that can be switched to. */
static bool vacant(const mo_pool *pool, const mo_request *request, const mo_site *site)
{
    const mo_span *span = site->span;
    mo_address address = site->at, end = address + request->size;
    mo_block *elsewhere;

    for (const mo_block *b = mo_span_block_at(span, address); b && b->address < end; b = b->next) {
        size_t low, high;

        if (b->state == MO_BLOCK_LIVE)
            return false;
        if (b->state == MO_BLOCK_FREE) {
            if (mo_stream_order_missing(&pool->order, request->stream, false, b->last_use))
                return false;
            continue;
        }
        low = mo_span_slot(span, b->address > address ? b->address : address);
        high = mo_span_slot(span, (b->address + b->size < end ? b->address + b->size : end) - 1) + 1;
        for (size_t i = low; i < high; i++)
            if (!mo_remap_switchable(pool, request, site, &span->slots[i], &elsewhere))
                return false;
    }
    return true;
}

/* The zone's span that an address lies in, NULL: none. */
static mo_span *span_at(const mo_zone *zone, mo_address address)
{
    mo_span *span = zone->spans;

    while (span && address - span->base >= span->size)
        span = span->next;
    return span;
}

mo_block *mo_remap_at(mo_pool *pool, const mo_request *request, mo_address address)
{
    mo_span *span = span_at(request->zone, address);
    mo_address end = address + request->size;
    mo_site p = {.at = address, .span = span};
    mo_block *block;

    if (span && end > span->base + span->size)
        return NULL;
    if (!span || !span->slot_count || !vacant(pool, request, &p))
        return NULL;
    for (block = mo_span_block_at(span, address); block && block->address < end; block = block->next)
        if (block->state == MO_BLOCK_HOLE) {
            mo_address low = block->address > address ? block->address : address;

            p.slot = mo_span_slot(span, low);
            p.count =
                mo_span_slot(span,
                             (block->address + block->size < end ? block->address + block->size : end) - 1) +
                1 - p.slot;
            if (switch_back(pool, request, &p, NULL))
                return NULL;
            block = mo_span_block_at(
                span, address); /* has grown over the hole, unless two slots shared a granule */
            if (block->state != MO_BLOCK_FREE || block->address + block->size <= low)
                return NULL;
        }
    block = mo_span_block_at(span, address);
    return block->state == MO_BLOCK_FREE && end <= block->address + block->size ? block : NULL;
}

mo_address mo_remap_follow(const mo_zone *zone, mo_address address)
{
    const mo_span *span = span_at(zone, address);
    const mo_slot *slot = span && span->slot_count ? &span->slots[mo_span_slot(span, address)] : NULL;
    const mo_slot *now = slot ? mo_slot_follow(slot) : NULL;

    if (!now || now == slot || now->span->zone != zone)
        return 0;
    return mo_view_address(now) + (address - mo_slot_address(span, mo_span_slot(span, address)));
}

/* ---- for devices that came later ------------------------------------------------------------------------------ */

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
