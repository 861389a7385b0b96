/* Where a request goes that no mapped free block holds: beside free memory, where the fewest calls bring granules, so that
 * what is free grows together instead of lying about; where there are too few, where the least is needed. And bringing
 * them there. */
#include <string.h>

#include "alloc/gather.h"
#include "alloc/trace_ring.h"
#include "base/size.h"

#define FIT_SCAN       8    /* free blocks looked at for one that needs no waiting */
#define SLOT_SCAN      8192 /* slots looked at for one request before the best so far is taken */
#define SPAN_FACTOR    2    /* addresses reserved at a time, in device memories */
#define STALE_FACTOR   4    /* stale views a granule, on average, that a step that repeats may keep */
#define STALE_LIMIT    8    /* stale views a granule, on average, before any are unmapped for their number */
#define STALE_FLOOR    4096 /* and this many more */
#define SWEEP_SLOTS    4096 /* looked at for one request */
#define SWEEP_UNMAPS   32
#define REPEATED_UNMAP 16 /* price, in calls, of unmapping what the same step may want again */

/* ---- free blocks ------------------------------------------------------------------------------------------- */

mo_block *mo_fit(mo_pool *pool, const mo_request *request, mo_block **waiting)
{
    mo_free_set *set = &request->zone->free;
    mo_block *block = mo_free_set_fit(set, request->size);

    *waiting = NULL;
    for (int i = 0; block && i < FIT_SCAN; i++, block = mo_free_set_after(set, block)) {
        if (mo_order_own(request->stream, block->use))
            return block;
        mo_order_settle(&pool->order, &block->use);
        if (!mo_order_missing(&pool->order, request->stream, false, block->use))
            return block;
        if (!*waiting)
            *waiting = block;
    }
    return NULL;
}

/* ---- choosing the site ------------------------------------------------------------------------------------- */

typedef struct search {
    const mo_pool *pool;
    const mo_request *request;
    bool join;    /* over free memory that the stream has to wait for, too */
    bool sparing; /* memory is what lacks: the least of it is better than the fewest calls */
    mo_site best;
    size_t looked_at; /* slots, and free blocks on the way */
} search;

static size_t first_price(const search *s, const mo_site *site)
{
    return s->sparing ? site->need : site->calls;
}

static bool better(const search *s, const mo_site *p)
{
    const mo_site *best = &s->best;
    size_t first = first_price(s, p), first_best = first_price(s, best);

    if (!best->span || first != first_best)
        return !best->span || first < first_best;
    if (p->calls + p->need != best->calls + best->need) /* the other price */
        return p->calls + p->need < best->calls + best->need;
    return p->at < best->at; /* low, so that addresses are used again */
}

/* Prices p, unless a stale view in it cannot go yet, and keeps it if it is better than the best so far. */
static void consider(search *s, mo_site p)
{
    const mo_pool *pool = s->pool;

    for (size_t i = p.slot; i < p.slot + p.count; i++) {
        const mo_slot *slot = &p.span->slots[i];
        mo_block *elsewhere;

        if (s->best.span && first_price(s, &p) > first_price(s, &s->best))
            return;
        s->looked_at++;
        if (mo_slot_owned(slot))
            continue;
        p.need++;
        if (!slot->granule)
            p.calls++;
        else if (!mo_switchable(pool, s->request, &p, slot, &elsewhere)) {
            if (!mo_order_over(&pool->order, slot->use))
                return;
            p.calls +=
                s->request->foretold && pool->granules.stale_count < STALE_FACTOR * pool->granules.count
                    ? REPEATED_UNMAP
                    : 2;
        }
    }
    if (better(s, &p))
        s->best = p;
}

static bool usable(const search *s, const mo_block *block)
{
    return block &&
           (block->state == MO_BLOCK_HOLE ||
            (block->state == MO_BLOCK_FREE &&
             (s->join || !mo_order_missing(&s->pool->order, s->request->stream, false, block->use))));
}

/* The site that begins at a block and goes on to the right, or ends with it and goes on to the left, over free memory and
 * holes until it is large enough. At its far end it takes of a hole no more slots than it needs. */
