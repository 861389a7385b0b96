/* The hooks as torch calls them, over the simulated device as libcuda.so.1, without torch: an exception is
 * std::runtime_error here, which ends the child that nobody catches it in. With torch:
 * tests/sim/test_pluggable_allocator.py. */
#include "alloc/torch_hooks.h"

#include <pthread.h>

#include "alloc/pool_parts.h"
#include "child.h"
#include "driver/driver_cuda.h"
#include "simulated_device.h"

#define MIB ((size_t)1 << 20)

static mo_stats stats(int device)
{
    mo_stats s = {0};
    mo_pool *pool = mo_pool_if_open(device);
    if (pool)
        mo_pool_read_stats(pool, &s);
    return s;
}

static int64_t live_blocks(int device)
{
    return stats(device).of[MO_ALLOCATION][MO_STAT_ALL].current;
}

static int64_t live_bytes(int device)
{
    return stats(device).of[MO_REQUESTED_BYTES][MO_STAT_ALL].current;
}

static int64_t held(int device)
{
    return stats(device).of[MO_RESERVED_BYTES][MO_STAT_ALL].current;
}

/* ---- first: in processes that have no device, or never had one before ------------------------------------ */

static void free_without_a_device(void)
{
    size_t size = 7;
    simulated_library(); /* not activated: cuInit fails */
    memopt_free(NULL, 0, 0, NULL);
    memopt_free((void *)0x10000, 100, 0, NULL);
    memopt_free((void *)0x10000, 100, 99, NULL);
    memopt_free((void *)0x10000, 100, -1, NULL);
    mo_torch_hook_record_stream((void *)0x10000, NULL);
    mo_torch_hook_record_stream(NULL, NULL);
    mo_torch_hook_reset();
    CHECK(mo_torch_hook_base((void *)0x10000, &size) == (void *)0x10000 && size == 7);
    mo_torch_hook_end_pool(0, (mo_arena_id){0, 1});
    mo_torch_hook_release_pool(99, (mo_arena_id){0, 1});
    CHECK_EQ(mo_torch_hooks_read().foreign_frees, 3);
    CHECK_EQ(mo_torch_hooks_read().foreign_streams, 1);
    CHECK_EQ(mo_torch_hooks_read().unbalanced, 2);
    CHECK(!mo_torch_hooks_current() && mo_torch_hooks_fraction(0) == 1);
}

TEST(where_there_is_no_device_what_cannot_throw_is_quiet)
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

static void malloc_on_a_device_of_a_negative_number(void)
{
    simulated_devices();
    memopt_malloc(100, -1, NULL);
}

static void malloc_on_a_device_without_room_for_a_context(void)
{
    simulated_devices()->fail("cuDevicePrimaryCtxRetain", 0, 1, CUDA_ERROR_OUT_OF_MEMORY);
    memopt_malloc(100, 0, NULL);
}

static void limit_without_a_device(void)
{
    simulated_library();
    mo_torch_hook_fraction(0.5, 0);
}

TEST(asking_where_there_is_no_device_throws)
{
    CHECK_THROWS(malloc_without_a_device, "cuInit");
    CHECK_THROWS(malloc_on_a_device_that_is_not_there, "2");
    CHECK_THROWS(malloc_on_a_device_of_a_negative_number, "-1");
    CHECK_THROWS(malloc_on_a_device_without_room_for_a_context,
                 "CUDA out of memory. Tried to allocate 100 bytes. GPU 0 did not report its capacity.");
    CHECK_THROWS(limit_without_a_device, "cuInit");
}

static void malloc_too_much(void)
{
    simulated_devices();
    memopt_malloc((ssize_t)1 << 40, 0, NULL);
}

static void tell_calls(int number)
{
    fprintf(stderr, "the driver was asked %d times\n", (int)simulated_devices()->calls("cuMemCreate"));
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
    simulated_devices()->fail("cuMemCreate", 0, UINT64_MAX, CUDA_ERROR_ILLEGAL_ADDRESS);
    memopt_malloc(100, 0, NULL);
}

static void tell(int device, size_t wanted, size_t total, size_t free_bytes)
{
    void *a = memopt_malloc(1000, device, NULL); /* nothing is locked */

    fprintf(stderr, "GPU %d of %zu bytes, %zu free, has no %zu\n", device, total, free_bytes, wanted);
    memopt_free(a, 1000, device, NULL);
}

