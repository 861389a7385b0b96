/* Devices, versions, errors, driver entry points by the runtime API. */
#include "context.h"
#include "cudart_api.h"
#include "device.h"
#include "driver_api.h"
#include "streams.h"

#include <stdio.h>
#include <string.h>

/* ---- devices ------------------------------------------------------------------------------------------ */
/* Without a device it is an error, and the count 0. */
SIM_RUNTIME(SIM_QUERY | SIM_DEVICELESS, cudaGetDeviceCount, (int *out), (out))
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = sim_device_count;
    return sim_activated() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

SIM_RUNTIME(SIM_QUERY, cudaGetDevice, (int *out), (out))
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = sim_current_device();
    return CUDA_SUCCESS;
}

/* Since CUDA 12 this also initialises the device and makes its primary context current. */
SIM_RUNTIME(SIM_QUERY, cudaSetDevice, (int device), (device))
{
    sim_thread *self = sim_self();

    if (!sim_device_exists(device))
        return CUDA_ERROR_INVALID_DEVICE;
    sim_context *context = sim_context_primary(device);
    if (!context)
        return CUDA_ERROR_OUT_OF_MEMORY;
    self->device = device;
    if (!self->depth)
        self->depth = 1;
    self->contexts[self->depth - 1] = context;
    sim_devices[device].primary_bound = true;
    return CUDA_SUCCESS;
}

/* 0 without a driver, which is no error (cudaDriverGetVersion's documentation). */
SIM_RUNTIME(SIM_ANYTIME, cudaDriverGetVersion, (int *out), (out))
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = sim_activated() ? SIM_DRIVER_VERSION : 0;
    return CUDA_SUCCESS;
}

SIM_RUNTIME(SIM_ANYTIME, cudaRuntimeGetVersion, (int *out), (out))
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = CUDART_VERSION;
    return CUDA_SUCCESS;
}

SIM_RUNTIME(SIM_CONTEXT | SIM_UNSAFE, cudaDeviceSynchronize, (void), ())
{
    int device = sim_current_device();

    sim_devices[device].counts.syncs++;
    return sim_device_synchronize(device);
}

SIM_RUNTIME(SIM_QUERY, cudaDeviceGetAttribute, (int *out, enum cudaDeviceAttr attribute, int device),
            (out, attribute, device))
{
    return sim_device_attribute(out, (int)attribute, device);
}

SIM_RUNTIME(SIM_QUERY, cudaDeviceGetPCIBusId, (char *out, int capacity, int device), (out, capacity, device))
{
    if (!out || capacity <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_exists(device))
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(out, (size_t)capacity, "0000:%02x:00.0", device + 1);
    return CUDA_SUCCESS;
}

SIM_RUNTIME(SIM_CONTEXT, cudaDeviceGetStreamPriorityRange, (int *least, int *greatest), (least, greatest))
{
    if (least)
        *least = SIM_PRIORITY_LEAST;
    if (greatest)
        *greatest = SIM_PRIORITY_GREATEST;
    return CUDA_SUCCESS;
}

SIM_RUNTIME(SIM_QUERY, cudaDeviceCanAccessPeer, (int *out, int device, int peer), (out, device, peer))
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_exists(device) || !sim_device_exists(peer))
        return CUDA_ERROR_INVALID_DEVICE;
    *out = device != peer;
    return CUDA_SUCCESS;
}

SIM_RUNTIME(SIM_CONTEXT, cudaDeviceEnablePeerAccess, (int peer, unsigned flags), (peer, flags))
{
    int device = sim_current_device();

    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_exists(peer) || peer == device)
        return CUDA_ERROR_INVALID_DEVICE;
    if (sim_devices[device].peers[peer])
        return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    sim_devices[device].peers[peer] = true;
    return CUDA_SUCCESS;
}

SIM_RUNTIME(SIM_CONTEXT, cudaDeviceDisablePeerAccess, (int peer), (peer))
{
    int device = sim_current_device();

    if (!sim_device_exists(peer))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!sim_devices[device].peers[peer])
        return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    sim_devices[device].peers[peer] = false;
    return CUDA_SUCCESS;
}

static int attribute(CUdevice_attribute which, int device)
{
    int value = 0;

    sim_device_attribute(&value, (int)which, device);
    return value;
}

