/* Memory by the driver API: allocation, pinned host memory, copies, sets, questions about pointers. */
#include "memory.h"

#include "capture.h"
#include "context.h"
#include "driver_api.h"
#include "heap.h"
#include "ranges.h"

#define ADDRESS(pointer) ((void *)(uintptr_t)(pointer))

/* ---- allocation --------------------------------------------------------------------------------------- */
SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuMemAlloc_v2, (CUdeviceptr * out, size_t size), (out, size))
{
    uintptr_t address;

    if (!out || !size)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_heap_alloc(sim_current_device(), size, NULL, &address);
    if (result == CUDA_SUCCESS)
        *out = address;
    return result;
}

SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuMemFree_v2, (CUdeviceptr address), (address))
{
    return address ? sim_heap_free((uintptr_t)address) : CUDA_SUCCESS;
}

SIM_DRIVER(SIM_CONTEXT, cuMemGetInfo_v2, (size_t * free_bytes, size_t *total), (free_bytes, total))
{
    const sim_store *store = &sim_devices[sim_current_device()].store;

    if (!free_bytes || !total)
        return CUDA_ERROR_INVALID_VALUE;
    *free_bytes = store->limit > store->used ? (store->limit - store->used) * SIM_FRAME : 0;
    *total = store->limit * SIM_FRAME;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_CONTEXT, cuMemGetAddressRange_v2, (CUdeviceptr * base, size_t *size, CUdeviceptr address),
           (base, size, address))
{
    const sim_range *range = sim_range_at(&sim_ranges, (uintptr_t)address);

    if (!range || !sim_range_on_device(range))
        return CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = range->base;
    if (size)
        *size = range->size;
    return CUDA_SUCCESS;
}

/* ---- pinned host memory ------------------------------------------------------------------------------- */
SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuMemHostAlloc, (void **out, size_t size, unsigned flags),
           (out, size, flags))
{
    const unsigned known =
        CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;

    if (!out || !size || flags & ~known)
        return CUDA_ERROR_INVALID_VALUE;
    return sim_host_alloc(size, out);
}

SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuMemAllocHost_v2, (void **out, size_t size), (out, size))
{
    return out && size ? sim_host_alloc(size, out) : CUDA_ERROR_INVALID_VALUE;
}

SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuMemFreeHost, (void *block), (block))
{
    return block ? sim_host_free(block, SIM_RANGE_HOST) : CUDA_ERROR_INVALID_VALUE;
}

SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuMemHostRegister_v2, (void *block, size_t size, unsigned flags),
           (block, size, flags))
{
    const unsigned known = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP |
                           CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY;

    if (!block || !size || flags & ~known)
        return CUDA_ERROR_INVALID_VALUE;
    return sim_host_register(block, size);
}

SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuMemHostUnregister, (void *block), (block))
{
    return block ? sim_host_free(block, SIM_RANGE_REGISTERED) : CUDA_ERROR_INVALID_VALUE;
}

SIM_DRIVER(SIM_CONTEXT, cuMemHostGetDevicePointer_v2, (CUdeviceptr * out, void *block, unsigned flags),
           (out, block, flags))
{
    const sim_range *range = sim_range_at(&sim_ranges, (uintptr_t)block);

    if (!out || flags || !range || sim_range_on_device(range))
        return CUDA_ERROR_INVALID_VALUE;
    *out = (uintptr_t)block;
    return CUDA_SUCCESS;
}

/* ---- copies ------------------------------------------------------------------------------------------- */
static bool pageable(const void *address)
{
    return !sim_range_at(&sim_ranges, (uintptr_t)address);
}

