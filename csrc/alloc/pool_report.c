/* What is known of a pool: statistics, its blocks, how it is fragmented, why a request failed, whether it is sound. */
#include <string.h>

#include "alloc/out_of_memory.h"
#include "alloc/pool_parts.h"
#include "base/hostmem.h"
#include "driver/forked.h"

/* In a forked child the lock may be torn; what it would protect does not change there, so it is read without. Elsewhere
 * what is told is what streams have done by now. */
static void take(mo_pool *pool)
{
    if (mo_forked())
        return;
    mo_lock_take(&pool->lock);
    mo_order_poll(&pool->order);
}

static void give(mo_pool *pool)
{
    if (!mo_forked())
        mo_lock_give(&pool->lock);
}

/* ---- every block -------------------------------------------------------------------------------------------- */

typedef void (*block_visitor)(void *user, mo_zone *zone, mo_block *block);

static void visit_blocks(mo_pool *pool, block_visitor visit, void *user)
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

typedef struct listing {
    const mo_pool *pool;
    mo_block_view *views;
    size_t count, capacity;
} listing;

/* Free memory that a stream which it was recorded for may still use; its own stream is in order with itself. */
static bool still_used(const mo_order *order, const mo_block *block)
{
    mo_use use = block->use;

    if (block->state != MO_BLOCK_FREE)
        return false;
    mo_order_settle(order, &use);
    return use.streams & ~(1ull << block->stream);
}

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
            .state = still_used(&l->pool->order, block) ? MO_BLOCK_PENDING : block->state,
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

    take(pool);
    visit_blocks(pool, list_block, &l);
    l.views = mo_host_calloc(l.count ? l.count : 1, sizeof *l.views);
    if (l.views) {
        l.count = 0;
        visit_blocks(pool, list_block, &l);
    }
    give(pool);
    if (!l.views)
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory to list %zu blocks", l.count);
    *out = l.views;
    *count = l.count;
    return MO_OK;
}

/* ---- statistics ------------------------------------------------------------------------------------------------ */

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
    const mo_order *order;
    int64_t split[MO_STAT_COLUMN_COUNT], split_bytes[MO_STAT_COLUMN_COUNT];
    int64_t active[MO_STAT_COLUMN_COUNT], active_bytes[MO_STAT_COLUMN_COUNT];
} free_count;

