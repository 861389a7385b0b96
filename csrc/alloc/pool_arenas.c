#include "alloc/pool_arenas.h"

#include "alloc/arena.h"
#include "alloc/placement.h"
#include "alloc/pool_check.h"
#include "alloc/pool_wait.h"
#include "alloc/trim.h"
#include "base/hostmem.h"
#include "driver/forked.h"

/* ---- references ----------------------------------------------------------------------------------------------- */

mo_status mo_pool_arena_retain(mo_pool *pool, mo_arena_id id, bool pinned, size_t budget, mo_detail *detail)
{
    mo_arena *arena;

    if (mo_forked())
        return mo_forked_refuse("opening a memory pool", detail);
    mo_lock_take(&pool->lock);
    arena = mo_arena_find(pool, id);
    if (!arena)
        arena = mo_arena_open(pool, id, detail);
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

void mo_arena_drop_reference(mo_pool *pool, mo_arena *arena)
{
    if (--arena->references)
        return;
    arena->reserved = 0;
    if (!arena->pinned) {
        mo_arena_check_retired(pool, arena);
        return;
    }
    arena->unsettled = ++pool->order.tick;
    if (!mo_pool_capturing(pool))
        mo_pool_synchronize(pool, NULL);
}

mo_status mo_pool_arena_release(mo_pool *pool, mo_arena_id id, mo_detail *detail)
{
    mo_arena *arena;

    if (mo_forked())
        return MO_OK;
    mo_lock_take(&pool->lock);
    arena = mo_arena_named(pool, id, detail);
    if (arena && !arena->references) {
        mo_fail(detail, MO_INVALID, 0,
                "the memory pool (%llu, %llu) was already released: only its blocks are left", id.first,
                id.second);
        arena = NULL;
    }
    if (arena)
        mo_arena_drop_reference(pool, arena);
    MO_CHECK_ALL(mo_pool_check_locked(pool, NULL) == MO_OK);
    mo_lock_give(&pool->lock);
    return arena ? MO_OK : MO_INVALID;
}

/* ---- routes --------------------------------------------------------------------------------------------------- */

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
    entry->arena = mo_arena_named(pool, id, detail);
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
        mo_arena_drop_reference(pool, entry->arena);
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
    arena = mo_arena_named(pool, id, detail);
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