static CUresult properties(struct cudaDeviceProp *out, int device)
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_exists(device))
        return CUDA_ERROR_INVALID_DEVICE;
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "%s", SIM_DEVICE_NAME);
    sim_device_uuid(device, out->uuid.bytes);
    out->totalGlobalMem = sim_devices[device].store.limit * SIM_FRAME;
    out->sharedMemPerBlock = (size_t)attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, device);
    out->sharedMemPerBlockOptin =
        (size_t)attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device);
    out->sharedMemPerMultiprocessor =
        (size_t)attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, device);
    out->reservedSharedMemPerBlock =
        (size_t)attribute(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, device);
    out->regsPerBlock = out->regsPerMultiprocessor =
        attribute(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, device);
    out->warpSize = attribute(CU_DEVICE_ATTRIBUTE_WARP_SIZE, device);
    out->memPitch = (size_t)attribute(CU_DEVICE_ATTRIBUTE_MAX_PITCH, device);
    out->maxThreadsPerBlock = attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, device);
    for (int i = 0; i < 3; i++) {
        out->maxThreadsDim[i] = attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + (unsigned)i, device);
        out->maxGridSize[i] = attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + (unsigned)i, device);
    }
    out->totalConstMem = (size_t)attribute(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, device);
    out->major = sim_cc / 10;
    out->minor = sim_cc % 10;
    out->textureAlignment = (size_t)attribute(CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, device);
    out->multiProcessorCount = sim_sms;
    out->maxThreadsPerMultiProcessor = attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device);
    out->maxBlocksPerMultiProcessor = attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, device);
    out->unifiedAddressing = out->canMapHostMemory = out->concurrentKernels = out->cooperativeLaunch = 1;
    out->memoryPoolsSupported = out->streamPrioritiesSupported = out->hostRegisterSupported = 1;
    out->canUseHostPointerForRegisteredMem = 1;
    out->clusterLaunch = attribute(CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH, device);
    out->asyncEngineCount = attribute(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, device);
    out->l2CacheSize = attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, device);
    out->memoryBusWidth = attribute(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, device);
#if SIM_CUDA_MAJOR == 12
    out->clockRate = attribute(CU_DEVICE_ATTRIBUTE_CLOCK_RATE, device);
    out->memoryClockRate = attribute(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, device);
    out->deviceOverlap = 1;
#endif
    out->pciBusID = device + 1;
    return CUDA_SUCCESS;
}

/* CUDA 12 called it _v2, since the structure had grown with 12; CUDA 13 has one name again. */
#if SIM_CUDA_MAJOR == 12
SIM_RUNTIME(SIM_QUERY, cudaGetDeviceProperties_v2, (struct cudaDeviceProp * out, int device), (out, device))
#else
SIM_RUNTIME(SIM_QUERY, cudaGetDeviceProperties, (struct cudaDeviceProp * out, int device), (out, device))
#endif
{
    return properties(out, device);
}

/* ---- errors ------------------------------------------------------------------------------------------- */
/* These two are not SIM_RUNTIME: they must not themselves become the last error. */
SIM_CALL(cudaGetLastError)
SIM_CALL(cudaPeekAtLastError)

static cudaError_t last_error(sim_call *call, bool forget)
{
    sim_thread *self = sim_self();

    sim_lock();
    call->count++;
    CUresult last = sim_fault != CUDA_SUCCESS ? sim_fault : self->last_error;
    if (forget)
        self->last_error = CUDA_SUCCESS;
    sim_unlock();
    return (cudaError_t)last;
}

cudaError_t cudaGetLastError(void)
{
    return last_error(&cudaGetLastError_call, true);
}

cudaError_t cudaPeekAtLastError(void)
{
    return last_error(&cudaPeekAtLastError_call, false);
}

const char *cudaGetErrorName(cudaError_t code)
{
    switch ((int)code) {
#define NAME(name, value)                                                                                    \
    case value:                                                                                              \
        return #name;
        CUDA_ERRORS(NAME)
#undef NAME
    default:
        return "unrecognized error code";
    }
}

const char *cudaGetErrorString(cudaError_t code)
{
    const char *text;

    switch ((int)code) { /* errors that the driver does not have */
    case cudaErrorInvalidConfiguration:
        return "invalid configuration argument";
    case cudaErrorInvalidSymbol:
        return "invalid device symbol";
    case cudaErrorInvalidMemcpyDirection:
        return "invalid copy direction for memcpy";
    case cudaErrorInvalidDeviceFunction:
        return "invalid device function";
    default:
        text = sim_error_text((int)code);
        return text ? text : cudaGetErrorName(code);
    }
}

/* ---- the driver's functions --------------------------------------------------------------------------- */
static CUresult entry_point(const char *name, void **out, unsigned version, unsigned long long flags,
                            enum cudaDriverEntryPointQueryResult *status)
{
    if (!name || !out || flags > CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM)
        return CUDA_ERROR_INVALID_VALUE;
    if (flags == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM)
        return CUDA_ERROR_NOT_SUPPORTED;
    *out = sim_driver_function(name, (int)version);
    if (status)
        *status = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *out || status ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

SIM_RUNTIME(SIM_QUERY, cudaGetDriverEntryPointByVersion,
            (const char *name, void **out, unsigned version, unsigned long long flags,
             enum cudaDriverEntryPointQueryResult *status),
            (name, out, version, flags, status))
{
    return entry_point(name, out, version, flags, status);
}

SIM_RUNTIME(SIM_QUERY, cudaGetDriverEntryPoint,
            (const char *name, void **out, unsigned long long flags,
             enum cudaDriverEntryPointQueryResult *status),
            (name, out, flags, status))
{
    return entry_point(name, out, CUDART_VERSION, flags, status);
}

SIM_RUNTIME(SIM_CONTEXT, cudaProfilerStart, (void), ())
{
    return CUDA_SUCCESS;
}

SIM_RUNTIME(SIM_CONTEXT, cudaProfilerStop, (void), ())
{
    return CUDA_SUCCESS;
}
