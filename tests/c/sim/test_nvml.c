/* NVML: what it says agrees with the device, and the structures are written no further than their version is
 * long. */
#include "device.h"

typedef const char *nvml_device;
int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlDeviceGetCount_v2(unsigned *out);
int nvmlDeviceGetHandleByIndex_v2(unsigned ordinal, nvml_device *out);
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvml_device *out);
int nvmlDeviceGetHandleByUUID(const char *uuid, nvml_device *out);
int nvmlDeviceGetUUID(nvml_device device, char *out, unsigned capacity);
int nvmlDeviceGetMemoryInfo(nvml_device device, unsigned long long out[3]);
int nvmlDeviceGetComputeRunningProcesses(nvml_device device, unsigned *count, void *out);
int nvmlDeviceGetComputeRunningProcesses_v3(nvml_device device, unsigned *count, void *out);

TEST(nvml_needs_init)
{
    open_device();
    unsigned count;

    CHECK_EQ(nvmlDeviceGetCount_v2(&count), 1);
    CHECK_EQ(nvmlShutdown(), 1);
    CHECK_EQ(nvmlInit_v2(), 0);
    CHECK_EQ(nvmlDeviceGetCount_v2(&count), 0);
    CHECK_EQ(count, 2);
    CHECK_EQ(nvmlDeviceGetCount_v2(NULL), 2);
    CHECK_EQ(nvmlShutdown(), 0);
}

TEST(devices_are_found_by_index_bus_and_uuid)
{
    open_device();
    nvml_device by_index, by_bus, by_uuid;
    char uuid[64], bus[32];

    CHECK_EQ(nvmlInit_v2(), 0);
    OK(cuDeviceGetPCIBusId(bus, sizeof bus, 1));
    CHECK_EQ(nvmlDeviceGetHandleByIndex_v2(1, &by_index), 0);
    CHECK_EQ(nvmlDeviceGetHandleByPciBusId_v2(bus, &by_bus), 0);
    CHECK_EQ(nvmlDeviceGetUUID(by_index, uuid, sizeof uuid), 0);
    CHECK_EQ(nvmlDeviceGetHandleByUUID(uuid, &by_uuid), 0);
    CHECK(by_index == by_bus && by_index == by_uuid);
    CHECK_EQ(nvmlDeviceGetUUID(by_index, uuid, 8), 7);
    CHECK_EQ(nvmlDeviceGetHandleByIndex_v2(2, &by_index), 2);
    CHECK_EQ(nvmlDeviceGetHandleByPciBusId_v2("0000:09:00.0", &by_bus), 6);
    CHECK_EQ(nvmlDeviceGetUUID("a string", uuid, sizeof uuid), 2); /* no handle */
    CHECK_EQ(nvmlShutdown(), 0);
}

TEST(memory_and_processes_are_the_devices)
{
    open_device();
    nvml_device device;
    CUdeviceptr block;
    unsigned long long memory[3];
    unsigned count = 1, process[8];

    CHECK_EQ(nvmlInit_v2(), 0);
    CHECK_EQ(nvmlDeviceGetHandleByIndex_v2(0, &device), 0);
    OK(cuMemAlloc_v2(&block, 4 * MIB));
    CHECK_EQ(nvmlDeviceGetMemoryInfo(device, memory), 0);
    CHECK(memory[0] == 64 * MIB && memory[1] == 60 * MIB && memory[2] == 4 * MIB);
    memset(process, 0x55, sizeof process);
    CHECK_EQ(nvmlDeviceGetComputeRunningProcesses(device, &count, process), 0);
    CHECK(count == 1 && process[0] == (unsigned)getpid() && process[2] == 4 * MIB &&
          process[4] == 0x55555555);
    CHECK_EQ(nvmlDeviceGetComputeRunningProcesses_v3(device, &count, process), 0);
    CHECK(process[4] == ~0u && process[6] == 0x55555555);
    count = 0;
    CHECK_EQ(nvmlDeviceGetComputeRunningProcesses(device, &count, NULL), 7);
    CHECK_EQ(count, 1);
    OK(cuMemFree_v2(block));
    CHECK_EQ(simcuda_fail("nvmlInit_v2", 0, 1, 9), 0);
    CHECK_EQ(nvmlInit_v2(), 9);
    CHECK_EQ(nvmlShutdown(), 0);
}

TEST_MAIN
