/* The simulated device under test: activated once a binary, its context current, and a leak check. */
#ifndef TEST_SIM_DEVICE_H
#define TEST_SIM_DEVICE_H

#include "../test.h"

#include "simcuda/control.h"
#include "simcuda/cudart_api.h"
#include "simcuda/driver_api.h"

#include <pthread.h>
#include <unistd.h>

#define MIB   ((size_t)1 << 20)
#define FRAME (2 * MIB)

/* Every test begins with it: healthy, eager, no fault plan, context of device 0 current. */
__attribute__((unused)) static void open_device_with(const char *settings)
{
    static bool open;
    CUcontext context;

    if (!open) {
        const char *error = simcuda_activate(settings);
        if (error)
            TEST_FAIL("activation: %s", error);
        open = true;
    }
    simcuda_set_lazy(0);
    simcuda_fail_clear();
    simcuda_forget_fault();
    CHECK_EQ(cuInit(0), CUDA_SUCCESS);
    CHECK_EQ(cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
    CHECK_EQ(cuCtxSetCurrent(context), CUDA_SUCCESS);
    CHECK_EQ(cuDevicePrimaryCtxRelease_v2(0), CUDA_SUCCESS);
}

__attribute__((unused)) static void open_device(void)
{
    open_device_with("memory=67108864 devices=2"); /* 64 MiB: 32 frames */
}

__attribute__((unused)) static simcuda_live live_now(void)
{
    simcuda_counts counts;

    CHECK_EQ(simcuda_stats(0, &counts), 0);
    return counts.live;
}

/* Nothing more and nothing less is held on device 0, or by the process, than `before`. */
#define CHECK_LIVE(before)                                                                                   \
    do {                                                                                                     \
        simcuda_live before_ = (before), after_ = live_now();                                                \
        for (size_t i_ = 0; i_ < sizeof before_ / sizeof(uint64_t); i_++)                                    \
            if (((uint64_t *)&before_)[i_] != ((uint64_t *)&after_)[i_])                                     \
                TEST_FAIL("field %zu of simcuda_live is %" PRIu64 ", was %" PRIu64, i_,                      \
                          ((uint64_t *)&after_)[i_], ((uint64_t *)&before_)[i_]);                            \
    } while (0)

#define OK(call)        CHECK_EQ(call, CUDA_SUCCESS)
#define IS(call, error) CHECK_EQ(call, CUDA_ERROR_##error)

__attribute__((unused)) static simcuda_counts counts_now(int device)
{
    simcuda_counts counts;

    CHECK_EQ(simcuda_stats(device, &counts), 0);
    return counts;
}

/* May this process touch the byte directly? Asked of the kernel, so that no sanitizer has to survive a fault. */
__attribute__((unused)) static bool touchable(const void *address, bool to_write)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    uintptr_t start, end, at = (uintptr_t)address;
    char line[512], rights[5];
    bool allowed = false;

    if (!maps)
        TEST_FAIL("no /proc/self/maps");
    while (fgets(line, sizeof line, maps))
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s", &start, &end, rights) == 3 && at >= start &&
            at < end)
            allowed = rights[to_write ? 1 : 0] != '-';
    fclose(maps);
    return allowed;
}

#endif