CUresult sim_copy_submit(const sim_copy *copy, sim_stream *stream)
{
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!copy->width || !copy->rows)
        return CUDA_SUCCESS;
    if (!copy->to || !copy->from ||
        (copy->rows > 1 && (copy->to_pitch < copy->width || copy->from_pitch < copy->width)))
        return CUDA_ERROR_INVALID_VALUE;
    sim_work *work = sim_work_new(SIM_WORK_COPY, stream->device);
    if (!work)
        return CUDA_ERROR_OUT_OF_MEMORY;
    work->copy.to = copy->to;
    work->copy.from = copy->from;
    work->copy.width = copy->width;
    work->copy.rows = copy->rows;
    work->copy.to_pitch = copy->to_pitch;
    work->copy.from_pitch = copy->from_pitch;
    work->copy.to_device = copy->to_device;
    work->copy.from_device = copy->from_device;
    if (!sim_work_addresses_valid(work)) {
        sim_work_release(work);
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUresult result = copy->synchronous ? sim_capture_check_wait(stream) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS) {
        sim_work_release(work);
        return result;
    }
    bool wait = !stream->capture && (copy->synchronous || pageable(copy->to) || pageable(copy->from));
    sim_stream_hold(stream);
    result = sim_stream_submit(stream, work, NULL);
    if (result == CUDA_SUCCESS && wait)
        result = sim_stream_synchronize(stream);
    sim_stream_release(stream);
    return result;
}

CUresult sim_copy_plain(void *to, const void *from, size_t size, CUstream stream, bool synchronous)
{
    sim_copy copy = {.to = to,
                     .from = from,
                     .width = size,
                     .rows = 1,
                     .to_device = -1,
                     .from_device = -1,
                     .synchronous = synchronous};

    return sim_copy_submit(&copy, sim_stream_of(stream));
}

SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuMemcpy, (CUdeviceptr to, CUdeviceptr from, size_t size),
           (to, from, size))
{
    return sim_copy_plain(ADDRESS(to), ADDRESS(from), size, NULL, true);
}

SIM_DRIVER(SIM_CONTEXT, cuMemcpyAsync, (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream),
           (to, from, size, stream))
{
    return sim_copy_plain(ADDRESS(to), ADDRESS(from), size, stream, false);
}

/* An end that the function's name calls a device's takes a device pointer. That is an address in device memory
 * or in pinned host memory, which under unified addressing is its own device pointer
 * (cuMemHostGetDevicePointer); pageable host memory has none. The other end takes any pointer. */
static CUresult device_end(CUdeviceptr address, size_t size)
{
    const sim_range *range = sim_range_at(&sim_ranges, (uintptr_t)address);

    return size && !range ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static CUresult copy_to_device(CUdeviceptr to, const void *from, size_t size, CUstream stream,
                               bool synchronous)
{
    CUresult result = device_end(to, size);
    return result != CUDA_SUCCESS ? result : sim_copy_plain(ADDRESS(to), from, size, stream, synchronous);
}

static CUresult copy_to_host(void *to, CUdeviceptr from, size_t size, CUstream stream, bool synchronous)
{
    CUresult result = device_end(from, size);
    return result != CUDA_SUCCESS ? result : sim_copy_plain(to, ADDRESS(from), size, stream, synchronous);
}

static CUresult copy_on_device(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    CUresult result = device_end(to, size);
    if (result == CUDA_SUCCESS)
        result = device_end(from, size);
    return result != CUDA_SUCCESS ? result : sim_copy_plain(ADDRESS(to), ADDRESS(from), size, stream, false);
}

SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuMemcpyHtoD_v2, (CUdeviceptr to, const void *from, size_t size),
           (to, from, size))
{
    return copy_to_device(to, from, size, NULL, true);
}

SIM_DRIVER(SIM_CONTEXT, cuMemcpyHtoDAsync_v2,
           (CUdeviceptr to, const void *from, size_t size, CUstream stream), (to, from, size, stream))
{
    return copy_to_device(to, from, size, stream, false);
}

SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuMemcpyDtoH_v2, (void *to, CUdeviceptr from, size_t size),
           (to, from, size))
{
    return copy_to_host(to, from, size, NULL, true);
}

SIM_DRIVER(SIM_CONTEXT, cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t size, CUstream stream),
           (to, from, size, stream))
{
    return copy_to_host(to, from, size, stream, false);
}

/* Between device addresses even the plain call does not wait for the host (API synchronization behavior). */
SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuMemcpyDtoD_v2, (CUdeviceptr to, CUdeviceptr from, size_t size),
           (to, from, size))
{
    return copy_on_device(to, from, size, NULL);
}

SIM_DRIVER(SIM_CONTEXT, cuMemcpyDtoDAsync_v2,
           (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream), (to, from, size, stream))
{
    return copy_on_device(to, from, size, stream);
}

