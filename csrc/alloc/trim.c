#include "alloc/trim.h"

#include "alloc/arena.h"
#include "alloc/pool_check.h"
#include "alloc/pool_wait.h"
#include "alloc/remap.h"
#include "alloc/segments.h"
#include "base/size.h"
#include "driver/forked.h"

static mo_status release_granule(mo_pool *pool, mo_granule *granule, mo_detail *detail)
{
    mo_status status = mo_unmap_views(pool, granule, detail);

    if (status)
        return status;
    if (!mo_stream_order_over(&pool->order, granule->last_use))
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
        mo_stream_order_settle(&pool->order, &block->last_use);
        if (low >= high || block->last_use.streams)
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

mo_status mo_pool_trim(mo_pool *pool, size_t keep, mo_detail *detail, size_t *freed)
{
    size_t held;
    mo_status status;

    if (mo_forked())
        return mo_forked_refuse("returning memory", detail);
    mo_lock_take(&pool->lock);
    mo_pool_wait(pool, NULL); /* what is not over then is kept */
    held = mo_pool_held(pool);
    status = mo_pool_shrink(pool, keep, detail);
    *freed = held - mo_pool_held(pool);
    MO_CHECK_ALL(mo_pool_check_locked(pool, NULL) == MO_OK);
    mo_lock_give(&pool->lock);
    return status;
}
