/* Waiting for the device, what is tried before a request fails, and giving memory back. */
#include "alloc/pool_parts.h"
#include "base/size.h"

#define POLL_NS 20000 /* between two looks at what is waited for */

/* ---- waiting ------------------------------------------------------------------------------------------------ */

mo_status mo_pool_synchronize(mo_pool *pool, mo_detail *detail)
{
    const uint64_t tick = pool->order.tick;
    mo_status status;

    pool->order.synchronized++;
    mo_lock_give(&pool->lock);
    status = pool->driver->synchronize(pool->driver, detail);
    mo_lock_take(&pool->lock);
    if (!status) {
        mo_order_synchronized(&pool->order, tick);
        mo_arenas_settle(pool, tick);
    }
    return status;
}

mo_status mo_pool_wait(mo_pool *pool, mo_detail *detail)
{
    mo_order *order = &pool->order;
    mo_use use = mo_order_pending(order);
    bool counted = false;
    mo_status status;

    while ((status = mo_order_await(order, &use, detail)) == MO_NOT_READY) {
        order->synchronized += !counted;
        counted = true;
        mo_lock_give(&pool->lock);
        pool->driver->pause(pool->driver, POLL_NS);
        mo_lock_take(&pool->lock);
    }
    /* What no event tells, the device as a whole does; where that fails, too, its error is the answer. */
    if ((status || use.streams || mo_arenas_unsettled(pool)) && !mo_order_capturing(order)) {
        mo_status whole = mo_pool_synchronize(pool, status ? detail : NULL);

        status = status ? whole : MO_OK;
    }
    return status;
}

mo_status mo_pool_number_stream(mo_pool *pool, mo_stream stream, mo_detail *detail, unsigned *out)
{
    mo_status status = mo_order_number(&pool->order, stream, detail, out);

    if (status != MO_NOT_READY)
        return status;
    status = mo_pool_wait(pool, detail);
    if (!status)
        status = mo_order_number(&pool->order, stream, detail, out);
    if (status != MO_NOT_READY)
        return status;
    return mo_fail(
        detail, MO_UNSUPPORTED, 0,
        "%d streams have live memory or are being captured, and memopt's allocator tells no more of "
        "them apart: let some streams share their work",
        MO_STREAMS);
}

/* ---- before a request fails --------------------------------------------------------------------------------- */

static bool may_wait(mo_pool *pool, const mo_request *request, const mo_ladder *ladder)
{
    if (!mo_order_pending(&pool->order).streams && !mo_arenas_unsettled(pool))
        return false;
    return !ladder->waits || (ladder->waits < MO_LADDER_WAITS && request->size <= mo_pool_allocatable(pool));
}

/* One that finds nothing to wait for (what is left is being captured) is the last. */
static mo_status wait_once(mo_pool *pool, mo_ladder *ladder, mo_detail *detail)
{
    const uint64_t before = pool->order.synchronized;
    const mo_status status = mo_pool_wait(pool, detail);

    ladder->waits = pool->order.synchronized == before ? MO_LADDER_WAITS : ladder->waits + 1;
    return status;
}

mo_status mo_ladder_climb(mo_pool *pool, const mo_request *request, mo_ladder *ladder, mo_detail *detail)
{
    mo_order *order = &pool->order;

    for (;;)
        switch (ladder->rung++) {
        case 0: /* work that has ended meanwhile */
            if (!mo_order_pending(order).streams)
                continue;
            mo_order_poll(order);
            return MO_OK;
        case 1: /* work that will end, however long that takes */
            if (!may_wait(pool, request, ladder))
                continue;
            ladder->rung = 1; /* what other threads freed meanwhile may be all that lacks */
            return wait_once(pool, ladder, detail);
        case 2: /* segments that are free, for one of another size */
            if (pool->granules.size || request->captured)
                continue;
            if (mo_pool_shrink(pool, 0, NULL))
                continue;
            return MO_OK;
        default:
            ladder->rung = 3;
            return mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "nothing is left to try");
        }
}

/* ---- giving back ----------------------------------------------------------------------------------------------- */

static mo_status release_granule(mo_pool *pool, mo_granule *granule, mo_detail *detail)
{
    mo_status status;

    while (granule->views) {
        mo_slot *slot = granule->views;

        if (!mo_order_over(&pool->order, slot->use))
            return MO_NOT_READY;
        status = mo_granule_unmap(&pool->granules, slot,
                                  mo_slot_address(slot->span, (size_t)(slot - slot->span->slots)), detail);
        if (status)
            return status;
    }
    if (!mo_order_over(&pool->order, granule->use))
        return MO_NOT_READY;
    pool->stats.num_device_free++;
    status = mo_granule_release(&pool->granules, granule, detail);
    pool->stats.failed_releases += status != MO_OK;
    return status;
}

/* What is not over stays: MO_NOT_READY is no failure here. */
static mo_status release_spare(mo_pool *pool, size_t keep, mo_detail *detail)
{
    for (mo_granule *granule = pool->granules.spare, *next; granule && mo_pool_held(pool) > keep;
         granule = next) {
        mo_status status;

        next = granule->next;
        status = release_granule(pool, granule, detail);
        if (status && status != MO_NOT_READY)
            return status;
    }
    return MO_OK;
}

/* The free granules of a zone become spare, the largest blocks' first, as many as `held` is above `keep`. */
static mo_status disown_free(mo_pool *pool, mo_zone *zone, size_t keep, mo_detail *detail)
{
    mo_block probe, *block = mo_free_set_last(&zone->free);

    for (; block && block->size >= pool->granules.size; block = mo_free_set_before(&zone->free, &probe)) {
        size_t spare = pool->granules.spare_count * pool->granules.size, held = mo_pool_held(pool);
        size_t inside = mo_arena_held(zone->arena), low, high, count;
        mo_status status;

        if (held <= spare + keep || inside <= zone->arena->reserved)
            return MO_OK;
        probe = *block;
        mo_block_slots(block, &low, &high);
        mo_order_settle(&pool->order, &block->use);
        if (low >= high || block->use.streams)
            continue;
        count = mo_size_min(high - low, (inside - zone->arena->reserved) / pool->granules.size);
        count = mo_size_min(count, (held - spare - keep + pool->granules.size - 1) / pool->granules.size);
        if (!count)
            return MO_OK;
        status = mo_blocks_reserve(&pool->blocks, 4, detail);
        if (status)
            return status;
        mo_pool_tell_slots(pool, MO_TRACE_UNMAP, block->span, high - count, count, NULL);
        mo_zone_disown(zone, block, high - count, count);
    }
    return MO_OK;
}

mo_status mo_pool_shrink(mo_pool *pool, size_t keep, mo_detail *detail)
{
    mo_status status = MO_OK;

    mo_arenas_settle(pool, 0); /* those that could not go when they were released */
    for (mo_arena *arena = pool->arenas; arena && !status; arena = arena->next) {
        if (arena->pinned || arena->paused)
            continue;
        MO_EACH_ZONE (zone, arena)
            if (!status)
                status = pool->granules.size ? disown_free(pool, zone, keep, detail)
                                             : mo_segments_free(pool, zone, keep, detail);
    }
    return status ? status : release_spare(pool, keep, detail);
}
