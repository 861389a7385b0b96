/* cuMemAlloc and cudaMalloc, and the stream-ordered pools.
 *
 * Requests above 1 MiB take whole frames; smaller ones share frames ("slabs") at 512 bytes, the alignment a
 * GPU gives. Freed memory is unmapped at once where a frame is free, so that a stale pointer faults.
 *
 * A pool keeps what was freed to it while it holds no more than its release threshold (0 at first, as in
 * CUDA): reserved = used + cached,  sizes padded to 512 bytes or whole frames */
#ifndef SIM_HEAP_H
#define SIM_HEAP_H

#include "device.h"
#include "ranges.h"

typedef struct sim_pool {
    uint64_t handle;
    int device;
    uint64_t used, used_high, cached, reserved_high, threshold, maximum;
    int flags[4]; /* the three reuse policies, by attribute number: kept, always on in effect */
    struct sim_cached *free_list;
    bool destroyed;
} sim_pool;

CUresult sim_heap_alloc(int device, size_t size, sim_pool *pool, uintptr_t *out);
/* The allocation that begins at an address; NULL for any other address. */
sim_range *sim_heap_at(uintptr_t address);
/* Frees without waiting for the device; does nothing where there is no allocation. */
void sim_heap_free_now(uintptr_t address);
/* cuMemFree, cudaFree: waits for the device first. */
CUresult sim_heap_free(uintptr_t address);

CUresult sim_host_alloc(size_t size, void **out);
CUresult sim_host_register(void *block, size_t size);
CUresult sim_host_free(void *block, sim_range_kind kind);

sim_pool *sim_pool_new(int device, size_t maximum);
void sim_pool_destroy(sim_pool *pool);
void sim_pool_trim(sim_pool *pool, size_t keep);
CUresult sim_pool_get(const sim_pool *pool, CUmemPool_attribute attribute, void *out);
CUresult sim_pool_set(sim_pool *pool, CUmemPool_attribute attribute, const void *value);
CUresult sim_pool_alloc(sim_pool *pool, size_t size, struct sim_stream *stream, uintptr_t *out);
CUresult sim_pool_free(uintptr_t address, struct sim_stream *stream);

#endif
