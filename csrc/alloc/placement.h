/* Where a request goes that no mapped free block holds: beside free memory, where the fewest calls bring granules, so that
 * what is free grows together instead of lying about; where there are too few, where the least is needed. */
#ifndef MO_PLACEMENT_H
#define MO_PLACEMENT_H

#include "alloc/request.h"

/* The free block that a request fits best, for which its stream waits for nobody, or NULL; then *waiting is the best of
 * those for which it would, or NULL. */
mo_block *mo_fit(mo_pool *pool, const mo_request *request, mo_block **waiting);

/* Brings memory to where a request can have it: then *out is a free block of the zone that holds it, and *at the address
 * to take. MO_NO_DEVICE_MEMORY where this effort is not enough. */
mo_status mo_place(mo_pool *pool, const mo_request *request, mo_effort effort, mo_detail *detail,
                   mo_block **out, mo_address *at);

/* At least `bytes` of physical memory for the arena, as far as its and the pool's budget go. */
mo_status mo_arena_fill(mo_pool *pool, mo_arena *arena, size_t bytes, mo_detail *detail);

#endif
