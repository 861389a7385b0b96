/* Arenas: memory kept apart. Opening, routes to them, pausing, and what becomes of one that nobody refers to. */
#include <string.h>

#include "alloc/pool_parts.h"
#include "base/hostmem.h"
#include "base/size.h"
#include "driver/forked.h"

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

static mo_arena *find(mo_pool *pool, mo_arena_id id, mo_detail *detail)
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

/* ---- references --------------------------------------------------------------------------------------------- */

/* A retired arena's addresses, with all that is still mapped there, serve the next one. */
static mo_arena *open_arena(mo_pool *pool, mo_arena_id id, mo_detail *detail)
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

mo_status mo_pool_arena_retain(mo_pool *pool, mo_arena_id id, bool pinned, size_t budget, mo_detail *detail)
{
    mo_arena *arena;

    if (mo_forked())
        return mo_forked_refuse("opening a memory pool", detail);
    mo_lock_take(&pool->lock);
    arena = mo_arena_find(pool, id);
    if (!arena)
        arena = open_arena(pool, id, detail);
    if (arena) {
        arena->references++;
        arena->pinned |= pinned;
        arena->unsettled = 0; /* one that waited for the device stays pinned */
        if (budget)
            arena->budget = budget;
    }
    mo_lock_give(&pool->lock);
    return arena ? MO_OK : MO_NO_HOST_MEMORY;
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

/* UNLOCKS. Graphs replay on streams that nobody told of: only when the whole device is done may what was pinned go elsewhere.
 * The device cannot be waited for while a graph is captured; then the next wait sees to it. */
static void drop_reference(mo_pool *pool, mo_arena *arena)
{
    if (--arena->references)
        return;
    arena->reserved = 0;
    if (!arena->pinned) {
        mo_arena_check_retired(pool, arena);
        return;
    }
    arena->unsettled = ++pool->order.tick;
    if (!mo_order_capturing(&pool->order))
        mo_pool_synchronize(pool, NULL);
}

mo_status mo_pool_arena_release(mo_pool *pool, mo_arena_id id, mo_detail *detail)
{
    mo_arena *arena;

    if (mo_forked())
        return MO_OK;
    mo_lock_take(&pool->lock);
    arena = find(pool, id, detail);
    if (arena && !arena->references) {
        mo_fail(detail, MO_INVALID, 0,
                "the memory pool (%llu, %llu) was released before: only its blocks are left", id.first,
                id.second);
        arena = NULL;
    }
    if (arena)
        drop_reference(pool, arena);
    MO_CHECK_ALL(mo_pool_check_locked(pool, NULL) == MO_OK);
    mo_lock_give(&pool->lock);
    return arena ? MO_OK : MO_INVALID;
}

/* ---- routes -------------------------------------------------------------------------------------------------- */

mo_status mo_pool_route(mo_pool *pool, mo_arena_id id, mo_route route, mo_detail *detail)
{
    mo_route_entry *entry;
    mo_status status = MO_OK;

    if (mo_forked())
        return mo_forked_refuse("routing requests to a memory pool", detail);
    entry = mo_host_calloc(1, sizeof *entry);
    if (!entry)
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory for a route");
    mo_lock_take(&pool->lock);
    entry->arena = find(pool, id, detail);
    if (entry->arena) {
        entry->arena->references++;
        entry->route = route;
        entry->next = pool->routes;
        pool->routes = entry;
    } else {
        status = MO_INVALID;
    }
    mo_lock_give(&pool->lock);
    if (status)
        mo_host_free(entry);
    return status;
}

mo_status mo_pool_unroute(mo_pool *pool, mo_arena_id id, mo_detail *detail)
{
    mo_route_entry **place, *entry;

    if (mo_forked())
        return MO_OK;
    mo_lock_take(&pool->lock);
    place = &pool->routes;
    while (*place && ((*place)->arena->id.first != id.first || (*place)->arena->id.second != id.second))
        place = &(*place)->next;
    entry = *place;
    if (entry) {
        *place = entry->next;
        drop_reference(pool, entry->arena);
    }
    MO_CHECK_ALL(mo_pool_check_locked(pool, NULL) == MO_OK);
    mo_lock_give(&pool->lock);
    if (!entry)
        return mo_fail(detail, MO_INVALID, 0, "there is no route to the memory pool (%llu, %llu)", id.first,
                       id.second);
    if (entry->route.drop)
        entry->route.drop(entry->route.user);
    mo_host_free(entry);
    return MO_OK;
}

/* ---- memory held ahead ---------------------------------------------------------------------------------------- */

mo_status mo_pool_preallocate(mo_pool *pool, mo_arena_id id, size_t bytes, mo_detail *detail)
{
    mo_arena *arena;
    size_t held;
    mo_status status = MO_OK;

    if (mo_forked())
        return mo_forked_refuse("holding device memory", detail);
    mo_lock_take(&pool->lock);
    arena = find(pool, id, detail);
    held = mo_pool_held(pool);
    status = arena ? mo_arena_fill(pool, arena, bytes, detail) : MO_INVALID;
    if (!status && arena->reserved < bytes)
        arena->reserved = bytes;
    if (status && mo_pool_held(pool) > held)
        mo_pool_shrink(pool, held, NULL); /* what was made before it failed, and nobody has used */
    MO_CHECK_ALL(mo_pool_check_locked(pool, NULL) == MO_OK);
    mo_lock_give(&pool->lock);
    return status;
}

/* ---- pausing ------------------------------------------------------------------------------------------------- */

typedef mo_status (*slot_action)(mo_pool *pool, mo_span *span, size_t slot, mo_detail *detail);

/* Does something with every owned slot; at the first failure undoes it for those before. */
static mo_status each_owned(mo_pool *pool, mo_arena *arena, slot_action action, slot_action undo,
                            mo_detail *detail)
{
    mo_status status = MO_OK;
    size_t done = 0, undone = 0;

    for (int pass = 0; pass < 2; pass++) {
        MO_EACH_ZONE (zone, arena)
            for (mo_span *span = zone->spans; span; span = span->next)
                for (size_t i = 0; i < span->fresh; i++) {
                    if (!mo_slot_owned(&span->slots[i]))
                        continue;
                    if (pass == 0) {
                        status = action(pool, span, i, detail);
                        if (status)
                            goto failed;
                        done++;
                    } else if (undone < done) {
                        undo(pool, span, i, NULL);
                        undone++;
                    }
                }
        return status;
    failed:;
    }
    return status;
}

static mo_status suspend(mo_pool *pool, mo_span *span, size_t i, mo_detail *detail)
{
    mo_status status = mo_granule_suspend(&pool->granules, &span->slots[i], mo_slot_address(span, i), detail);

    if (status)
        return status;
    pool->stats.num_device_free++;
    mo_pool_tell_slots(pool, MO_TRACE_UNMAP, span, i, 1, NULL);
    return MO_OK;
}

/* Whatever the budget is: it may have been lowered below what was held until now. */
static mo_status put_back(mo_pool *pool, mo_span *span, size_t i, mo_detail *detail)
{
    mo_status status = mo_granule_restore(&pool->granules, &span->slots[i], mo_slot_address(span, i), detail);

    if (status)
        return status;
    pool->stats.num_device_alloc++;
    mo_pool_tell_slots(pool, MO_TRACE_MAP, span, i, 1, NULL);
    return MO_OK;
}

static mo_status restore(mo_pool *pool, mo_span *span, size_t i, mo_detail *detail)
{
    if (pool->settings.budget && mo_pool_held(pool) + pool->granules.size > pool->settings.budget)
        return mo_fail(detail, MO_NO_DEVICE_MEMORY, 0,
                       "CUDA out of memory. The memory budget has no room to resume the pool");
    return put_back(pool, span, i, detail);
}

/* Other views of its granules would be faults: they go first. MO_NOT_READY: one is in use. */
static mo_status drop_views(mo_pool *pool, mo_span *span, size_t i, mo_detail *detail)
{
    mo_slot *owner = &span->slots[i], *next;

    for (mo_slot *view = owner->granule->views; view; view = next) {
        mo_status status;

        next = view->next_view;
        if (view == owner)
            continue;
        if (!mo_order_over(&pool->order, view->use))
            return MO_NOT_READY;
        status = mo_granule_unmap(&pool->granules, view,
                                  mo_slot_address(view->span, (size_t)(view - view->span->slots)), detail);
        if (status)
            return status;
    }
    return MO_OK;
}

static mo_status nothing(mo_pool *pool, mo_span *span, size_t i, mo_detail *detail)
{
    (void)pool, (void)span, (void)i, (void)detail;
    return MO_OK;
}

static bool free_memory_is_over(const mo_pool *pool, const mo_arena *arena)
{
    for (const mo_zone *zone = arena->zones; zone < arena->zones + MO_ZONES; zone++)
        for (const mo_span *span = zone->spans; span; span = span->next)
            for (const mo_block *block = span->lowest; block; block = block->next)
                if (block->state == MO_BLOCK_FREE && !mo_order_over(&pool->order, block->use))
                    return false;
    return true;
}

/* UNLOCKS. What the arena's live blocks are used for, nobody has told: the whole device is waited for; once more where
 * another thread freed some of the arena's memory meanwhile. */
static mo_status wait_for_arena(mo_pool *pool, mo_arena *arena, mo_detail *detail)
{
    mo_status status;

    arena->references++; /* it stays, while nobody holds the lock */
    arena->pausing = true;
    do {
        status = mo_pool_synchronize(pool, detail);
        if (!status)
            status = free_memory_is_over(pool, arena) ? each_owned(pool, arena, drop_views, nothing, detail)
                                                      : MO_NOT_READY;
    } while (status == MO_NOT_READY);
    arena->pausing = false;
    return status;
}

static mo_status pause_locked(mo_pool *pool, mo_arena *arena, mo_detail *detail)
{
    mo_status status;

    if (arena->paused || arena->pausing)
        return mo_fail(detail, MO_INVALID, 0, "the pool is paused already");
    if (!pool->granules.size)
        return mo_fail(
            detail, MO_UNSUPPORTED, 0,
            "this device has no virtual memory management, without which addresses cannot be kept");
    status = wait_for_arena(pool, arena, detail);
    if (!status)
        status = each_owned(pool, arena, suspend, put_back, detail);
    arena->paused = !status;
    drop_reference(pool, arena);
    return status;
}

mo_status mo_pool_pause(mo_pool *pool, mo_arena_id id, mo_detail *detail)
{
    mo_arena *arena;
    mo_status status;

    if (mo_forked())
        return mo_forked_refuse("pausing a memory pool", detail);
    mo_lock_take(&pool->lock);
    arena = find(pool, id, detail);
    status = arena ? pause_locked(pool, arena, detail) : MO_INVALID;
    MO_CHECK_ALL(mo_pool_check_locked(pool, NULL) == MO_OK);
    mo_lock_give(&pool->lock);
    return status;
}

/* Gives back what lies free in other arenas, as much as this one lacks: whether any could be. */
static bool make_room(mo_pool *pool, const mo_arena *arena)
{
    size_t needed = mo_arena_held(arena), held = mo_pool_held(pool), keep = held > needed ? held - needed : 0;

    if (pool->settings.budget)
        keep = mo_size_min(keep, pool->settings.budget > needed ? pool->settings.budget - needed : 0);
    return !mo_pool_shrink(pool, keep, NULL) && mo_pool_held(pool) < held;
}

static mo_arena *find_paused(mo_pool *pool, mo_arena_id id, mo_detail *detail)
{
    mo_arena *arena = find(pool, id, detail);

    if (!arena || arena->paused)
        return arena;
    mo_fail(detail, MO_INVALID, 0, "the pool is not paused");
    return NULL;
}

/* UNLOCKS, where there is no room: then for what other arenas' memory is still used by. */
static mo_status resume_locked(mo_pool *pool, mo_arena_id id, mo_detail *detail)
{
    mo_arena *arena = find_paused(pool, id, detail);
    mo_status status = arena ? each_owned(pool, arena, restore, suspend, detail) : MO_INVALID;

    if (status == MO_NO_DEVICE_MEMORY) {
        mo_pool_wait(pool, NULL);
        arena = find_paused(pool, id, detail);
        if (!arena)
            return MO_INVALID;
        if (make_room(pool, arena))
            status = each_owned(pool, arena, restore, suspend, detail);
    }
    if (!status)
        arena->paused = false;
    return status;
}

mo_status mo_pool_resume(mo_pool *pool, mo_arena_id id, mo_detail *detail)
{
    mo_status status;

    if (mo_forked())
        return mo_forked_refuse("resuming a memory pool", detail);
    mo_lock_take(&pool->lock);
    status = resume_locked(pool, id, detail);
    MO_CHECK_ALL(mo_pool_check_locked(pool, NULL) == MO_OK);
    mo_lock_give(&pool->lock);
    return status;
}

/* ---- the end --------------------------------------------------------------------------------------------------- */

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
