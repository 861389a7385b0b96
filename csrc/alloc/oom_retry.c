#include "alloc/oom_retry.h"

#include "alloc/arena.h"
#include "alloc/fragmentation.h"
#include "alloc/pool_wait.h"
#include "alloc/trim.h"

static bool may_wait(mo_pool *pool, const mo_request *request, const mo_oom_retry *retry)
{
    if (!mo_stream_order_pending(&pool->order).streams && !mo_arenas_unsettled(pool))
        return false;
    return !retry->waits || (retry->waits < MO_OOM_RETRY_WAITS && request->size <= mo_pool_allocatable(pool));
}

/* One that finds nothing to wait for (what is left is being captured) is the last. */
static mo_status wait_once(mo_pool *pool, mo_oom_retry *retry, mo_detail *detail)
{
    const uint64_t before = pool->order.synchronized;
    const mo_status status = mo_pool_wait(pool, detail);

    retry->waits = pool->order.synchronized == before ? MO_OOM_RETRY_WAITS : retry->waits + 1;
    return status;
}

mo_status mo_oom_retry_next(mo_pool *pool, const mo_request *request, mo_oom_retry *retry, mo_detail *detail)
{
    mo_stream_order *order = &pool->order;

    for (;;)
        switch (retry->step++) {
        case 0: /* work that has ended meanwhile */
            if (!mo_stream_order_pending(order).streams)
                continue;
            mo_stream_order_poll(order);
            return MO_OK;
        case 1: /* work that will end, however long that takes */
            if (!may_wait(pool, request, retry))
                continue;
            retry->step = 1; /* what other threads freed meanwhile may be all that lacks */
            return wait_once(pool, retry, detail);
        case 2: /* segments that are free, for one of another size */
            if (pool->granules.size || request->captured)
                continue;
            if (mo_pool_shrink(pool, 0, NULL))
                continue;
            return MO_OK;
        default:
            retry->step = 3;
            return mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "nothing is left to try");
        }
}
