/* The CUDA runtime API's types: the project's own declarations, under NVIDIA's names.
 *
 * Only what the simulated libcudart uses. What differs between the majors lies in cudart_types_12.h and
 * cudart_types_13.h; SIM_CUDA_MAJOR chooses. Checked against NVIDIA's headers as cuda_types.h is; with
 * SIM_NVIDIA_HEADERS it is them. */
#ifndef SIM_CUDART_TYPES_H
#define SIM_CUDART_TYPES_H

#include "driver/cuda_types.h"

/* Every cudaError_t: X(name, value). */
/* clang-format off */
#define CUDA_ERRORS(X)                                                                                       \
    X(cudaSuccess, 0) X(cudaErrorInvalidValue, 1) X(cudaErrorMemoryAllocation, 2)                            \
    X(cudaErrorInitializationError, 3) X(cudaErrorCudartUnloading, 4) X(cudaErrorProfilerDisabled, 5)        \
    X(cudaErrorProfilerNotInitialized, 6) X(cudaErrorProfilerAlreadyStarted, 7)                              \
    X(cudaErrorProfilerAlreadyStopped, 8) X(cudaErrorInvalidConfiguration, 9)                                \
    X(cudaErrorInvalidPitchValue, 12) X(cudaErrorInvalidSymbol, 13) X(cudaErrorInvalidHostPointer, 16)       \
    X(cudaErrorInvalidDevicePointer, 17) X(cudaErrorInvalidTexture, 18)                                      \
    X(cudaErrorInvalidTextureBinding, 19) X(cudaErrorInvalidChannelDescriptor, 20)                           \
    X(cudaErrorInvalidMemcpyDirection, 21) X(cudaErrorAddressOfConstant, 22)                                 \
    X(cudaErrorTextureFetchFailed, 23) X(cudaErrorTextureNotBound, 24) X(cudaErrorSynchronizationError, 25)  \
    X(cudaErrorInvalidFilterSetting, 26) X(cudaErrorInvalidNormSetting, 27)                                  \
    X(cudaErrorMixedDeviceExecution, 28) X(cudaErrorNotYetImplemented, 31)                                   \
    X(cudaErrorMemoryValueTooLarge, 32) X(cudaErrorStubLibrary, 34) X(cudaErrorInsufficientDriver, 35)       \
    X(cudaErrorCallRequiresNewerDriver, 36) X(cudaErrorInvalidSurface, 37)                                   \
    X(cudaErrorDuplicateVariableName, 43) X(cudaErrorDuplicateTextureName, 44)                               \
    X(cudaErrorDuplicateSurfaceName, 45) X(cudaErrorDevicesUnavailable, 46)                                  \
    X(cudaErrorIncompatibleDriverContext, 49) X(cudaErrorMissingConfiguration, 52)                           \
    X(cudaErrorPriorLaunchFailure, 53) X(cudaErrorLaunchMaxDepthExceeded, 65)                                \
    X(cudaErrorLaunchFileScopedTex, 66) X(cudaErrorLaunchFileScopedSurf, 67)                                 \
    X(cudaErrorSyncDepthExceeded, 68) X(cudaErrorLaunchPendingCountExceeded, 69)                             \
    X(cudaErrorInvalidDeviceFunction, 98) X(cudaErrorNoDevice, 100) X(cudaErrorInvalidDevice, 101)           \
    X(cudaErrorDeviceNotLicensed, 102) X(cudaErrorSoftwareValidityNotEstablished, 103)                       \
    X(cudaErrorStartupFailure, 127) X(cudaErrorInvalidKernelImage, 200) X(cudaErrorDeviceUninitialized, 201) \
    X(cudaErrorMapBufferObjectFailed, 205) X(cudaErrorUnmapBufferObjectFailed, 206)                          \
    X(cudaErrorArrayIsMapped, 207) X(cudaErrorAlreadyMapped, 208) X(cudaErrorNoKernelImageForDevice, 209)    \
    X(cudaErrorAlreadyAcquired, 210) X(cudaErrorNotMapped, 211) X(cudaErrorNotMappedAsArray, 212)            \
    X(cudaErrorNotMappedAsPointer, 213) X(cudaErrorECCUncorrectable, 214) X(cudaErrorUnsupportedLimit, 215)  \
    X(cudaErrorDeviceAlreadyInUse, 216) X(cudaErrorPeerAccessUnsupported, 217) X(cudaErrorInvalidPtx, 218)   \
    X(cudaErrorInvalidGraphicsContext, 219) X(cudaErrorNvlinkUncorrectable, 220)                             \
    X(cudaErrorJitCompilerNotFound, 221) X(cudaErrorUnsupportedPtxVersion, 222)                              \
    X(cudaErrorJitCompilationDisabled, 223) X(cudaErrorUnsupportedExecAffinity, 224)                         \
    X(cudaErrorUnsupportedDevSideSync, 225) X(cudaErrorContained, 226) X(cudaErrorInvalidSource, 300)        \
    X(cudaErrorFileNotFound, 301) X(cudaErrorSharedObjectSymbolNotFound, 302)                                \
    X(cudaErrorSharedObjectInitFailed, 303) X(cudaErrorOperatingSystem, 304)                                 \
    X(cudaErrorInvalidResourceHandle, 400) X(cudaErrorIllegalState, 401) X(cudaErrorLossyQuery, 402)         \
    X(cudaErrorSymbolNotFound, 500) X(cudaErrorNotReady, 600) X(cudaErrorIllegalAddress, 700)                \
    X(cudaErrorLaunchOutOfResources, 701) X(cudaErrorLaunchTimeout, 702)                                     \
    X(cudaErrorLaunchIncompatibleTexturing, 703) X(cudaErrorPeerAccessAlreadyEnabled, 704)                   \
    X(cudaErrorPeerAccessNotEnabled, 705) X(cudaErrorSetOnActiveProcess, 708)                                \
    X(cudaErrorContextIsDestroyed, 709) X(cudaErrorAssert, 710) X(cudaErrorTooManyPeers, 711)                \
    X(cudaErrorHostMemoryAlreadyRegistered, 712) X(cudaErrorHostMemoryNotRegistered, 713)                    \
    X(cudaErrorHardwareStackError, 714) X(cudaErrorIllegalInstruction, 715)                                  \
    X(cudaErrorMisalignedAddress, 716) X(cudaErrorInvalidAddressSpace, 717) X(cudaErrorInvalidPc, 718)       \
    X(cudaErrorLaunchFailure, 719) X(cudaErrorCooperativeLaunchTooLarge, 720)                                \
    X(cudaErrorTensorMemoryLeak, 721) X(cudaErrorNotPermitted, 800) X(cudaErrorNotSupported, 801)            \
    X(cudaErrorSystemNotReady, 802) X(cudaErrorSystemDriverMismatch, 803)                                    \
    X(cudaErrorCompatNotSupportedOnDevice, 804) X(cudaErrorMpsConnectionFailed, 805)                         \
    X(cudaErrorMpsRpcFailure, 806) X(cudaErrorMpsServerNotReady, 807) X(cudaErrorMpsMaxClientsReached, 808)  \
    X(cudaErrorMpsMaxConnectionsReached, 809) X(cudaErrorMpsClientTerminated, 810)                           \
    X(cudaErrorCdpNotSupported, 811) X(cudaErrorCdpVersionMismatch, 812)                                     \
    X(cudaErrorStreamCaptureUnsupported, 900) X(cudaErrorStreamCaptureInvalidated, 901)                      \
    X(cudaErrorStreamCaptureMerge, 902) X(cudaErrorStreamCaptureUnmatched, 903)                              \
    X(cudaErrorStreamCaptureUnjoined, 904) X(cudaErrorStreamCaptureIsolation, 905)                           \
    X(cudaErrorStreamCaptureImplicit, 906) X(cudaErrorCapturedEvent, 907)                                    \
    X(cudaErrorStreamCaptureWrongThread, 908) X(cudaErrorTimeout, 909)                                       \
    X(cudaErrorGraphExecUpdateFailure, 910) X(cudaErrorExternalDevice, 911)                                  \
    X(cudaErrorInvalidClusterSize, 912) X(cudaErrorFunctionNotLoaded, 913)                                   \
    X(cudaErrorInvalidResourceType, 914) X(cudaErrorInvalidResourceConfiguration, 915)                       \
    X(cudaErrorUnknown, 999)
