#include "alloc/pool_check.h"

#include "alloc/pool_views.h"

typedef struct tally {
    mo_pool *pool;
    const char *broken;
    size_t live, live_bytes, requested, free_blocks, holes, stale;
    uint64_t users[MO_STREAMS];
} tally;

#define EXPECT(condition)                                                                                    \
    do {                                                                                                     \
        if (!c->broken && !(condition)) /* what is broken is followed no further */                          \
            c->broken = #condition;                                                                          \
    } while (0)

static void check_slots(tally *c, const mo_span *span, const mo_block *block)
{
    size_t size = c->pool->granules.size;
    size_t low = mo_span_slot(span, block->address),
           high = (block->address + block->size - 1 - span->base) / size;
    const mo_block *first = span->firsts[mo_span_page(span, block->address)];

    if (block->state == MO_BLOCK_HOLE)
        EXPECT((block->address - span->base) % size == 0 && block->size % size == 0);
    if (block->state == MO_BLOCK_HOLE && high >= span->fresh)
        high = span->fresh ? span->fresh - 1 : 0;
    for (size_t i = low; i <= high && !c->broken; i++)
        if (block->state == MO_BLOCK_HOLE)
            EXPECT(i >= span->fresh || !mo_slot_owned(&span->slots[i]));
        else
            EXPECT(mo_slot_owned(&span->slots[i]) && span->slots[i].granted);
    EXPECT(first && first->address <= block->address);
    EXPECT(mo_span_block_at(span, block->address) == block);
    EXPECT(mo_span_block_at(span, block->address + block->size - 1) == block);
}

static void check_block(tally *c, const mo_span *span, mo_block *block)
{
    EXPECT(block->size && block->size % MO_ALIGNMENT == 0 && block->span == span);
    EXPECT(!block->next || block->next->address == block->address + block->size);
    EXPECT(!block->next || block->next->previous == block);
    EXPECT(!block->next || block->state == MO_BLOCK_LIVE || block->next->state != block->state);
    if (span->slot_count)
        check_slots(c, span, block);
    EXPECT(block->last_use.tick <= c->pool->order.tick && block->stream < MO_STREAMS);
    if (c->broken)
        return;
    if (block->state == MO_BLOCK_LIVE) {
        for (uint64_t rest = block->last_use.streams | 1ull << block->stream; rest; rest &= rest - 1)
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

static void check_zone(tally *c, mo_zone *zone, size_t *owned)
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

static void check_granules(tally *c, size_t owned)
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

static void check_counts(tally *c)
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
    tally counted = {.pool = pool}, *c = &counted;
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
        return mo_fail(detail, MO_CORRUPT, 0, "the pool's state is inconsistent: violated: %s", c->broken);
    return MO_OK;
}

mo_status mo_pool_check(mo_pool *pool, mo_detail *detail)
{
    mo_status status;

    mo_pool_read_begin(pool);
    status = mo_pool_check_locked(pool, detail);
    mo_pool_read_end(pool);
    return status;
}
