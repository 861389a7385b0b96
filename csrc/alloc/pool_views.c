#include "alloc/pool_views.h"

#include "alloc/arena.h"
#include "base/hostmem.h"
#include "driver/forked.h"

void mo_pool_read_begin(mo_pool *pool)
{
    if (mo_forked())
        return;
    mo_lock_take(&pool->lock);
    mo_stream_order_poll(&pool->order);
}

void mo_pool_read_end(mo_pool *pool)
{
    if (!mo_forked())
        mo_lock_give(&pool->lock);
}

/* ---- blocks ------------------------------------------------------------------------------------------------- */

void mo_pool_each_block(mo_pool *pool, mo_block_visitor visit, void *user)
{
    for (mo_arena *arena = pool->arenas; arena; arena = arena->next)
        MO_EACH_ZONE (zone, arena) {
            for (mo_span *span = zone->spans; span; span = span->next)
                for (mo_block *block = span->lowest, *next; block; block = next) {
                    next = block->next;
                    visit(user, zone, block);
                }
        }
}

bool mo_block_still_used(const mo_stream_order *order, const mo_block *block)
{
    mo_last_use use = block->last_use;

    if (block->state != MO_BLOCK_FREE)
        return false;
    mo_stream_order_settle(order, &use);
    return use.streams & ~(1ull << block->stream);
}

typedef struct listing {
    const mo_pool *pool;
    mo_block_view *views;
    size_t count, capacity;
} listing;

static void list_block(void *user, mo_zone *zone, mo_block *block)
{
    listing *l = user;

    if (block->state == MO_BLOCK_HOLE)
        return;
    if (l->views)
        l->views[l->count] = (mo_block_view){
            .address = block->address,
            .size = block->size,
            .requested = block->requested,
            .state = mo_block_still_used(&l->pool->order, block) ? MO_BLOCK_PENDING : block->state,
            .stream = l->pool->order.streams[block->stream].handle,
            .serial = block->serial,
            .arena = zone->arena->id,
            .small = zone->column == MO_STAT_SMALL,
            .starts_segment = !block->previous || block->previous->state == MO_BLOCK_HOLE,
        };
    l->count++;
}

mo_status mo_pool_blocks(mo_pool *pool, mo_detail *detail, mo_block_view **out, size_t *count)
{
    listing l = {.pool = pool};

    mo_pool_read_begin(pool);
    mo_pool_each_block(pool, list_block, &l);
    l.views = mo_host_calloc(l.count ? l.count : 1, sizeof *l.views);
    if (l.views) {
        l.count = 0;
        mo_pool_each_block(pool, list_block, &l);
    }
    mo_pool_read_end(pool);
    if (!l.views)
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory to list %zu blocks", l.count);
    *out = l.views;
    *count = l.count;
    return MO_OK;
}

/* ---- arenas ------------------------------------------------------------------------------------------------- */

mo_status mo_pool_arena_info(mo_pool *pool, mo_arena_id id, mo_detail *detail, mo_arena_info *out)
{
    mo_arena *arena;

    mo_pool_read_begin(pool);
    arena = mo_arena_named(pool, id, detail);
    if (arena)
        *out = (mo_arena_info){
            .id = id,
            .pinned = arena->pinned,
            .paused = arena->paused,
            .references = arena->references,
            .budget = arena->budget,
            .held_bytes = arena->paused ? 0 : mo_arena_held(arena),
            .live_blocks = arena->live_blocks,
            .live_bytes = arena->live_bytes,
            .requested_bytes = arena->requested_bytes,
            .peak_bytes = arena->peak_bytes,
            .free_bytes = arena->paused ? 0 : mo_arena_held(arena) - arena->live_bytes,
        };
    mo_pool_read_end(pool);
    return arena ? MO_OK : MO_INVALID;
}
