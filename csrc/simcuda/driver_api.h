/* The driver API functions that the simulated device implements: NVIDIA's names and signatures.
 *
 * With SIM_NVIDIA_HEADERS the prototypes are those of NVIDIA's cuda.h, and the compiler compares. All other
 * symbols of libcuda.so.1 are stubs (library_stub.c), which answer CUDA_ERROR_NOT_SUPPORTED. */
#ifndef SIM_DRIVER_API_H
#define SIM_DRIVER_API_H

#include "calls.h"

/* The same for cudaGetDriverEntryPoint: NULL when it is not implemented. Called with the lock held. */
void *sim_driver_function(const char *name, int version);

/* CUDA 13's header gives these names to newer functions; its driver keeps the old ones. */
#undef cuDeviceGetUuid
#undef cuEventElapsedTime
CUresult cuDeviceGetUuid(CUuuid *out, CUdevice device);
CUresult cuEventElapsedTime(float *milliseconds, CUevent from, CUevent to);
CUresult cuCtxCreate_v2(CUcontext *out, unsigned flags, CUdevice device);
CUresult cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id,
                                   CUgraph *graph, const CUgraphNode **dependencies, size_t *count);

#ifndef SIM_NVIDIA_HEADERS

/* driver_context.c */
CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active);
CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags);
CUresult cuCtxDestroy_v2(CUcontext handle);
CUresult cuCtxGetCurrent(CUcontext *out);
CUresult cuCtxSetCurrent(CUcontext handle);
CUresult cuCtxPushCurrent_v2(CUcontext handle);
CUresult cuCtxPopCurrent_v2(CUcontext *out);
CUresult cuCtxGetDevice(CUdevice *out);
CUresult cuCtxGetFlags(unsigned *out);
CUresult cuCtxGetApiVersion(CUcontext handle, unsigned *out);
CUresult cuCtxSynchronize(void);
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest);
CUresult cuCtxGetLimit(size_t *out, CUlimit limit);
CUresult cuCtxSetLimit(CUlimit limit, size_t value);
CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags);
CUresult cuCtxDisablePeerAccess(CUcontext peer);

/* driver_device.c */
CUresult cuInit(unsigned flags);
CUresult cuDriverGetVersion(int *out);
CUresult cuDeviceGetCount(int *out);
CUresult cuDeviceGet(CUdevice *out, int ordinal);
CUresult cuDeviceGetName(char *out, int capacity, CUdevice device);
CUresult cuDeviceGetUuid_v2(CUuuid *out, CUdevice device);
CUresult cuDeviceTotalMem_v2(size_t *out, CUdevice device);
CUresult cuDeviceGetAttribute(int *out, CUdevice_attribute attribute, CUdevice device);
CUresult cuDeviceCanAccessPeer(int *out, CUdevice device, CUdevice peer);
CUresult cuDeviceGetP2PAttribute(int *out, CUdevice_P2PAttribute attribute, CUdevice device, CUdevice peer);
CUresult cuDeviceGetPCIBusId(char *out, int capacity, CUdevice device);
CUresult cuGetErrorName(CUresult code, const char **out);
CUresult cuGetErrorString(CUresult code, const char **out);

/* driver_graph.c */
CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode);
CUresult cuStreamBeginCaptureToGraph(CUstream handle, CUgraph graph, const CUgraphNode *dependencies,
                                     const CUgraphEdgeData *edges, size_t count, CUstreamCaptureMode mode);
CUresult cuStreamEndCapture(CUstream handle, CUgraph *out);
CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status);
CUresult cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id,
                                   CUgraph *graph, const CUgraphNode **dependencies,
                                   const CUgraphEdgeData **edges, size_t *count);
CUresult cuStreamUpdateCaptureDependencies_v2(CUstream handle, CUgraphNode *dependencies,
                                              const CUgraphEdgeData *edges, size_t count, unsigned flags);
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode);
CUresult cuGraphCreate(CUgraph *out, unsigned flags);
CUresult cuGraphDestroy(CUgraph handle);
CUresult cuGraphAddEmptyNode(CUgraphNode *out, CUgraph handle, const CUgraphNode *dependencies, size_t count);
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count);
CUresult cuGraphNodeGetType(CUgraphNode handle, CUgraphNodeType *out);
CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags);
CUresult cuGraphLaunch(CUgraphExec exec_handle, CUstream handle);
CUresult cuGraphUpload(CUgraphExec exec, CUstream stream);
CUresult cuGraphExecDestroy(CUgraphExec handle);

/* driver_launch.c */
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned shared, CUstream stream, void **arguments, void **extra);
CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                   unsigned by, unsigned bz, unsigned shared, CUstream stream,
                                   void **arguments);
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra);
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, CUfunction function, int block_size,
                                                     size_t shared);
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, CUfunction function, int block_size,
                                                              size_t shared, unsigned flags);
