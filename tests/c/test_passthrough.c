/* Over the double. The counters are the process's and live for ever: each test has a device ordinal of its
 * own. */
#include "alloc/passthrough.h"

#include <pthread.h>

#include "base/hostmem.h"
#include "driver/driver_double.h"
#include "test.h"

#define MIB ((size_t)1 << 20)

static mo_double device;

static mo_driver *fresh(int ordinal, size_t capacity)
{
    mo_double_close(&device);
    mo_double_open(&device, capacity, 2 * MIB);
    device.table.device = ordinal;
    return &device.table;
}

static mo_passthrough_stats stats(int ordinal)
{
    mo_passthrough_stats s;
    memset(&s, 0xAA, sizeof s);
    mo_passthrough_read(ordinal, &s);
    return s;
}

/* The equations of the header, and what the device itself says. */
static void check_equations(int ordinal)
{
    const mo_passthrough_stats s = stats(ordinal);
    CHECK_EQ(s.allocations - s.frees, s.live_blocks);
    CHECK_EQ(s.live_blocks, mo_double_live(&device));
    CHECK_EQ(s.live_bytes, device.used);
    CHECK_EQ(s.peak_bytes, device.peak);
}

TEST(a_device_that_was_never_used_has_counted_nothing)
{
    static const mo_passthrough_stats zero;
    const int unused[] = {40, 63, -1, MO_MAX_DEVICES, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof unused / sizeof *unused; i++) {
        const mo_passthrough_stats s = stats(unused[i]);
        CHECK(memcmp(&s, &zero, sizeof s) == 0);
    }
}

TEST(a_request_is_a_segment_and_a_free_gives_it_back)
{
    mo_driver *m = fresh(0, 64 * MIB);
    mo_address a, b;
    CHECK_EQ(mo_passthrough_alloc(m, 1000, NULL, &a), MO_OK);
    CHECK_EQ(mo_passthrough_alloc(m, 3 * MIB, NULL, &b), MO_OK);
    CHECK(a && b && a != b);
    CHECK_EQ(stats(0).live_bytes, 1000 + 3 * MIB);
    check_equations(0);
    CHECK_EQ(mo_passthrough_free(m, a, 1000, NULL), MO_OK);
    check_equations(0);
    CHECK_EQ(mo_passthrough_free(m, b, 3 * MIB, NULL), MO_OK);
    check_equations(0);
    const mo_passthrough_stats s = stats(0);
    CHECK(s.allocations == 2 && s.frees == 2 && s.live_bytes == 0 && s.peak_bytes == 1000 + 3 * MIB);
}

TEST(no_bytes_are_address_0_and_no_call_of_the_driver)
{
    mo_driver *m = fresh(1, 64 * MIB);
    mo_address a = 77;
    CHECK_EQ(mo_passthrough_alloc(m, 0, NULL, &a), MO_OK);
    CHECK_EQ(a, 0);
    CHECK_EQ(mo_passthrough_free(m, 0, 0, NULL), MO_OK);
    CHECK_EQ(device.calls[MO_DOUBLE_segment_alloc] + device.calls[MO_DOUBLE_segment_free], 0);
    CHECK_EQ(stats(1).allocations + stats(1).frees, 0);
}

TEST(out_of_memory_is_counted_and_holds_nothing)
{
    mo_driver *m = fresh(2, 4 * MIB);
    mo_address a, b = 77;
    mo_detail detail;
    CHECK_EQ(mo_passthrough_alloc(m, 3 * MIB, NULL, &a), MO_OK);
    for (int i = 1; i <= 3; i++) {
        CHECK_EQ(mo_passthrough_alloc(m, 2 * MIB, &detail, &b), MO_NO_DEVICE_MEMORY);
        CHECK_EQ(detail.status, MO_NO_DEVICE_MEMORY);
        CHECK_EQ(stats(2).out_of_memory, i);
        check_equations(2);
    }
    CHECK_EQ(b, 77);
    CHECK_EQ(mo_passthrough_free(m, a, 3 * MIB, NULL), MO_OK);
    CHECK_EQ(mo_passthrough_alloc(m, 2 * MIB, NULL, &b), MO_OK);
    CHECK_EQ(mo_passthrough_free(m, b, 2 * MIB, NULL), MO_OK);
    check_equations(2);
}

TEST(a_driver_error_is_not_an_out_of_memory)
{
    mo_driver *m = fresh(3, 64 * MIB);
    mo_address a = 77;
    mo_double_fail(&device, MO_DOUBLE_segment_alloc, 0, 1, MO_DRIVER);
    CHECK_EQ(mo_passthrough_alloc(m, 100, NULL, &a), MO_DRIVER);
    CHECK_EQ(a, 77);
    CHECK_EQ(stats(3).out_of_memory, 0);
    check_equations(3);
}

