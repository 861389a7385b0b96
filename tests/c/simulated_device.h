/* The simulated CUDA device's driver library in a C test: opened by path, activated once, its control
 * interface looked up. MEMOPT_TEST_LIBCUDA names another one. */
#ifndef MEMOPT_SIMULATED_DEVICE_H
#define MEMOPT_SIMULATED_DEVICE_H

#include <dlfcn.h>

#include "driver/cuda_api.h"
#include "simcuda/control.h"
#include "test.h"

typedef struct simulated_device {
    void *library;
    const char *(*activate)(const char *);
    int (*stats)(int, simcuda_counts *);
    uint64_t (*calls)(const char *);
    int (*fail)(const char *, uint64_t, uint64_t, int);
    void (*fail_clear)(void);
    int (*progress)(void *, int);
    mo_cuda_api api;
    /* What a program that uses streams calls, and memopt does not. */
    CUresult (*stream_create)(CUstream *, unsigned);
    CUresult (*host_function)(CUstream, void (*)(void *), void *);
    CUresult (*begin_capture)(CUstream, CUstreamCaptureMode);
    CUresult (*end_capture)(CUstream, CUgraph *);
    CUresult (*graph_destroy)(CUgraph);
    CUresult (*set_current)(CUcontext);
    CUresult (*primary_state)(CUdevice, unsigned *, int *);
} simulated_device;

static void *simulated_symbol(void *library, const char *name)
{
    void *found = dlsym(library, name);
    if (!found)
        TEST_FAIL("the simulated driver has no %s", name);
    return found;
}

/* The library, loaded and not activated: a machine without a GPU. It answers to the name libcuda.so.1 from
 * now on. */
static simulated_device *simulated_library(void)
{
    static simulated_device d;
    const char *given = getenv("MEMOPT_TEST_LIBCUDA");
    const char *path = given && *given ? given : "memopt/sim/cu13/sim_cuda.so";
    mo_detail detail;

    if (d.library)
        return &d;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        TEST_FAIL("%s: `make` builds the simulated device, and tests start in the repository's root",
                  dlerror());
#define SYMBOL(field, name) *(void **)&d.field = simulated_symbol(library, name)
    SYMBOL(activate, "simcuda_activate");
    SYMBOL(stats, "simcuda_stats");
    SYMBOL(calls, "simcuda_calls");
    SYMBOL(fail, "simcuda_fail");
    SYMBOL(fail_clear, "simcuda_fail_clear");
    SYMBOL(progress, "simcuda_progress");
    SYMBOL(stream_create, "cuStreamCreate");
    SYMBOL(host_function, "cuLaunchHostFunc");
    SYMBOL(begin_capture, "cuStreamBeginCapture_v2");
    SYMBOL(end_capture, "cuStreamEndCapture");
    SYMBOL(graph_destroy, "cuGraphDestroy");
    SYMBOL(set_current, "cuCtxSetCurrent");
    SYMBOL(primary_state, "cuDevicePrimaryCtxGetState");
#undef SYMBOL
    if (mo_cuda_api_open(path, &d.api, &detail) != MO_OK)
        TEST_FAIL("%s", detail.text);
    d.library = library;
    return &d;
}

/* Two devices of 64 MiB whose work waits until the test lets it run. */
__attribute__((unused)) static simulated_device *simulated_devices(void)
{
    static bool active;
    simulated_device *d = simulated_library();
    if (!active) {
        const char *why = d->activate("memory=67108864 devices=2 lazy=1");
        if (why)
            TEST_FAIL("%s", why);
        CHECK_EQ(d->api.init(0), CUDA_SUCCESS);
        active = true;
    }
    return d;
}

#endif