static void consider_from(search *s, const mo_block *block, bool right)
{
    size_t granule = s->pool->granules.size, size = s->request->size, have = 0, part;
    mo_span *span = block->span;
    mo_address edge = right ? block->address : block->address + block->size, low, high;
    mo_site p = {.span = span};

    while (have + block->size < size) {
        have += block->size;
        block = right ? block->next : block->previous;
        if (!usable(s, block) || ++s->looked_at > SLOT_SCAN)
            return;
    }
    part = size - have;
    if (block->state == MO_BLOCK_HOLE)
        part = mo_ceil_div(part, granule) * granule;
    p.at = right ? edge : block->address + block->size - part;
    low = right ? edge : p.at;
    high = right ? block->address + part : edge;
    p.slot = mo_span_slot(span, low);
    p.count = mo_span_slot(span, high - 1) + 1 - p.slot;
    consider(s, p);
}

static void consider_hole(search *s, const mo_block *hole, bool fresh)
{
    mo_span *span = hole->span;
    size_t granule = s->pool->granules.size, first = mo_span_slot(span, hole->address);
    size_t slots = hole->size / granule, need = mo_ceil_div(s->request->size, granule), never;

    /* Addresses that were never mapped are always possible; with a gap they join nothing that lies before. */
    never = span->fresh + s->request->apart;
    if ((fresh || never > first) && never >= first && never + need <= first + slots)
        consider(s,
                 (mo_site){.span = span, .at = mo_slot_address(span, never), .slot = never, .count = need});
    if (fresh)
        return;
    consider_from(s, usable(s, hole->previous) ? hole->previous : hole, true);
    consider_from(s, usable(s, hole->next) ? hole->next : hole, false);
}

static mo_site choose(const mo_pool *pool, const mo_request *request, mo_effort effort, bool fresh)
{
    search s = {.pool = pool,
                .request = request,
                .join = mo_joins(request, effort),
                .sparing = effort == MO_EFFORT_CREATE};

    for (const mo_block *hole = request->zone->holes; hole && s.looked_at < SLOT_SCAN; hole = hole->link[1])
        consider_hole(&s, hole, fresh);
    return s.best;
}

/* More addresses for a zone: a few device memories at a time. */
static mo_status add_span(mo_pool *pool, mo_zone *zone, size_t size, mo_detail *detail)
{
    mo_driver *driver = pool->driver;
    size_t free_bytes = 0, total = 0, wanted = 0;
    mo_address base = 0;
    mo_span *span = NULL;
    mo_status status = driver->memory_info(driver, detail, &free_bytes, &total);

    if (status)
        return status;
    pool->device_bytes = total;
    wanted = total > size ? total : size;
    if (!mo_mul_ok(wanted, SPAN_FACTOR, &wanted) || !mo_align_up_ok(wanted, pool->granules.size, &wanted))
        return mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "no device has %zu bytes", size);
    status = driver->reserve(driver, wanted, detail, &base);
    if (status)
        return status;
    status = mo_zone_add_span(zone, base, wanted, false, detail, &span);
    if (status)
        driver->unreserve(driver, base, wanted, NULL);
    return status;
}

/* ---- bringing them there ------------------------------------------------------------------------------------ */

