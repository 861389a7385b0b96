/* A pool's statistics. What requests and frees count is there already; the rest is counted when it is asked for. */
#include <string.h>

#include "alloc/pool_views.h"
#include "base/hostmem.h"

static void raise_peak(mo_stat *stat, int64_t value)
{
    if (stat->peak < value)
        stat->peak = value;
}

static void set_current(mo_stat *stat, int64_t value)
{
    if (value > stat->current)
        stat->allocated += value - stat->current;
    else
        stat->freed += stat->current - value;
    stat->current = value;
    raise_peak(stat, value);
}

/* A kind that is counted here: its two columns, and their sum. */
static void set_kind(mo_stat kind[MO_STAT_COLUMN_COUNT], const int64_t value[MO_STAT_COLUMN_COUNT])
{
    mo_stat *all = &kind[MO_STAT_ALL], *small = &kind[MO_STAT_SMALL], *large = &kind[MO_STAT_LARGE];

    set_current(small, value[MO_STAT_SMALL]);
    set_current(large, value[MO_STAT_LARGE]);
    all->allocated = small->allocated + large->allocated;
    all->freed = small->freed + large->freed;
    all->current = small->current + large->current;
    raise_peak(all, all->current);
}

/* All that is allocated becomes active; what is freed stays so while a stream uses it: `used` of it now (never more than
 * was freed: free memory is used as it is merged), `before` of it when the counts began. */
static void set_active(mo_stat active[MO_STAT_COLUMN_COUNT], const mo_stat live[MO_STAT_COLUMN_COUNT],
                       const int64_t used[MO_STAT_COLUMN_COUNT], const int64_t before[MO_STAT_COLUMN_COUNT])
{
    int64_t still[MO_STAT_COLUMN_COUNT];

    for (size_t column = MO_STAT_SMALL; column < MO_STAT_COLUMN_COUNT; column++) {
        const int64_t freed = live[column].freed + before[column];

        still[column] = used[column] < freed ? used[column] : freed;
    }
    still[MO_STAT_ALL] = still[MO_STAT_SMALL] + still[MO_STAT_LARGE];
    for (size_t column = 0; column < MO_STAT_COLUMN_COUNT; column++) {
        active[column].allocated = live[column].allocated;
        active[column].freed = live[column].freed + before[column] - still[column];
        active[column].current = live[column].current + still[column];
        raise_peak(&active[column], active[column].current);
        raise_peak(&active[column], live[column].peak);
    }
}

typedef struct free_count {
    const mo_stream_order *order;
    int64_t split[MO_STAT_COLUMN_COUNT], split_bytes[MO_STAT_COLUMN_COUNT];
    int64_t active[MO_STAT_COLUMN_COUNT], active_bytes[MO_STAT_COLUMN_COUNT];
} free_count;

/* Free memory is active while it is still used. */
static void count_free(void *user, mo_zone *zone, mo_block *block)
{
    free_count *count = user;

    if (block->state != MO_BLOCK_FREE)
        return;
    if (mo_block_still_used(count->order, block)) {
        count->active[zone->column]++;
        count->active_bytes[zone->column] += (int64_t)block->size;
    }
    if (block->span->lowest->next) {
        count->split[zone->column]++;
        count->split_bytes[zone->column] += (int64_t)block->size;
    }
}

/* What need not be counted at each request is counted here. Its peak is that of the times it was asked for, but for what
 * is held, whose own peak is kept. */
