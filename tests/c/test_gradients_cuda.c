/* Over the simulated device, which runs the text of kernels/gradients.cuh when the test lets it: so what a launch is
 * given and what it changes are those of the real thing. The kernels are the embedded ones, or where this build has
 * none, what the made-up NVRTC makes. */
#include "scaler/gradients.h"

#include <math.h>

#include "base/hostmem.h"
#include "child.h"
#include "driver/launch.h"
#include "driver/staging.h"
#include "simulated_kernels.h"

enum { COUNT = 4096, LISTS = MO_STAGING_SLOTS + 2, MANY = 172 }; /* MANY: a table beyond the least capacity */

/* Device memory, which here is the host's too. */
static float *values, *inv_scale, *found_inf, *norm, *clip, *factor;
static double *norm64;
static mo_detail detail;

static void start(void)
{
    if (start_kernels()) {
        values = device_memory(COUNT * sizeof *values);
        inv_scale = device_memory(sizeof *inv_scale);
        found_inf = device_memory(sizeof *found_inf);
        norm = device_memory(3 * sizeof *norm);
        clip = norm + 1;
        factor = norm + 2;
        norm64 = device_memory(sizeof *norm64);
    }
    for (int i = 0; i < COUNT; i++)
        values[i] = 1.0f;
    *inv_scale = 0.5f;
    *found_inf = 0.0f;
    *norm = *clip = *factor = -1.0f;
    *norm64 = -1;
}

static mo_status pass(const mo_gradient *gradients, size_t count, unsigned passes, double max_norm)
{
    const mo_gradients_job job = {
        .gradients = gradients,
        .count = count,
        .passes = passes,
        .inv_scale = (uintptr_t)inv_scale,
        .found_inf = (uintptr_t)found_inf,
        .norm = (uintptr_t)norm,
        .norm64 = (uintptr_t)norm64,
        .clip = (uintptr_t)clip,
        .factor = (uintptr_t)factor,
        .max_norm = max_norm,
    };
    return mo_gradients_cuda(0, stream, &job, &detail);
}

static mo_gradient run_of(int from, int count)
{
    return (mo_gradient){(uintptr_t)(values + from), (size_t)count, MO_F32};
}

#define UNSCALE (MO_GRADIENTS_CHECK | MO_GRADIENTS_STORE)

static mo_status unscale_run(int from, int count)
{
    return pass(&(mo_gradient){(uintptr_t)(values + from), (size_t)count, MO_F32}, 1, UNSCALE, 0);
}

static mo_launch_counts counts_now(void)
{
    mo_launch_counts counts;
    mo_launch_read(0, &counts);
    return counts;
}

/* ---- where a call fails -------------------------------------------------------------------------------- */

/* These come first: each child is of a process that has not used CUDA, and so loads the kernels itself.
 *
 * Launches that go through every path: new slots, a repeat in flight, slots looked at, the wait for the oldest, a table
 * that outgrows its slot. Stops at the first failure. */