static void tell_nobody(int device, size_t wanted, size_t total, size_t free_bytes)
{
    (void)device, (void)wanted, (void)total, (void)free_bytes;
    _exit(7); /* so that nothing is thrown */
}

static void malloc_too_much_with_an_observer(void)
{
    mo_torch_hooks_observe(tell);
    malloc_too_much();
}

static void malloc_less_than_nothing_with_an_observer(void)
{
    mo_torch_hooks_observe(tell_nobody);
    malloc_less_than_nothing();
}

static void malloc_too_much_with_no_observer_any_more(void)
{
    mo_torch_hooks_observe(tell_nobody);
    mo_torch_hooks_observe(NULL);
    malloc_too_much();
}

TEST(an_out_of_memory_is_told_before_it_is_thrown_and_nothing_else_is)
{
    CHECK_THROWS(malloc_too_much_with_an_observer,
                 "GPU 0 of 67108864 bytes, 67108864 free, has no 1099511627776");
    CHECK_THROWS(malloc_too_much_with_an_observer, "CUDA out of memory. Tried to allocate 1024.00 GiB.");
    CHECK_THROWS(malloc_less_than_nothing_with_an_observer, "the size -1 is negative");
    CHECK_THROWS(malloc_too_much_with_no_observer_any_more, "CUDA out of memory");
}

TEST(a_request_that_cannot_be_met_throws)
{
    CHECK_THROWS(malloc_too_much, "CUDA out of memory. Tried to allocate 1024.00 GiB. GPU 0 has a total "
                                  "capacity of 64.00 MiB of which ");
    CHECK_THROWS(malloc_less_than_nothing, "the size -1 is negative");
#ifndef __SANITIZE_ADDRESS__ /* which ends a program without the signal */
    child_end end = in_child(malloc_less_than_nothing);
    CHECK_SAID(&end, "the driver was asked 0 times");
#endif
    CHECK_THROWS(malloc_of_a_broken_driver, "cuMemCreate");
}

static void hold_from_the_start(void)
{
    mo_pool_settings settings = mo_pool_defaults();
    simulated_devices();
    settings.preallocate = 20 * MIB;
    mo_pool_set_defaults(settings);
    CHECK(!mo_pool_if_open(0));
    void *a = memopt_malloc(1000, 0, NULL);
    CHECK_EQ(held(0), 20 * MIB);
    CHECK(!mo_pool_if_open(1)); /* used by nobody */
    memopt_free(a, 1000, 0, NULL);
}

static void hold_more_than_there_is(void)
{
    mo_pool_settings settings = mo_pool_defaults();
    simulated_devices();
    settings.preallocate = 100 * MIB;
    mo_pool_set_defaults(settings);
    memopt_malloc(1000, 0, NULL);
}

TEST(a_device_holds_from_its_first_use_what_it_was_told_to)
{
    CHECK_CHILD(hold_from_the_start);
    CHECK_THROWS(hold_more_than_there_is,
                 "CUDA out of memory. Tried to allocate 100.00 MiB. GPU 0 has a total");
}

static void a_budget_and_a_fraction(void)
{
    mo_pool_settings settings = mo_pool_defaults();
    simulated_devices();
    settings.budget = 16 * MIB;
    mo_pool_set_defaults(settings);
    mo_torch_hook_fraction(0.5, 0);
    CHECK_EQ(mo_pool_if_open(0)->settings.budget, 16 * MIB); /* the smaller */
    mo_torch_hook_fraction(0.125, 0);
    CHECK_EQ(mo_pool_if_open(0)->settings.budget, 8 * MIB);
    mo_torch_hook_fraction(1, 0);
    CHECK_EQ(mo_pool_if_open(0)->settings.budget, 16 * MIB);
}

TEST(of_a_budget_and_a_fraction_the_smaller_counts)
{
    CHECK_CHILD(a_budget_and_a_fraction);
}

static void be_current(void)
{
    simulated_devices();
    CHECK(!mo_torch_hooks_current());
    mo_torch_hook_init(2);
    CHECK(mo_torch_hooks_current());
    CHECK(!mo_pool_if_open(0)); /* and no context was made */
}

TEST(torch_has_it_as_its_current_one_when_it_says_so)
{
    CHECK_CHILD(be_current);
}

