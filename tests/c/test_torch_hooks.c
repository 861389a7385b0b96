/* The two hooks as torch calls them, over the simulated device as libcuda.so.1, without torch: an exception
 * is std::runtime_error here, which ends the child that nobody catches it in. With torch:
 * tests/sim/test_torch_hooks.py. */
#include "alloc/torch_hooks.h"

#include <pthread.h>

#include "alloc/passthrough.h"
#include "child.h"
#include "simulated_device.h"

static mo_passthrough_stats stats(int device)
{
    mo_passthrough_stats s;
    mo_passthrough_read(device, &s);
    return s;
}

/* ---- first: in processes that have no device ----------------------------------------------------------- */

static void free_without_a_device(void)
{
    simulated_library(); /* not activated: cuInit fails */
    memopt_free(NULL, 0, 0, NULL);
    memopt_free((void *)0x10000, 100, 0, NULL);
    memopt_free((void *)0x10000, 100, 99, NULL);
    memopt_free((void *)0x10000, 100, -1, NULL);
    CHECK_EQ(stats(0).failed_frees, 0);
}

TEST(freeing_where_there_is_no_device_is_quiet)
{
    CHECK_CHILD(free_without_a_device);
}

static void malloc_without_a_device(void)
{
    simulated_library();
    memopt_malloc(100, 0, NULL);
}

static void malloc_on_a_device_that_is_not_there(void)
{
    simulated_devices();
    memopt_malloc(100, 2, NULL);
}

static void malloc_on_a_device_without_room_for_a_context(void)
{
    simulated_devices()->fail("cuDevicePrimaryCtxRetain", 0, 1, CUDA_ERROR_OUT_OF_MEMORY);
    memopt_malloc(100, 0, NULL);
}

TEST(asking_where_there_is_no_device_throws)
{
    CHECK_THROWS(malloc_without_a_device, "");
    CHECK_THROWS(malloc_on_a_device_that_is_not_there, "");
    CHECK_THROWS(malloc_on_a_device_without_room_for_a_context, "");
}

static void malloc_too_much(void)
{
    simulated_devices();
    memopt_malloc((ssize_t)1 << 40, 0, NULL);
}

static void tell_calls(int number)
{
    fprintf(stderr, "the driver was asked %d times\n", (int)simulated_devices()->calls("cuMemAlloc_v2"));
    signal(number, SIG_DFL);
    raise(number);
}

static void malloc_less_than_nothing(void)
{
    simulated_devices();
    signal(SIGABRT, tell_calls);
    memopt_malloc(-1, 0, NULL);
}

static void malloc_of_a_broken_driver(void)
{
    simulated_devices()->fail("cuMemAlloc_v2", 0, 1, CUDA_ERROR_ILLEGAL_ADDRESS);
    memopt_malloc(100, 0, NULL);
}

TEST(a_request_that_cannot_be_met_throws)
{
    CHECK_THROWS(malloc_too_much, "");
    CHECK_THROWS(malloc_less_than_nothing, "");
#ifndef __SANITIZE_ADDRESS__ /* which ends a program without the signal */
    child_end end = in_child(malloc_less_than_nothing);
    CHECK_SAID(&end, "the driver was asked 0 times");
#endif
    CHECK_THROWS(malloc_of_a_broken_driver, "");
}

/* ---- then: with one ------------------------------------------------------------------------------------ */

static uint64_t allocations_on(int device)
{
    simcuda_counts counts;
    CHECK_EQ(simulated_devices()->stats(device, &counts), 0);
    return counts.live.allocations;
}

