/* Initialisation, devices, errors. */
#include "device.h"
#include "driver_api.h"

#include <stdio.h>
#include <string.h>

SIM_DRIVER(SIM_ANYTIME, cuInit, (unsigned flags), (flags))
{
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (sim_forked())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!sim_activated())
        return CUDA_ERROR_NO_DEVICE;
    sim_initialised = true;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_ANYTIME, cuDriverGetVersion, (int *out), (out))
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = SIM_DRIVER_VERSION;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuDeviceGetCount, (int *out), (out))
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = sim_device_count;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuDeviceGet, (CUdevice * out, int ordinal), (out, ordinal))
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_exists(ordinal))
        return CUDA_ERROR_INVALID_DEVICE;
    *out = ordinal;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuDeviceGetName, (char *out, int capacity, CUdevice device),
           (out, capacity, device))
{
    if (!out || capacity <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_exists(device))
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(out, (size_t)capacity, "%s", SIM_DEVICE_NAME);
    return CUDA_SUCCESS;
}

void sim_device_uuid(int device, char out[16])
{
    memset(out, 0, 16);
    memcpy(out, "simulated", 9);
    out[15] = (char)device;
}

static CUresult uuid(CUuuid *out, CUdevice device)
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_exists(device))
        return CUDA_ERROR_INVALID_DEVICE;
    sim_device_uuid(device, out->bytes);
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuDeviceGetUuid, (CUuuid * out, CUdevice device), (out, device))
{
    return uuid(out, device);
}

SIM_DRIVER(SIM_INITIALISED, cuDeviceGetUuid_v2, (CUuuid * out, CUdevice device), (out, device))
{
    return uuid(out, device);
}

SIM_DRIVER(SIM_INITIALISED, cuDeviceTotalMem_v2, (size_t * out, CUdevice device), (out, device))
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_exists(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *out = sim_devices[device].store.limit * SIM_FRAME;
    return CUDA_SUCCESS;
}

/* Shared memory grew with the generations (CUDA C++ Programming Guide, technical specifications a compute
 * capability); in KiB, of a multiprocessor. A block gets 1 KiB less from 8.0 on. */
static int shared_kib(void)
{
    switch (sim_cc) {
    case 70:
    case 72:
        return 96;
    case 75:
        return 64;
    case 80:
    case 87:
        return 164;
    case 86:
    case 89:
    case 120:
    case 121:
        return 100;
    default:
        return sim_cc < 70 ? 96 : 228;
    }
}

CUresult sim_device_attribute(int *out, int attribute, int device)
{
    int shared = shared_kib() * 1024;

    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_exists(device))
        return CUDA_ERROR_INVALID_DEVICE;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
        *out = 1024;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
        *out = 64;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH:
        *out = 2147483647;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
        *out = 65535;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
        *out = 49152;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        *out = sim_cc >= 80 ? shared - 1024 : shared;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
        *out = shared;
        break;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK:
        *out = sim_cc >= 80 ? 1024 : 0;
        break;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
        *out = 65536;
        break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
        *out = 32;
        break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
        *out = 1410000;
        break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
        *out = 1215000;
        break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
        *out = 5120;
        break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
        *out = 40 << 20;
        break;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT:
        *out = 512;
        break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *out = sim_sms;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
        *out = sim_cc == 75                                                    ? 1024
               : sim_cc == 86 || sim_cc == 87 || sim_cc == 89 || sim_cc >= 120 ? 1536
                                                                               : 2048;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
        *out = sim_cc == 75 || sim_cc == 86 || sim_cc == 87 ? 16 : sim_cc == 89 ? 24 : 32;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *out = sim_cc / 10;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *out = sim_cc % 10;
        break;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
        *out = 2;
        break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
        *out = device + 1;
        break;
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH:
        *out = sim_cc >= 90;
        break;
    case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
        *out = 1;
        break;
    default: /* not supported: managed memory, sharing between processes, multicast, textures, … */
        *out = 0;
    }
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuDeviceGetAttribute, (int *out, CUdevice_attribute attribute, CUdevice device),
           (out, attribute, device))
{
    return sim_device_attribute(out, (int)attribute, device);
}

