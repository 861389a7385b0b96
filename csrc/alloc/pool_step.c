#include "alloc/pool_step.h"

#include "alloc/pool_parts.h"
#include "alloc/trace_ring.h"
#include "driver/forked.h"

void mo_pool_step(mo_pool *pool)
{
    if (mo_forked())
        return;
    mo_lock_take(&pool->lock);
    if (pool->trace)
        mo_trace_put(pool->trace, pool->driver->device, MO_TRACE_STEP, 0, 0, 0, NULL, (mo_arena_id){0, 0});
    mo_lock_give(&pool->lock);
}
