#include "alloc/replay.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/hostmem.h"
#include "base/size.h"
#include "driver/model_device.h"

/* Operations of every stream that end while the allocator waits before it fails: about what a device does in the
 * while. */
enum { WORK_PER_PAUSE = 64 };

typedef struct stream_state {
    mo_stream handle;
    uint64_t last_step; /* operations queued by the end of the step before */
} stream_state;

typedef struct run {
    const mo_trace_text *trace;
    const mo_replay_options *options;
    mo_model_device device;
    mo_pool *pool;
    mo_address *addresses; /* by block */
    stream_state *streams;
    unsigned long long *arenas; /* pool numbers that were opened, never 0 */
    size_t arena_count, arena_room;
    uint64_t clock_cost; /* nanoseconds of one reading */
    uint32_t *times;     /* nanoseconds of each request so far */
    size_t requests;
    mo_replay_result result;
    mo_detail *detail;
} run;

mo_replay_options mo_replay_defaults(void)
{
    return (mo_replay_options){
        .slack = 20,
        .double_map = true,
        .recall = true,
        .granularity = 2u << 20,
    };
}

mo_status mo_replay_device(const mo_trace_text *trace, mo_detail *detail, uint32_t *device)
{
    uint64_t devices;

    mo_trace_text_live_peak(trace, 0, &devices);
    if (!devices)
        return mo_fail(detail, MO_INVALID, 0, "the trace has no requests: there is nothing to replay");
    const uint32_t first = (uint32_t)__builtin_ctzll(devices);
    if (devices & (devices - 1))
        return mo_fail(detail, MO_INVALID, 0,
                       "the trace has requests on several devices, %" PRIu32 " and %d among them: select "
                       "the one to replay",
                       first, 63 - __builtin_clzll(devices));
    *device = first;
    return MO_OK;
}

static uint64_t now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* What a measured interval holds beside what was measured. */
static uint64_t cost_of_clock(void)
{
    uint64_t least = UINT64_MAX;

    for (int i = 0; i < 100; i++) {
        const uint64_t start = now(), took = now() - start;
        if (took < least)
            least = took;
    }
    return least;
}

static uint64_t end_clock(run *r, uint64_t start)
{
    const uint64_t read = now() - start, took = read > r->clock_cost ? read - r->clock_cost : 0;

    r->result.nanoseconds += took;
    r->result.operations++;
    return took;
}

static int by_number(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return (x > y) - (x < y);
}

/* Sorts them. */
static mo_replay_times summary(uint32_t *times, size_t count)
{
    if (!count)
        return (mo_replay_times){0};
    qsort(times, count, sizeof *times, by_number);
    return (mo_replay_times){.p50 = times[mo_ceil_div(count * 50, 100) - 1],
                             .p99 = times[mo_ceil_div(count * 99, 100) - 1],
                             .max = times[count - 1]};
}

/* ---- work on the streams --------------------------------------------------------------------------------------- */

/* A handle that is none of CUDA's special ones (NULL, 1, 2); the trace's first stream is the default stream if it is
 * number 0. */
static mo_stream handle_of(const mo_trace_text *trace, uint32_t stream)
{
    if (trace->streams[stream] == 0)
        return NULL;
    return (mo_stream)(uintptr_t)(0x10000 + 0x100 * (uintptr_t)stream);
}

/* Lets each stream go on to the end of the step before, or (all) to its own end; once more while one may have ended
 * another's wait. */
static void complete(run *r, bool all)
{
    for (bool moved = true; moved;) {
        moved = false;
        for (uint32_t i = 0; i < r->trace->stream_count; i++) {
            const stream_state *s = &r->streams[i];
            uint64_t queued, over, goal;
            mo_model_device_progress(&r->device, s->handle, &queued, &over);
            goal = all ? queued : s->last_step;
            if (over < goal)
                moved |= mo_model_device_complete(&r->device, s->handle, goal - over) &&
                         r->trace->stream_count > 1;
        }
    }
}

