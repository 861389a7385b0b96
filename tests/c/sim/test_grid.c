/* What a grid gives a kernel, and what ends one that cannot go on. */
#include "simcuda/cuda_words.h"

#include "../test.h"

enum { BLOCKS = 7, THREADS = 96 };

static unsigned results[BLOCKS * THREADS];
static unsigned counter;

static void run(void (*kernel)(const void *), const char *expected)
{
    uint64_t random = test_seed();
    char why[200] = "";

    for (int round = 0; round < test_rounds(20, 1000); round++) {
        const sim_grid grid = {
            .kernel = kernel, .blocks = BLOCKS, .threads = THREADS, .seed = test_random(&random)};
        counter = 0;
        memset(results, 0, sizeof results);
        CHECK_EQ(sim_grid_run(&grid, why, sizeof why), !expected);
        if (expected && !strstr(why, expected))
            TEST_FAIL("%s", why);
    }
}

static unsigned here(void)
{
    return blockIdx.x * blockDim.x + threadIdx.x;
}

/* Each thread's neighbour's place, by shared memory that other blocks write in the meantime. */
static void neighbours(const void *none)
{
    __shared__ unsigned places[THREADS];

    (void)none;
    places[threadIdx.x] = here();
    __syncthreads();
    results[here()] = places[(threadIdx.x + 1) % blockDim.x] + gridDim.x;
    __syncthreads();
    places[threadIdx.x] = 0;
}

TEST(shared_memory_is_a_blocks_own)
{
    run(neighbours, NULL);
    for (unsigned k = 0; k < BLOCKS * THREADS; k++)
        CHECK_EQ(results[k], k / THREADS * THREADS + (k + 1) % THREADS + BLOCKS);
}

static void unwritten(const void *none)
{
    __shared__ unsigned words[64];

    (void)none;
    if (threadIdx.x < 64 && words[threadIdx.x] != 0)
        results[here()] = 1;
}

TEST(shared_memory_begins_with_anything)
{
    unsigned other_than_zero = 0;

    run(unwritten, NULL);
    for (unsigned k = 0; k < BLOCKS * THREADS; k++)
        other_than_zero += results[k];
    CHECK(other_than_zero > BLOCKS * 60);
}

static void sums(const void *none)
{
    float x = (float)(threadIdx.x % 32);
    double y = x;

    (void)none;
    for (unsigned apart = 16; apart > 0; apart /= 2) {
        x += __shfl_down_sync(0xFFFFFFFFu, x, apart);
        y += __shfl_xor_sync(0xFFFFFFFFu, y, apart);
    }
    results[here()] = threadIdx.x % 32 == 0 ? (unsigned)x : (unsigned)y;
}

TEST(shuffles_bring_other_lanes_values)
{
    run(sums, NULL);
    for (unsigned k = 0; k < BLOCKS * THREADS; k++)
        CHECK_EQ(results[k], 31 * 32 / 2);
}

static void counts(const void *none)
{
    (void)none;
    results[here()] = atomicAdd(&counter, 1) + 1;
    if (__syncthreads_or(threadIdx.x == 5) != 1)
        results[here()] = 0;
}

TEST(an_atomic_counts_each_thread_once_and_a_predicate_is_all_threads)
{
    unsigned long sum = 0;

    run(counts, NULL);
    CHECK_EQ(counter, BLOCKS * THREADS);
    for (unsigned k = 0; k < BLOCKS * THREADS; k++)
        sum += results[k];
    CHECK_EQ(sum, (unsigned long)counter * (counter + 1) / 2);
}

static void two_barriers(const void *none)
{
    (void)none;
    if (threadIdx.x < 40)
        __syncthreads();
    else
        __syncthreads();
}

static void one_leaves(const void *none)
{
    (void)none;
    if (threadIdx.x != 3)
        __syncthreads();
}

static void lane_is_gone(const void *none)
{
    (void)none;
    if (threadIdx.x != 3)
        (void)__shfl_xor_sync(0xFFFFFFFFu, 1.0f, 1);
}

static void outside_the_mask(const void *none)
{
    (void)none;
    if (threadIdx.x % 32 < 8)
        (void)__shfl_down_sync(0xFFu, 1.0f, 4);
}

static void for_ever(const void *none)
{
    (void)none;
    if (threadIdx.x == 0)
        __syncwarp();
    else
        __syncthreads();
}

TEST(threads_that_cannot_go_on_end_the_grid_with_a_text)
{
    run(two_barriers, "two barriers");
    run(one_leaves, "have ended while others wait");
    run(lane_is_gone, "lane 3, which has ended");
    run(outside_the_mask, "its mask leaves out");
    run(for_ever, "wait forever");
    run(sums, NULL); /* and the next one runs */
}

TEST(a_size_that_no_device_takes_is_refused)
{
    char why[200] = "";

    CHECK(!sim_grid_run(&(sim_grid){.kernel = sums, .blocks = 1, .threads = 33}, why, sizeof why));
    CHECK(strstr(why, "1 blocks of 33 threads"));
    CHECK(!sim_grid_run(&(sim_grid){.kernel = sums, .blocks = 0, .threads = 32}, why, sizeof why));
    CHECK(!sim_grid_run(&(sim_grid){.kernel = sums, .blocks = 1, .threads = 1056}, why, sizeof why));
}

TEST_MAIN
