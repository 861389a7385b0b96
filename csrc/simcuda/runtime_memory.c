/* Memory by the runtime API. */
#include "capture.h"
#include "context.h"
#include "cudart_api.h"
#include "handles.h"
#include "heap.h"
#include "memory.h"
#include "ranges.h"

#include <string.h>

/* ---- allocation --------------------------------------------------------------------------------------- */
SIM_RUNTIME(SIM_CONTEXT | SIM_UNSAFE, cudaMalloc, (void **out, size_t size), (out, size))
{
    uintptr_t address = 0;

    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = NULL;
    if (!size)
        return CUDA_SUCCESS; /* as CUDA: no error, no memory */
    CUresult result = sim_heap_alloc(sim_current_device(), size, NULL, &address);
    *out = (void *)address;
    return result;
}

SIM_RUNTIME(SIM_CONTEXT | SIM_UNSAFE, cudaFree, (void *block), (block))
{
    return block ? sim_heap_free((uintptr_t)block) : CUDA_SUCCESS;
}

SIM_RUNTIME(SIM_CONTEXT, cudaMemGetInfo, (size_t * free_bytes, size_t *total), (free_bytes, total))
{
    const sim_store *store = &sim_devices[sim_current_device()].store;

    if (!free_bytes || !total)
        return CUDA_ERROR_INVALID_VALUE;
    *free_bytes = store->limit > store->used ? (store->limit - store->used) * SIM_FRAME : 0;
    *total = store->limit * SIM_FRAME;
    return CUDA_SUCCESS;
}

static CUresult host_alloc(void **out, size_t size, unsigned flags)
{
    if (!out || flags & ~(unsigned)(cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined))
        return CUDA_ERROR_INVALID_VALUE;
    *out = NULL;
    return size ? sim_host_alloc(size, out) : CUDA_SUCCESS;
}

SIM_RUNTIME(SIM_CONTEXT | SIM_UNSAFE, cudaHostAlloc, (void **out, size_t size, unsigned flags),
            (out, size, flags))
{
    return host_alloc(out, size, flags);
}

SIM_RUNTIME(SIM_CONTEXT | SIM_UNSAFE, cudaMallocHost, (void **out, size_t size), (out, size))
{
    return host_alloc(out, size, 0);
}

SIM_RUNTIME(SIM_CONTEXT | SIM_UNSAFE, cudaFreeHost, (void *block), (block))
{
    return block ? sim_host_free(block, SIM_RANGE_HOST) : CUDA_SUCCESS;
}

SIM_RUNTIME(SIM_CONTEXT | SIM_UNSAFE, cudaHostRegister, (void *block, size_t size, unsigned flags),
            (block, size, flags))
{
    if (!block || !size || flags & ~0xFu) /* portable, mapped, I/O memory, read only */
        return CUDA_ERROR_INVALID_VALUE;
    return sim_host_register(block, size);
}

SIM_RUNTIME(SIM_CONTEXT | SIM_UNSAFE, cudaHostUnregister, (void *block), (block))
{
    return block ? sim_host_free(block, SIM_RANGE_REGISTERED) : CUDA_ERROR_INVALID_VALUE;
}

SIM_RUNTIME(SIM_CONTEXT, cudaHostGetDevicePointer, (void **out, void *block, unsigned flags),
            (out, block, flags))
{
    const sim_range *range = sim_range_at(&sim_ranges, (uintptr_t)block);

    if (!out || flags || !range || sim_range_on_device(range))
        return CUDA_ERROR_INVALID_VALUE;
    *out = block;
    return CUDA_SUCCESS;
}

SIM_RUNTIME(SIM_CONTEXT, cudaPointerGetAttributes, (struct cudaPointerAttributes * out, const void *address),
            (out, address))
{
    const sim_range *range = sim_range_at(&sim_ranges, (uintptr_t)address);

    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    memset(out, 0, sizeof *out);
    out->device = range ? range->device : -2; /* of memory that CUDA does not know */
    out->type = !range                       ? cudaMemoryTypeUnregistered
                : sim_range_on_device(range) ? cudaMemoryTypeDevice
                                             : cudaMemoryTypeHost;
    if (range)
        out->devicePointer = (void *)(uintptr_t)address;
    if (!range || !sim_range_on_device(range))
        out->hostPointer = (void *)(uintptr_t)address;
    return CUDA_SUCCESS;
}

/* ---- copies and sets ---------------------------------------------------------------------------------- */
/* Where the kind says "device" an end must be known to the device. The pointers decide everything else, as
 * they do under unified addressing. */
