/* Stream-ordered allocation by the driver API. */
#include "context.h"
#include "driver_api.h"
#include "handles.h"
#include "heap.h"
#include "streams.h"

static sim_pool *pool_of(CUmemoryPool handle)
{
    return sim_handle_get(SIM_HANDLE(handle), SIM_KIND_POOL);
}

static CUresult alloc(CUdeviceptr *out, size_t size, sim_pool *pool, CUstream handle)
{
    sim_stream *stream = sim_stream_of(handle);
    uintptr_t address;

    if (!out || !size || !pool)
        return CUDA_ERROR_INVALID_VALUE;
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = sim_pool_alloc(pool, size, stream, &address);
    if (result == CUDA_SUCCESS)
        *out = address;
    return result;
}

SIM_DRIVER(SIM_CONTEXT, cuMemAllocAsync, (CUdeviceptr * out, size_t size, CUstream stream),
           (out, size, stream))
{
    return alloc(out, size, sim_devices[sim_current_device()].pool, stream);
}

SIM_DRIVER(SIM_CONTEXT, cuMemAllocFromPoolAsync,
           (CUdeviceptr * out, size_t size, CUmemoryPool pool, CUstream stream), (out, size, pool, stream))
{
    return alloc(out, size, pool_of(pool), stream);
}

SIM_DRIVER(SIM_CONTEXT, cuMemFreeAsync, (CUdeviceptr address, CUstream handle), (address, handle))
{
    sim_stream *stream = sim_stream_of(handle);

    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    return sim_pool_free((uintptr_t)address, stream);
}

static CUresult device_pool(CUmemoryPool *out, CUdevice device, bool fallback)
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_exists(device))
        return CUDA_ERROR_INVALID_DEVICE;
    const sim_pool *pool = fallback ? sim_devices[device].default_pool : sim_devices[device].pool;
    *out = (CUmemoryPool)(uintptr_t)pool->handle;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuDeviceGetDefaultMemPool, (CUmemoryPool * out, CUdevice device), (out, device))
{
    return device_pool(out, device, true);
}

SIM_DRIVER(SIM_INITIALISED, cuDeviceGetMemPool, (CUmemoryPool * out, CUdevice device), (out, device))
{
    return device_pool(out, device, false);
}

SIM_DRIVER(SIM_INITIALISED, cuDeviceSetMemPool, (CUdevice device, CUmemoryPool handle), (device, handle))
{
    sim_pool *pool = pool_of(handle);

    if (!sim_device_exists(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!pool || pool->device != device)
        return CUDA_ERROR_INVALID_VALUE;
    sim_devices[device].pool = pool;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuMemPoolCreate, (CUmemoryPool * out, const CUmemPoolProps *properties),
           (out, properties))
{
    if (!out || !properties || properties->allocType != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE || properties->handleTypes)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!sim_device_exists(properties->location.id))
        return CUDA_ERROR_INVALID_DEVICE;
    sim_pool *pool = sim_pool_new(properties->location.id, properties->maxSize);
    if (!pool)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = (CUmemoryPool)(uintptr_t)pool->handle;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuMemPoolDestroy, (CUmemoryPool handle), (handle))
{
    sim_pool *pool = pool_of(handle);

    if (!pool || pool == sim_devices[pool->device].default_pool)
        return CUDA_ERROR_INVALID_VALUE;
    sim_pool_destroy(pool);
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuMemPoolTrimTo, (CUmemoryPool handle, size_t keep), (handle, keep))
{
    sim_pool *pool = pool_of(handle);

    if (!pool)
        return CUDA_ERROR_INVALID_VALUE;
    sim_pool_trim(pool, keep);
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuMemPoolGetAttribute,
           (CUmemoryPool handle, CUmemPool_attribute attribute, void *out), (handle, attribute, out))
{
    const sim_pool *pool = pool_of(handle);

    return pool ? sim_pool_get(pool, attribute, out) : CUDA_ERROR_INVALID_VALUE;
}

SIM_DRIVER(SIM_INITIALISED, cuMemPoolSetAttribute,
           (CUmemoryPool handle, CUmemPool_attribute attribute, void *value), (handle, attribute, value))
{
    sim_pool *pool = pool_of(handle);

    return pool ? sim_pool_set(pool, attribute, value) : CUDA_ERROR_INVALID_VALUE;
}

/* Pool memory can be reached from every device here; rights are checked and then granted anyway. */
SIM_DRIVER(SIM_INITIALISED, cuMemPoolSetAccess,
           (CUmemoryPool handle, const CUmemAccessDesc *access, size_t count), (handle, access, count))
{
    const sim_pool *pool = pool_of(handle);

    if (!pool || (count && !access))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
            !sim_device_exists(access[i].location.id))
            return CUDA_ERROR_INVALID_VALUE;
        if (access[i].location.id == pool->device && access[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
            return CUDA_ERROR_INVALID_DEVICE; /* a pool can't be taken from its own device */
    }
    return CUDA_SUCCESS;
}