SIM_DRIVER(SIM_INITIALISED, cuDeviceCanAccessPeer, (int *out, CUdevice device, CUdevice peer),
           (out, device, peer))
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_exists(device) || !sim_device_exists(peer))
        return CUDA_ERROR_INVALID_DEVICE;
    *out = device != peer;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuDeviceGetP2PAttribute,
           (int *out, CUdevice_P2PAttribute attribute, CUdevice device, CUdevice peer),
           (out, attribute, device, peer))
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_exists(device) || !sim_device_exists(peer) || device == peer)
        return CUDA_ERROR_INVALID_DEVICE;
    *out = attribute == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuDeviceGetPCIBusId, (char *out, int capacity, CUdevice device),
           (out, capacity, device))
{
    if (!out || capacity <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_exists(device))
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(out, (size_t)capacity, "0000:%02x:00.0", device + 1);
    return CUDA_SUCCESS;
}

/* ---- errors ------------------------------------------------------------------------------------------- */
const char *sim_error_name(int code)
{
    switch (code) {
#define NAME(name, value)                                                                                    \
    case value:                                                                                              \
        return #name;
        CU_RESULTS(NAME)
#undef NAME
    default:
        return NULL;
    }
}

/* Our own words, close to CUDA's: callers match on the ones that are widely matched on. */
const char *sim_error_text(int code)
{
    switch (code) {
    case CUDA_SUCCESS:
        return "no error";
    case CUDA_ERROR_INVALID_VALUE:
        return "invalid argument";
    case CUDA_ERROR_OUT_OF_MEMORY:
        return "out of memory";
    case CUDA_ERROR_NOT_INITIALIZED:
        return "initialization error";
    case CUDA_ERROR_NO_DEVICE:
        return "no CUDA-capable device is detected";
    case CUDA_ERROR_INVALID_DEVICE:
        return "invalid device ordinal";
    case CUDA_ERROR_INVALID_IMAGE:
        return "device kernel image is invalid";
    case CUDA_ERROR_INVALID_CONTEXT:
        return "invalid device context";
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
        return "no kernel image is available for execution on the device";
    case CUDA_ERROR_INVALID_PTX:
        return "a PTX JIT compilation failed";
    case CUDA_ERROR_FILE_NOT_FOUND:
        return "file not found";
    case CUDA_ERROR_INVALID_HANDLE:
        return "invalid resource handle";
    case CUDA_ERROR_NOT_FOUND:
        return "named symbol not found";
    case CUDA_ERROR_NOT_READY:
        return "device not ready";
    case CUDA_ERROR_ILLEGAL_ADDRESS:
        return "an illegal memory access was encountered";
    case CUDA_ERROR_LAUNCH_FAILED:
        return "unspecified launch failure";
    case CUDA_ERROR_MISALIGNED_ADDRESS:
        return "misaligned address";
    case CUDA_ERROR_OPERATING_SYSTEM:
        return "OS call failed or operation not supported on this OS";
    case CUDA_ERROR_ILLEGAL_STATE:
        return "the operation cannot be performed in the present state";
    case CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
        return "peer access is already enabled";
    case CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES:
        return "too many resources requested for launch";
    case CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE:
        return "too many blocks in cooperative launch";
    case CUDA_ERROR_NOT_PERMITTED:
        return "operation not permitted";
    case CUDA_ERROR_NOT_SUPPORTED:
        return "operation not supported";
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
        return "operation not permitted when stream is capturing";
    case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED:
        return "operation failed due to a previous error during capture";
    case CUDA_ERROR_STREAM_CAPTURE_ISOLATION:
        return "dependency created on uncaptured work in another stream";
    case CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
        return "operation would make the legacy stream depend on a capturing blocking stream";
    case CUDA_ERROR_STREAM_CAPTURE_UNJOINED:
        return "capturing stream has unjoined work";
    case CUDA_ERROR_CAPTURED_EVENT:
        return "operation not permitted on an event last recorded in a capturing stream";
    case CUDA_ERROR_UNKNOWN:
        return "unknown error";
    default:
        return NULL;
    }
}

SIM_DRIVER(SIM_ANYTIME, cuGetErrorName, (CUresult code, const char **out), (code, out))
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = sim_error_name((int)code);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

SIM_DRIVER(SIM_ANYTIME, cuGetErrorString, (CUresult code, const char **out), (code, out))
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = sim_error_text((int)code);
    if (!*out)
        *out = sim_error_name((int)code);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
