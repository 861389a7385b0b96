#include "alloc/pool_wait.h"

#include "alloc/arena.h"

#define POLL_NS 20000 /* between two looks at what is waited for */

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
    if ((status || use.streams || mo_arenas_unsettled(pool)) && !mo_stream_order_capturing(order)) {
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
    return mo_fail(
        detail, MO_UNSUPPORTED, 0,
        "%d streams have live memory or are being captured, and memopt's allocator tells no more of "
        "them apart: let some streams share their work",
        MO_STREAMS);
}