/* An operation on the block. */
static void work(run *r, const mo_trace_event *e)
{
    const mo_stream stream = r->streams[e->stream].handle;
    const size_t size = r->trace->blocks[e->block].size;

    if (r->options->check && size)
        mo_model_device_use(&r->device, stream, r->addresses[e->block], size, e->block + 1);
    else
        mo_model_device_submit(&r->device, stream);
    if (!r->options->lazy)
        complete(r, true);
}

/* The program's own wait, of which the allocator is not told. */
static mo_status wait_between(run *r, const mo_trace_event *e)
{
    mo_driver *d = &r->device.table;
    mo_event *event;
    mo_status status = d->event_create(d, r->detail, &event);

    if (status)
        return status;
    status = d->event_record(d, event, r->streams[e->stream].handle, r->detail);
    if (!status)
        status = d->stream_wait(d, r->streams[e->other].handle, event, r->detail);
    mo_status destroyed = d->event_destroy(d, event, status ? NULL : r->detail);
    return status ? status : destroyed;
}

/* ---- steps ------------------------------------------------------------------------------------------------------- */

/* All that was counted so far. */
static mo_replay_step counted(run *r)
{
    static const mo_model_device_call memory_calls[] = {
        MO_MODEL_DEVICE_create,      MO_MODEL_DEVICE_release, MO_MODEL_DEVICE_map,
        MO_MODEL_DEVICE_unmap,       MO_MODEL_DEVICE_grant,   MO_MODEL_DEVICE_segment_alloc,
        MO_MODEL_DEVICE_segment_free};
    mo_replay_step sum = {.held = r->device.used};
    mo_stats stats;

    for (size_t i = 0; i < sizeof memory_calls / sizeof *memory_calls; i++)
        sum.driver_calls += r->device.calls[memory_calls[i]];
    mo_pool_read_stats(r->pool, &stats);
    sum.granules_moved = stats.granules_moved;
    sum.granules_switched = stats.granules_switched;
    sum.stitches = stats.stitches;
    sum.host_waits = stats.num_sync_all_streams;
    return sum;
}

static mo_status end_step(run *r)
{
    const mo_replay_step sum = counted(r), before = r->result.total;

    r->result.steps[r->result.step_count++] = (mo_replay_step){
        .driver_calls = sum.driver_calls - before.driver_calls,
        .granules_moved = sum.granules_moved - before.granules_moved,
        .granules_switched = sum.granules_switched - before.granules_switched,
        .stitches = sum.stitches - before.stitches,
        .host_waits = sum.host_waits - before.host_waits,
        .held = sum.held,
    };
    r->result.total = sum;
    complete(r, !r->options->lazy);
    for (uint32_t i = 0; i < r->trace->stream_count; i++) {
        uint64_t over;
        mo_model_device_progress(&r->device, r->streams[i].handle, &r->streams[i].last_step, &over);
    }
    if (r->device.violations)
        return mo_fail(r->detail, MO_CORRUPT, 0, "%s", r->device.violation);
    return r->options->check ? mo_pool_check(r->pool, r->detail) : MO_OK;
}

/* ---- events ------------------------------------------------------------------------------------------------------- */

static mo_status open_arena(run *r, unsigned long long pool)
{
    for (size_t i = 0; i < r->arena_count; i++)
        if (r->arenas[i] == pool)
            return MO_OK;
    if (r->arena_count == r->arena_room) {
        const size_t room = r->arena_room ? 2 * r->arena_room : 8;
        void *fresh = mo_host_realloc(r->arenas, room * sizeof *r->arenas);
        if (!fresh)
            return mo_fail(r->detail, MO_NO_HOST_MEMORY, 0, "no host memory for the trace's pools");
        r->arenas = fresh;
        r->arena_room = room;
    }
    mo_status status = mo_pool_arena_retain(r->pool, (mo_arena_id){0, pool}, false, 0, r->detail);
    if (!status)
        r->arenas[r->arena_count++] = pool;
    return status;
}