/* clang-format on */

#ifdef SIM_NVIDIA_HEADERS
#include <cuda_runtime_api.h>
#else

enum cudaError {
#define CUDA_ERROR_ENUMERATOR(name, value) name = value,
    CUDA_ERRORS(CUDA_ERROR_ENUMERATOR)
#undef CUDA_ERROR_ENUMERATOR
};
typedef enum cudaError cudaError_t;

/* ---- handles: the driver's, under other names -------------------------------------------------------- */
typedef CUstream cudaStream_t;
typedef CUevent cudaEvent_t;
typedef CUgraph cudaGraph_t;
typedef CUgraphNode cudaGraphNode_t;
typedef CUgraphExec cudaGraphExec_t;
typedef CUmemoryPool cudaMemPool_t;
typedef CUkernel cudaKernel_t;
typedef CUlibrary cudaLibrary_t;
typedef CUfunction cudaFunction_t;
typedef CUuuid cudaUUID_t;
typedef CUhostFn cudaHostFn_t;
typedef void (*cudaStreamCallback_t)(cudaStream_t stream, cudaError_t status, void *user_data);

#define cudaStreamLegacy    ((cudaStream_t)0x1)
#define cudaStreamPerThread ((cudaStream_t)0x2)

typedef struct uint3 {
    unsigned int x, y, z;
} uint3;
typedef struct dim3 {
    unsigned int x, y, z;
} dim3;

