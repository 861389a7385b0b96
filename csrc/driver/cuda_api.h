/* The CUDA driver's functions, found at run time. No part of memopt is linked against CUDA: the library is opened
 * by dlopen when something first needs it, so that `import memopt` works on a machine without one.
 *
 * A symbol's name carries its version (_v2 …), as NVIDIA's headers would have it. Required ones exist in every
 * driver since CUDA 11.2; without one of them the table is refused. Optional ones are NULL in older drivers: who
 * uses one tests it first. */
#ifndef MO_CUDA_API_H
#define MO_CUDA_API_H

#include <stdbool.h>

#include "base/status.h"
#include "driver/cuda_types.h"

/* clang-format off */
/*    field                        symbol                              parameters                             */
#define MO_CUDA_REQUIRED(X)                                                                                  \
    X(init, cuInit, (unsigned flags))                                                                        \
    X(driver_version, cuDriverGetVersion, (int *out))                                                        \
    X(error_name, cuGetErrorName, (CUresult code, const char **out))                                         \
    X(error_string, cuGetErrorString, (CUresult code, const char **out))                                     \
    X(device_count, cuDeviceGetCount, (int *out))                                                            \
    X(device_get, cuDeviceGet, (CUdevice *out, int ordinal))                                                 \
    X(device_name, cuDeviceGetName, (char *out, int capacity, CUdevice device))                              \
    X(device_attribute, cuDeviceGetAttribute, (int *out, CUdevice_attribute which, CUdevice device))         \
    X(device_total_memory, cuDeviceTotalMem_v2, (size_t *out, CUdevice device))                              \
    X(primary_retain, cuDevicePrimaryCtxRetain, (CUcontext *out, CUdevice device))                           \
    X(primary_release, cuDevicePrimaryCtxRelease_v2, (CUdevice device))                                      \
    X(context_current, cuCtxGetCurrent, (CUcontext *out))                                                    \
    X(context_push, cuCtxPushCurrent_v2, (CUcontext context))                                                \
    X(context_pop, cuCtxPopCurrent_v2, (CUcontext *out))                                                     \
    X(context_synchronize, cuCtxSynchronize, (void))                                                         \
    X(capture_mode, cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *mode))                          \
    X(memory_info, cuMemGetInfo_v2, (size_t *free_bytes, size_t *total_bytes))                               \
    X(memory_alloc, cuMemAlloc_v2, (CUdeviceptr *out, size_t size))                                          \
    X(memory_free, cuMemFree_v2, (CUdeviceptr address))                                                      \
    X(host_alloc, cuMemHostAlloc, (void **out, size_t size, unsigned flags))                                 \
    X(host_free, cuMemFreeHost, (void *block))                                                               \
    X(copy_to_device, cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void *from, size_t size, CUstream stream)) \
    X(copy_to_host, cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t size, CUstream stream))        \
    X(event_create, cuEventCreate, (CUevent *out, unsigned flags))                                           \
    X(event_destroy, cuEventDestroy_v2, (CUevent event))                                                     \
    X(event_record, cuEventRecord, (CUevent event, CUstream stream))                                         \
    X(event_query, cuEventQuery, (CUevent event))                                                            \
    X(event_synchronize, cuEventSynchronize, (CUevent event))                                                \
    X(stream_wait, cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags))                      \
    X(stream_create, cuStreamCreate, (CUstream *out, unsigned flags))                                        \
    X(stream_destroy, cuStreamDestroy_v2, (CUstream stream))                                                 \
    X(stream_synchronize, cuStreamSynchronize, (CUstream stream))                                            \
    X(stream_capturing, cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus *out))                  \
    X(module_load, cuModuleLoadDataEx,                                                                       \
      (CUmodule *out, const void *image, unsigned options, CUjit_option *names, void **values))              \
    X(module_unload, cuModuleUnload, (CUmodule module))                                                      \
    X(module_function, cuModuleGetFunction, (CUfunction *out, CUmodule module, const char *name))            \
    X(launch, cuLaunchKernel,                                                                                \
      (CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,    \
       unsigned shared_bytes, CUstream stream, void **arguments, void **extra))

