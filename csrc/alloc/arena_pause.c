/* Pausing: an arena gives its memory back, live blocks too, and keeps its addresses. */
#include "alloc/arena.h"
#include "alloc/pool_arenas.h"
#include "alloc/pool_check.h"
#include "alloc/pool_wait.h"
#include "alloc/remap.h"
#include "alloc/trim.h"
#include "base/size.h"
#include "driver/forked.h"

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
                       "CUDA out of memory. The memory budget is too small to resume the pool");
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
        status = mo_unmap_stale(pool, view, detail);
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
                if (block->state == MO_BLOCK_FREE && !mo_stream_order_over(&pool->order, block->last_use))
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
        return mo_fail(detail, MO_INVALID, 0, "the pool is already paused");
    if (!pool->granules.size)
        return mo_fail(
            detail, MO_UNSUPPORTED, 0,
            "this device has no virtual memory management, without which addresses cannot be reserved");
    status = wait_for_arena(pool, arena, detail);
    if (!status)
        status = each_owned(pool, arena, suspend, put_back, detail);
    arena->paused = !status;
    mo_arena_drop_reference(pool, arena);
    return status;
}

mo_status mo_pool_pause(mo_pool *pool, mo_arena_id id, mo_detail *detail)
{
    mo_arena *arena;
    mo_status status;

    if (mo_forked())
        return mo_forked_refuse("pausing a memory pool", detail);
    mo_lock_take(&pool->lock);
    arena = mo_arena_named(pool, id, detail);
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
    mo_arena *arena = mo_arena_named(pool, id, detail);

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