/* The stale slots of a site get their granules back where that costs nothing. */
static mo_status switch_back(mo_pool *pool, const mo_request *request, const mo_site *p, mo_detail *detail)
{
    for (size_t i = p->slot; i < p->slot + p->count; i++) {
        mo_slot *slot = &p->span->slots[i];
        mo_block *elsewhere;
        mo_status status;

        if (!mo_switchable(pool, request, p, slot, &elsewhere))
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

/* Empties a slot whose view is stale. MO_NOT_READY while the view may be in use. */
static mo_status vacate(mo_pool *pool, mo_span *span, size_t i, mo_detail *detail)
{
    mo_slot *slot = &span->slots[i];

    if (!slot->granule)
        return MO_OK;
    if (!mo_order_over(&pool->order, slot->use))
        return mo_fail(detail, MO_NOT_READY, 0, "an address is still mapped for work that has not ended");
    return mo_granule_unmap(&pool->granules, slot, mo_slot_address(span, i), detail);
}

/* Where granules may not be mapped twice, a spare one loses its views before it gets another. */
static mo_status unmap_views(mo_pool *pool, mo_granule *granule, mo_detail *detail)
{
    while (granule->views) {
        mo_slot *slot = granule->views;
        mo_status status = vacate(pool, slot->span, (size_t)(slot - slot->span->slots), detail);

        if (status)
            return status;
    }
    return MO_OK;
}

/* Undoes map_run: the slots' granules are spare again and, since nobody may use what was not granted, unmapped. */
static void unmap_run(mo_pool *pool, mo_span *span, size_t slot, size_t count)
{
    for (size_t i = slot; i < slot + count; i++) {
        mo_granule_disown(&pool->granules, &span->slots[i], span->slots[i].granule->use);
        if (mo_granule_unmap(&pool->granules, &span->slots[i], mo_slot_address(span, i), NULL))
            pool->stats.failed_releases++; /* stale and not granted: never switched to */
    }
}

/* Slots [slot, slot + count) of a hole get spare granules, and become free memory. */
static mo_status map_run(mo_pool *pool, const mo_request *request, mo_span *span, size_t slot, size_t count,
                         bool join, mo_detail *detail)
{
    mo_status status = mo_blocks_reserve(&pool->blocks, 4, detail);
    size_t mapped = 0;

    while (mapped < count && !status) {
        mo_granule *granule = mo_usable_spare(pool, request, join);

        status = granule ? vacate(pool, span, slot + mapped, detail)
                         : mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "no granule is spare");
        if (!status && !pool->settings.double_map)
            status = unmap_views(pool, granule, detail);
        if (!status)
            status = mo_granule_map(&pool->granules, granule, span, &span->slots[slot + mapped],
                                    mo_slot_address(span, slot + mapped), detail);
        if (!status)
            mo_granule_own(&pool->granules, &span->slots[slot + mapped++]);
    }
    if (span->fresh < slot + mapped)
        span->fresh = slot + mapped;
    if (!status)
        status = mo_granules_grant(&pool->granules, &span->slots[slot], mo_slot_address(span, slot), count,
                                   detail);
    if (status) {
        unmap_run(pool, span, slot, mapped);
        return status;
    }
    mo_zone_own(request->zone, span, slot, count);
    mo_pool_tell_slots(pool, MO_TRACE_MAP, span, slot, count, pool->order.streams[request->stream].handle);
    return MO_OK;
}

static mo_status bring(mo_pool *pool, const mo_request *request, const mo_site *p, mo_effort effort,
                       mo_detail *detail)
{
    size_t end = p->slot + p->count, need = 0, create = 0, take = 0;
    mo_status status;

    for (size_t i = p->slot; i < end; i++) {
        const mo_slot *slot = &p->span->slots[i];
        mo_block *elsewhere;

        need += !mo_slot_owned(slot) && !mo_switchable(pool, request, p, slot, &elsewhere);
    }
    if (!mo_gather_plan(pool, request, p, need, effort, &create, &take))
        return mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "%zu granules cannot be had", need);
    status = switch_back(pool, request, p, detail);
    need = 0;
    for (size_t i = p->slot; i < end && !status; i++)
        need += !mo_slot_owned(&p->span->slots[i]);
    if (!status && !mo_gather_plan(pool, request, p, need, effort, &create, &take))
        status = mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "%zu granules cannot be had", need);
    if (!status)
        status = mo_gather(pool, request, p, effort, create, take, detail);
    for (size_t i = p->slot, run; i < end && !status; i = run) {
        for (run = i; run < end && mo_slot_owned(&p->span->slots[run]) == mo_slot_owned(&p->span->slots[i]);)
            run++;
        if (!mo_slot_owned(&p->span->slots[i]))
            status = map_run(pool, request, p->span, i, run - i, mo_joins(request, effort), detail);
    }
    return status;
}

