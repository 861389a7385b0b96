/* Reading a pool: its blocks and arenas as they are at one time. */
#ifndef MO_POOL_VIEWS_H
#define MO_POOL_VIEWS_H

#include "alloc/pool_parts.h"

/* Takes the pool's lock, and learns what streams have done by now. In a forked child the lock may be torn; what it would
 * protect does not change there, so it is read without. */
void mo_pool_read_begin(mo_pool *pool);
void mo_pool_read_end(mo_pool *pool);

/* Calls visit with each block and hole of the arenas, by zone, span and address. It must not change which blocks there
 * are. */
typedef void (*mo_block_visitor)(void *user, mo_zone *zone, mo_block *block);
void mo_pool_each_block(mo_pool *pool, mo_block_visitor visit, void *user);

/* Free memory that a stream which it was recorded for may still use; its own stream is in order with itself. */
bool mo_block_still_used(const mo_stream_order *order, const mo_block *block);

#endif