static mo_status session(void)
{
    static mo_gradient list[MANY];
    mo_status status = MO_OK;

    for (int i = 0; i < LISTS && !status; i++) {
        status = unscale_run(i, 1000);
        if (!status && i == 0)
            status = unscale_run(i, 1000);
    }
    for (int i = 0; i < MANY; i++)
        list[i] = run_of(i, 1);
    return status ? status : pass(list, MANY, UNSCALE | MO_GRADIENTS_NORM, 1);
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

TEST(every_element_type_is_known_and_one_launch_takes_all)
{
    static const uint64_t two[] = {0x40000000, 0x4000, 0x4000, 0x4000000000000000},
                          one[] = {0x3F800000, 0x3C00, 0x3F80, 0x3FF0000000000000};
    mo_gradient list[MO_FLOAT_COUNT];

    start();
    const uint64_t before = counts_now().launches;
    for (mo_float kind = MO_F32; kind < MO_FLOAT_COUNT; kind++) {
        list[kind] = (mo_gradient){(uintptr_t)(values + 16 * kind), 1, kind};
        memcpy(values + 16 * kind, &two[kind], mo_float_size(kind));
    }
    CHECK_OK(pass(list, MO_FLOAT_COUNT, UNSCALE | MO_GRADIENTS_NORM, 1));
    finish(stream);
    for (mo_float kind = MO_F32; kind < MO_FLOAT_COUNT; kind++) {
        uint64_t got = 0;
        memcpy(&got, values + 16 * kind, mo_float_size(kind));
        CHECK_EQ(got, one[kind]);
    }
    CHECK(*found_inf == 0.0f && *norm == 2.0f);
    CHECK_EQ(counts_now().launches, before + 1);
}

TEST(what_was_only_read_has_its_scale_and_its_clip_in_the_factor)
{
    start();
    CHECK_OK(
        pass(&(mo_gradient){(uintptr_t)values, 1024, MO_F32}, 1, MO_GRADIENTS_CHECK | MO_GRADIENTS_NORM, 4));
    finish(stream);
    CHECK(values[0] == 1.0f && *norm == 16.0f && *clip == (float)(4 / (16 + 1e-6)) && *factor == *clip / 2);
    CHECK_OK(pass(&(mo_gradient){(uintptr_t)values, 1024, MO_F32}, 1, MO_GRADIENTS_NORM, 100));
    finish(stream);
    CHECK(*norm == 16.0f && *clip == 1.0f && *factor == 0.5f);
    CHECK_OK(pass(&(mo_gradient){(uintptr_t)values, 2, MO_F32}, 1, MO_GRADIENTS_NORM, 100));
    finish(stream);
    CHECK(*norm64 == sqrt(2) / 2 && *norm == (float)*norm64);
    values[1000] = -3;
    CHECK_OK(pass(&(mo_gradient){(uintptr_t)values, 1024, MO_F32}, 1,
                  MO_GRADIENTS_NORM | MO_GRADIENTS_MAXIMUM, 1));
    finish(stream);
    CHECK(*norm == 1.5f);
    values[1] = NAN;
    for (unsigned maximum = 0; maximum <= MO_GRADIENTS_MAXIMUM; maximum += MO_GRADIENTS_MAXIMUM) {
        *norm = *clip = *factor = 0;
        CHECK_OK(pass(&(mo_gradient){(uintptr_t)values, 1024, MO_F32}, 1, MO_GRADIENTS_NORM | maximum, 1));
        finish(stream);
        CHECK(isnan(*norm) && isnan(*clip) && isnan(*factor) && *found_inf == 0);
    }
}

TEST(a_norm_is_written_for_no_elements_and_only_where_it_is_asked_for)
{
    const mo_gradients_job job = {.passes = MO_GRADIENTS_NORM, .clip = (uintptr_t)clip, .max_norm = 1};

    start();
    CHECK_OK(pass(NULL, 0, MO_GRADIENTS_NORM | MO_GRADIENTS_CHECK, 1));
    finish(stream);
    CHECK(*norm == 0.0f && *clip == 1.0f && *factor == 0.5f && *found_inf == 0.0f);
    start();
    CHECK_OK(mo_gradients_cuda(0, stream, &job, &detail));
    finish(stream);
    CHECK(*norm == -1.0f && *norm64 == -1 && *clip == 1.0f && *factor == -1.0f);
}

TEST(clipping_multiplies_by_what_lies_in_memory_when_it_runs)
{
    start();
    CHECK_OK(mo_gradients_clip_cuda(0, stream, &(mo_gradient){(uintptr_t)values, 100, MO_F32}, 1,
                                    (uintptr_t)clip, &detail));
    *clip = 0.25f;
    finish(stream);
    CHECK(values[0] == 0.25f && values[99] == 0.25f && values[100] == 1.0f);
    CHECK_EQ(mo_gradients_clip_cuda(0, stream, NULL, 0, 0, &detail), MO_INVALID);
}

TEST(norms_in_flight_on_two_streams_do_not_share_their_sums)
{
    const mo_stream other = contract()->other;
    float *const norm2 = norm + 1;
    mo_gradients_job job = {.count = 1, .passes = MO_GRADIENTS_NORM};

    start();
    for (int i = 0; i < COUNT; i++)
        values[i] = (float)(i % 2);
    for (int round = 0; round < 3; round++) {
        job.gradients = &(mo_gradient){(uintptr_t)values, COUNT, MO_F32};
        job.norm = (uintptr_t)norm;
        CHECK_OK(mo_gradients_cuda(0, stream, &job, &detail));
        job.gradients = &(mo_gradient){(uintptr_t)values, 2 * 512, MO_F32};
        job.norm = (uintptr_t)norm2;
        CHECK_OK(mo_gradients_cuda(0, other, &job, &detail));
        finish(round % 2 ? stream : other);
        finish(round % 2 ? other : stream);
        CHECK(*norm == sqrtf(COUNT / 2) && *norm2 == sqrtf(512));
    }
}

TEST(chunks_grow_with_the_job_and_stay_within_their_bounds)
{
    CHECK_EQ(mo_gradients_chunk_bytes(0, 132), 16 << 10);
    CHECK_EQ(mo_gradients_chunk_bytes((size_t)1 << 33, 132), 256 << 10);
    CHECK_EQ(mo_gradients_chunk_bytes((size_t)132 * 32 * (32 << 10), 132), 32 << 10);
    CHECK_EQ(mo_gradients_chunk_bytes(1000, 0), 16 << 10);
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
    const mo_launch_counts before = counts_now();
    CHECK_OK(pass(NULL, 0, UNSCALE, 0));
    CHECK_OK(pass(&(mo_gradient){0, 0, MO_F32}, 1, UNSCALE, 0));
    CHECK_EQ(counts_now().launches, before.launches);
    CHECK_EQ(live_on(0).pending, 0);
}

TEST(a_list_that_comes_again_is_not_uploaded_again)
{
    start();
    CHECK_OK(unscale_run(11, 22));
    const mo_launch_counts before = counts_now();
    CHECK_OK(unscale_run(11, 22));
    finish(stream);
    const mo_launch_counts after = counts_now();
    CHECK_EQ(after.launches, before.launches + 1);
    CHECK_EQ(after.uploads, before.uploads);
    CHECK_EQ(after.repeats, before.repeats + 1);
    CHECK_EQ(values[11] * 4, 1);
}

TEST(a_captured_launch_is_counted_and_does_not_run_or_break_the_capture)
{
    start();
    const mo_launch_counts before = counts_now();
    begin_capture(stream);
    const mo_status status = unscale_run(0, 100);
    end_capture(stream);
    CHECK_OK(status);
    CHECK_EQ(counts_now().captured, before.captured + 1);
    finish(stream);
    CHECK(values[0] == 1.0f);
}

static void refuses(const mo_gradients_job *job, int ordinal, mo_status expected, const char *words)
{
    const uint64_t launches = counts_now().launches;

    CHECK_EQ(mo_gradients_cuda(ordinal, stream, job, &detail), expected);
    if (!strstr(detail.text, words))
        TEST_FAIL("\"%.300s\" does not say \"%s\"", detail.text, words);
    CHECK_EQ(counts_now().launches, launches);
}

TEST(wrong_arguments_are_refused_by_name)
{
    start();
    mo_gradient gradient = run_of(0, 1);
    mo_gradients_job job = {
        .gradients = &gradient, .count = 1, .passes = UNSCALE, .inv_scale = (uintptr_t)inv_scale};
    refuses(&job, 0, MO_INVALID, "a check without found_inf");
    job.found_inf = (uintptr_t)found_inf + 2;
    refuses(&job, 0, MO_INVALID, "found_inf at");
    job.found_inf = (uintptr_t)found_inf;
    job.passes = MO_GRADIENTS_MAXIMUM;
    refuses(&job, 0, MO_INVALID, "passes 0x8");
    job.passes = UNSCALE | 16;
    refuses(&job, 0, MO_INVALID, "passes 0x13");
    job.passes = UNSCALE;
    gradient.kind = MO_FLOAT_COUNT;
    refuses(&job, 0, MO_INVALID, "tensor 0: element type 4");
    gradient = (mo_gradient){(uintptr_t)values, SIZE_MAX / 2, MO_F32};
    refuses(&job, 0, MO_OVERFLOW, "do not fit");
    gradient = run_of(0, 1);
    refuses(&job, 2, MO_NO_DEVICE, "no CUDA device 2");
    refuses(&job, -1, MO_NO_DEVICE, "device -1");
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
