/* A pool on a model device that watches it, and the words that tests of it use.
 *
 *     open_pool(…)    a fresh device and pool        close_pool()   nothing is left, and nothing was violated
 *     get, put        alloc and free, with the model's checks and a use of every byte on the device
 *     meanwhile       what the rest of the program does while the host waits, which is never under the pool's lock
 *
 * A test's program is a correct one: what it allocates it uses on that stream, what it uses on another it records. */
#ifndef MEMOPT_POOL_FIXTURE_H
#define MEMOPT_POOL_FIXTURE_H

#include "alloc/pool_parts.h"
#include "base/hostmem.h"
#include "driver/model_device.h"
#include "interval_model.h"
#include "test.h"

#define KIB     ((size_t)1 << 10)
#define MIB     ((size_t)1 << 20)
#define GRANULE (2 * MIB)
#define A       ((mo_stream)0x10)
#define B       ((mo_stream)0x20)
#define C       ((mo_stream)0x30)
#define GENERAL ((mo_arena_id){0, 0})

#define CHECK_OK(call)                                                                                       \
    do {                                                                                                     \
        said.text[0] = 0;                                                                                    \
        mo_status ok_ = (call);                                                                              \
        test_checks++;                                                                                       \
        if (ok_)                                                                                             \
            TEST_FAIL("%s gives %s: %s", #call, mo_status_name(ok_), said.text);                             \
    } while (0)

static mo_model_device device;
static mo_pool *pool;
static mo_detail said;
static size_t host_before;
static interval_model model;
static int paused_arenas; /* a test that pauses counts them */

static const mo_pool_settings plain_settings = {.slack = 20, .double_map = true, .recall = true};

static void (*meanwhile)(void);
static void (*double_pause)(mo_driver *, uint64_t);
static mo_status (*double_synchronize)(mo_driver *, mo_detail *);

static void wait_unlocked(void)
{
    if (mo_lock_held(&pool->lock))
        TEST_FAIL("the host waits, and holds the pool's lock");
    if (meanwhile)
        meanwhile();
}

static void fixture_pause(mo_driver *driver, uint64_t duration)
{
    wait_unlocked();
    double_pause(driver, duration);
}

static mo_status fixture_synchronize(mo_driver *driver, mo_detail *detail)
{
    const mo_status status = double_synchronize(driver, detail);

    wait_unlocked();
    return status;
}

static void open_pool(size_t capacity, size_t granularity, mo_pool_settings settings)
{
    mo_host_fail_never();
    mo_model_device_close(&device);
    mo_model_device_open(&device, capacity, granularity);
    mo_model_device_watch(&device);
    device.work_per_pause = 1000;
    meanwhile = NULL;
    double_pause = device.table.pause;
    double_synchronize = device.table.synchronize;
    device.table.pause = fixture_pause;
    device.table.synchronize = fixture_synchronize;
    model_clear(&model);
    paused_arenas = 0;
    host_before = mo_host_live();
    CHECK_OK(mo_pool_open(&device.table, &settings, &said, &pool));
}

/* What the device saw so far was in order. */
#define CHECK_CLEAN()                                                                                        \
    do {                                                                                                     \
        test_checks++;                                                                                       \
        if (device.violations)                                                                               \
            TEST_FAIL("%" PRIu64 " violations: %s", device.violations, device.violation);                    \
    } while (0)

#define CHECK_POOL()                                                                                         \
    do {                                                                                                     \
        CHECK_OK(mo_pool_check(pool, &said));                                                                \
        CHECK_CLEAN();                                                                                       \
    } while (0)

__attribute__((unused)) static void close_pool(void)
{
    meanwhile = NULL;
    CHECK_OK(mo_pool_check(pool, &said));
    CHECK_OK(mo_pool_close(pool, &said));
    CHECK_EQ(mo_model_device_live(&device), 0);
    CHECK_EQ(device.used, 0);
    CHECK_EQ(mo_host_live(), host_before);
    CHECK_CLEAN();
    model_clear(&model);
    mo_model_device_close(&device);
}

/* Notes a block that was given out, and uses it. */
__attribute__((unused)) static model_block *take_in(mo_address address, size_t size, mo_stream stream)
{
    mo_address base = 0;
    size_t rounded = 0;
    CHECK(address);
    CHECK_OK(mo_pool_base(pool, address + size - 1, &said, &base, &rounded));
    CHECK_EQ(base, address);
    CHECK_EQ(rounded, (size + MO_ALIGNMENT - 1) / MO_ALIGNMENT * MO_ALIGNMENT);
    model_block *block = model_add(&model, address, rounded, size, stream);
    mo_model_device_use(&device, stream, address, size, block->owner);
    CHECK_CLEAN();
    return block;
}

__attribute__((unused)) static mo_address get(size_t size, mo_stream stream)
{
    mo_address address = 0;
    CHECK_OK(mo_pool_alloc(pool, size, stream, &said, &address));
    take_in(address, size, stream);
    return address;
}

__attribute__((unused)) static mo_address get_in(mo_arena_id arena, size_t size, mo_stream stream)
{
    mo_address address = 0;
    CHECK_OK(mo_pool_alloc_in(pool, arena, size, stream, &said, &address));
    take_in(address, size, stream);
    return address;
}

__attribute__((unused)) static void put(mo_address address)
{
    model_remove(&model, address);
    CHECK_OK(mo_pool_free(pool, address, &said));
}

/* Work on a stream that the block was not allocated for, and that is ordered behind what its own stream did. */
__attribute__((unused)) static void use_on(mo_address address, mo_stream stream)
{
    mo_driver *m = &device.table;
    const model_block *block = model_at(&model, address);
    mo_event *e;
    CHECK(block);
    CHECK_OK(m->event_create(m, &said, &e));
    CHECK_OK(m->event_record(m, e, block->stream, &said));
    CHECK_OK(m->stream_wait(m, stream, e, &said));
    CHECK_OK(m->event_destroy(m, e, &said));
    mo_model_device_use(&device, stream, block->address, block->requested, block->owner);
    CHECK_OK(mo_pool_record_stream(pool, address, stream, &said));
}

__attribute__((unused)) static void finish(mo_stream stream)
{
    mo_model_device_complete(&device, stream, SIZE_MAX);
}

__attribute__((unused)) static mo_stats stats_now(void)
{
    mo_stats stats;
    mo_pool_read_stats(pool, &stats);
    return stats;
}

__attribute__((unused)) static size_t held(void)
{
    mo_stats stats = stats_now();
    return (size_t)stats.of[MO_RESERVED_BYTES][MO_STAT_ALL].current;
}

/* Calls of the table that change memory: what a steady step makes none of. */
__attribute__((unused)) static uint64_t memory_calls(void)
{
    return device.calls[MO_MODEL_DEVICE_create] + device.calls[MO_MODEL_DEVICE_release] +
           device.calls[MO_MODEL_DEVICE_map] + device.calls[MO_MODEL_DEVICE_unmap] +
           device.calls[MO_MODEL_DEVICE_grant] + device.calls[MO_MODEL_DEVICE_segment_alloc] +
           device.calls[MO_MODEL_DEVICE_segment_free];
}

/* An out-of-memory error that says so in torch's words. */
#define CHECK_OUT_OF_MEMORY(call)                                                                            \
    do {                                                                                                     \
        said = (mo_detail){.text = ""};                                                                      \
        CHECK_EQ(call, MO_NO_DEVICE_MEMORY);                                                                 \
        CHECK_EQ(said.status, MO_NO_DEVICE_MEMORY);                                                          \
        if (strncmp(said.text, "CUDA out of memory. Tried to allocate ", 38) != 0)                           \
            TEST_FAIL("not torch's words: %s", said.text);                                                   \
    } while (0)

/* The statistics, against the model and the device. */
__attribute__((unused)) static void check_stats(void)
{
    const mo_stats s = stats_now();
    for (int kind = 0; kind < MO_STAT_KIND_COUNT; kind++) {
        const mo_stat *all = &s.of[kind][MO_STAT_ALL];
        const mo_stat *small = &s.of[kind][MO_STAT_SMALL], *large = &s.of[kind][MO_STAT_LARGE];
        CHECK_EQ(all->current, small->current + large->current);
        CHECK_EQ(all->allocated, small->allocated + large->allocated);
        CHECK_EQ(all->freed, small->freed + large->freed);
        CHECK_EQ(all->current, all->allocated - all->freed);
        CHECK(all->peak >= all->current && small->peak >= small->current && large->peak >= large->current);
        CHECK(small->current >= 0 && large->current >= 0);
    }
#define ALL(kind) s.of[kind][MO_STAT_ALL]
    CHECK_EQ(ALL(MO_ALLOCATION).current, model.count);
    CHECK_EQ(ALL(MO_ALLOCATION).allocated, model.allocations);
    CHECK_EQ(ALL(MO_ALLOCATION).freed, model.frees);
    CHECK_EQ(ALL(MO_ALLOCATION).peak, model.peak_count);
    CHECK_EQ(ALL(MO_ALLOCATED_BYTES).current, model.live);
    CHECK_EQ(ALL(MO_ALLOCATED_BYTES).peak, model.peak_live);
    CHECK_EQ(ALL(MO_REQUESTED_BYTES).current, model.requested);
    CHECK_EQ(ALL(MO_REQUESTED_BYTES).peak, model.peak_requested);
    CHECK_EQ(ALL(MO_RESERVED_BYTES).current, device.used);
    CHECK(ALL(MO_ACTIVE).current >= ALL(MO_ALLOCATION).current);
    CHECK(ALL(MO_ACTIVE_BYTES).current >= ALL(MO_ALLOCATED_BYTES).current);
    if (!paused_arenas) { /* their blocks live, and hold nothing */
        CHECK(ALL(MO_RESERVED_BYTES).current >= ALL(MO_ACTIVE_BYTES).current);
        CHECK(ALL(MO_RESERVED_BYTES).current >=
              ALL(MO_ALLOCATED_BYTES).current + ALL(MO_INACTIVE_SPLIT_BYTES).current);
    }
    CHECK_EQ(ALL(MO_SEGMENT).current,
             device.blocks[MO_MODEL_DEVICE_HANDLE].live + device.blocks[MO_MODEL_DEVICE_SEGMENT].live);
    CHECK_EQ(s.driver_calls, memory_calls());
    CHECK_EQ(s.num_device_alloc - s.num_device_free, (uint64_t)ALL(MO_SEGMENT).current);
    CHECK(s.num_device_alloc <=
          device.calls[MO_MODEL_DEVICE_create] + device.calls[MO_MODEL_DEVICE_segment_alloc]);
    CHECK_EQ(s.num_device_free,
             device.calls[MO_MODEL_DEVICE_release] + device.calls[MO_MODEL_DEVICE_segment_free]);
#undef ALL
    if (pool->settings.budget)
        CHECK(held() <= pool->settings.budget);
}

#endif
