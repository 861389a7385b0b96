/* Virtual memory management: addresses, physical memory, and mappings of one in the other.
 *
 * What CUDA's documentation calls an error is one. A mapping goes into addresses reserved before, begins at
 * offset 0 of its memory ("currently must be zero") and is granted and unmapped whole. It may be shorter than
 * its memory: cuMemMap asks that offset + size be less than the memory's size, which, as all of NVIDIA's
 * samples map all of it, can only mean "at most". */
#include "device.h"
#include "driver_api.h"
#include "handles.h"
#include "ranges.h"
#include "streams.h"

#include <string.h>
#include <sys/mman.h>

static bool whole_frames(uint64_t value)
{
    return value % SIM_FRAME == 0;
}

static CUresult check_properties(const CUmemAllocationProp *properties)
{
    if (!properties || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return properties->location.type == CU_MEM_LOCATION_TYPE_INVALID ? CUDA_ERROR_INVALID_VALUE
                                                                         : CUDA_ERROR_NOT_SUPPORTED;
    if (!sim_device_exists(properties->location.id))
        return CUDA_ERROR_INVALID_DEVICE;
    /* A handle that could be sent to another process is made, but exporting it is not supported. */
    if (properties->requestedHandleTypes & ~(unsigned)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuMemGetAllocationGranularity,
           (size_t * out, const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags option),
           (out, properties, option))
{
    if (!out || (unsigned)option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = check_properties(properties);
    if (result == CUDA_SUCCESS)
        *out = SIM_FRAME;
    return result;
}

/* ---- addresses ---------------------------------------------------------------------------------------- */
SIM_DRIVER(SIM_INITIALISED, cuMemAddressReserve,
           (CUdeviceptr * out, size_t size, size_t alignment, CUdeviceptr wanted, unsigned long long flags),
           (out, size, alignment, wanted, flags))
{
    if (!out || !size || !whole_frames(size) || flags || alignment & (alignment - 1))
        return CUDA_ERROR_INVALID_VALUE;
    sim_range range = {.size = size, .kind = SIM_RANGE_RESERVED};
    range.base = sim_addresses_reserve(size, alignment < SIM_FRAME ? SIM_FRAME : alignment,
                                       whole_frames(wanted) ? (uintptr_t)wanted : 0);
    if (!range.base)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!sim_range_add(&sim_reserved, &range)) {
        sim_addresses_free(range.base, size);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    sim_reservations++;
    sim_reserved_bytes += size;
    *out = range.base;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuMemAddressFree, (CUdeviceptr address, size_t size), (address, size))
{
    sim_range *range = sim_range_at(&sim_reserved, (uintptr_t)address);

    if (!range || range->base != address || range->size != size)
        return CUDA_ERROR_INVALID_VALUE;
    if (sim_range_within(&sim_ranges, range->base, size))
        return CUDA_ERROR_INVALID_VALUE; /* something is mapped there still */
    sim_range_remove(&sim_reserved, range);
    sim_addresses_free((uintptr_t)address, size);
    sim_reservations--;
    sim_reserved_bytes -= size;
    return CUDA_SUCCESS;
}

/* ---- physical memory ---------------------------------------------------------------------------------- */
static sim_frames *frames_of(CUmemGenericAllocationHandle handle)
{
    return sim_handle_get(handle, SIM_KIND_FRAMES);
}

SIM_DRIVER(SIM_INITIALISED | SIM_UNSAFE, cuMemCreate,
           (CUmemGenericAllocationHandle * out, size_t size, const CUmemAllocationProp *properties,
            unsigned long long flags),
           (out, size, properties, flags))
{
    CUresult result = check_properties(properties);

    if (!out || !size || !whole_frames(size) || flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    sim_device *device = &sim_devices[properties->location.id];
    sim_frames *frames = sim_frames_take(&device->store, size / SIM_FRAME);
    uint64_t handle = frames ? sim_handle_new(SIM_KIND_FRAMES, frames) : 0;
    if (!handle) {
        if (frames)
            sim_frames_release(frames);
        device->counts.ooms++;
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    frames->handle = handle;
    frames->handles = 1;
    frames->properties = *properties;
    device->counts.live.handles++;
    *out = handle;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED | SIM_UNSAFE, cuMemRelease, (CUmemGenericAllocationHandle handle), (handle))
{
    sim_frames *frames = frames_of(handle);

    if (!frames)
        return CUDA_ERROR_INVALID_VALUE;
    if (--frames->handles == 0) {
        /* Mapped still, the memory lives on, and cuMemRetainAllocationHandle can give it a handle again. */
        sim_handle_drop(handle);
        frames->handle = 0;
        sim_devices[frames->store->device].counts.live.handles--;
        sim_frames_release(frames);
    }
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle * out, void *address),
           (out, address))
{
    sim_range *range = sim_range_at(&sim_ranges, (uintptr_t)address);

    if (!out || !range || range->kind != SIM_RANGE_MAPPING)
        return CUDA_ERROR_INVALID_VALUE;
    sim_frames *frames = range->frames;
    if (!frames->handle) {
        frames->handle = sim_handle_new(SIM_KIND_FRAMES, frames);
        if (!frames->handle)
            return CUDA_ERROR_OUT_OF_MEMORY;
        sim_devices[frames->store->device].counts.live.handles++;
    }
    frames->handles++;
    *out = frames->handle;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuMemGetAllocationPropertiesFromHandle,
           (CUmemAllocationProp * out, CUmemGenericAllocationHandle handle), (out, handle))
{
    const sim_frames *frames = frames_of(handle);

    if (!out || !frames)
        return CUDA_ERROR_INVALID_VALUE;
    *out = frames->properties;
    return CUDA_SUCCESS;
}

/* ---- mappings ----------------------------------------------------------------------------------------- */
SIM_DRIVER(SIM_INITIALISED | SIM_UNSAFE, cuMemMap,
           (CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
            unsigned long long flags),
           (address, size, offset, handle, flags))
{
    sim_frames *frames = frames_of(handle);

    if (!frames || flags || offset || !size || !whole_frames(size) || !whole_frames(address) ||
        size > frames->count * SIM_FRAME)
        return CUDA_ERROR_INVALID_VALUE;
    const sim_range *reserved = sim_range_at(&sim_reserved, (uintptr_t)address);
    if (!reserved || size > reserved->base + reserved->size - address ||
        sim_range_within(&sim_ranges, (uintptr_t)address, size))
        return CUDA_ERROR_INVALID_VALUE;

    sim_range range = {.base = (uintptr_t)address,
                       .size = size,
                       .kind = SIM_RANGE_MAPPING,
                       .device = frames->store->device,
                       .frames = frames};
    sim_range *mapping = sim_range_add(&sim_ranges, &range);
    if (!mapping)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!sim_frames_map(frames, size / SIM_FRAME, range.base, PROT_NONE)) {
        sim_range_remove(&sim_ranges, mapping);
        return CUDA_ERROR_OUT_OF_MEMORY; /* the kernel's limit of mappings (vm.max_map_count) */
    }
    sim_devices[range.device].counts.live.mappings++;
    return CUDA_SUCCESS;
}

/* Is [address, address + size) exactly covered by whole mappings? */
static bool whole_mappings(CUdeviceptr address, size_t size)
{
    if (!size || !whole_frames(size) || size > UINTPTR_MAX - address)
        return false;
    for (uintptr_t at = (uintptr_t)address, end = at + size; at < end;) {
        const sim_range *range = sim_range_at(&sim_ranges, at);
        if (!range || range->kind != SIM_RANGE_MAPPING || range->base != at || range->size > end - at)
            return false;
        at += range->size;
    }
    return true;
}

/* The host reads and writes simulated memory directly, so it gets the most that any device has. */
static bool protect(const sim_range *range, const unsigned char access[SIM_MAX_DEVICES])
{
    unsigned any = 0;

    for (int device = 0; device < sim_device_count; device++)
        any |= access[device];
    return mprotect((void *)range->base, range->size,
                    any == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE
                    : any == CU_MEM_ACCESS_FLAGS_PROT_READ    ? PROT_READ
                                                              : PROT_NONE) == 0;
}

static void grant(unsigned char rights[SIM_MAX_DEVICES], const CUmemAccessDesc *access, size_t count)
{
    for (size_t i = 0; i < count; i++)
        rights[access[i].location.id] = (unsigned char)access[i].flags;
}

/* The pages first, the table when all of them have changed. The host may refuse one in the middle of a mapping
 * (vm.max_map_count: a mapping whose frames lie apart is several to the kernel); then the pages of all go back
 * to what the table says. That cannot be refused for the same reason: it cuts nothing that was whole before. */
SIM_DRIVER(SIM_INITIALISED | SIM_UNSAFE, cuMemSetAccess,
           (CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count),
           (address, size, access, count))
{
    if (!access || !count || !whole_mappings(address, size))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE)
            return CUDA_ERROR_INVALID_VALUE;
        if (!sim_device_exists(access[i].location.id))
            return CUDA_ERROR_INVALID_DEVICE;
        if (access[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE &&
            access[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
            access[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
            return CUDA_ERROR_INVALID_VALUE;
    }
    uintptr_t start = (uintptr_t)address, end = start + size;
    sim_range *range;
    for (uintptr_t at = start; at < end; at += range->size) {
        unsigned char rights[SIM_MAX_DEVICES];
        range = sim_range_at(&sim_ranges, at);
        memcpy(rights, range->access, sizeof rights);
        grant(rights, access, count);
        if (protect(range, rights))
            continue;
        for (uintptr_t back = start; back <= at; back += range->size) {
            range = sim_range_at(&sim_ranges, back);
            protect(range, range->access);
        }
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    for (uintptr_t at = start; at < end; at += range->size) {
        range = sim_range_at(&sim_ranges, at);
        grant(range->access, access, count);
    }
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuMemGetAccess,
           (unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address),
           (flags, location, address))
{
    const sim_range *range = sim_range_at(&sim_ranges, (uintptr_t)address);

    if (!flags || !location || !range || !sim_range_on_device(range) ||
        location->type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_exists(location->id))
        return CUDA_ERROR_INVALID_DEVICE;
    *flags = range->kind == SIM_RANGE_MAPPING ? range->access[location->id]
             : range->device == location->id  ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                              : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED | SIM_UNSAFE, cuMemUnmap, (CUdeviceptr address, size_t size), (address, size))
{
    if (!whole_mappings(address, size))
        return CUDA_ERROR_INVALID_VALUE;
    /* CUDA does not wait here: what is queued would find the addresses empty, or other memory there. */
    sim_streams_lose((uintptr_t)address, size);
    for (uintptr_t at = (uintptr_t)address, end = at + size; at < end;) {
        sim_range *range = sim_range_at(&sim_ranges, at), copy = *range;

        sim_range_remove(&sim_ranges, range);
        sim_devices[copy.device].counts.live.mappings--;
        sim_frames_unmap(copy.frames, copy.size / SIM_FRAME, at);
        at += copy.size;
    }
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuMemExportToShareableHandle,
           (void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
            unsigned long long flags),
           (out, handle, type, flags))
{
    (void)type;
    return !out || flags || !frames_of(handle) ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NOT_SUPPORTED;
}

SIM_DRIVER(SIM_INITIALISED, cuMemImportFromShareableHandle,
           (CUmemGenericAllocationHandle * out, void *handle, CUmemAllocationHandleType type),
           (out, handle, type))
{
    (void)handle;
    (void)type;
    return out ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
}
