/* Over the simulated device, which runs the text of kernels/cross_entropy.cu. */
#include "child.h"
#include "driver/staging.h"
#include "logits_rows.h"
#include "simulated_kernels.h"

static made *memory; /* the device's */
static mo_detail detail;

static void start(void)
{
    if (start_kernels())
        memory = device_memory(sizeof *memory);
}

/* That job in the device's memory; what becomes of it is *m's then. */
static mo_status on_the_device(made *m)
{
    mo_status status;

    *memory = *m;
    memory->job.logits = m->job.kind == MO_F32 ? (uintptr_t)memory->floats : (uintptr_t)memory->halves;
    memory->job.target = memory->target;
    memory->job.lse = memory->lse;
    memory->job.loss = memory->loss;
    memory->job.scale = memory->scale;
    status = mo_cross_entropy_cuda(0, stream, &memory->job, &detail);
    finish(stream);
    memory->job = m->job;
    *m = *memory;
    return status;
}

static const char *const calls_made[] = {
    "cuCtxPushCurrent_v2", "cuModuleLoadDataEx", "cuModuleGetFunction",  "cuMemHostAlloc", "cuMemAlloc_v2",
    "cuEventCreate",       "cuLaunchKernel",     "cuMemcpyHtoDAsync_v2", "cuEventRecord",
};
static size_t failing;

static void every_failure_in_child(void)
{
    const char *call = calls_made[failing];
    uint64_t random = 1;
    bool more = true;

    start();
    for (uint64_t after = 0; more; after++) {
        made *m = make(&random, MO_BF16, 100 + after, 0.01f * (float)after, 0);
        const uint64_t calls_before = simulated_devices()->calls(call);
        CHECK_EQ(simulated_devices()->fail(call, after, 1, CUDA_ERROR_OUT_OF_MEMORY), 0);
        const mo_status status = on_the_device(m);
        more = simulated_devices()->calls(call) - calls_before > after;
        simulated_devices()->fail_clear();
        if (status != (more ? MO_NO_DEVICE_MEMORY : MO_OK))
            TEST_FAIL("%s failing after %d: %s", call, (int)after, mo_status_name(status));
        CHECK(after > 0 || more); /* it is called at all */
        free(m);
        m = make(&random, MO_BF16, 100, 0, 0);
        CHECK_OK(on_the_device(m));
        check_rows(m, KERNEL_TANGENT);
        free(m);
    }
    CHECK_EQ(live_on(0).pending, 0);
}

TEST(failing_each_driver_call_in_turn_leaves_nothing_pending_and_the_next_call_works)
{
    for (failing = 0; failing < sizeof calls_made / sizeof *calls_made; failing++)
        CHECK_CHILD(every_failure_in_child);
}

TEST(every_kind_on_the_device_is_the_oracles_by_one_launch_and_the_options_are_uploaded_once)
{
    static const size_t sizes[] = {1, 31, 100, 2048, COLUMNS_MAX};
    uint64_t random = test_seed();
    mo_launch_counts before, after;

    start();
    for (mo_float kind = MO_F32; kind < MO_F64; kind++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            made *m = make(&random, kind, sizes[i], i % 2 ? 0.1f : 0, i % 3 ? 0 : 30),
                 *again = malloc(sizeof *m);
            *again = *m;
            again->job.logits = kind == MO_F32 ? (uintptr_t)again->floats : (uintptr_t)again->halves;
            CHECK_OK(on_the_device(m));
            check_rows(m, KERNEL_TANGENT);
            mo_launch_read(0, &before);
            CHECK_OK(on_the_device(again));
            mo_launch_read(0, &after);
            CHECK_EQ(after.launches - before.launches, 1);
            CHECK_EQ(after.uploads, before.uploads);
            free(m);
            free(again);
        }
}

TEST(nothing_is_launched_for_no_rows_or_for_what_is_refused)
{
    uint64_t random = 5;
    mo_launch_counts before, after;

    start();
    made *m = make(&random, MO_F32, 8, 0, 0);
    mo_launch_read(0, &before);
    m->job.rows = 0;
    CHECK_OK(on_the_device(m));
    m->job.rows = (size_t)1 << 31;
    CHECK_EQ(on_the_device(m), MO_OVERFLOW);
    m->job.softcap = -1;
    CHECK_EQ(on_the_device(m), MO_INVALID);
    mo_launch_read(0, &after);
    CHECK_EQ(after.launches, before.launches);
    free(m);
}

TEST_MAIN