CUresult cuOccupancyMaxActiveClusters(int *out, CUfunction function, const CUlaunchConfig *config);

/* driver_memory.c */
CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t size);
CUresult cuMemFree_v2(CUdeviceptr address);
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total);
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address);
CUresult cuMemHostAlloc(void **out, size_t size, unsigned flags);
CUresult cuMemAllocHost_v2(void **out, size_t size);
CUresult cuMemFreeHost(void *block);
CUresult cuMemHostRegister_v2(void *block, size_t size, unsigned flags);
CUresult cuMemHostUnregister(void *block);
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *block, unsigned flags);
CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size);
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream);
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size);
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream);
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size);
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream);
CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size);
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream);
CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *of, CUstream stream);
CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count);
CUresult cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t count);
CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count);
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream);
CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream);
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream);
CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr to, cuuint32_t value, unsigned flags);
CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr to, cuuint64_t value, unsigned flags);
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr address);
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **data,
                                CUdeviceptr address);

/* driver_module.c */
CUresult cuModuleLoad(CUmodule *out, const char *path);
CUresult cuModuleLoadData(CUmodule *out, const void *image);
CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned count, CUjit_option *options,
                            void **values);
CUresult cuModuleLoadFatBinary(CUmodule *out, const void *image);
CUresult cuModuleUnload(CUmodule handle);
CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name);
CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *size, CUmodule module, const char *name);
CUresult cuLibraryLoadData(CUlibrary *out, const void *image, CUjit_option *jit, void **jit_values,
                           unsigned jit_count, CUlibraryOption *options, void **values, unsigned count);
CUresult cuLibraryLoadFromFile(CUlibrary *out, const char *path, CUjit_option *jit, void **jit_values,
                               unsigned jit_count, CUlibraryOption *options, void **values, unsigned count);
CUresult cuLibraryUnload(CUlibrary handle);
CUresult cuLibraryGetKernel(CUkernel *out, CUlibrary library, const char *name);
CUresult cuLibraryGetGlobal(CUdeviceptr *address, size_t *size, CUlibrary library, const char *name);
CUresult cuKernelGetFunction(CUfunction *out, CUkernel kernel);
CUresult cuFuncGetAttribute(int *out, CUfunction_attribute attribute, CUfunction handle);
CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value);
CUresult cuKernelGetAttribute(int *out, CUfunction_attribute attribute, CUkernel kernel, CUdevice device);
CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device);
CUresult cuFuncSetCacheConfig(CUfunction handle, CUfunc_cache config);
CUresult cuFuncGetModule(CUmodule *out, CUfunction handle);
CUresult cuFuncGetName(const char **out, CUfunction handle);

/* driver_pool.c */
CUresult cuMemAllocAsync(CUdeviceptr *out, size_t size, CUstream stream);
CUresult cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t size, CUmemoryPool pool, CUstream stream);
CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle);
CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice device);
CUresult cuDeviceGetMemPool(CUmemoryPool *out, CUdevice device);
CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool handle);
CUresult cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *properties);
CUresult cuMemPoolDestroy(CUmemoryPool handle);
CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t keep);
CUresult cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void *out);
CUresult cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void *value);
CUresult cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc *access, size_t count);

/* driver_stream.c */
CUresult cuStreamCreate(CUstream *out, unsigned flags);
CUresult cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority);
CUresult cuStreamDestroy_v2(CUstream handle);
CUresult cuStreamQuery(CUstream handle);
CUresult cuStreamSynchronize(CUstream handle);
CUresult cuStreamGetPriority(CUstream handle, int *out);
CUresult cuStreamGetFlags(CUstream handle, unsigned *out);
CUresult cuStreamGetId(CUstream handle, unsigned long long *out);
CUresult cuStreamGetCtx(CUstream handle, CUcontext *out);
CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned flags);
CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *data);
CUresult cuStreamAddCallback(CUstream handle, CUstreamCallback callback, void *data, unsigned flags);
CUresult cuEventCreate(CUevent *out, unsigned flags);
CUresult cuEventDestroy_v2(CUevent handle);
CUresult cuEventRecord(CUevent event, CUstream stream);
CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags);
CUresult cuEventQuery(CUevent handle);
CUresult cuEventSynchronize(CUevent handle);
CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent from, CUevent to);

/* driver_symbols.c */
CUresult cuGetProcAddress_v2(const char *name, void **out, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status);

/* driver_vmm.c */
CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option);
CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags);
CUresult cuMemAddressFree(CUdeviceptr address, size_t size);
CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *properties,
                     unsigned long long flags);
CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address);
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *out,
                                                CUmemGenericAllocationHandle handle);
CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags);
CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count);
CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address);
CUresult cuMemUnmap(CUdeviceptr address, size_t size);
CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags);
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *handle,
                                        CUmemAllocationHandleType type);

#endif
#endif
