#include "alloc/fragmentation.h"

#include "alloc/out_of_memory.h"
#include "alloc/pool_views.h"
#include "driver/forked.h"

static void survey_block(void *user, mo_zone *zone, mo_block *block)
{
    mo_survey *s = user;
    mo_last_use use = block->last_use;
    size_t low = 0, high = 0;

    if (block->state != MO_BLOCK_FREE || zone->arena->paused)
        return;
    if (block->size > s->result.largest_free)
        s->result.largest_free = block->size;
    if (block->span->slot_count) {
        mo_block_slots(block, &low, &high);
        if (high > low && !zone->arena->pinned)
            s->whole += high - low;
    }
    mo_stream_order_settle(&s->pool->order, &use);
    if (use.streams)
        s->result.pending_bytes += block->size;
    for (uint64_t rest = use.streams; rest; rest &= rest - 1)
        s->pending[__builtin_ctzll(rest)] += block->size;
}

void mo_pool_survey(mo_pool *pool, mo_survey *s)
{
    mo_fragmentation *out = &s->result;
    size_t held = mo_pool_held(pool), room = 0, free_bytes = 0, total = 0;
    const mo_stat *live = &pool->stats.of[MO_ALLOCATED_BYTES][MO_STAT_ALL];
    const mo_stat *requested = &pool->stats.of[MO_REQUESTED_BYTES][MO_STAT_ALL];

    *s = (mo_survey){.pool = pool, .whole = pool->granules.spare_count};
    mo_pool_each_block(pool, survey_block, s);
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
    mo_survey survey;

    mo_pool_read_begin(pool);
    mo_pool_survey(pool, &survey);
    mo_pool_read_end(pool);
    *out = survey.result;
}

size_t mo_pool_allocatable(mo_pool *pool)
{
    mo_survey survey;

    mo_pool_survey(pool, &survey);
    return survey.result.largest_allocatable;
}

void mo_pool_describe_oom(mo_pool *pool, const mo_arena *arena, size_t size, mo_detail *detail)
{
    const mo_fragmentation *f;
    mo_survey survey;
    mo_out_of_memory facts = {
        .device = pool->driver->device, .wanted = size, .budget = pool->settings.budget};

    mo_pool_survey(pool, &survey);
    f = &survey.result;
    pool->driver->memory_info(pool->driver, NULL, &facts.free_bytes, &facts.total_bytes);
    if (arena->budget && (!facts.budget || arena->budget < facts.budget))
        facts.budget = arena->budget;
    facts.held = f->held_bytes;
    facts.live = f->live_bytes;
    facts.requested = f->requested_bytes;
    facts.largest_free = f->largest_free;
    facts.largest_allocatable = f->largest_allocatable;
    facts.pending_bytes = f->pending_bytes;
    facts.stale_bytes = f->stale_bytes;
    facts.external = f->external;
    facts.internal = f->internal;
    while (facts.pending_streams < MO_PENDING_SHOWN) {
        unsigned most = 0;

        for (unsigned t = 1; t < pool->order.count; t++)
            if (survey.pending[t] > survey.pending[most])
                most = t;
        if (!survey.pending[most])
            break;
        facts.pending[facts.pending_streams++] =
            (mo_pending){pool->order.streams[most].handle, survey.pending[most]};
        survey.pending[most] = 0;
    }
    detail->status = MO_NO_DEVICE_MEMORY;
    detail->code = 0;
    mo_out_of_memory_text(detail->text, sizeof detail->text, &facts);
}
