#include "alloc/placement.h"

#include "alloc/remap.h"
#include "alloc/segments.h"
#include "base/size.h"

#define FIT_SCAN    8    /* free blocks looked at for one that needs no waiting */
#define SLOT_SCAN   1024 /* slots looked at for one request before the best so far is taken */
#define SPAN_FACTOR 2    /* addresses reserved at a time, in device memories */

/* ---- free blocks ---------------------------------------------------------------------------------------------- */

mo_block *mo_fit(mo_pool *pool, const mo_request *request, mo_block **waiting)
{
    mo_free_set *set = &request->zone->free;
    mo_block *block = mo_free_set_fit(set, request->size);

    *waiting = NULL;
    for (int i = 0; block && i < FIT_SCAN; i++, block = mo_free_set_after(set, block)) {
        if (mo_stream_order_own(request->stream, block->last_use))
            return block;
        mo_stream_order_settle(&pool->order, &block->last_use);
        if (!mo_stream_order_missing(&pool->order, request->stream, false, block->last_use))
            return block;
        if (!*waiting)
            *waiting = block;
    }
    return NULL;
}

/* ---- choosing the site ---------------------------------------------------------------------------------------- */

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
        int price;

        if (s->best.span && first_price(s, &p) > first_price(s, &s->best))
            return;
        s->looked_at++;
        if (mo_slot_owned(slot))
            continue;
        p.need++;
        price = mo_remap_price(pool, s->request, &p, slot);
        if (price < 0)
            return;
        p.calls += (size_t)price;
    }
    if (better(s, &p))
        s->best = p;
}

static bool usable(const search *s, const mo_block *block)
{
    return block && (block->state == MO_BLOCK_HOLE ||
                     (block->state == MO_BLOCK_FREE &&
                      (s->join || !mo_stream_order_missing(&s->pool->order, s->request->stream, false,
                                                           block->last_use))));
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
        return mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "%zu bytes are more than any device has", size);
    status = driver->reserve(driver, wanted, detail, &base);
    if (status)
        return status;
    status = mo_zone_add_span(zone, base, wanted, false, detail, &span);
    if (status)
        driver->unreserve(driver, base, wanted, NULL);
    return status;
}

/* ---- having memory there -------------------------------------------------------------------------------------- */

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
        status = mo_remap_site(pool, request, &p, effort, detail);
    if (status == MO_NOT_READY) { /* two stale slots of one granule, say: addresses never used always do */
        p = choose(pool, request, effort, true);
        if (p.span)
            status = mo_remap_site(pool, request, &p, effort, detail);
    }
    if (status)
        return status;
    mo_unmap_some_stale(pool, request->zone);
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
        return mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "%zu bytes are more than any device has", size);
    p = choose(pool, &request, MO_EFFORT_CREATE, true);
    if (!p.span) {
        status = add_span(pool, request.zone, request.size, detail);
        p = choose(pool, &request, MO_EFFORT_CREATE, true);
    }
    return status ? status : mo_remap_site(pool, &request, &p, MO_EFFORT_CREATE, detail);
}