TEST(a_free_that_the_driver_refuses_is_counted_and_the_block_stays)
{
    mo_driver *m = fresh(4, 64 * MIB);
    mo_address a;
    CHECK_EQ(mo_passthrough_alloc(m, 100, NULL, &a), MO_OK);
    CHECK(mo_passthrough_free(m, a + 4, 100, NULL) != MO_OK); /* a foreign pointer */
    mo_double_fail(&device, MO_DOUBLE_segment_free, 0, 1, MO_DRIVER);
    CHECK_EQ(mo_passthrough_free(m, a, 100, NULL), MO_DRIVER);
    CHECK_EQ(stats(4).failed_frees, 2);
    CHECK_EQ(stats(4).frees, 0);
    check_equations(4);
    CHECK_EQ(mo_passthrough_free(m, a, 100, NULL), MO_OK);
    CHECK(mo_passthrough_free(m, a, 100, NULL) != MO_OK); /* twice */
    CHECK_EQ(stats(4).failed_frees, 3);
    check_equations(4);
}

TEST(devices_are_counted_apart)
{
    mo_driver *m = fresh(5, 64 * MIB);
    mo_address a;
    CHECK_EQ(mo_passthrough_alloc(m, 100, NULL, &a), MO_OK);
    CHECK_EQ(stats(5).live_blocks, 1);
    CHECK_EQ(stats(6).live_blocks, 0);
    m->device = MO_MAX_DEVICES - 1;
    CHECK_EQ(mo_passthrough_free(m, a, 100, NULL), MO_OK); /* wherever it was asked for */
    CHECK_EQ(stats(MO_MAX_DEVICES - 1).frees, 1);
    CHECK_EQ(stats(5).frees, 0);
}

TEST(any_request_and_any_free_may_fail)
{
    const size_t host = mo_host_live();
    for (uint64_t n = 0; n < 6; n++) {
        mo_driver *m = fresh(7, 64 * MIB);
        const mo_passthrough_stats before = stats(7);
        mo_address blocks[3] = {0};
        uint64_t failures = 0, refused = 0;
        mo_double_fail(&device, n < 3 ? MO_DOUBLE_segment_alloc : MO_DOUBLE_segment_free, n % 3, 1,
                       MO_DRIVER);
        for (int i = 0; i < 3; i++)
            failures += mo_passthrough_alloc(m, 1000, NULL, &blocks[i]) != MO_OK;
        for (int i = 0; i < 3; i++)
            while (blocks[i] && mo_passthrough_free(m, blocks[i], 1000, NULL) != MO_OK)
                refused++;
        CHECK_EQ(failures, n < 3);
        CHECK_EQ(refused, n >= 3);
        CHECK_EQ(stats(7).failed_frees, before.failed_frees + refused);
        CHECK_EQ(stats(7).live_blocks, 0);
        CHECK_EQ(stats(7).live_bytes, 0);
        CHECK_EQ(mo_double_live(&device), 0);
    }
    CHECK_EQ(mo_host_live(), host);
}

/* Random requests and frees against the device's own figures. */
TEST(the_counters_are_right_after_any_sequence)
{
    uint64_t state = test_seed();
    mo_driver *m = fresh(8, 64 * MIB);
    struct {
        mo_address address;
        size_t size;
    } blocks[64] = {{0, 0}};
    for (int i = 0, n = test_rounds(2000, 200000); i < n; i++) {
        const size_t slot = test_random(&state) % 64;
        if (blocks[slot].address) {
            CHECK_EQ(mo_passthrough_free(m, blocks[slot].address, blocks[slot].size, NULL), MO_OK);
            blocks[slot].address = 0;
        } else {
            blocks[slot].size = test_random(&state) % (4 * MIB);
            const mo_status status = mo_passthrough_alloc(m, blocks[slot].size, NULL, &blocks[slot].address);
            CHECK(status == MO_OK || status == MO_NO_DEVICE_MEMORY);
            if (status)
                blocks[slot].address = 0;
        }
        check_equations(8);
    }
}

static pthread_barrier_t together;

static void *churn(void *unused)
{
    mo_address a;
    pthread_barrier_wait(&together);
    for (int i = 0, n = test_rounds(20000, 1000000); i < n; i++)
        if (mo_passthrough_alloc(&device.table, 1000, NULL, &a) ||
            mo_passthrough_free(&device.table, a, 1000, NULL))
            return NULL;
    return unused;
}

TEST(threads_lose_no_count)
{
    enum { THREADS = 4 };
    pthread_t threads[THREADS];
    void *done;
    fresh(9, 64 * MIB);
    pthread_barrier_init(&together, NULL, THREADS);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, churn, &device), 0);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], &done);
        CHECK(done == &device);
    }
    const mo_passthrough_stats s = stats(9);
    CHECK_EQ(s.allocations, (uint64_t)THREADS * (uint64_t)test_rounds(20000, 1000000));
    CHECK_EQ(s.frees, s.allocations);
    CHECK_EQ(s.live_blocks, 0);
    CHECK_EQ(s.live_bytes, 0);
    CHECK(s.peak_bytes >= 1000 && s.peak_bytes <= 1000 * THREADS);
}

TEST_MAIN
