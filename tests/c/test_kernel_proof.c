#include "driver/kernel_proof.h"

#include "driver/context.h"
#include "simulated_device.h"

#define IDLE "memopt_idle" /* a kernel that nothing is known of: its launch does nothing */

#define ENTRY(identifier, name) ".entry " name "\n"

static const char image[] = ".version 7.0\n" MO_KERNELS(ENTRY) ".entry " IDLE "\n";
static CUfunction functions[MO_KERNEL_COUNT], idle;
static mo_detail detail;

/* The simulated device runs the kernels' own text. */
static const mo_cuda_api *enter(mo_context_scope *scope)
{
    const mo_cuda_api *api = &simulated_devices()->api;
    static mo_driver_cuda device;
    static CUmodule module;

    if (!device.api) {
        device.api = api;
        CHECK_EQ(api->primary_retain(&device.context, 0), CUDA_SUCCESS);
    }
    CHECK_EQ(mo_context_enter(&device, scope), CUDA_SUCCESS);
    if (!module) {
        CHECK_EQ(api->module_load(&module, image, 0, NULL, NULL), CUDA_SUCCESS);
        CHECK_EQ(api->module_function(&idle, module, IDLE), CUDA_SUCCESS);
        for (int i = 0; i < MO_KERNEL_COUNT; i++)
            CHECK_EQ(api->module_function(&functions[i], module, mo_kernel_name((mo_kernel)i)), CUDA_SUCCESS);
    }
    return api;
}

TEST(kernels_that_compute_are_proven_and_nothing_stays_on_the_device)
{
    simcuda_counts before, after;
    mo_context_scope scope;
    const mo_cuda_api *api = enter(&scope);

    CHECK_EQ(simulated_devices()->stats(0, &before), 0);
    if (mo_kernels_prove(api, functions, &detail))
        TEST_FAIL("%.300s", detail.text);
    CHECK_EQ(simulated_devices()->stats(0, &after), 0);
    CHECK(memcmp(&before.live, &after.live, sizeof before.live) == 0);
    CHECK_EQ(after.launches - before.launches, MO_KERNEL_COUNT);
    mo_context_leave(&scope);
}

TEST(a_kernel_that_does_nothing_is_named)
{
    mo_context_scope scope;
    const mo_cuda_api *api = enter(&scope);

    for (int i = 0; i < MO_KERNEL_COUNT; i++) {
        CUfunction some[MO_KERNEL_COUNT];
        memcpy(some, functions, sizeof some);
        some[i] = idle;
        CHECK_EQ(mo_kernels_prove(api, some, &detail), MO_CORRUPT);
        CHECK(strstr(detail.text, mo_kernel_name((mo_kernel)i)));
    }
    mo_context_leave(&scope);
}

TEST(an_error_of_the_driver_is_told_as_its_own_and_nothing_stays)
{
    static const char *const calls[] = {"cuMemAlloc",     "cuStreamCreate",    "cuMemcpyHtoDAsync",
                                        "cuLaunchKernel", "cuMemcpyDtoHAsync", "cuStreamSynchronize"};
    simulated_device *sim = simulated_devices();
    simcuda_counts before, after;
    mo_context_scope scope;
    const mo_cuda_api *api = enter(&scope);

    CHECK_EQ(sim->stats(0, &before), 0);
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        CHECK_EQ(sim->fail(calls[i], 0, 1, CUDA_ERROR_OUT_OF_MEMORY), 0);
        CHECK_EQ(mo_kernels_prove(api, functions, &detail), MO_NO_DEVICE_MEMORY);
        CHECK(strstr(detail.text, calls[i]));
        sim->fail_clear();
    }
    CHECK_EQ(sim->stats(0, &after), 0);
    CHECK(memcmp(&before.live, &after.live, sizeof before.live) == 0);
    mo_context_leave(&scope);
}

TEST_MAIN