#define MO_CUDA_OPTIONAL(X)                                                                                  \
    X(reserve, cuMemAddressReserve,                                                                          \
      (CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags))         \
    X(unreserve, cuMemAddressFree, (CUdeviceptr address, size_t size))                                       \
    X(create, cuMemCreate,                                                                                   \
      (CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *properties,                \
       unsigned long long flags))                                                                            \
    X(release, cuMemRelease, (CUmemGenericAllocationHandle handle))                                          \
    X(map, cuMemMap,                                                                                         \
      (CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,                 \
       unsigned long long flags))                                                                            \
    X(unmap, cuMemUnmap, (CUdeviceptr address, size_t size))                                                 \
    X(grant, cuMemSetAccess,                                                                                 \
      (CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count))                       \
    X(can_access_peer, cuDeviceCanAccessPeer, (int *out, CUdevice device, CUdevice peer))                    \
    X(granularity, cuMemGetAllocationGranularity,                                                            \
      (size_t *out, const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags option))         \
    X(memory_set, cuMemsetD8Async, (CUdeviceptr to, unsigned char value, size_t size, CUstream stream))      \
    X(copy_on_device, cuMemcpyDtoDAsync_v2, (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)) \
    X(begin_capture, cuStreamBeginCapture_v2, (CUstream stream, CUstreamCaptureMode mode))                   \
    X(end_capture, cuStreamEndCapture, (CUstream stream, CUgraph *out))                                      \
    X(graph_instantiate, cuGraphInstantiateWithFlags,                                                        \
      (CUgraphExec *out, CUgraph graph, unsigned long long flags))                                           \
    X(graph_launch, cuGraphLaunch, (CUgraphExec graph, CUstream stream))                                     \
    X(graph_exec_destroy, cuGraphExecDestroy, (CUgraphExec graph))                                           \
    X(graph_destroy, cuGraphDestroy, (CUgraph graph))                                                        \
    /* CUDA 11.3 to 12.x, and its successor with edge data, the only one a CUDA 13 driver need keep. */      \
    X(capture_info_v2, cuStreamGetCaptureInfo_v2,                                                            \
      (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,                       \
       const CUgraphNode **dependencies, size_t *count))                                                     \
    X(capture_info_v3, cuStreamGetCaptureInfo_v3,                                                            \
      (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,                       \
       const CUgraphNode **dependencies, const CUgraphEdgeData **edges, size_t *count))
/* clang-format on */

typedef struct mo_cuda_api {
#define FIELD(field, symbol, parameters) CUresult(*field) parameters;
    MO_CUDA_REQUIRED(FIELD)
    MO_CUDA_OPTIONAL(FIELD)
#undef FIELD
    void *library;  /* what dlopen gave; never closed, since the driver's threads outlive any wish to */
    bool simulated; /* by csrc/simcuda: its launches run bodies of the host's, whatever an image holds */
} mo_cuda_api;

/* Fills *out from the library at path ("libcuda.so.1" for the one that the linker finds). MO_NO_LIBRARY,
 * MO_NO_SYMBOL (the text names it); touches no device. */
mo_status mo_cuda_api_open(const char *path, mo_cuda_api *out, mo_detail *detail);

/* The process's own table: libcuda.so.1, opened and initialised (cuInit) at the first call that succeeds.
 * MO_NO_DEVICE where the driver has none. A failure is not remembered: the next call tries again. From the first call
 * on this process's forks are watched (forked.h), unless it fails; MO_DRIVER in a child that they tell of. */
mo_status mo_cuda_api_get(const mo_cuda_api **out, mo_detail *detail);

/* What code means to us: CUDA_SUCCESS, _OUT_OF_MEMORY, _NOT_READY, _NOT_SUPPORTED, _NO_DEVICE have statuses of
 * their own, all else is MO_DRIVER. On failure *detail says "cuMemMap(…): CUDA_ERROR_…: …", where `call` is the
 * text before the colon. */
mo_status mo_cuda_check(const mo_cuda_api *api, CUresult code, const char *call, mo_detail *detail);

/* The rows of the two lists, required ones first, for whoever reports on them; NULL past the end. */
const char *mo_cuda_api_symbol(int index, int *required);

#endif