TEST(every_setter_of_torchs_has_its_hook)
{
    const char *names[] = {"set_init_fn",
                           "set_reset_fn",
                           "set_memory_fraction_fn",
                           "set_base_alloc_fn",
                           "set_record_stream_fn",
                           "set_begin_allocate_to_pool",
                           "set_end_allocate_to_pool_fn",
                           "set_release_pool"};
    const mo_torch_hook *h = mo_torch_hooks();
    for (size_t i = 0; i < sizeof names / sizeof *names; i++, h++) {
        CHECK_STR(h->setter, names[i]);
        CHECK(h->hook);
    }
    CHECK(!h->setter);
}

/* ---- then: with one ------------------------------------------------------------------------------------ */

static uint64_t used_on(int device)
{
    simcuda_counts counts;
    CHECK_EQ(simulated_devices()->stats(device, &counts), 0);
    return counts.live.bytes;
}

TEST(what_is_asked_for_is_memory_of_that_device_until_it_is_freed)
{
    simulated_devices();
    void *a = memopt_malloc(1000, 0, NULL), *b = memopt_malloc(5 << 20, 1, CU_STREAM_LEGACY);
    CHECK(a && b && a != b);
    CHECK_EQ(live_bytes(0), 1000);
    CHECK_EQ(live_bytes(1), 5 << 20);
    CHECK(used_on(0) >= 1000 && used_on(1) >= 5 << 20);
    memopt_free(a, 1000, 0, NULL);
    memopt_free(b, 5 << 20, 1, CU_STREAM_LEGACY);
    CHECK_EQ(live_bytes(0) + live_bytes(1), 0);
    simulated_devices()->progress(NULL, -1);
    mo_torch_hook_reset();
    CHECK_EQ(used_on(0) + used_on(1), 0);
}

TEST(no_bytes_are_no_pointer)
{
    simulated_devices();
    const int64_t before = live_blocks(0);
    CHECK(!memopt_malloc(0, 0, NULL));
    memopt_free(NULL, 0, 0, NULL);
    CHECK_EQ(live_blocks(0), before);
}

TEST(a_free_that_is_refused_is_counted_and_never_thrown)
{
    simulated_devices();
    void *a = memopt_malloc(1000, 0, NULL), *b = memopt_malloc(1000, 1, NULL);
    const mo_stats before = stats(0);
    memopt_free((void *)0x1234500, 1000, 0, NULL);
    CHECK_EQ(stats(0).foreign_frees, before.foreign_frees + 1);
    memopt_free((char *)a + 8, 1000, 0, NULL); /* inside a block is not a block */
    memopt_free(b, 1000, 0, NULL);             /* another device's */
    CHECK_EQ(stats(0).foreign_frees + stats(0).double_frees, before.foreign_frees + before.double_frees + 3);
    memopt_free(a, 1000, 0, NULL);
    CHECK_EQ(live_blocks(0), 0);
    memopt_free(a, 1000, 0, NULL); /* twice */
    CHECK_EQ(stats(0).foreign_frees + stats(0).double_frees, before.foreign_frees + before.double_frees + 4);
    CHECK_EQ(live_blocks(1), 1);
    memopt_free(b, 1, 1, (void *)0x77); /* of a wrong size and stream: the pool knows better */
    CHECK_EQ(live_blocks(1), 0);
    CHECK_EQ(mo_pool_check(mo_pool_if_open(0), NULL), MO_OK);
}

TEST(an_address_is_found_in_its_block_on_any_device)
{
    simulated_devices();
    size_t size = 7;
    char *a = memopt_malloc(1000, 0, NULL), *b = memopt_malloc(5 << 20, 1, NULL);
    CHECK(mo_torch_hook_base(a, &size) == a && size == 1024);
    CHECK(mo_torch_hook_base(b + (5 << 20) - 1, &size) == b && size == 5 << 20);
    CHECK(mo_torch_hook_base(b, NULL) == b);
    memopt_free(a, 1000, 0, NULL);
    memopt_free(b, 5 << 20, 1, NULL);
    size = 7;
    CHECK(mo_torch_hook_base(b, &size) == b && size == 7);
}