static void complete_stats(mo_pool *pool)
{
    mo_stats *s = &pool->stats;
    int64_t held[MO_STAT_COLUMN_COUNT] = {0}, pieces[MO_STAT_COLUMN_COUNT] = {0};
    free_count free_ones = {.order = &pool->order};

    for (mo_arena *arena = pool->arenas; arena; arena = arena->next) {
        int64_t mine[MO_STAT_COLUMN_COUNT] = {0};

        MO_EACH_ZONE (zone, arena) {
            const int64_t bytes = (int64_t)(zone->owned * pool->granules.size + zone->segment_bytes);

            if (arena->paused)
                break;
            mine[zone->column] += bytes;
            held[zone->column] += bytes;
            pieces[zone->column] += (int64_t)zone->owned;
            for (mo_span *span = zone->spans; span; span = span->next)
                pieces[zone->column] += !span->slot_count;
        }
        set_kind(arena->held, mine);
    }
    held[MO_STAT_LARGE] += (int64_t)(pool->granules.spare_count * pool->granules.size);
    pieces[MO_STAT_LARGE] += (int64_t)pool->granules.spare_count;
    set_kind(s->of[MO_RESERVED_BYTES], held);
    set_kind(s->of[MO_SEGMENT], pieces);
    raise_peak(&s->of[MO_RESERVED_BYTES][MO_STAT_ALL], (int64_t)pool->held_peak);
    mo_pool_each_block(pool, count_free, &free_ones);
    set_kind(s->of[MO_INACTIVE_SPLIT], free_ones.split);
    set_kind(s->of[MO_INACTIVE_SPLIT_BYTES], free_ones.split_bytes);
    set_active(s->of[MO_ACTIVE], s->of[MO_ALLOCATION], free_ones.active, pool->active_before);
    set_active(s->of[MO_ACTIVE_BYTES], s->of[MO_ALLOCATED_BYTES], free_ones.active_bytes,
               pool->active_bytes_before);
    s->events_recorded = pool->order.recorded;
    s->stream_waits = pool->order.waited;
    s->num_sync_all_streams = pool->order.synchronized;
    s->driver_calls = pool->granules.calls;
}

void mo_pool_read_stats(mo_pool *pool, mo_stats *out)
{
    mo_pool_read_begin(pool);
    complete_stats(pool);
    *out = pool->stats;
    mo_pool_read_end(pool);
}

void mo_pool_reset_peaks(mo_pool *pool)
{
    mo_pool_read_begin(pool);
    complete_stats(pool);
    pool->held_peak = mo_pool_held(pool);
    mo_stats_reset_peaks(&pool->stats);
    for (mo_arena *arena = pool->arenas; arena; arena = arena->next)
        for (size_t column = 0; column < MO_STAT_COLUMN_COUNT; column++)
            arena->held[column].peak = arena->held[column].current;
    mo_pool_read_end(pool);
}

void mo_pool_reset_accumulated(mo_pool *pool)
{
    mo_pool_read_begin(pool);
    complete_stats(pool);
    for (size_t column = 0; column < MO_STAT_COLUMN_COUNT; column++) {
        const mo_stats *stats = &pool->stats;

        pool->active_before[column] =
            stats->of[MO_ACTIVE][column].current - stats->of[MO_ALLOCATION][column].current;
        pool->active_bytes_before[column] =
            stats->of[MO_ACTIVE_BYTES][column].current - stats->of[MO_ALLOCATED_BYTES][column].current;
    }
    mo_stats_reset_accumulated(&pool->stats);
    for (mo_arena *arena = pool->arenas; arena; arena = arena->next)
        for (size_t column = 0; column < MO_STAT_COLUMN_COUNT; column++)
            arena->held[column].allocated = arena->held[column].freed = 0;
    pool->order.recorded = pool->order.waited = pool->order.synchronized = pool->granules.calls = 0;
    mo_pool_read_end(pool);
}

mo_status mo_pool_arenas(mo_pool *pool, mo_detail *detail, mo_arena_held_bytes **out, size_t *count)
{
    mo_arena_held_bytes *list;
    size_t n = 0;

    mo_pool_read_begin(pool);
    complete_stats(pool);
    for (mo_arena *arena = pool->general.next; arena; arena = arena->next)
        n++;
    list = mo_host_calloc(n ? n : 1, sizeof *list);
    if (list) {
        n = 0;
        for (mo_arena *arena = pool->general.next; arena; arena = arena->next, n++) {
            list[n].id = arena->id;
            memcpy(list[n].bytes, arena->held, sizeof list[n].bytes);
        }
    }
    mo_pool_read_end(pool);
    if (!list)
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory to list %zu memory pools", n);
    *out = list;
    *count = n;
    return MO_OK;
}
