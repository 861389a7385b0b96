/* Pinned host memory: ordinary pages, known to the device as its own. */
#include "heap.h"
#include "streams.h"

#include <stdlib.h>

CUresult sim_host_alloc(size_t size, void **out)
{
    sim_range range = {.size = size, .kind = SIM_RANGE_HOST};

    if (posix_memalign(&range.host_block, 4096, size) != 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    range.base = (uintptr_t)range.host_block;
    if (!sim_range_add(&sim_ranges, &range)) {
        free(range.host_block);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    sim_host_allocations++;
    sim_host_bytes += size;
    if (sim_host_bytes > sim_host_bytes_peak)
        sim_host_bytes_peak = sim_host_bytes;
    *out = range.host_block;
    return CUDA_SUCCESS;
}

CUresult sim_host_register(void *block, size_t size)
{
    sim_range range = {.base = (uintptr_t)block, .size = size, .kind = SIM_RANGE_REGISTERED};

    if (sim_range_within(&sim_ranges, range.base, size))
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    if (!sim_range_add(&sim_ranges, &range))
        return CUDA_ERROR_OUT_OF_MEMORY;
    sim_host_allocations++;
    return CUDA_SUCCESS;
}

static sim_range *host_at(void *block, sim_range_kind kind)
{
    sim_range *range = sim_range_at(&sim_ranges, (uintptr_t)block);

    return range && range->kind == kind && range->base == (uintptr_t)block ? range : NULL;
}

CUresult sim_host_free(void *block, sim_range_kind kind)
{
    sim_range *range = host_at(block, kind);
    CUresult unknown =
        kind == SIM_RANGE_HOST ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;

    if (!range)
        return unknown;
    uint64_t id = range->id;
    CUresult result = CUDA_SUCCESS; /* copies to or from it may be queued on any device */
    for (int device = 0; device < sim_device_count; device++)
        result = sim_device_synchronize(device);
    range = host_at(block, kind);
    if (!range || range->id != id)
        return unknown;
    if (kind == SIM_RANGE_HOST)
        sim_host_bytes -= range->size;
    free(range->host_block);
    sim_range_remove(&sim_ranges, range);
    sim_host_allocations--;
    return result;
}
