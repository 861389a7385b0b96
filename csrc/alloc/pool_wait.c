#include "alloc/pool_wait.h"

#include "alloc/arena.h"
#include "alloc/fragmentation.h"
#include "alloc/trim.h"

#define POLL_NS 20000 /* between two looks at what is waited for */

bool mo_pool_capturing(mo_pool *pool)
{
    return (pool->routes && pool->order.borrowed) || mo_stream_order_capturing(&pool->order);
}

mo_status mo_pool_synchronize(mo_pool *pool, mo_detail *detail)
{
    const uint64_t tick = pool->order.tick;
    mo_status status;

    pool->order.synchronized++;
    mo_lock_give(&pool->lock);
    status = pool->driver->synchronize(pool->driver, detail);
    mo_lock_take(&pool->lock);
    if (!status) {
        mo_stream_order_synchronized(&pool->order, tick);
        mo_arenas_settle(pool, tick);
    }
    return status;
}

mo_status mo_pool_wait(mo_pool *pool, mo_detail *detail)
{
    mo_stream_order *order = &pool->order;
    mo_last_use use = mo_stream_order_pending(order);
    bool counted = false;
    mo_status status;

    while ((status = mo_stream_order_await(order, &use, detail)) == MO_NOT_READY) {
        order->synchronized += !counted;
        counted = true;
        mo_lock_give(&pool->lock);
        pool->driver->pause(pool->driver, POLL_NS);
        mo_lock_take(&pool->lock);
    }
    /* What no event tells, the device as a whole does; where that fails, too, its error is the answer. */
    if ((status || use.streams || mo_arenas_unsettled(pool)) && !mo_pool_capturing(pool)) {
        mo_status whole = mo_pool_synchronize(pool, status ? detail : NULL);

        status = status ? whole : MO_OK;
    }
    return status;
}

mo_status mo_pool_number_stream(mo_pool *pool, mo_stream stream, mo_detail *detail, unsigned *out)
{
    mo_status status = mo_stream_order_number(&pool->order, stream, detail, out);

    if (status != MO_NOT_READY)
        return status;
    status = mo_pool_wait(pool, detail);
    if (!status)
        status = mo_stream_order_number(&pool->order, stream, detail, out);
    if (status != MO_NOT_READY)
        return status;
    return mo_fail(detail, MO_UNSUPPORTED, 0,
                   "%d streams have live memory or are being captured, the most that memopt's allocator can "
                   "distinguish: use fewer streams",
                   MO_STREAMS);
}

/* ---- before a request fails ---------------------------------------------------------------------------------- */

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