/* ---- devices ------------------------------------------------------------------------------------------ */
enum cudaDeviceAttr { cudaDevAttrMaxThreadsPerBlock = 1 }; /* numbered as CUdevice_attribute */

/* ---- memory ------------------------------------------------------------------------------------------- */
enum cudaMemcpyKind {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4
};

enum cudaMemoryType {
    cudaMemoryTypeUnregistered = 0,
    cudaMemoryTypeHost = 1,
    cudaMemoryTypeDevice = 2,
    cudaMemoryTypeManaged = 3
};

enum cudaMemPoolAttr {
    cudaMemPoolReuseFollowEventDependencies = 1,
    cudaMemPoolReuseAllowOpportunistic = 2,
    cudaMemPoolReuseAllowInternalDependencies = 3,
    cudaMemPoolAttrReleaseThreshold = 4,
    cudaMemPoolAttrReservedMemCurrent = 5,
    cudaMemPoolAttrReservedMemHigh = 6,
    cudaMemPoolAttrUsedMemCurrent = 7,
    cudaMemPoolAttrUsedMemHigh = 8
};

enum cudaMemLocationType { cudaMemLocationTypeInvalid = 0, cudaMemLocationTypeDevice = 1 };
enum cudaMemAccessFlags {
    cudaMemAccessFlagsProtNone = 0,
    cudaMemAccessFlagsProtRead = 1,
    cudaMemAccessFlagsProtReadWrite = 3
};

struct cudaMemLocation {
    enum cudaMemLocationType type;
    int id;
};

struct cudaMemAccessDesc {
    struct cudaMemLocation location;
    enum cudaMemAccessFlags flags;
};

#define cudaHostAllocPortable      0x01
#define cudaHostAllocMapped        0x02
#define cudaHostAllocWriteCombined 0x04

/* ---- streams and graphs ------------------------------------------------------------------------------- */
enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone = 0,
    cudaStreamCaptureStatusActive = 1,
    cudaStreamCaptureStatusInvalidated = 2
};

enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal = 0,
    cudaStreamCaptureModeThreadLocal = 1,
    cudaStreamCaptureModeRelaxed = 2
};

typedef CUgraphEdgeData cudaGraphEdgeData;

enum cudaDriverEntryPointQueryResult {
    cudaDriverEntryPointSuccess = 0,
    cudaDriverEntryPointSymbolNotFound = 1,
    cudaDriverEntryPointVersionNotSufficent = 2
};

/* ---- kernels ------------------------------------------------------------------------------------------ */
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9,
    cudaFuncAttributeClusterDimMustBeSet = 10,
    cudaFuncAttributeRequiredClusterWidth = 11,
    cudaFuncAttributeRequiredClusterHeight = 12,
    cudaFuncAttributeRequiredClusterDepth = 13,
    cudaFuncAttributeNonPortableClusterSizeAllowed = 14,
    cudaFuncAttributeClusterSchedulingPolicyPreference = 15
};

struct cudaFuncAttributes {
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA;
    int maxDynamicSharedSizeBytes, preferredShmemCarveout;
    int clusterDimMustBeSet, requiredClusterWidth, requiredClusterHeight, requiredClusterDepth;
    int clusterSchedulingPolicyPreference, nonPortableClusterSizeAllowed;
    int reserved[16];
};

typedef enum cudaLaunchAttributeID {
    cudaLaunchAttributeIgnore = 0,
    cudaLaunchAttributeCooperative = 2
} cudaLaunchAttributeID;

typedef struct cudaLaunchAttribute_st {
    cudaLaunchAttributeID id;
    char pad[8 - sizeof(cudaLaunchAttributeID)];
    CUlaunchAttributeValue val;
} cudaLaunchAttribute;

typedef struct cudaLaunchConfig_st {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned int numAttrs;
} cudaLaunchConfig_t;

enum cudaJitOption { cudaJitMaxRegisters = 0 };
enum cudaLibraryOption { cudaLibraryBinaryIsPreserved = 1 };

#if SIM_CUDA_MAJOR == 12
#include "cudart_types_12.h"
#elif SIM_CUDA_MAJOR == 13
#include "cudart_types_13.h"
#else
#error "build with -DSIM_CUDA_MAJOR=12 or 13"
#endif

#endif
#endif