static mo_status allocate(run *r, const mo_trace_event *e)
{
    const mo_trace_block *b = &r->trace->blocks[e->block];
    const mo_stream stream = r->streams[e->stream].handle;
    mo_status status = b->pool ? open_arena(r, b->pool) : MO_OK;

    if (status)
        return status;
    const uint64_t start = now();
    if (b->pool)
        status = mo_pool_alloc_in(r->pool, (mo_arena_id){0, b->pool}, b->size, stream, r->detail,
                                  &r->addresses[e->block]);
    else
        status = mo_pool_alloc(r->pool, b->size, stream, r->detail, &r->addresses[e->block]);
    const uint64_t took = end_clock(r, start);
    r->times[r->requests++] = took < UINT32_MAX ? (uint32_t)took : UINT32_MAX;
    if (!status)
        work(r, e);
    return status;
}

static mo_status use(run *r, const mo_trace_event *e)
{
    /* A block of no bytes has no address. */
    if (!r->addresses[e->block])
        return MO_OK;
    const uint64_t start = now();
    const mo_status status =
        mo_pool_record_stream(r->pool, r->addresses[e->block], r->streams[e->stream].handle, r->detail);
    end_clock(r, start);
    if (!status)
        work(r, e);
    return status;
}

static mo_status release(run *r, const mo_trace_event *e)
{
    mo_status status = MO_OK;

    if (e->stream != r->trace->blocks[e->block].stream)
        status = use(r, e);
    else
        work(r, e);
    if (status)
        return status;
    const uint64_t start = now();
    status = mo_pool_free(r->pool, r->addresses[e->block], r->detail);
    end_clock(r, start);
    return status;
}

static mo_status event(run *r, const mo_trace_event *e)
{
    const bool of_block = e->op != MO_TRACE_WAIT && e->op != MO_TRACE_STEP;

    if (of_block && r->trace->blocks[e->block].device != r->options->device)
        return MO_OK;
    switch (e->op) {
    case MO_TRACE_ALLOC:
        return allocate(r, e);
    case MO_TRACE_FREE:
        return release(r, e);
    case MO_TRACE_RECORD_STREAM:
        return use(r, e);
    case MO_TRACE_WAIT:
        return wait_between(r, e);
    default:
        return end_step(r);
    }
}

/* ---- runs ----------------------------------------------------------------------------------------------------------- */

static mo_status open_run(run *r)
{
    const mo_trace_text *t = r->trace;
    const mo_replay_options *o = r->options;
    const mo_pool_settings settings = {.budget = o->memory,
                                       .slack = o->slack,
                                       .small_limit = o->small_limit,
                                       .double_map = o->double_map,
                                       .recall = o->recall};
    size_t memory = o->memory;
    uint64_t devices;

    r->result.live_peak = mo_trace_text_live_peak(t, o->device, &devices);
    if (!memory && (!mo_mul_ok(r->result.live_peak, 4, &memory) || !mo_add_ok(memory, 1u << 30, &memory)))
        memory = INT64_MAX;
    mo_model_device_open(&r->device, memory, o->granularity);
    r->device.work_per_pause = WORK_PER_PAUSE;
    if (o->check)
        mo_model_device_watch(&r->device);
    if (o->device >= MO_MAX_DEVICES || !(devices >> o->device & 1))
        return mo_fail(r->detail, MO_INVALID, 0, "the trace has no request on device %" PRIu32, o->device);
    r->addresses = mo_host_calloc(t->block_count, sizeof *r->addresses);
    r->streams = mo_host_calloc(t->stream_count, sizeof *r->streams);
    r->times = mo_host_calloc(t->block_count, sizeof *r->times);
    r->result.steps = mo_host_calloc((size_t)t->steps + 1, sizeof *r->result.steps);
    if (!r->addresses || !r->streams || !r->times || !r->result.steps)
        return mo_fail(r->detail, MO_NO_HOST_MEMORY, 0, "no host memory to replay %" PRIu32 " blocks",
                       t->block_count);
    for (uint32_t i = 0; i < t->stream_count; i++)
        r->streams[i].handle = handle_of(t, i);
    r->clock_cost = cost_of_clock();
    return mo_pool_open(&r->device.table, &settings, r->detail, &r->pool);
}

