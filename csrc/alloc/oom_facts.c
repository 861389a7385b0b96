#include "alloc/oom_facts.h"

#include "alloc/fragmentation.h"
#include "alloc/out_of_memory.h"

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