/* Free memory is active while it is still used. */
static void count_free(void *user, mo_zone *zone, mo_block *block)
{
    free_count *count = user;

    if (block->state != MO_BLOCK_FREE)
        return;
    if (still_used(count->order, block)) {
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
    visit_blocks(pool, count_free, &free_ones);
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
    take(pool);
    complete_stats(pool);
    *out = pool->stats;
    give(pool);
}

void mo_pool_reset_peaks(mo_pool *pool)
{
    take(pool);
    complete_stats(pool);
    pool->held_peak = mo_pool_held(pool);
    mo_stats_reset_peaks(&pool->stats);
    for (mo_arena *arena = pool->arenas; arena; arena = arena->next)
        for (size_t column = 0; column < MO_STAT_COLUMN_COUNT; column++)
            arena->held[column].peak = arena->held[column].current;
    give(pool);
}

void mo_pool_reset_accumulated(mo_pool *pool)
{
    take(pool);
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
    give(pool);
}

mo_status mo_pool_arenas(mo_pool *pool, mo_detail *detail, mo_arena_held_bytes **out, size_t *count)
{
    mo_arena_held_bytes *list;
    size_t n = 0;

    take(pool);
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
    give(pool);
    if (!list)
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory to list %zu memory pools", n);
    *out = list;
    *count = n;
    return MO_OK;
}

mo_status mo_pool_arena_info(mo_pool *pool, mo_arena_id id, mo_detail *detail, mo_arena_info *out)
{
    mo_arena *arena;

    take(pool);
    arena = mo_arena_find(pool, id);
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
    give(pool);
    if (!arena)
        return mo_fail(detail, MO_INVALID, 0, "there is no memory pool (%llu, %llu) on this device", id.first,
                       id.second);
    return MO_OK;
}

/* ---- fragmentation --------------------------------------------------------------------------------------------- */

typedef struct survey {
    const mo_pool *pool;
    mo_fragmentation *out;
    size_t whole; /* free granules that could be moved */
    size_t pending[MO_STREAMS];
} survey;

static void survey_block(void *user, mo_zone *zone, mo_block *block)
{
    survey *s = user;
    mo_use use = block->use;
    size_t low = 0, high = 0;

    if (block->state != MO_BLOCK_FREE || zone->arena->paused)
        return;
    if (block->size > s->out->largest_free)
        s->out->largest_free = block->size;
    if (block->span->slot_count) {
        mo_block_slots(block, &low, &high);
        if (high > low && !zone->arena->pinned)
            s->whole += high - low;
    }
    mo_order_settle(&s->pool->order, &use);
    if (use.streams)
        s->out->pending_bytes += block->size;
    for (uint64_t rest = use.streams; rest; rest &= rest - 1)
        s->pending[__builtin_ctzll(rest)] += block->size;
}

static void survey_pool(mo_pool *pool, survey *s, mo_fragmentation *out)
{
    size_t held = mo_pool_held(pool), room = 0, free_bytes = 0, total = 0;
    const mo_stat *live = &pool->stats.of[MO_ALLOCATED_BYTES][MO_STAT_ALL];
    const mo_stat *requested = &pool->stats.of[MO_REQUESTED_BYTES][MO_STAT_ALL];

    *out = (mo_fragmentation){0};
    *s = (survey){.pool = pool, .out = out, .whole = pool->granules.spare_count};
    visit_blocks(pool, survey_block, s);
    if (!mo_forked() && pool->driver->memory_info(pool->driver, NULL, &free_bytes, &total) == MO_OK)
        room = free_bytes;
    if (pool->settings.budget) {
        size_t left = pool->settings.budget > held ? pool->settings.budget - held : 0;

        room = left < room ? left : room;
    }
    out->held_bytes = held;
    out->live_bytes = (size_t)live->current;
    out->requested_bytes = (size_t)requested->current;
    out->free_bytes = held > out->live_bytes ? held - out->live_bytes : 0;
    out->stale_bytes = pool->granules.stale_count * pool->granules.size;
    out->largest_allocatable = s->whole * pool->granules.size + room;
    if (out->largest_allocatable < out->largest_free)
        out->largest_allocatable = out->largest_free;
    if (out->free_bytes + room)
        out->external = 1 - (double)out->largest_allocatable / (double)(out->free_bytes + room);
    if (out->external < 0)
        out->external = 0;
    if (out->live_bytes)
        out->internal = 1 - (double)out->requested_bytes / (double)out->live_bytes;
    if (pool->held_peak)
        out->unused_at_peak = 1 - (double)requested->peak / (double)pool->held_peak;
}

void mo_pool_fragmentation(mo_pool *pool, mo_fragmentation *out)
{
    survey s;

    take(pool);
    survey_pool(pool, &s, out);
    give(pool);
}

size_t mo_pool_allocatable(mo_pool *pool)
{
    mo_fragmentation f;
    survey s;

    survey_pool(pool, &s, &f);
    return f.largest_allocatable;
}

void mo_pool_describe_oom(mo_pool *pool, const mo_arena *arena, size_t size, mo_detail *detail)
{
    mo_fragmentation f;
    survey s;
    mo_out_of_memory facts = {
        .device = pool->driver->device, .wanted = size, .budget = pool->settings.budget};

    survey_pool(pool, &s, &f);
    pool->driver->memory_info(pool->driver, NULL, &facts.free_bytes, &facts.total_bytes);
    if (arena->budget && (!facts.budget || arena->budget < facts.budget))
        facts.budget = arena->budget;
    facts.held = f.held_bytes;
    facts.live = f.live_bytes;
    facts.requested = f.requested_bytes;
    facts.largest_free = f.largest_free;
    facts.largest_allocatable = f.largest_allocatable;
    facts.pending_bytes = f.pending_bytes;
    facts.stale_bytes = f.stale_bytes;
    facts.external = f.external;
    facts.internal = f.internal;
    while (facts.pending_streams < MO_PENDING_SHOWN) {
        unsigned most = 0;

        for (unsigned t = 1; t < pool->order.count; t++)
            if (s.pending[t] > s.pending[most])
                most = t;
        if (!s.pending[most])
            break;
        facts.pending[facts.pending_streams++] =
            (mo_pending){pool->order.streams[most].handle, s.pending[most]};
        s.pending[most] = 0;
    }
    detail->status = MO_NO_DEVICE_MEMORY;
    detail->code = 0;
    mo_out_of_memory_text(detail->text, sizeof detail->text, &facts);
}

/* ---- soundness --------------------------------------------------------------------------------------------------- */

typedef struct census {
    mo_pool *pool;
    const char *broken;
    size_t live, live_bytes, requested, free_blocks, holes, stale;
    uint64_t users[MO_STREAMS];
} census;

#define EXPECT(condition)                                                                                    \
    do {                                                                                                     \
        if (!c->broken && !(condition)) /* what is broken is followed no further */                          \
            c->broken = #condition;                                                                          \
    } while (0)

static void check_slots(census *c, const mo_span *span, const mo_block *block)
{
    size_t size = c->pool->granules.size;
    size_t low = mo_span_slot(span, block->address),
           high = (block->address + block->size - 1 - span->base) / size;

    if (block->state == MO_BLOCK_HOLE)
        EXPECT((block->address - span->base) % size == 0 && block->size % size == 0);
    if (block->state == MO_BLOCK_HOLE && high >= span->fresh)
        high = span->fresh ? span->fresh - 1 : 0;
    for (size_t i = low; i <= high && !c->broken; i++)
        if (block->state == MO_BLOCK_HOLE)
            EXPECT(i >= span->fresh || !mo_slot_owned(&span->slots[i]));
        else
            EXPECT(mo_slot_owned(&span->slots[i]) && span->slots[i].granted);
    EXPECT(span->slots[low].first && span->slots[low].first->address <= block->address);
    EXPECT(mo_span_block_at(span, block->address) == block);
    EXPECT(mo_span_block_at(span, block->address + block->size - 1) == block);
}

static void check_block(census *c, const mo_span *span, mo_block *block)
{
    EXPECT(block->size && block->size % MO_ALIGNMENT == 0 && block->span == span);
    EXPECT(!block->next || block->next->address == block->address + block->size);
    EXPECT(!block->next || block->next->previous == block);
    EXPECT(!block->next || block->state == MO_BLOCK_LIVE || block->next->state != block->state);
    if (span->slot_count)
        check_slots(c, span, block);
    EXPECT(block->use.tick <= c->pool->order.tick && block->stream < MO_STREAMS);
    if (c->broken)
        return;
    if (block->state == MO_BLOCK_LIVE) {
        for (uint64_t rest = block->use.streams | 1ull << block->stream; rest; rest &= rest - 1)
            c->users[__builtin_ctzll(rest)]++;
        EXPECT(mo_address_map_find(&c->pool->live, block->address) == block);
        c->live++;
        c->live_bytes += block->size;
        c->requested += block->requested;
    } else if (block->state == MO_BLOCK_FREE) {
        c->free_blocks++;
    } else {
        c->holes++;
    }
}

static void check_zone(census *c, mo_zone *zone, size_t *owned)
{
    size_t free_before = c->free_blocks, holes_before = c->holes, live_before = c->live;
    size_t mine = 0, listed = 0, bytes = 0;

    for (mo_span *span = zone->spans; span; span = span->next) {
        mo_address end = span->base;

        for (mo_block *block = span->lowest; block && !c->broken; block = block->next) {
            check_block(c, span, block);
            end += block->size;
        }
        EXPECT(end == span->base + span->size);
        for (size_t i = 0; i < span->fresh; i++) {
            mine += mo_slot_owned(&span->slots[i]);
            c->stale += span->slots[i].granule && !mo_slot_owned(&span->slots[i]);
        }
        bytes += span->slot_count ? 0 : span->size;
    }
    for (const mo_block *b = mo_free_set_last(&zone->free), *earlier; b && !c->broken; b = earlier) {
        earlier = mo_free_set_before(&zone->free, b);
        EXPECT(b->state == MO_BLOCK_FREE);
        EXPECT(!earlier || earlier->size < b->size ||
               (earlier->size == b->size && earlier->address < b->address));
        listed++;
    }
    EXPECT(listed == c->free_blocks - free_before && listed == zone->free.count);
    listed = 0;
    for (const mo_block *b = zone->holes; b; b = b->link[1])
        listed++;
    EXPECT(listed == c->holes - holes_before);
    EXPECT(mine == zone->owned && bytes == zone->segment_bytes && c->live - live_before == zone->live_count);
    *owned += zone->arena->paused ? 0 : mine;
}

static void check_granules(census *c, size_t owned)
{
    const mo_granules *granules = &c->pool->granules;
    size_t spare = 0;

    for (const mo_granule *g = granules->spare; g && !c->broken; g = g->next) {
        EXPECT(!g->owner && g->handle);
        for (const mo_slot *view = g->views; view; view = view->next_view)
            EXPECT(view->granule == g);
        spare++;
    }
    EXPECT(spare == granules->spare_count);
    EXPECT(owned + spare == granules->count && c->stale == granules->stale_count);
}

static void check_counts(census *c)
{
    const mo_pool *pool = c->pool;

    EXPECT(c->live == pool->live.count);
    EXPECT((size_t)pool->stats.of[MO_ALLOCATION][MO_STAT_ALL].current == c->live);
    EXPECT((size_t)pool->stats.of[MO_ALLOCATED_BYTES][MO_STAT_ALL].current == c->live_bytes);
    EXPECT((size_t)pool->stats.of[MO_REQUESTED_BYTES][MO_STAT_ALL].current == c->requested);
    for (size_t kind = 0; kind < MO_STAT_KIND_COUNT; kind++) {
        const mo_stat *stat = pool->stats.of[kind];

        EXPECT(stat[MO_STAT_ALL].current == stat[MO_STAT_SMALL].current + stat[MO_STAT_LARGE].current);
    }
    for (unsigned t = 0; t < pool->order.count; t++)
        EXPECT(pool->order.streams[t].users == c->users[t]);
    EXPECT(pool->peak >= c->requested);
}

mo_status mo_pool_check_locked(mo_pool *pool, mo_detail *detail)
{
    census counted = {.pool = pool}, *c = &counted;
    size_t owned = 0, segments = 0;

    for (mo_arena *arena = pool->arenas; arena; arena = arena->next) {
        size_t live = c->live, live_bytes = c->live_bytes, requested = c->requested;

        MO_EACH_ZONE (zone, arena) {
            check_zone(c, zone, &owned);
            segments += zone->segment_bytes;
        }
        EXPECT(arena->live_blocks == c->live - live && arena->live_bytes == c->live_bytes - live_bytes);
        EXPECT(arena->requested_bytes == c->requested - requested);
    }
    for (mo_arena *arena = pool->retired; arena; arena = arena->next) {
        MO_EACH_ZONE (zone, arena)
            check_zone(c, zone, &owned);
        EXPECT(!arena->live_blocks);
    }
    check_granules(c, owned);
    EXPECT(segments == pool->segment_bytes);
    check_counts(c);
    if (c->broken)
        return mo_fail(detail, MO_CORRUPT, 0, "the pool's state is broken: not so: %s", c->broken);
    return MO_OK;
}

mo_status mo_pool_check(mo_pool *pool, mo_detail *detail)
{
    mo_status status;

    take(pool);
    status = mo_pool_check_locked(pool, detail);
    give(pool);
    return status;
}
