#include "alloc/arena.h"

#include <string.h>

#include "alloc/segments.h"
#include "base/hostmem.h"

static void start_zone(mo_pool *pool, mo_arena *arena, mo_zone *zone, mo_stat_column column)
{
    zone->arena = arena;
    zone->store = &pool->blocks;
    zone->granules = &pool->granules;
    zone->column = column;
}

void mo_arena_start(mo_pool *pool, mo_arena *arena, mo_arena_id id)
{
    arena->id = id;
    arena->number = ++pool->arena_count;
    MO_EACH_ZONE (zone, arena)
        start_zone(pool, arena, zone, zone == &arena->zones[MO_ZONE_SMALL] ? MO_STAT_SMALL : MO_STAT_LARGE);
}

mo_arena *mo_arena_find(mo_pool *pool, mo_arena_id id)
{
    mo_arena *arena = pool->arenas;

    while (arena && (arena->id.first != id.first || arena->id.second != id.second))
        arena = arena->next;
    return arena;
}

mo_arena *mo_arena_named(mo_pool *pool, mo_arena_id id, mo_detail *detail)
{
    mo_arena *arena = mo_arena_find(pool, id);

    if (!arena)
        mo_fail(detail, MO_INVALID, 0, "there is no memory pool (%llu, %llu) on this device", id.first,
                id.second);
    return arena;
}

mo_arena *mo_arena_routed(mo_pool *pool, mo_stream stream)
{
    for (mo_route_entry *entry = pool->routes; entry; entry = entry->next)
        if (!entry->route.accepts || entry->route.accepts(entry->route.user, stream))
            return entry->arena;
    return &pool->general;
}

/* ---- opening and retiring ------------------------------------------------------------------------------------- */

mo_arena *mo_arena_open(mo_pool *pool, mo_arena_id id, mo_detail *detail)
{
    mo_arena *arena = pool->retired;

    if (arena) {
        pool->retired = arena->next;
    } else {
        arena = mo_host_calloc(1, sizeof *arena);
        if (!arena) {
            mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory for a memory pool");
            return NULL;
        }
    }
    mo_arena_start(pool, arena, id);
    arena->references = 0;
    arena->budget = arena->reserved = arena->peak_bytes = 0;
    memset(arena->held, 0, sizeof arena->held);
    arena->pinned = arena->pausing = false;
    arena->unsettled = 0;
    arena->next = pool->general.next; /* the general one stays first */
    pool->general.next = arena;
    return arena;
}

/* All its memory becomes spare, or goes back where it is segments. A free that cannot be done now is for the next time. */
static void retire(mo_pool *pool, mo_arena *arena)
{
    mo_arena **place = &pool->arenas;

    MO_EACH_ZONE (zone, arena) {
        for (mo_block *block; (block = mo_free_set_last(&zone->free)) && pool->granules.size;) {
            size_t low, high;

            if (mo_blocks_reserve(&pool->blocks, 4, NULL))
                return; /* stays, empty, until the next release or trim */
            mo_block_slots(block, &low, &high);
            mo_pool_tell_slots(pool, MO_TRACE_UNMAP, block->span, low, high - low, NULL);
            mo_zone_disown(zone, block, low, high - low);
        }
        if (!pool->granules.size && mo_segments_free(pool, zone, 0, NULL)) {
            pool->stats.failed_releases++;
            return; /* stays, with the segment */
        }
    }
    while (*place != arena)
        place = &(*place)->next;
    *place = arena->next;
    arena->next = pool->retired;
    pool->retired = arena;
}

void mo_arena_check_retired(mo_pool *pool, mo_arena *arena)
{
    if (arena == &pool->general || arena->references || arena->live_blocks || arena->unsettled)
        return;
    arena->paused = false; /* what was suspended has nothing to give back */
    retire(pool, arena);
}

bool mo_arenas_unsettled(const mo_pool *pool)
{
    const mo_arena *arena = pool->arenas;

    while (arena && !arena->unsettled)
        arena = arena->next;
    return arena;
}

void mo_arenas_settle(mo_pool *pool, uint64_t tick)
{
    for (mo_arena *arena = pool->arenas, *next; arena; arena = next) {
        next = arena->next;
        if (arena->unsettled && arena->unsettled <= tick) {
            arena->unsettled = 0;
            arena->pinned = false;
        }
        mo_arena_check_retired(pool, arena);
    }
}

/* ---- the end -------------------------------------------------------------------------------------------------- */

static void note_failure(mo_status *first, mo_status status)
{
    if (!*first)
        *first = status;
}

static mo_status close_span(mo_pool *pool, mo_span *span, mo_detail *detail)
{
    mo_driver *driver = pool->driver;
    mo_status status = MO_OK;

    if (!span->slot_count)
        return driver->segment_free(driver, span->base, detail);
    for (size_t i = 0; i < span->fresh; i++)
        if (span->slots[i].granule && span->slots[i].granule->handle)
            note_failure(&status,
                         driver->unmap(driver, mo_slot_address(span, i), pool->granules.size, detail));
    note_failure(&status, driver->unreserve(driver, span->base, span->size, detail));
    return status;
}

static mo_status close_zone(mo_pool *pool, mo_zone *zone, mo_detail *detail)
{
    mo_status status = MO_OK;

    for (mo_span *span = zone->spans; span; span = span->next) {
        note_failure(&status, close_span(pool, span, detail));
        for (size_t i = 0; i < span->fresh; i++)
            if (mo_slot_owned(&span->slots[i]) && span->slots[i].granule->handle)
                note_failure(&status,
                             pool->driver->release(pool->driver, span->slots[i].granule->handle, detail));
    }
    while (zone->spans)
        mo_zone_forget_span(zone, zone->spans);
    return status;
}

mo_status mo_arenas_close(mo_pool *pool, mo_detail *detail)
{
    mo_status status = MO_OK;

    for (mo_granule *g = pool->granules.spare; g; g = g->next)
        note_failure(&status, pool->driver->release(pool->driver, g->handle, detail));
    for (int retired = 0; retired < 2; retired++)
        for (mo_arena *arena = retired ? pool->retired : pool->arenas, *next; arena; arena = next) {
            next = arena->next;
            MO_EACH_ZONE (zone, arena)
                note_failure(&status, close_zone(pool, zone, detail));
            if (arena != &pool->general)
                mo_host_free(arena);
        }
    for (mo_route_entry *entry = pool->routes, *next; entry; entry = next) {
        next = entry->next;
        if (entry->route.drop)
            entry->route.drop(entry->route.user);
        mo_host_free(entry);
    }
    return status;
}
