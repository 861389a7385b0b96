/* The host waits for the device, and what else is tried before a request fails. Each function here UNLOCKS the pool while
 * it waits: blocks, arenas and numbers of streams that its caller knew of may be gone after it, and are looked up again. */
#ifndef MO_POOL_WAIT_H
#define MO_POOL_WAIT_H

#include "alloc/request.h"

/* Until all that was freed so far is over, however long that takes; but for what is being captured, which has no end.
 * Arenas are settled, too. */
mo_status mo_pool_wait(mo_pool *pool, mo_detail *detail);

/* Whether the device cannot be waited for as a whole, since a stream is being captured. Of borrowed streams, which are not
 * asked, any may be while there is a route: torch's captures have one. */
bool mo_pool_capturing(mo_pool *pool);

/* Until the whole device is done: not while a graph is captured, which CUDA may end for that. */
mo_status mo_pool_synchronize(mo_pool *pool, mo_detail *detail);

/* Where all numbers are taken and one may become free. The stream's number. */
mo_status mo_pool_number_stream(mo_pool *pool, mo_stream stream, mo_detail *detail, unsigned *out);

/* Waits at most: threads that go on freeing and queueing could keep one waiting for ever. */
#define MO_OOM_RETRY_WAITS 64

typedef struct mo_oom_retry {
    int step, waits;
} mo_oom_retry;

/* The next thing to try for a request that cannot be had. MO_OK: make it once more, from the start.
 * MO_NO_DEVICE_MEMORY: nothing is left to try; else the error that ended a wait. */
mo_status mo_oom_retry_next(mo_pool *pool, const mo_request *request, mo_oom_retry *retry, mo_detail *detail);

#endif
