/* Devices without virtual memory management: memory comes with its addresses, in segments that neither move nor grow. */
#ifndef MO_SEGMENTS_H
#define MO_SEGMENTS_H

#include "alloc/pool_parts.h"

#define MO_SEGMENT_STEP ((size_t)2 << 20) /* bytes: what segments are multiples of */

/* A segment that holds `size` bytes, as one free block of the zone; MO_NO_DEVICE_MEMORY. */
mo_status mo_segment_add(mo_pool *pool, mo_zone *zone, size_t size, mo_detail *detail, mo_block **out);
/* Gives segments that are free as a whole back, until no more than `keep` bytes are held. WAITS. */
mo_status mo_segments_free(mo_pool *pool, mo_zone *zone, size_t keep, mo_detail *detail);

#endif
