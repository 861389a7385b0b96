#include "ranges.h"

#include "device.h"

#include <stdlib.h>
#include <string.h>

sim_range_table sim_ranges, sim_reserved;

/* Index of the first range whose base lies above the address. */
static size_t above(const sim_range_table *table, uintptr_t address)
{
    size_t low = 0, high = table->count;

    while (low < high) {
        size_t middle = (low + high) / 2;
        if (table->range[middle]->base > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

sim_range *sim_range_add(sim_range_table *table, const sim_range *description)
{
    static uint64_t ids;

    if (table->count == table->capacity) {
        size_t capacity = table->capacity ? 2 * table->capacity : 256;
        sim_range **grown = realloc(table->range, capacity * sizeof *grown);
        if (!grown)
            return NULL;
        table->range = grown;
        table->capacity = capacity;
    }
    sim_range *range = malloc(sizeof *range);
    if (!range)
        return NULL;
    *range = *description;
    range->id = ++ids;
    size_t at = above(table, range->base);
    memmove(table->range + at + 1, table->range + at, (table->count - at) * sizeof *table->range);
    table->range[at] = range;
    table->count++;
    return range;
}

void sim_range_remove(sim_range_table *table, sim_range *range)
{
    size_t at = above(table, range->base) - 1;

    memmove(table->range + at, table->range + at + 1, (table->count - at - 1) * sizeof *table->range);
    table->count--;
    free(range);
}

sim_range *sim_range_at(const sim_range_table *table, uintptr_t address)
{
    size_t at = above(table, address);

    if (at == 0 || address - table->range[at - 1]->base >= table->range[at - 1]->size)
        return NULL;
    return table->range[at - 1];
}

sim_range *sim_range_within(const sim_range_table *table, uintptr_t address, size_t size)
{
    sim_range *range = sim_range_at(table, address);

    if (range || size == 0)
        return range;
    size_t at = above(table, address);
    return at < table->count && table->range[at]->base - address < size ? table->range[at] : NULL;
}

bool sim_range_allows(const sim_range *range, int device, bool write)
{
    unsigned wanted = write ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;

    if (range->kind == SIM_RANGE_MAPPING)
        return (range->access[device] & wanted) == wanted;
    return true; /* cudaMalloc's memory: peers are copied through the host where they have no access */
}

sim_access sim_range_access(const void *address, size_t size, int device, bool write)
{
    uintptr_t at = (uintptr_t)address, end = at + size;
    sim_range *range = sim_range_at(&sim_ranges, at);

    if (end < at)
        return SIM_ACCESS_NO;
    if (!range || !sim_range_on_device(range)) {
        /* Host memory; it must not run on into a device's. */
        if (range)
            at = range->base + range->size;
        for (; at < end && (range = sim_range_within(&sim_ranges, at, end - at));
             at = range->base + range->size)
            if (sim_range_on_device(range))
                return SIM_ACCESS_NO;
        return sim_range_at(&sim_reserved, (uintptr_t)address) ? SIM_ACCESS_NO : SIM_ACCESS_HOST;
    }
    for (; at < end; at = range->base + range->size) {
        range = sim_range_at(&sim_ranges, at);
        if (!range || !sim_range_on_device(range) || !sim_range_allows(range, device, write))
            return SIM_ACCESS_NO;
        /* Mappings that touch are one range to a copy; allocations that happen to touch are not. */
        if (range->kind != SIM_RANGE_MAPPING && end - range->base > range->size)
            return SIM_ACCESS_NO;
    }
    return SIM_ACCESS_DEVICE;
}
