/* Over the simulated device, which runs the text of kernels/unscale.cuh when the test lets it: so what a launch is
 * given and what it changes are those of the real thing. The kernels are the embedded ones, or where this build has
 * none, what the made-up NVRTC makes. */
#include "scaler/unscale_cuda.h"

#include "base/hostmem.h"
#include "child.h"
#include "driver/kernel_module.h"
#include "driver/staging.h"
#include "fake_nvrtc.h"
#include "simulated_contract.h"

#define PTX                                                                                                  \
    ".version 7.0\n.entry memopt_unscale_f32\n.entry memopt_unscale_f16\n.entry memopt_unscale_bf16\n"       \
    ".entry memopt_unscale_f64\n"

enum { COUNT = 4096, LISTS = MO_STAGING_SLOTS + 2, MANY = 300 };

/* Device memory, which here is the host's too. */
static float *values, *inv_scale, *found_inf;
static mo_detail detail;
static CUstream stream;

static CUdeviceptr device_block(size_t size)
{
    CUdeviceptr out = 0;
    IN_CONTEXT(simulated_devices()->api.memory_alloc(&out, size));
    return out;
}

static void start(void)
{
    static const mo_kernel_settings settings = {.nvrtc_paths = {FAKE_NVRTC_PATH}, .nvrtc_path_count = 1};

    if (!values) {
        stream = contract()->stream;
        nvrtc_reset();
        nvrtc.image = PTX;
        CHECK_EQ(mo_kernels_configure(&settings, NULL), MO_OK);
        values = (float *)(uintptr_t)device_block(COUNT * sizeof *values);
        inv_scale = (float *)(uintptr_t)device_block(sizeof *inv_scale);
        found_inf = (float *)(uintptr_t)device_block(sizeof *found_inf);
    }
    finish(stream);
    for (int i = 0; i < COUNT; i++)
        values[i] = 1.0f;
    *inv_scale = 0.5f;
    *found_inf = 0.0f;
}

static mo_status unscale(mo_float kind, const uintptr_t *addresses, const size_t *counts, size_t tensors)
{
    const mo_unscale_job job = {
        .stream = stream,
        .kind = kind,
        .tensors = {.addresses = addresses, .counts = counts, .tensors = tensors},
        .inv_scale = (uintptr_t)inv_scale,
        .found_inf = (uintptr_t)found_inf,
    };
    return mo_unscale_cuda(&job, &detail);
}

static mo_status unscale_run(int from, int count)
{
    return unscale(MO_F32, &(uintptr_t){(uintptr_t)(values + from)}, &(size_t){(size_t)count}, 1);
}

static mo_unscale_counts counts_now(void)
{
    mo_unscale_counts counts;
    mo_unscale_read(0, &counts);
    return counts;
}

/* ---- where a call fails -------------------------------------------------------------------------------- */

/* These come first: each child is of a process that has not used CUDA, and so loads the kernels itself.
 *
 * Launches that go through every path: new slots, a repeat in flight, slots looked at, the wait for the oldest, a table
 * that outgrows its slot. Stops at the first failure. */
static mo_status session(void)
{
    static uintptr_t addresses[MANY];
    static size_t counts[MANY];
    mo_status status = MO_OK;

    for (int i = 0; i < LISTS && !status; i++) {
        status = unscale_run(i, 1000);
        if (!status && i == 0)
            status = unscale_run(i, 1000);
    }
    for (int i = 0; i < MANY; i++) {
        addresses[i] = (uintptr_t)(values + i);
        counts[i] = 1;
    }
    return status ? status : unscale(MO_F32, addresses, counts, MANY);
}

static void check_session(void)
{
    start();
    const mo_status status = session();
    if (status)
        TEST_FAIL("%s: %s", mo_status_name(status), detail.text);
    finish(stream);
    for (int i = 0; i < COUNT; i++) {
        float expected = i < MANY ? 0.5f : 1.0f;
        for (int from = 0; from < LISTS; from++)
            if (i >= from && i < from + 1000)
                expected *= from ? 0.5f : 0.25f;
        CHECK(values[i] == expected);
    }
}

