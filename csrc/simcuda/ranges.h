/* The registry of address ranges: what lies at an address, and who may touch it.
 *
 *     ranges of one table do not overlap; table.range[] is sorted by base
 *
 * Two tables: `sim_ranges` of everything that is backed by memory, `sim_reserved` of cuMemAddressReserve's
 * ranges. Addresses no table knows are ordinary host memory to a copy. */
#ifndef SIM_RANGES_H
#define SIM_RANGES_H

#include "control.h"
#include "frames.h"

typedef enum sim_range_kind {
    SIM_RANGE_ALLOCATION, /* cuMemAlloc, cudaMalloc: whole frames */
    SIM_RANGE_PIECE,      /* the same, a piece of a slab */
    SIM_RANGE_MAPPING,    /* cuMemMap */
    SIM_RANGE_HOST,       /* pinned host memory of ours */
    SIM_RANGE_REGISTERED, /* the user's host memory, pinned */
    SIM_RANGE_RESERVED    /* addresses only; in sim_reserved */
} sim_range_kind;

typedef struct sim_range {
    uintptr_t base;
    size_t size; /* as asked for; an allocation is padded to frames */
    sim_range_kind kind;
    int device;                            /* that holds the memory */
    uint64_t id;                           /* CU_POINTER_ATTRIBUTE_BUFFER_ID: never used twice */
    unsigned char access[SIM_MAX_DEVICES]; /* CUmemAccess_flags a device, of a MAPPING */
    sim_frames *frames;                    /* NULL for host memory */
    struct sim_pool *pool;                 /* that it was taken from in stream order, else NULL */
    bool freeing;                          /* cudaFreeAsync is queued behind it */
    void *host_block;                      /* HOST: what free() takes */
} sim_range;

typedef struct sim_range_table {
    sim_range **range;
    size_t count, capacity;
} sim_range_table;

extern sim_range_table sim_ranges, sim_reserved;

/* Copies the description; NULL when the host is out of memory. Ranges are given an id. */
sim_range *sim_range_add(sim_range_table *table, const sim_range *description);
void sim_range_remove(sim_range_table *table, sim_range *range);

/* The range an address lies in, or NULL. */
sim_range *sim_range_at(const sim_range_table *table, uintptr_t address);
/* The first range that has a byte in [address, address + size), or NULL. */
sim_range *sim_range_within(const sim_range_table *table, uintptr_t address, size_t size);

static inline bool sim_range_on_device(const sim_range *range)
{
    return range->kind <= SIM_RANGE_MAPPING;
}

/* May work on `device` read (or write) every byte? Only device memory counts: NO also when it runs out of a
 * range into nothing, HOST for addresses that are no device's at either end. */
typedef enum sim_access { SIM_ACCESS_NO, SIM_ACCESS_DEVICE, SIM_ACCESS_HOST } sim_access;
sim_access sim_range_access(const void *address, size_t size, int device, bool write);

/* May this device touch the range so? */
bool sim_range_allows(const sim_range *range, int device, bool write);

#endif
