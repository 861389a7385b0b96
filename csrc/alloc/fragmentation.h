/* How a pool's free memory lies, who still uses it, and so why a request failed. */
#ifndef MO_FRAGMENTATION_H
#define MO_FRAGMENTATION_H

#include "alloc/pool_parts.h"

typedef struct mo_survey {
    const mo_pool *pool;
    mo_fragmentation result;
    size_t whole;               /* free granules that could be moved */
    size_t pending[MO_STREAMS]; /* free bytes that each stream may still use */
} mo_survey;

/* Under the pool's lock. */
void mo_pool_survey(mo_pool *pool, mo_survey *out);

/* Bytes that a request could have, were all work over (mo_fragmentation.largest_allocatable). Under the pool's lock. */
size_t mo_pool_allocatable(mo_pool *pool);

/* Fills detail with what a user is told of a request of `size` bytes that failed in an arena. Under the pool's lock. */
void mo_pool_describe_oom(mo_pool *pool, const mo_arena *arena, size_t size, mo_detail *detail);

#endif