/* A slot is a block, a pinned block and an event: more than the slots of them is a leak. */
static void check_only_slots(const simcuda_live *before)
{
    const simcuda_live now = live_on(0);
    const uint64_t slots = now.events - before->events;
    CHECK(slots <= MO_STAGING_SLOTS);
    CHECK_EQ(now.allocations - before->allocations, slots);
    CHECK_EQ(now.host_allocations - before->host_allocations, slots);
    CHECK_EQ(now.modules - before->modules, 1);
    CHECK_EQ(now.pending, 0);
}

/* What a session calls, but for what releases (a block that the driver keeps is no leak of ours). Of a call that is
 * made in pairs, to enter and to leave, only each first failure is anybody's to hear. */
static const struct {
    const char *call;
    unsigned stride;
} calls_made[] = {
    {"cuDeviceGetAttribute", 1},
    {"cuCtxPushCurrent_v2", 1},
    {"cuCtxGetCurrent", 1},
    {"cuThreadExchangeStreamCaptureMode", 2},
    {"cuModuleLoadDataEx", 1},
    {"cuModuleGetFunction", 1},
    {"cuStreamGetCaptureInfo_v3", 1},
    {"cuMemHostAlloc", 1},
    {"cuMemAlloc_v2", 1},
    {"cuEventCreate", 1},
    {"cuMemcpyHtoDAsync_v2", 1},
    {"cuLaunchKernel", 1},
    {"cuEventRecord", 1},
    {"cuEventQuery", 1},
    {"cuEventSynchronize", 1},
    {"cuStreamWaitEvent", 1},
    {"cuDeviceGetCount", 1},
    {"cuDeviceGet", 1},
    {"cuDevicePrimaryCtxRetain", 1},
    {"cuMemGetAllocationGranularity", 1},
    {"cuInit", 1},
};
static size_t failing;

static void every_failure_in_child(void)
{
    const char *call = calls_made[failing].call;
    bool more = true;

    start();
    const simcuda_live before = live_on(0);
    for (uint64_t after = 0; more; after += calls_made[failing].stride) {
        start();
        const uint64_t calls_before = simulated_devices()->calls(call);
        CHECK_EQ(simulated_devices()->fail(call, after, 1, CUDA_ERROR_OUT_OF_MEMORY), 0);
        const mo_status status = session();
        more = simulated_devices()->calls(call) - calls_before > after;
        simulated_devices()->fail_clear();
        if (status != (more ? MO_NO_DEVICE_MEMORY : MO_OK))
            TEST_FAIL("%s failing after %d: %s", call, (int)after, mo_status_name(status));
        CHECK(after > 0 || more); /* it is called at all */
        check_session();
        check_only_slots(&before);
    }
}

TEST(failing_each_driver_call_in_turn_leaks_nothing_and_the_next_call_works)
{
    for (failing = 0; failing < sizeof calls_made / sizeof *calls_made; failing++)
        CHECK_CHILD(every_failure_in_child);
}

static uint64_t requests;

static void no_host_memory_in_child(void)
{
    start();
    const size_t before = mo_host_live();
    mo_host_fail_after(requests);
    const mo_status status = session();
    mo_host_fail_never();
    CHECK(status == MO_NO_HOST_MEMORY || (status == MO_OK && requests > 0));
    check_session();
    CHECK_EQ(mo_host_live(), before + 1); /* the table's scratch */
}

TEST(failing_each_request_for_host_memory_leaks_nothing_and_the_next_call_works)
{
    for (requests = 0; requests < 12; requests++)
        CHECK_CHILD(no_host_memory_in_child);
}

/* ---- what it does -------------------------------------------------------------------------------------- */

TEST(the_values_change_in_stream_order_and_nothing_beside_them)
{
    start();
    CHECK_OK(unscale_run(7, 1000));
    CHECK_OK(unscale_run(500, 10));
    CHECK_EQ(values[7] * 4, 4); /* queued, and not run */
    finish(stream);
    for (int i = 0; i < COUNT; i++)
        CHECK_EQ(values[i] * 4, i < 7 || i >= 1007 ? 4 : i >= 500 && i < 510 ? 1 : 2);
    CHECK(*found_inf == 0.0f);
}

