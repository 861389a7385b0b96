/* References to arenas, and routes that hold them. */
#ifndef MO_POOL_ARENAS_H
#define MO_POOL_ARENAS_H

#include "alloc/pool_parts.h"

/* UNLOCKS. One reference fewer. Graphs replay on streams that nobody told of: only when the whole device is done may what
 * was pinned go elsewhere. The device cannot be waited for while a graph is captured; then the next wait sees to it. */
void mo_arena_drop_reference(mo_pool *pool, mo_arena *arena);

#endif
