#include "alloc/segments.h"

#include "base/size.h"

mo_status mo_segment_add(mo_pool *pool, mo_zone *zone, size_t size, mo_detail *detail, mo_block **out)
{
    mo_driver *driver = pool->driver;
    size_t budget = pool->settings.budget, arena_budget = zone->arena->budget;
    mo_address base = 0;
    mo_span *span = NULL;
    mo_status status;

    if (!mo_align_up_ok(size, MO_SEGMENT_STEP, &size) || (budget && mo_pool_held(pool) + size > budget) ||
        (arena_budget && mo_arena_held(zone->arena) + size > arena_budget))
        return mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "the memory budget is exhausted");
    pool->granules.calls++;
    status = driver->segment_alloc(driver, size, detail, &base);
    if (status)
        return status;
    status = mo_zone_add_span(zone, base, size, true, detail, &span);
    if (status) {
        pool->granules.calls++;
        driver->segment_free(driver, base, NULL);
        return status;
    }
    pool->segment_bytes += size;
    pool->stats.num_device_alloc++;
    if (pool->held_peak < mo_pool_held(pool))
        pool->held_peak = mo_pool_held(pool);
    mo_pool_tell(pool, MO_TRACE_MAP, span, base, size, NULL);
    *out = span->lowest;
    return MO_OK;
}

mo_status mo_segments_free(mo_pool *pool, mo_zone *zone, size_t keep, mo_detail *detail)
{
    for (mo_span *span = zone->spans, *next; span && mo_pool_held(pool) > keep; span = next) {
        mo_status status;

        next = span->next;
        if (span->lowest->next || span->lowest->state != MO_BLOCK_FREE ||
            mo_arena_held(zone->arena) < zone->arena->reserved + span->size)
            continue;
        pool->granules.calls++;
        status = pool->driver->segment_free(pool->driver, span->base, detail);
        if (status)
            return status;
        pool->stats.num_device_free++;
        mo_pool_tell(pool, MO_TRACE_UNMAP, span, span->base, span->size, NULL);
        pool->segment_bytes -= span->size;
        mo_zone_remove_span(zone, span);
    }
    return MO_OK;
}