SIM_DRIVER(SIM_CONTEXT, cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *of, CUstream stream), (of, stream))
{
    if (!of)
        return CUDA_ERROR_INVALID_VALUE;
    if (of->srcMemoryType == CU_MEMORYTYPE_ARRAY || of->dstMemoryType == CU_MEMORYTYPE_ARRAY)
        return CUDA_ERROR_NOT_SUPPORTED;
    const char *from = of->srcMemoryType == CU_MEMORYTYPE_HOST ? of->srcHost : ADDRESS(of->srcDevice);
    char *to = of->dstMemoryType == CU_MEMORYTYPE_HOST ? of->dstHost : ADDRESS(of->dstDevice);
    size_t from_pitch = of->srcPitch ? of->srcPitch : of->srcXInBytes + of->WidthInBytes;
    size_t to_pitch = of->dstPitch ? of->dstPitch : of->dstXInBytes + of->WidthInBytes;
    sim_copy copy = {.to = to + of->dstY * to_pitch + of->dstXInBytes,
                     .to_pitch = to_pitch,
                     .to_device = -1,
                     .from = from + of->srcY * from_pitch + of->srcXInBytes,
                     .from_pitch = from_pitch,
                     .from_device = -1,
                     .width = of->WidthInBytes,
                     .rows = of->Height};
    return sim_copy_submit(&copy, sim_stream_of(stream));
}

/* ---- sets --------------------------------------------------------------------------------------------- */
CUresult sim_set_submit(void *to, size_t pitch, uint64_t value, unsigned element, size_t width, size_t rows,
                        sim_stream *stream)
{
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!width || !rows)
        return CUDA_SUCCESS;
    if (width > SIZE_MAX / element || (rows > 1 && pitch < width * element))
        return CUDA_ERROR_INVALID_VALUE;
    sim_work *work = sim_work_new(SIM_WORK_SET, stream->device);
    if (!work)
        return CUDA_ERROR_OUT_OF_MEMORY;
    work->set.to = to;
    work->set.pitch = pitch;
    work->set.value = value;
    work->set.element = element;
    work->set.width = width;
    work->set.rows = rows;
    if (!sim_work_addresses_valid(work)) {
        sim_work_release(work);
        return CUDA_ERROR_INVALID_VALUE;
    }
    return sim_stream_submit(stream, work, NULL);
}

SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuMemsetD8_v2, (CUdeviceptr to, unsigned char value, size_t count),
           (to, value, count))
{
    return sim_set_submit(ADDRESS(to), 0, value, 1, count, 1, sim_stream_of(NULL));
}

SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuMemsetD16_v2, (CUdeviceptr to, unsigned short value, size_t count),
           (to, value, count))
{
    return sim_set_submit(ADDRESS(to), 0, value, 2, count, 1, sim_stream_of(NULL));
}

SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuMemsetD32_v2, (CUdeviceptr to, unsigned value, size_t count),
           (to, value, count))
{
    return sim_set_submit(ADDRESS(to), 0, value, 4, count, 1, sim_stream_of(NULL));
}

SIM_DRIVER(SIM_CONTEXT, cuMemsetD8Async, (CUdeviceptr to, unsigned char value, size_t count, CUstream stream),
           (to, value, count, stream))
{
    return sim_set_submit(ADDRESS(to), 0, value, 1, count, 1, sim_stream_of(stream));
}

SIM_DRIVER(SIM_CONTEXT, cuMemsetD16Async,
           (CUdeviceptr to, unsigned short value, size_t count, CUstream stream), (to, value, count, stream))
{
    return sim_set_submit(ADDRESS(to), 0, value, 2, count, 1, sim_stream_of(stream));
}

SIM_DRIVER(SIM_CONTEXT, cuMemsetD32Async, (CUdeviceptr to, unsigned value, size_t count, CUstream stream),
           (to, value, count, stream))
{
    return sim_set_submit(ADDRESS(to), 0, value, 4, count, 1, sim_stream_of(stream));
}

static CUresult write_value(CUstream stream, CUdeviceptr to, uint64_t value, unsigned size, unsigned flags)
{
    if (flags & ~(unsigned)CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER)
        return CUDA_ERROR_INVALID_VALUE;
    return sim_set_submit(ADDRESS(to), 0, value, size, 1, 1, sim_stream_of(stream));
}

