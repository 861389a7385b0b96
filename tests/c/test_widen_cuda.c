/* Over the simulated device, which runs the text of kernels/widen.cuh when the test lets it. */
#include "child.h"
#include "base/hostmem.h"
#include "driver/staging.h"
#include "simulated_kernels.h"
#include "widen_jobs.h"

enum { COUNT = 30000 };

static unsigned char *memory; /* the device's */
static mo_detail detail;

static void start(void)
{
    if (start_kernels())
        memory = device_memory(8 * COUNT);
    memset(memory, 7, 8 * COUNT);
}

/* That job in the device's memory; the host's copy of it stays for widen_check. */
static mo_status on_the_device(made_job *m, unsigned shift)
{
    mo_widen_job job = m->job;
    const unsigned size = mo_number_size(job.source_kind);

    job.source = (uintptr_t)memory + shift * size;
    job.target = (uintptr_t)memory + 4 * COUNT + shift * mo_float_size(job.target_kind);
    memcpy((void *)job.source, (const void *)m->job.source, job.count * size);
    const mo_status status = mo_widen_cuda(0, stream, &job, &detail);
    const float mean = m->mean[0];
    m->mean[0] = 100; /* the host's again when it returns */
    finish(stream);
    m->mean[0] = mean;
    memcpy((void *)m->job.target, (const void *)job.target, job.count * mo_float_size(job.target_kind));
    return status;
}

static const struct {
    const char *call;
    unsigned stride;
} calls_made[] = {
    {"cuCtxPushCurrent_v2", 1},  {"cuModuleLoadDataEx", 1}, {"cuModuleGetFunction", 1},
    {"cuMemHostAlloc", 1},       {"cuMemAlloc_v2", 1},      {"cuEventCreate", 1},
    {"cuMemcpyHtoDAsync_v2", 1}, {"cuLaunchKernel", 1},     {"cuEventRecord", 1},
};
static size_t failing;

static void every_failure_in_child(void)
{
    const char *call = calls_made[failing].call;
    uint64_t random = 1;
    bool more = true;

    start();
    const simcuda_live before = live_on(0);
    for (uint64_t after = 0; more; after += calls_made[failing].stride) {
        made_job *m = widen_make(&random, MO_NUMBER_U8, MO_F32, 16, 3, 20 + 10 * after, 0);
        const uint64_t calls_before = simulated_devices()->calls(call);
        start();
        CHECK_EQ(simulated_devices()->fail(call, after, 1, CUDA_ERROR_OUT_OF_MEMORY), 0);
        const mo_status status = on_the_device(m, 0);
        more = simulated_devices()->calls(call) - calls_before > after;
        simulated_devices()->fail_clear();
        if (status != (more ? MO_NO_DEVICE_MEMORY : MO_OK))
            TEST_FAIL("%s failing after %d: %s", call, (int)after, mo_status_name(status));
        CHECK(after > 0 || more); /* it is called at all */
        CHECK_OK(on_the_device(m, 0));
        widen_check(m, call);
        widen_free(m);
    }
    const simcuda_live now = live_on(0);
    CHECK(now.events - before.events <= MO_STAGING_SLOTS);
    CHECK_EQ(now.allocations - before.allocations, now.events - before.events);
    CHECK_EQ(now.pending, 0);
}

TEST(failing_each_driver_call_in_turn_leaks_nothing_and_the_next_call_works)
{
    for (failing = 0; failing < sizeof calls_made / sizeof *calls_made; failing++)
        CHECK_CHILD(every_failure_in_child);
}

static uint64_t requests;

static void no_host_memory_in_child(void)
{
    uint64_t random = 2;
    made_job *m = widen_make(&random, MO_NUMBER_I16, MO_F16, 1, 3, 100, 0);

    start();
    const size_t before = mo_host_live();
    mo_host_fail_after(requests);
    const mo_status status = on_the_device(m, 0);
    mo_host_fail_never();
    CHECK(status == MO_NO_HOST_MEMORY || (status == MO_OK && requests > 0));
    CHECK_OK(on_the_device(m, 0));
    widen_check(m, "after it");
    CHECK_EQ(mo_host_live(), before + 1); /* the table's scratch */
    widen_free(m);
}

TEST(failing_each_request_for_host_memory_leaks_nothing_and_the_next_call_works)
{
    for (requests = 0; requests < 8; requests++)
        CHECK_CHILD(no_host_memory_in_child);
}

TEST(every_kind_on_the_device_is_what_the_oracle_makes_of_it_by_one_launch)
{
    uint64_t random = 3;
    mo_launch_counts counts, after;

    start();
    for (mo_number kind = MO_NUMBER_U8; kind < MO_NUMBER_COUNT; kind++)
        for (mo_float target = MO_F32; target < MO_F64; target++)
            for (unsigned shift = 0; shift < 4; shift += 3) {
                made_job *m = widen_make(&random, kind, target, shift ? 1 : 100, 3, shift ? 3333 : 40, 0);
                mo_launch_read(0, &counts);
                CHECK_OK(on_the_device(m, shift));
                mo_launch_read(0, &after);
                CHECK_EQ(after.launches - counts.launches, 1);
                widen_check(m, "on the device");
                widen_free(m);
            }
}

TEST(the_channels_are_uploaded_once)
{
    uint64_t random = 4;
    mo_launch_counts counts, after;

    start();
    made_job *m = widen_make(&random, MO_NUMBER_U8, MO_F32, 100, 3, 40, 0);
    CHECK_OK(on_the_device(m, 0));
    mo_launch_read(0, &counts);
    for (int i = 0; i < 5; i++)
        CHECK_OK(on_the_device(m, 0));
    mo_launch_read(0, &after);
    CHECK_EQ(after.uploads, counts.uploads);
    CHECK_EQ(after.repeats - counts.repeats, 5);
    widen_free(m);
}

TEST(nothing_is_launched_for_no_elements_or_for_what_is_refused)
{
    uint64_t random = 5;
    mo_launch_counts counts, after;

    start();
    made_job *m = widen_make(&random, MO_NUMBER_U8, MO_F32, 1, 3, 0, 0);
    mo_launch_read(0, &counts);
    CHECK_OK(on_the_device(m, 0));
    m->job.count = 4;
    CHECK_EQ(mo_widen_cuda(0, stream, &m->job, &detail), MO_INVALID);
    mo_launch_read(0, &after);
    CHECK_EQ(after.launches, counts.launches);
    widen_free(m);
}

TEST_MAIN
