/* The simulated device as one that kernels are launched on: those that the made-up NVRTC makes, whether this build has
 * compiled ones or not. */
#ifndef MEMOPT_SIMULATED_KERNELS_H
#define MEMOPT_SIMULATED_KERNELS_H

#include "driver/launch.h"
#include "fake_nvrtc.h"
#include "simulated_contract.h"

static CUstream stream;

/* Finishes what is queued. Returns whether it is the first call, which opens the device. */
static bool start_kernels(void)
{
    static const mo_kernel_settings settings = {
        .no_image = true, .nvrtc_paths = {FAKE_NVRTC_PATH}, .nvrtc_path_count = 1};
    const bool first_call = !stream;

    if (first_call) {
        stream = contract()->stream;
        nvrtc_reset();
        nvrtc.image = NVRTC_KERNELS;
        CHECK_EQ(mo_kernels_configure(&settings, NULL), MO_OK);
    }
    finish(stream);
    return first_call;
}

/* Memory of the device, which is the host's too. */
__attribute__((unused)) static void *device_memory(size_t size)
{
    CUdeviceptr block = 0;
    IN_CONTEXT(simulated_devices()->api.memory_alloc(&block, size));
    return (void *)(uintptr_t)block;
}

#endif
