#include "alloc/address_map.h"

#include "base/assert.h"
#include "base/hostmem.h"

#define FIRST_CAPACITY 1024

/* Fibonacci hashing: the upper half of the product depends on every bit of the address. */
static size_t home(const mo_address_map *map, mo_address address)
{
    return (size_t)(((uint64_t)address * 0x9E3779B97F4A7C15u) >> 32) & (map->capacity - 1);
}

static void put(mo_address_map *map, mo_address address, mo_block *block)
{
    size_t i = home(map, address);

    while (map->entries[i].address) {
        MO_ASSERT(map->entries[i].address != address);
        i = (i + 1) & (map->capacity - 1);
    }
    map->entries[i] = (mo_address_entry){address, block};
    map->count++;
}

mo_status mo_address_map_grow(mo_address_map *map, mo_detail *detail)
{
    mo_address_map larger = {.capacity = map->capacity ? 2 * map->capacity : FIRST_CAPACITY};

    larger.entries = mo_host_calloc_dense(larger.capacity, sizeof *larger.entries);
    if (!larger.entries)
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0,
                       "no host memory for the allocator's table of addresses (%zu entries)",
                       larger.capacity);
    for (size_t i = 0; i < map->capacity; i++)
        if (map->entries[i].address)
            put(&larger, map->entries[i].address, map->entries[i].block);
    mo_host_free(map->entries);
    *map = larger;
    return MO_OK;
}

void mo_address_map_put(mo_address_map *map, mo_block *block)
{
    MO_ASSERT(2 * (map->count + 1) <= map->capacity);
    put(map, block->address, block);
}

static mo_address_entry *entry_of(const mo_address_map *map, mo_address address)
{
    if (!map->capacity || !address)
        return NULL;
    for (size_t i = home(map, address); map->entries[i].address; i = (i + 1) & (map->capacity - 1))
        if (map->entries[i].address == address)
            return &map->entries[i];
    return NULL;
}

mo_block *mo_address_map_find(const mo_address_map *map, mo_address address)
{
    mo_address_entry *entry = entry_of(map, address);

    return entry ? entry->block : NULL;
}

/* Whoever was pushed past the gap by it moves back into it. */
mo_block *mo_address_map_take(mo_address_map *map, mo_address address)
{
    mo_address_entry *entry = entry_of(map, address);
    size_t mask = map->capacity - 1, gap, i;
    mo_block *block;

    if (!entry)
        return NULL;
    block = entry->block;
    gap = (size_t)(entry - map->entries);
    for (i = (gap + 1) & mask; map->entries[i].address; i = (i + 1) & mask) {
        size_t wanted = home(map, map->entries[i].address);

        if (((i - wanted) & mask) >= ((i - gap) & mask)) {
            map->entries[gap] = map->entries[i];
            gap = i;
        }
    }
    map->entries[gap] = (mo_address_entry){0};
    map->count--;
    return block;
}

void mo_address_map_close(mo_address_map *map)
{
    mo_host_free(map->entries);
    *map = (mo_address_map){0};
}
