/* From the address of a live block to the block: open addressing with linear probing, at most half full. Room is made
 * ahead (mo_address_map_reserve), so that putting cannot fail. No locks: the pool's. */
#ifndef MO_ADDRESS_MAP_H
#define MO_ADDRESS_MAP_H

#include "alloc/block.h"

typedef struct mo_address_entry {
    mo_address address; /* 0: empty */
    mo_block *block;
} mo_address_entry;

typedef struct mo_address_map {
    mo_address_entry *entries;
    size_t capacity; /* a power of two, or 0 */
    size_t count;    /* <= capacity / 2 */
} mo_address_map;

/* The rare half of mo_address_map_reserve, which is inline: every request passes through it. */
mo_status mo_address_map_grow(mo_address_map *map, mo_detail *detail);
/* One more can be put. MO_NO_HOST_MEMORY; the map is as it was then. */
static inline mo_status mo_address_map_reserve(mo_address_map *map, mo_detail *detail)
{
    return 2 * (map->count + 1) <= map->capacity ? MO_OK : mo_address_map_grow(map, detail);
}
void mo_address_map_put(mo_address_map *map, mo_block *block);
/* NULL where it is not there. */
mo_block *mo_address_map_find(const mo_address_map *map, mo_address address);
/* Finds and takes out. */
mo_block *mo_address_map_take(mo_address_map *map, mo_address address);
void mo_address_map_close(mo_address_map *map);

#endif
