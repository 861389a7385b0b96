/* The arenas of a pool: finding one, opening one, and what becomes of one that nobody refers to. Nothing here gives the lock
 * away.
 *
 *     an arena is among pool->arenas while it is referred to, has live blocks, or waits for the device (unsettled);
 *     after that it is retired, and its addresses, with all that is still mapped there, serve the next one
 *
 * Under the pool's lock. */
#ifndef MO_ARENA_H
#define MO_ARENA_H

#include "alloc/pool_parts.h"

void mo_arena_start(mo_pool *pool, mo_arena *arena, mo_arena_id id);

mo_arena *mo_arena_find(mo_pool *pool, mo_arena_id id);
/* The same; where there is none, NULL and MO_INVALID in detail. */
mo_arena *mo_arena_named(mo_pool *pool, mo_arena_id id, mo_detail *detail);
/* The arena for a request that names none. */
mo_arena *mo_arena_routed(mo_pool *pool, mo_stream stream);

/* A new arena, with no reference yet. NULL: MO_NO_HOST_MEMORY. */
mo_arena *mo_arena_open(mo_pool *pool, mo_arena_id id, mo_detail *detail);

/* After a free: an arena without references and live blocks is retired. */
void mo_arena_check_retired(mo_pool *pool, mo_arena *arena);
/* Whether an arena was pinned, and is released, and waits for the whole device. */
bool mo_arenas_unsettled(const mo_pool *pool);
/* The device is done with all that was queued at `tick`. Arenas that waited for that go, and those that could not go yet. */
void mo_arenas_settle(mo_pool *pool, uint64_t tick);

/* Gives all memory and addresses of all arenas back to the driver; the first failure is reported. */
mo_status mo_arenas_close(mo_pool *pool, mo_detail *detail);

#endif