/* A stream of device 0, as a program makes it: the device is current to this thread from now on. */
static CUstream new_stream(void)
{
    simulated_device *sim = simulated_devices();
    mo_driver *driver = NULL;
    CUstream stream = NULL;

    CHECK_EQ(mo_driver_cuda_get(0, &driver, NULL), MO_OK);
    sim->set_current(((mo_driver_cuda *)driver)->context);
    CHECK_EQ(sim->stream_create(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    return stream;
}

static void do_nothing(void *unused)
{
    (void)unused;
}

static size_t pending(int device)
{
    mo_fragmentation f;
    mo_pool_fragmentation(mo_pool_if_open(device), &f);
    return f.pending_bytes;
}

TEST(a_stream_that_uses_a_block_keeps_it_busy_after_the_free)
{
    simulated_device *sim = simulated_devices();
    CUstream stream = new_stream();
    mo_torch_hook_reset();
    CHECK_EQ(pending(0), 0);
    void *a = memopt_malloc((ssize_t)(4 * MIB), 0, NULL);
    const uint64_t foreign = mo_torch_hooks_read().foreign_streams;
    mo_torch_hook_record_stream((char *)a + 100, stream);
    CHECK_EQ(sim->host_function(stream, do_nothing, NULL), CUDA_SUCCESS);
    memopt_free(a, 4 << 20, 0, NULL);
    CHECK_EQ(pending(0), 4 * MIB);
    sim->progress(NULL, -1);
    mo_torch_hook_reset();
    CHECK_EQ(pending(0), 0);
    mo_torch_hook_record_stream(a, stream); /* it is free */
    CHECK_EQ(mo_torch_hooks_read().foreign_streams, foreign + 1);
}

TEST(a_fraction_is_a_limit_until_another_one)
{
    simulated_devices();
    void *a = memopt_malloc(1000, 0, NULL);
    mo_torch_hook_fraction(0.25, 0);
    CHECK_EQ(mo_pool_if_open(0)->settings.budget, 16 * MIB);
    CHECK(mo_torch_hooks_fraction(0) == 0.25 && mo_torch_hooks_fraction(1) == 1);
    mo_torch_hook_fraction(0, 0);
    CHECK_EQ(mo_pool_if_open(0)->settings.budget, 1);
    mo_torch_hook_fraction(1, 0);
    CHECK_EQ(mo_pool_if_open(0)->settings.budget, 0);
    CHECK(mo_torch_hooks_fraction(-1) == 1 && mo_torch_hooks_fraction(MO_MAX_DEVICES) == 1);
    memopt_free(a, 1000, 0, NULL);
}

/* ---- private pools: a filter as libstdc++ lays it out, that accepts one stream -------------------------------- */

static int filters, questions;

static bool manage(void *self, const void *other, int operation)
{
    if (operation == 2)
        memcpy(self, other, 2 * sizeof(void *));
    filters += operation == 2 ? 1 : -1;
    return false;
}

static bool is_the_stream(const void *self, mo_stream *stream)
{
    questions++;
    return *(void *const *)self == *stream;
}

static mo_stream_filter only(mo_stream stream)
{
    return (mo_stream_filter){{stream, NULL}, manage, is_the_stream};
}

static mo_arena_info arena(mo_arena_id id)
{
    mo_arena_info info = {.references = 0};
    mo_pool_arena_info(mo_pool_if_open(0), id, NULL, &info);
    return info;
}

TEST(a_private_pool_serves_the_streams_of_its_filter_and_gives_back_when_released)
{
    const mo_arena_id id = {0, 77};
    CUstream ours = new_stream();
    memopt_free(memopt_malloc(1000, 0, NULL), 1000, 0, NULL);
    mo_stream_filter filter = only(ours);
    mo_torch_hook_begin_pool(0, id, &filter);
    memset(&filter, 0xff, sizeof filter); /* torch destroys its own */
    CHECK_EQ(filters, 1);
    void *inside = memopt_malloc(3000, 0, ours), *outside = memopt_malloc(3000, 0, NULL);
    CHECK_EQ(questions, 2);
    CHECK_EQ(arena(id).live_blocks, 1);
    CHECK(arena(id).pinned);
    mo_torch_hook_end_pool(0, id);
    CHECK_EQ(filters, 0);
    void *later = memopt_malloc(3000, 0, ours);
    CHECK_EQ(arena(id).live_blocks, 1);
    memopt_free(inside, 3000, 0, ours);
    CHECK_EQ(arena(id).live_blocks, 0);
    CHECK(arena(id).held_bytes > 0); /* a graph may still replay its addresses */
    mo_torch_hook_release_pool(0, id);
    CHECK_EQ(arena(id).references, 0);
    memopt_free(outside, 3000, 0, NULL);
    memopt_free(later, 3000, 0, ours);
    CHECK_EQ(mo_pool_check(mo_pool_if_open(0), NULL), MO_OK);
}

TEST(a_pool_that_two_graphs_share_lives_as_long_as_the_longer)
{
    simulated_devices();
    const mo_arena_id id = {0, 78};
    for (int i = 0; i < 2; i++) {
        mo_stream_filter filter = only(NULL);
        mo_torch_hook_begin_pool(0, id, &filter);
        memopt_free(memopt_malloc(3000, 0, NULL), 3000, 0, NULL);
        mo_torch_hook_end_pool(0, id);
    }
    mo_torch_hook_release_pool(0, id);
    CHECK_EQ(arena(id).references, 1);
    CHECK(arena(id).held_bytes > 0);
    mo_torch_hook_release_pool(0, id);
    CHECK_EQ(arena(id).references, 0);
    CHECK_EQ(filters, 0);
    const uint64_t before = mo_torch_hooks_read().unbalanced;
    mo_torch_hook_release_pool(0, id);
    mo_torch_hook_end_pool(0, id);
    CHECK_EQ(mo_torch_hooks_read().unbalanced, before + 2);
}

/* ---- the end, and children ----------------------------------------------------------------------------------- */

TEST(freeing_after_the_driver_has_ended_is_success)
{
    simulated_device *sim = simulated_devices();
    void *a = memopt_malloc(1000, 0, NULL);
    const mo_stats before = stats(0);
    CHECK_EQ(sim->fail("cuCtxGetCurrent", 0, UINT64_MAX, CUDA_ERROR_DEINITIALIZED), 0);
    memopt_free(a, 1000, 0, NULL);
    sim->fail_clear();
    CHECK_EQ(stats(0).failed_releases, before.failed_releases);
    CHECK_EQ(stats(0).of[MO_ALLOCATION][MO_STAT_ALL].freed, before.of[MO_ALLOCATION][MO_STAT_ALL].freed + 1);
}

static void *kept;

static void everything_in_a_fork(void)
{
    size_t size = 7;
    const uint64_t entered = simulated_devices()->calls("cuCtxGetCurrent");
    memopt_free(kept, 1000, 0, NULL);
    memopt_free((void *)0x1234500, 1000, 0, NULL);
    mo_torch_hook_reset();
    mo_torch_hook_record_stream(kept, NULL);
    CHECK(mo_torch_hook_base(kept, &size) == kept && size == 7);
    mo_torch_hook_end_pool(0, (mo_arena_id){0, 1});
    mo_torch_hook_release_pool(0, (mo_arena_id){0, 1});
    CHECK_EQ(mo_torch_hooks_read().in_child, 7);
    CHECK_EQ(mo_torch_hooks_read().foreign_frees, 0);
    CHECK_EQ(simulated_devices()->calls("cuCtxGetCurrent"), entered);
}

static void malloc_in_a_fork(void)
{
    memopt_malloc(1000, 0, NULL);
}

static void limit_in_a_fork(void)
{
    mo_torch_hook_fraction(0.5, 0);
}

static void begin_in_a_fork(void)
{
    mo_stream_filter filter = only(NULL);
    mo_torch_hook_begin_pool(0, (mo_arena_id){0, 1}, &filter);
}

TEST(a_forked_child_only_counts_and_its_requests_throw)
{
    simulated_devices();
    kept = memopt_malloc(1000, 0, NULL);
    CHECK_CHILD(everything_in_a_fork);
    CHECK_THROWS(malloc_in_a_fork, "this process was forked");
    CHECK_THROWS(limit_in_a_fork, "this process was forked");
    CHECK_THROWS(begin_in_a_fork, "this process was forked");
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
    const int64_t before = live_blocks(0) + live_blocks(1);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, churn, NULL), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    CHECK_EQ(live_blocks(0) + live_blocks(1), before);
    for (int device = 0; device < 2; device++)
        CHECK_EQ(mo_pool_check(mo_pool_if_open(device), NULL), MO_OK);
}

TEST_MAIN
