/* The soundness of a pool: everything is walked, counted anew, and compared with the equations of pool.h and of the
 * headers of its parts. */
#ifndef MO_POOL_CHECK_H
#define MO_POOL_CHECK_H

#include "alloc/pool_parts.h"

/* mo_pool_check, under the pool's lock. */
mo_status mo_pool_check_locked(mo_pool *pool, mo_detail *detail);

#endif