/* Takes the pool down; the first failure wins. */
static mo_status close_run(run *r, mo_status status)
{
    r->result.peak_reserved = r->device.peak;
    r->result.request = summary(r->times, r->requests);
    for (size_t i = 0; i < r->arena_count; i++) {
        mo_status s =
            mo_pool_arena_release(r->pool, (mo_arena_id){0, r->arenas[i]}, status ? NULL : r->detail);
        status = status ? status : s;
    }
    if (r->pool) {
        mo_status s = mo_pool_close(r->pool, status ? NULL : r->detail);
        status = status ? status : s;
    }
    const size_t left = mo_model_device_live(&r->device);
    if (left && !status)
        status = mo_fail(r->detail, MO_CORRUPT, 0, "the allocator has left %zu objects on the device", left);
    mo_model_device_close(&r->device);
    mo_host_free(r->addresses);
    mo_host_free(r->streams);
    mo_host_free(r->times);
    mo_host_free(r->arenas);
    return status;
}

mo_status mo_replay_run(const mo_trace_text *trace, const mo_replay_options *options, mo_detail *detail,
                        mo_replay_result *out)
{
    mo_detail own = {.text = ""};
    run r = {.trace = trace, .options = options, .detail = detail ? detail : &own};
    mo_status status = open_run(&r);

    r.result.completed = true;
    for (uint32_t i = 0; i < trace->event_count && !status && r.result.completed; i++) {
        status = event(&r, &trace->events[i]);
        if (status == MO_NO_DEVICE_MEMORY) {
            r.result.completed = false;
            r.result.failed_line = trace->events[i].line;
            snprintf(r.result.failure, sizeof r.result.failure, "%s", r.detail->text);
            status = MO_OK;
        }
    }
    if (!status && !trace->steps)
        status = end_step(&r);
    else if (!status)
        r.result.total = counted(&r);
    if (!status && r.device.violations)
        status = mo_fail(r.detail, MO_CORRUPT, 0, "%s", r.device.violation);
    status = close_run(&r, status);
    if (status)
        mo_host_free(r.result.steps);
    else
        *out = r.result;
    return status;
}

void mo_replay_clear(mo_replay_result *result)
{
    mo_host_free(result->steps);
    *result = (mo_replay_result){0};
}

/* Runs with `memory` bytes; where that completes it is the best run so far. */
static mo_status try(const mo_trace_text *trace, const mo_replay_options *options, size_t memory,
                     mo_detail *detail, mo_replay_result *best, bool *completed)
{
    mo_replay_options o = *options;
    mo_replay_result result;

    o.memory = memory;
    mo_status status = mo_replay_run(trace, &o, detail, &result);
    if (status)
        return status;
    *completed = result.completed;
    mo_replay_clear(result.completed ? best : &result);
    if (*completed)
        *best = result;
    return MO_OK;
}

mo_status mo_replay_frontier(const mo_trace_text *trace, const mo_replay_options *options, mo_detail *detail,
                             size_t *frontier, mo_replay_result *at_frontier)
{
    mo_replay_options unlimited = *options;
    mo_replay_result best;
    bool completed = false;

    unlimited.memory = 0;
    mo_status status = mo_replay_run(trace, &unlimited, detail, &best);
    if (status)
        return status;
    const size_t precision = best.live_peak / 1000 + 1, held = best.peak_reserved;
    size_t low = best.live_peak, high = held > low ? held : low;
    if (!best.completed)
        status = mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "line %" PRIu32 ", with no limit: %s",
                         best.failed_line, best.failure);
    /* At its limit the allocator may go other ways than with none, so that what it held then may not be enough. */
    while (!status && !completed) {
        status = try(trace, options, high, detail, &best, &completed);
        if (!status && !completed) {
            low = high;
            high += high / 16 + precision;
        }
    }
    while (!status && high - low > precision) {
        const size_t middle = low + (high - low) / 2;
        status = try(trace, options, middle, detail, &best, &completed);
        *(completed ? &high : &low) = middle;
    }
    if (status) {
        mo_replay_clear(&best);
        return status;
    }
    *frontier = high;
    *at_frontier = best;
    return MO_OK;
}
