/* libnvidia-ml.so.1: what PyTorch asks when it reports out of memory, and a little of what monitors ask.
 *
 * No header of NVIDIA's runtime wheels declares NVML; signatures and numbers are those of its reference
 * manual. The functions share the lock, the counts and the fault plan of calls.h; nvmlReturn_t is an int
 * here. */
#include "calls.h"
#include "context.h"
#include "device.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9
};

typedef const char *nvml_device; /* address of an entry of `devices`, never followed */

typedef struct process_v1 {
    unsigned pid;
    unsigned long long used;
} process_v1;

typedef struct process_v2 {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} process_v2;

typedef struct memory_v1 {
    unsigned long long total, free, used;
} memory_v1;

typedef struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
} memory_v2;

static const char devices[SIM_MAX_DEVICES];
static unsigned initialised; /* nvmlInit minus nvmlShutdown */

#define SIM_NVML(name, parameters, arguments)                                                                \
    int name parameters;                                                                                     \
    SIM_CALL(name)                                                                                           \
    static int name##_body parameters;                                                                       \
    int name parameters                                                                                      \
    {                                                                                                        \
        int result = (int)sim_driver_enter(&name##_call, SIM_ANYTIME);                                       \
        if (result == NVML_SUCCESS) {                                                                        \
            result = name##_body arguments;                                                                  \
            sim_leave();                                                                                     \
        }                                                                                                    \
        return result;                                                                                       \
    }                                                                                                        \
    static int name##_body parameters

static int index_of(nvml_device device)
{
    uintptr_t at = (uintptr_t)device - (uintptr_t)devices;

    return initialised && at < (uintptr_t)sim_device_count ? (int)at : -1;
}

static int not_a_device(void)
{
    return initialised ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_UNINITIALIZED;
}

static int init(void)
{
    if (!sim_activated())
        return NVML_ERROR_DRIVER_NOT_LOADED;
    initialised++;
    return NVML_SUCCESS;
}

SIM_NVML(nvmlInit, (void), ())
{
    return init();
}

SIM_NVML(nvmlInit_v2, (void), ())
{
    return init();
}

SIM_NVML(nvmlInitWithFlags, (unsigned flags), (flags))
{
    (void)flags;
    return init();
}

SIM_NVML(nvmlShutdown, (void), ())
{
    if (!initialised)
        return NVML_ERROR_UNINITIALIZED;
    initialised--;
    return NVML_SUCCESS;
}

const char *nvmlErrorString(int code);
const char *nvmlErrorString(int code)
{
    switch (code) {
    case NVML_SUCCESS:
        return "The operation was successful";
    case NVML_ERROR_UNINITIALIZED:
        return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT:
        return "Invalid Argument";
    case 3:
        return "Not Supported";
    case NVML_ERROR_NOT_FOUND:
        return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE:
        return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED:
        return "Driver Not Loaded";
    default:
        return "Unknown Error";
    }
}

SIM_NVML(nvmlSystemGetCudaDriverVersion_v2, (int *out), (out))
{
    if (!out || !initialised)
        return not_a_device();
    *out = SIM_DRIVER_VERSION;
    return NVML_SUCCESS;
}

SIM_NVML(nvmlDeviceGetCount_v2, (unsigned *out), (out))
{
    if (!out || !initialised)
        return not_a_device();
    *out = (unsigned)sim_device_count;
    return NVML_SUCCESS;
}

/* ---- devices ------------------------------------------------------------------------------------------ */
static int handle(int device, nvml_device *out)
{
    if (!initialised || !out)
        return not_a_device();
    if (!sim_device_exists(device))
        return NVML_ERROR_NOT_FOUND;
    *out = &devices[device];
    return NVML_SUCCESS;
}

SIM_NVML(nvmlDeviceGetHandleByIndex_v2, (unsigned ordinal, nvml_device *out), (ordinal, out))
{
    if (ordinal >= (unsigned)sim_device_count)
        return not_a_device();
    return handle((int)ordinal, out);
}

/* As cudaDeviceGetPCIBusId writes it: bus number is the ordinal plus one. */
SIM_NVML(nvmlDeviceGetHandleByPciBusId_v2, (const char *bus_id, nvml_device *out), (bus_id, out))
{
    unsigned domain, bus;

    if (!bus_id || sscanf(bus_id, "%x:%x:", &domain, &bus) != 2)
        return not_a_device();
    return handle(domain == 0 && bus > 0 && bus <= SIM_MAX_DEVICES ? (int)bus - 1 : -1, out);
}

static void write_uuid(int device, char *out, size_t capacity)
{
    unsigned char id[16];

    sim_device_uuid(device, (char *)id);
    int at = snprintf(out, capacity, "GPU-");
    for (int i = 0; i < 16; i++)
        at += snprintf(out + at, capacity - (size_t)at, "%s%02x",
                       i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", id[i]);
}

enum { UUID_SIZE = 4 + 36 + 1 };

SIM_NVML(nvmlDeviceGetUUID, (nvml_device device, char *out, unsigned capacity), (device, out, capacity))
{
    int ordinal = index_of(device);

    if (ordinal < 0 || !out)
        return not_a_device();
    if (capacity < UUID_SIZE)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    write_uuid(ordinal, out, capacity);
    return NVML_SUCCESS;
}

SIM_NVML(nvmlDeviceGetHandleByUUID, (const char *uuid, nvml_device *out), (uuid, out))
{
    char known[UUID_SIZE];

    if (!uuid)
        return not_a_device();
    for (int device = 0; device < sim_device_count; device++) {
        write_uuid(device, known, sizeof known);
        if (strcmp(known, uuid) == 0)
            return handle(device, out);
    }
    return handle(-1, out);
}

SIM_NVML(nvmlDeviceGetIndex, (nvml_device device, unsigned *out), (device, out))
{
    int ordinal = index_of(device);

    if (ordinal < 0 || !out)
        return not_a_device();
    *out = (unsigned)ordinal;
    return NVML_SUCCESS;
}

SIM_NVML(nvmlDeviceGetName, (nvml_device device, char *out, unsigned capacity), (device, out, capacity))
{
    if (index_of(device) < 0 || !out)
        return not_a_device();
    if (capacity < sizeof SIM_DEVICE_NAME)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    memcpy(out, SIM_DEVICE_NAME, sizeof SIM_DEVICE_NAME);
    return NVML_SUCCESS;
}

/* ---- memory ------------------------------------------------------------------------------------------- */
static memory_v1 memory_of(int device)
{
    const sim_store *store = &sim_devices[device].store;
    memory_v1 memory = {.total = store->limit * SIM_FRAME, .used = store->used * SIM_FRAME};

    memory.free = memory.total > memory.used ? memory.total - memory.used : 0;
    return memory;
}

SIM_NVML(nvmlDeviceGetMemoryInfo, (nvml_device device, memory_v1 *out), (device, out))
{
    int ordinal = index_of(device);

    if (ordinal < 0 || !out)
        return not_a_device();
    *out = memory_of(ordinal);
    return NVML_SUCCESS;
}

SIM_NVML(nvmlDeviceGetMemoryInfo_v2, (nvml_device device, memory_v2 *out), (device, out))
{
    int ordinal = index_of(device);

    if (ordinal < 0 || !out)
        return not_a_device();
    memory_v1 memory = memory_of(ordinal);
    *out =
        (memory_v2){.version = out->version, .total = memory.total, .free = memory.free, .used = memory.used};
    return NVML_SUCCESS;
}

/* One process uses the device: this one. *count is the room in the array, then the number of processes. */
static int processes(nvml_device device, unsigned *count, process_v2 *out)
{
    int ordinal = index_of(device);

    if (ordinal < 0 || !count)
        return not_a_device();
    *out = (process_v2){.pid = (unsigned)getpid(),
                        .used = memory_of(ordinal).used,
                        .gpu_instance = ~0u,
                        .compute_instance = ~0u};
    unsigned room = *count;
    *count = 1;
    return room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

SIM_NVML(nvmlDeviceGetComputeRunningProcesses, (nvml_device device, unsigned *count, process_v1 *out),
         (device, count, out))
{
    process_v2 self;
    int result = processes(device, count, &self);

    if (result == NVML_SUCCESS && out)
        *out = (process_v1){.pid = self.pid, .used = self.used};
    return result;
}

SIM_NVML(nvmlDeviceGetComputeRunningProcesses_v3, (nvml_device device, unsigned *count, process_v2 *out),
         (device, count, out))
{
    process_v2 self;
    int result = processes(device, count, &self);

    if (result == NVML_SUCCESS && out)
        *out = self;
    return result;
}

/* The caller's structure, zeroed but for its version, already says "no fabric". PyTorch's expandable segments
 * need this to succeed. */
SIM_NVML(nvmlDeviceGetGpuFabricInfoV, (nvml_device device, void *info), (device, info))
{
    return index_of(device) < 0 || !info ? not_a_device() : NVML_SUCCESS;
}
