/* Why a request failed: the facts that out_of_memory.h makes its text of. */
#ifndef MO_OOM_FACTS_H
#define MO_OOM_FACTS_H

#include "alloc/pool_parts.h"

/* Fills detail with what a user is told of a request of `size` bytes that failed in an arena. Under the pool's lock. */
void mo_pool_describe_oom(mo_pool *pool, const mo_arena *arena, size_t size, mo_detail *detail);

#endif