SIM_DRIVER(SIM_CONTEXT, cuStreamWriteValue32_v2,
           (CUstream stream, CUdeviceptr to, cuuint32_t value, unsigned flags), (stream, to, value, flags))
{
    return write_value(stream, to, value, 4, flags);
}

SIM_DRIVER(SIM_CONTEXT, cuStreamWriteValue64_v2,
           (CUstream stream, CUdeviceptr to, cuuint64_t value, unsigned flags), (stream, to, value, flags))
{
    return write_value(stream, to, value, 8, flags);
}

/* ---- questions about pointers -------------------------------------------------------------------------- */
static CUcontext context_of(const sim_range *range)
{
    sim_context *primary = sim_context_primary(range->device);

    /* Memory of the VMM belongs to no context (CU_POINTER_ATTRIBUTE_CONTEXT's documentation). */
    return range->kind == SIM_RANGE_MAPPING || !primary ? NULL : (CUcontext)(uintptr_t)primary->handle;
}

CUresult sim_pointer_attribute(void *out, CUpointer_attribute attribute, const void *address)
{
    const sim_range *range = sim_range_at(&sim_ranges, (uintptr_t)address);
    const sim_range *reserved = sim_range_at(&sim_reserved, (uintptr_t)address);
    const sim_range *whole = reserved ? reserved : range;

    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    switch ((int)attribute) { /* these have answers for every address */
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *(unsigned char *)out = range != NULL;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
        if (!whole)
            return CUDA_ERROR_INVALID_VALUE;
        *(unsigned char *)out = 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        if (!whole)
            return CUDA_ERROR_INVALID_VALUE;
        *(CUdeviceptr *)out = whole->base;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        if (!whole)
            return CUDA_ERROR_INVALID_VALUE;
        *(size_t *)out = whole->size;
        return CUDA_SUCCESS;
    default:
        break;
    }
    if (!range)
        return CUDA_ERROR_INVALID_VALUE;
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)out = context_of(range);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)out = sim_range_on_device(range) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)out = (uintptr_t)address;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (sim_range_on_device(range))
            return CUDA_ERROR_INVALID_VALUE;
        *(void **)out = (void *)(uintptr_t)address;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(unsigned long long *)out = range->id;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        *(unsigned *)out = 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)out = range->device;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(unsigned char *)out = 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        *(cuuint64_t *)out =
            range->kind == SIM_RANGE_MAPPING ? range->frames->properties.requestedHandleTypes : 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
        *(unsigned *)out = range->kind == SIM_RANGE_MAPPING ? range->access[sim_current_device()]
                                                            : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        *(CUmemoryPool *)out = range->pool ? (CUmemoryPool)(uintptr_t)range->pool->handle : NULL;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
        *(size_t *)out = range->size;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
        *(CUdeviceptr *)out = range->base;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

SIM_DRIVER(SIM_INITIALISED, cuPointerGetAttribute,
           (void *out, CUpointer_attribute attribute, CUdeviceptr address), (out, attribute, address))
{
    return sim_pointer_attribute(out, attribute, ADDRESS(address));
}

/* Unlike the call for one attribute, this gives zeros where an address is unknown or an attribute has no
 * answer. */
SIM_DRIVER(SIM_INITIALISED, cuPointerGetAttributes,
           (unsigned count, CUpointer_attribute *attributes, void **data, CUdeviceptr address),
           (count, attributes, data, address))
{
    if (!count || !attributes || !data)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++)
        if (sim_pointer_attribute(data[i], attributes[i], ADDRESS(address)) != CUDA_SUCCESS)
            switch ((int)attributes[i]) {
            case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
            case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
                *(unsigned *)data[i] = 0;
                break;
            case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
                *(int *)data[i] = -2; /* as CUDA does: no device is -2 */
                break;
            case CU_POINTER_ATTRIBUTE_IS_MANAGED:
            case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
            case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
                *(unsigned char *)data[i] = 0;
                break;
            default:
                *(uint64_t *)data[i] = 0;
            }
    return CUDA_SUCCESS;
}