TEST(what_is_asked_for_is_memory_of_that_device_until_it_is_freed)
{
    simulated_devices();
    void *a = memopt_malloc(1000, 0, NULL),
         *b = memopt_malloc(5 << 20, 1, /* CU_STREAM_PER_THREAD */ (void *)2);
    CHECK(a && b && a != b);
    CHECK_EQ(allocations_on(0), 1);
    CHECK_EQ(allocations_on(1), 1);
    CHECK_EQ(stats(0).live_bytes, 1000);
    CHECK_EQ(stats(1).live_bytes, 5 << 20);
    memopt_free(a, 1000, 0, NULL);
    memopt_free(b, 5 << 20, 1, /* CU_STREAM_PER_THREAD */ (void *)2);
    CHECK_EQ(allocations_on(0) + allocations_on(1), 0);
    CHECK_EQ(stats(0).live_bytes + stats(1).live_bytes, 0);
    CHECK_EQ(stats(0).failed_frees + stats(1).failed_frees, 0);
}

TEST(no_bytes_are_no_pointer)
{
    simulated_devices();
    CHECK(!memopt_malloc(0, 0, NULL));
    memopt_free(NULL, 0, 0, NULL);
}

TEST(a_free_that_is_refused_is_counted_and_never_thrown)
{
    simulated_device *sim = simulated_devices();
    void *a = memopt_malloc(1000, 0, NULL);
    const uint64_t before = stats(0).failed_frees;
    memopt_free((void *)0x1234500, 1000, 0, NULL);
    CHECK_EQ(stats(0).failed_frees, before + 1);
    CHECK_EQ(sim->fail("cuMemFree_v2", 0, 1, CUDA_ERROR_ILLEGAL_ADDRESS), 0);
    memopt_free(a, 1000, 0, NULL);
    CHECK_EQ(stats(0).failed_frees, before + 2);
    CHECK_EQ(stats(0).live_blocks, 1);
    memopt_free(a, 1000, 0, NULL);
    memopt_free(a, 1000, 0, NULL); /* twice */
    CHECK_EQ(stats(0).failed_frees, before + 3);
    CHECK_EQ(stats(0).live_blocks, 0);
    CHECK_EQ(allocations_on(0), 0);
}

TEST(freeing_after_the_driver_has_ended_is_success)
{
    simulated_device *sim = simulated_devices();
    void *a = memopt_malloc(1000, 0, NULL);
    const mo_passthrough_stats before = stats(0);
    CHECK_EQ(sim->fail("cuCtxGetCurrent", 0, UINT64_MAX, CUDA_ERROR_DEINITIALIZED), 0);
    memopt_free(a, 1000, 0, NULL);
    sim->fail_clear();
    CHECK_EQ(stats(0).failed_frees, before.failed_frees);
    CHECK_EQ(stats(0).frees, before.frees + 1);
}

static void *kept;

static void free_in_a_fork(void)
{
    const uint64_t failed = stats(0).failed_frees;
    const uint64_t entered = simulated_devices()->calls("cuMemFree_v2");
    memopt_free(kept, 1000, 0, NULL);
    CHECK_EQ(stats(0).failed_frees, failed);
    CHECK_EQ(simulated_devices()->calls("cuMemFree_v2"), entered);
}

static void malloc_in_a_fork(void)
{
    memopt_malloc(1000, 0, NULL);
}

TEST(a_forked_child_frees_quietly_and_its_requests_throw)
{
    simulated_devices();
    kept = memopt_malloc(1000, 0, NULL);
    CHECK_CHILD(free_in_a_fork);
    CHECK_THROWS(malloc_in_a_fork, "");
    memopt_free(kept, 1000, 0, NULL);
}

static void *churn(void *unused)
{
    for (int i = 0, n = test_rounds(500, 50000); i < n; i++)
        memopt_free(memopt_malloc(1000, i % 2, unused), 1000, i % 2, unused);
    return unused;
}

TEST(threads_ask_and_free_at_once)
{
    pthread_t threads[4];
    simulated_devices();
    const uint64_t before = stats(0).live_blocks + stats(1).live_blocks, failed = stats(0).failed_frees;
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, churn, NULL), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    CHECK_EQ(stats(0).live_blocks + stats(1).live_blocks, before);
    CHECK_EQ(stats(0).failed_frees, failed);
    CHECK_EQ(stats(1).failed_frees, 0);
}

TEST_MAIN
