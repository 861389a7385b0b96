/* What is tried before a request fails, one rung after the other; after each the whole search begins again (a search
 * that stopped at the rung would refuse what the very next request gets). And giving memory back. */
#include "alloc/pool_parts.h"
#include "base/size.h"

#define TRIM_NS 60000000000u

/* Streams whose last use of any memory is not known to be over. */
static mo_use all_use(const mo_pool *pool)
{
    mo_use use = {0, pool->order.tick};

    for (unsigned t = 0; t < pool->order.count; t++)
        if (pool->order.streams[t].last > pool->order.streams[t].done)
            use.streams |= 1ull << t;
    return use;
}

mo_status mo_ladder_climb(mo_pool *pool, const mo_request *request, mo_ladder *ladder, mo_detail *detail)
{
    mo_order *order = &pool->order;

    for (;;)
        switch (ladder->rung++) {
        case 0: /* work that has ended meanwhile */
            if (!all_use(pool).streams)
                continue;
            mo_order_poll(order);
            return MO_OK;
        case 1: /* work that ends soon. What is being captured cannot be waited for, but the rest has been. */
            if (!all_use(pool).streams)
                continue;
            mo_order_wait(order, all_use(pool), MO_LADDER_NS, NULL);
            return MO_OK;
        case 2: /* segments that are free, for one of another size */
            if (pool->granules.size || request->captured)
                continue;
            if (mo_pool_shrink(pool, 0, NULL))
                continue;
            return MO_OK;
        default:
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
    mo_use use = all_use(pool);
    mo_status status = MO_OK;

    if (use.streams && pool->granules.size)
        mo_order_wait(&pool->order, use, TRIM_NS, NULL); /* what is not over then is kept */
    mo_arenas_settle(pool);
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
