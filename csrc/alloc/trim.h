/* Memory that goes back to the device. */
#ifndef MO_TRIM_H
#define MO_TRIM_H

#include "alloc/pool_parts.h"

/* Releases spare granules, and free ones of whole arenas, until held <= keep. What is not known to be over stays. Under the
 * pool's lock. */
mo_status mo_pool_shrink(mo_pool *pool, size_t keep, mo_detail *detail);

#endif
