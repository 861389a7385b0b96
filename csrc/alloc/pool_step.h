/* Steps in a pool's trace, which the program alone knows of. */
#ifndef MO_POOL_STEP_H
#define MO_POOL_STEP_H

#include "alloc/pool.h"

/* Notes the end of a step where the pool is traced. */
void mo_pool_step(mo_pool *pool);

#endif
