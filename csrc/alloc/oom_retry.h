/* What is tried before a request fails for want of memory. */
#ifndef MO_OOM_RETRY_H
#define MO_OOM_RETRY_H

#include "alloc/request.h"

/* Waits at most: threads that go on freeing and queueing could keep one waiting for ever. */
#define MO_OOM_RETRY_WAITS 64

typedef struct mo_oom_retry {
    int step, waits;
} mo_oom_retry;

/* UNLOCKS (pool_wait.h). The next thing to try for a request that cannot be had. MO_OK: make it once more, from the start.
 * MO_NO_DEVICE_MEMORY: nothing is left to try; else the error that ended a wait. */
mo_status mo_oom_retry_next(mo_pool *pool, const mo_request *request, mo_oom_retry *retry, mo_detail *detail);

#endif