static CUresult check_kind(const void *to, const void *from, size_t size, enum cudaMemcpyKind kind)
{
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;

    if ((unsigned)kind > cudaMemcpyDefault)
        return (CUresult)cudaErrorInvalidMemcpyDirection;
    if (size && ((to_device && !sim_range_at(&sim_ranges, (uintptr_t)to)) ||
                 (from_device && !sim_range_at(&sim_ranges, (uintptr_t)from))))
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

SIM_RUNTIME(SIM_CONTEXT | SIM_UNSAFE, cudaMemcpy,
            (void *to, const void *from, size_t size, enum cudaMemcpyKind kind), (to, from, size, kind))
{
    CUresult result = check_kind(to, from, size, kind);
    return result != CUDA_SUCCESS ? result : sim_copy_plain(to, from, size, NULL, true);
}

SIM_RUNTIME(SIM_CONTEXT, cudaMemcpyAsync,
            (void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream),
            (to, from, size, kind, stream))
{
    CUresult result = check_kind(to, from, size, kind);
    return result != CUDA_SUCCESS ? result : sim_copy_plain(to, from, size, stream, false);
}

SIM_RUNTIME(SIM_CONTEXT, cudaMemcpyPeerAsync,
            (void *to, int to_device, const void *from, int from_device, size_t size, cudaStream_t stream),
            (to, to_device, from, from_device, size, stream))
{
    sim_copy copy = {
        .to = to, .from = from, .width = size, .rows = 1, .to_device = to_device, .from_device = from_device};

    if (!sim_device_exists(to_device) || !sim_device_exists(from_device))
        return CUDA_ERROR_INVALID_DEVICE;
    return sim_copy_submit(&copy, sim_stream_of(stream));
}

SIM_RUNTIME(SIM_CONTEXT, cudaMemcpy2DAsync,
            (void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t rows,
             enum cudaMemcpyKind kind, cudaStream_t stream),
            (to, to_pitch, from, from_pitch, width, rows, kind, stream))
{
    sim_copy copy = {.to = to,
                     .to_pitch = to_pitch,
                     .from = from,
                     .from_pitch = from_pitch,
                     .width = width,
                     .rows = rows,
                     .to_device = -1,
                     .from_device = -1};
    CUresult result = check_kind(to, from, width * rows, kind);

    if (width > to_pitch || width > from_pitch)
        return (CUresult)cudaErrorInvalidPitchValue;
    return result != CUDA_SUCCESS ? result : sim_copy_submit(&copy, sim_stream_of(stream));
}

SIM_RUNTIME(SIM_CONTEXT | SIM_UNSAFE, cudaMemset, (void *to, int value, size_t size), (to, value, size))
{
    return sim_set_submit(to, 0, (unsigned char)value, 1, size, 1, sim_stream_of(NULL));
}

SIM_RUNTIME(SIM_CONTEXT, cudaMemsetAsync, (void *to, int value, size_t size, cudaStream_t stream),
            (to, value, size, stream))
{
    return sim_set_submit(to, 0, (unsigned char)value, 1, size, 1, sim_stream_of(stream));
}

/* ---- stream-ordered allocation ------------------------------------------------------------------------ */
static sim_pool *pool_of(cudaMemPool_t handle)
{
    return sim_handle_get(SIM_HANDLE(handle), SIM_KIND_POOL);
}

static CUresult pool_alloc(void **out, size_t size, sim_pool *pool, cudaStream_t handle)
{
    sim_stream *stream = sim_stream_of(handle);
    uintptr_t address = 0;

    if (!out || !pool)
        return CUDA_ERROR_INVALID_VALUE;
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    *out = NULL;
    CUresult result = size ? sim_pool_alloc(pool, size, stream, &address) : CUDA_SUCCESS;
    *out = (void *)address;
    return result;
}

SIM_RUNTIME(SIM_CONTEXT, cudaMallocAsync, (void **out, size_t size, cudaStream_t stream), (out, size, stream))
{
    return pool_alloc(out, size, sim_devices[sim_current_device()].pool, stream);
}

SIM_RUNTIME(SIM_CONTEXT, cudaMallocFromPoolAsync,
            (void **out, size_t size, cudaMemPool_t pool, cudaStream_t stream), (out, size, pool, stream))
{
    return pool_alloc(out, size, pool_of(pool), stream);
}

SIM_RUNTIME(SIM_CONTEXT, cudaFreeAsync, (void *block, cudaStream_t handle), (block, handle))
{
    sim_stream *stream = sim_stream_of(handle);

    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    return block ? sim_pool_free((uintptr_t)block, stream) : CUDA_SUCCESS;
}

SIM_RUNTIME(SIM_QUERY, cudaDeviceGetDefaultMemPool, (cudaMemPool_t * out, int device), (out, device))
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_exists(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *out = (cudaMemPool_t)(uintptr_t)sim_devices[device].default_pool->handle;
    return CUDA_SUCCESS;
}

SIM_RUNTIME(SIM_QUERY, cudaMemPoolGetAttribute,
            (cudaMemPool_t handle, enum cudaMemPoolAttr attribute, void *out), (handle, attribute, out))
{
    const sim_pool *pool = pool_of(handle);

    return pool ? sim_pool_get(pool, (CUmemPool_attribute)attribute, out) : CUDA_ERROR_INVALID_VALUE;
}

SIM_RUNTIME(SIM_QUERY, cudaMemPoolSetAttribute,
            (cudaMemPool_t handle, enum cudaMemPoolAttr attribute, void *value), (handle, attribute, value))
{
    sim_pool *pool = pool_of(handle);

    return pool ? sim_pool_set(pool, (CUmemPool_attribute)attribute, value) : CUDA_ERROR_INVALID_VALUE;
}

SIM_RUNTIME(SIM_QUERY, cudaMemPoolTrimTo, (cudaMemPool_t handle, size_t keep), (handle, keep))
{
    sim_pool *pool = pool_of(handle);

    if (!pool)
        return CUDA_ERROR_INVALID_VALUE;
    sim_pool_trim(pool, keep);
    return CUDA_SUCCESS;
}

/* Pool memory can be reached from every device here; what is asked for is checked and then granted anyway. */
SIM_RUNTIME(SIM_QUERY, cudaMemPoolSetAccess,
            (cudaMemPool_t handle, const struct cudaMemAccessDesc *access, size_t count),
            (handle, access, count))
{
    if (!pool_of(handle) || (count && !access))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (access[i].location.type != cudaMemLocationTypeDevice || !sim_device_exists(access[i].location.id))
            return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}
