/* What a launch is given and counted as; the paths through staging, and where each call of the driver fails, are those
 * of test_gradients_cuda.c. */
#include "driver/launch.h"

#include "../kernels/gradients.cuh"
#include "base/hostmem.h"
#include "child.h"
#include "simulated_kernels.h"

static mo_detail detail;

static mo_launch begin(void)
{
    mo_launch launch;
    CHECK_OK(mo_launch_begin(0, "a test", &launch, &detail));
    return launch;
}

static uint64_t launches_now(int ordinal)
{
    mo_launch_counts counts;
    mo_launch_read(ordinal, &counts);
    return counts.launches;
}

/* The norm of one fp32 in device memory, by hand. */
static mo_status norm_of(float *value, float *norm)
{
    mo_gradients_launch argument = {.norm = (uintptr_t)norm, .chunks = 1, .passes = MO_GRADIENTS_NORM};
    const mo_launch_shape shape = {.kernel = MO_KERNEL_GRADIENTS,
                                   .blocks = 1,
                                   .threads = 32,
                                   .size = sizeof(mo_gradients_head) + sizeof(mo_chunk),
                                   .room = sizeof(double)};
    mo_launch launch = begin();
    mo_gradients_head *table = NULL;
    mo_status status = mo_launch_table(&launch, shape.size, (void **)&table, &detail);

    if (!status) {
        table[0] = (mo_gradients_head){0};
        *(mo_chunk *)(table + 1) = (mo_chunk){.address = (uintptr_t)value, .count = 1, .kind = MO_F32};
        status = mo_launch_run(&launch, stream, shape, &argument, &detail);
        CHECK(status || argument.table);
    }
    mo_launch_end(&launch);
    return status;
}

TEST(a_launch_reads_its_table_in_stream_order)
{
    CUdeviceptr block = 0;

    start_kernels();
    IN_CONTEXT(simulated_devices()->api.memory_alloc(&block, 64));
    float *const values = (float *)(uintptr_t)block;
    values[0] = -3;
    values[1] = 0;
    const uint64_t before = launches_now(0);
    CHECK_OK(norm_of(values, values + 1));
    CHECK(values[1] == 0.0f);
    finish(stream);
    CHECK(values[1] == 3.0f);
    CHECK_EQ(launches_now(0), before + 1);
    CHECK_EQ(launches_now(1), 0);
}

TEST(a_table_grows_and_stays)
{
    mo_launch launch;
    void *small = NULL, *large = NULL, *again = NULL;

    start_kernels();
    launch = begin();
    CHECK(launch.multiprocessors > 0);
    CHECK_OK(mo_launch_table(&launch, 100, &small, &detail));
    CHECK_OK(mo_launch_table(&launch, 1000000, &large, &detail));
    CHECK_EQ((uintptr_t)large % 16, 0);
    mo_host_fail_after(0);
    CHECK_EQ(mo_launch_table(&launch, 2000000, &again, &detail), MO_NO_HOST_MEMORY);
    CHECK(strstr(detail.text, "2000000 bytes"));
    CHECK_OK(mo_launch_table(&launch, 1000000, &again, &detail));
    mo_host_fail_never();
    CHECK(again == large);
    mo_launch_end(&launch);
}

TEST(a_device_that_is_none_is_refused_and_nothing_is_held)
{
    mo_launch launch;

    start_kernels();
    CHECK_EQ(mo_launch_begin(2, "a test", &launch, &detail), MO_NO_DEVICE);
    CHECK_EQ(mo_launch_begin(-1, "a test", &launch, &detail), MO_NO_DEVICE);
    CHECK_EQ(launches_now(-1), 0);
    CHECK_EQ(launches_now(1000), 0);
    launch = begin();
    mo_launch_end(&launch);
}

static void forked_child(void)
{
    mo_launch launch;
    CHECK_EQ(mo_launch_begin(0, "a test", &launch, &detail), MO_DRIVER);
    CHECK(strstr(detail.text, "a test") && strstr(detail.text, "spawn"));
    CHECK_EQ(launches_now(0), 0);
}

TEST(a_forked_child_is_refused_though_the_lock_was_held)
{
    start_kernels();
    mo_launch launch = begin();
    CHECK_CHILD(forked_child);
    mo_launch_end(&launch);
}

TEST_MAIN