/* Stale views cost page tables and addresses. Where there are many, some of this zone's that are over go, on the slow path
 * and a few at a time, so that no request pays for all. */
static void sweep(mo_pool *pool, mo_zone *zone)
{
    size_t limit = STALE_LIMIT * pool->granules.count + STALE_FLOOR, looked_at = 0, unmapped = 0;

    for (mo_span *span = zone->spans; span; span = span->next)
        for (size_t i = 0; i < span->fresh && looked_at < SWEEP_SLOTS; i++, looked_at++) {
            size_t at = span->swept++ % span->fresh;
            const mo_slot *slot = &span->slots[at];

            if (pool->granules.stale_count <= limit || unmapped == SWEEP_UNMAPS)
                return;
            if (slot->granule && !mo_slot_owned(slot) && mo_order_over(&pool->order, slot->use))
                unmapped += vacate(pool, span, at, NULL) == MO_OK;
        }
}

mo_status mo_place(mo_pool *pool, const mo_request *request, mo_effort effort, mo_detail *detail,
                   mo_block **out, mo_address *at)
{
    mo_site p = choose(pool, request, effort, request->apart);
    mo_status status = MO_OK;

    if (!p.span) {
        status = add_span(pool, request->zone, request->size, detail);
        p = choose(pool, request, effort, request->apart);
    }
    if (!status)
        status = bring(pool, request, &p, effort, detail);
    if (status == MO_NOT_READY) { /* two stale slots of one granule, say: addresses never used always do */
        p = choose(pool, request, effort, true);
        if (p.span)
            status = bring(pool, request, &p, effort, detail);
    }
    if (status)
        return status;
    if (pool->granules.stale_count > STALE_LIMIT * pool->granules.count + STALE_FLOOR)
        sweep(pool, request->zone);
    *out = mo_span_block_at(p.span, p.at);
    *at = p.at;
    MO_ASSERT((*out)->state == MO_BLOCK_FREE && p.at + request->size <= (*out)->address + (*out)->size);
    return MO_OK;
}

mo_status mo_arena_fill(mo_pool *pool, mo_arena *arena, size_t bytes, mo_detail *detail)
{
    size_t held = mo_arena_held(arena), size;
    mo_request request = {.arena = arena,
                          .zone = &arena->zones[MO_ZONE_LARGE],
                          .captured = true}; /* memory that all may have */
    mo_block *segment;
    mo_status status = MO_OK;
    mo_site p;

    if (bytes <= held)
        return MO_OK;
    size = bytes - held;
    if (!pool->granules.size)
        return mo_segment_add(pool, request.zone, size, detail, &segment);
    if (!mo_align_up_ok(size, pool->granules.size, &request.size))
        return mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "no device has %zu bytes", size);
    p = choose(pool, &request, MO_EFFORT_CREATE, true);
    if (!p.span) {
        status = add_span(pool, request.zone, request.size, detail);
        p = choose(pool, &request, MO_EFFORT_CREATE, true);
    }
    return status ? status : bring(pool, &request, &p, MO_EFFORT_CREATE, detail);
}

/* ---- a site that is given ------------------------------------------------------------------------------------ */

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
            if (mo_order_missing(&pool->order, request->stream, false, b->use))
                return false;
            continue;
        }
        low = mo_span_slot(span, b->address > address ? b->address : address);
        high = mo_span_slot(span, (b->address + b->size < end ? b->address + b->size : end) - 1) + 1;
        for (size_t i = low; i < high; i++)
            if (!mo_switchable(pool, request, site, &span->slots[i], &elsewhere))
                return false;
    }
    return true;
}

mo_block *mo_place_at(mo_pool *pool, const mo_request *request, mo_address address)
{
    mo_span *span = request->zone->spans;
    mo_address end = address + request->size;
    mo_site p = {.at = address};
    mo_block *block;

    while (span && (address < span->base || end > span->base + span->size))
        span = span->next;
    p.span = span;
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