TEST(every_element_type_is_known)
{
    static const uint64_t two[] = {0x40000000, 0x4000, 0x4000, 0x4000000000000000},
                          one[] = {0x3F800000, 0x3C00, 0x3F80, 0x3FF0000000000000};
    for (mo_float kind = MO_F32; kind < MO_FLOAT_COUNT; kind++) {
        uint64_t got = 0;
        start();
        memcpy(values, &two[kind], mo_float_size(kind));
        CHECK_OK(unscale(kind, &(uintptr_t){(uintptr_t)values}, &(size_t){1}, 1));
        finish(stream);
        memcpy(&got, values, mo_float_size(kind));
        CHECK_EQ(got, one[kind]);
        CHECK(*found_inf == 0.0f);
    }
}

TEST(a_value_that_is_not_finite_is_found)
{
    start();
    values[3] = __builtin_inff();
    CHECK_OK(unscale_run(0, 3));
    finish(stream);
    CHECK(*found_inf == 0.0f);
    CHECK_OK(unscale_run(0, 4));
    finish(stream);
    CHECK(*found_inf == 1.0f);
}

TEST(a_list_without_elements_queues_nothing)
{
    start();
    const mo_unscale_counts before = counts_now();
    CHECK_OK(unscale(MO_F32, NULL, NULL, 0));
    CHECK_OK(unscale(MO_F32, &(uintptr_t){0}, &(size_t){0}, 1));
    CHECK_EQ(counts_now().launches, before.launches);
    CHECK_EQ(live_on(0).pending, 0);
}

TEST(a_list_that_comes_again_is_not_uploaded_again)
{
    start();
    CHECK_OK(unscale_run(11, 22));
    const mo_unscale_counts before = counts_now();
    CHECK_OK(unscale_run(11, 22));
    finish(stream);
    const mo_unscale_counts after = counts_now();
    CHECK_EQ(after.launches, before.launches + 1);
    CHECK_EQ(after.uploads, before.uploads);
    CHECK_EQ(after.repeats, before.repeats + 1);
    CHECK_EQ(values[11] * 4, 1);
}

TEST(a_captured_launch_is_counted_and_does_not_run_or_break_the_capture)
{
    start();
    const mo_unscale_counts before = counts_now();
    begin_capture(stream);
    const mo_status status = unscale_run(0, 100);
    end_capture(stream);
    CHECK_OK(status);
    CHECK_EQ(counts_now().captured, before.captured + 1);
    finish(stream);
    CHECK(values[0] == 1.0f);
}

TEST(wrong_arguments_are_refused_by_name)
{
    start();
    mo_unscale_job job = {.kind = MO_FLOAT_COUNT, .inv_scale = (uintptr_t)inv_scale};
    CHECK_EQ(mo_unscale_cuda(&job, &detail), MO_INVALID);
    CHECK(strstr(detail.text, "element type 4"));
    job.kind = MO_F32;
    CHECK_EQ(mo_unscale_cuda(&job, &detail), MO_INVALID);
    CHECK(strstr(detail.text, "found_inf at 0"));
    job.found_inf = (uintptr_t)found_inf + 2;
    CHECK_EQ(mo_unscale_cuda(&job, &detail), MO_INVALID);
    job.found_inf = (uintptr_t)found_inf;
    job.device = 2;
    CHECK_EQ(mo_unscale_cuda(&job, &detail), MO_NO_DEVICE);
    CHECK(strstr(detail.text, "no CUDA device 2"));
    job.device = -1;
    CHECK_EQ(mo_unscale_cuda(&job, &detail), MO_NO_DEVICE);
}

/* ---- after a fork -------------------------------------------------------------------------------------- */

static void forked_child(void)
{
    const uint64_t launches = simulated_devices()->calls("cuLaunchKernel");
    CHECK_EQ(unscale_run(0, 1), MO_DRIVER);
    CHECK(strstr(detail.text, "spawn"));
    CHECK_EQ(simulated_devices()->calls("cuLaunchKernel"), launches);
    CHECK_EQ(counts_now().launches, 0);
}

TEST(a_forked_child_is_refused_and_the_parent_goes_on)
{
    check_session();
    CHECK_CHILD(forked_child);
    check_session();
}

TEST_MAIN
