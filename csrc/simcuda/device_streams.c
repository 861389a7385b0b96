#include "streams.h"

#include "capture.h"
#include "clock.h"
#include "context.h"
#include "handles.h"

#include <stdlib.h>

sim_stream *sim_streams;
static uint64_t tickets;
static unsigned asked; /* queries in a row that answered "not yet", with nothing queued between them */
static uint64_t
    pending; /* over all streams: work that runs at once, the usual case, never looks at the list */

/* ---- marks -------------------------------------------------------------------------------------------- */
sim_mark *sim_mark_new(void)
{
    sim_mark *mark = calloc(1, sizeof *mark);

    if (mark)
        mark->references = 1;
    return mark;
}

void sim_mark_release(sim_mark *mark)
{
    if (mark && --mark->references == 0)
        free(mark);
}

/* ---- streams ------------------------------------------------------------------------------------------ */
sim_stream *sim_stream_new_default(int device)
{
    static uint64_t ids;
    sim_stream *stream = calloc(1, sizeof *stream);

    if (!stream)
        return NULL;
    stream->id = ++ids;
    stream->device = device;
    stream->blocking = sim_devices[device].legacy != NULL; /* the first one made is the legacy stream */
    stream->next = sim_streams;
    sim_streams = stream;
    return stream;
}

/* Frees a destroyed stream that nothing refers to any more. */
static void reap(sim_stream *stream)
{
    if (!stream->destroyed || stream->head || stream->holders)
        return;
    for (sim_stream **link = &sim_streams; *link; link = &(*link)->next)
        if (*link == stream) {
            *link = stream->next;
            break;
        }
    free(stream);
}

void sim_stream_hold(sim_stream *stream)
{
    stream->holders++;
}

void sim_stream_release(sim_stream *stream)
{
    stream->holders--;
    reap(stream);
}

void sim_stream_destroy(sim_stream *stream)
{
    if (stream->handle) {
        sim_handle_drop(stream->handle);
        sim_devices[stream->device].counts.live.streams--;
    }
    sim_capture_stream_gone(stream);
    stream->destroyed = true;
    reap(stream);
}

sim_stream *sim_stream_new(int device, unsigned flags, int priority)
{
    sim_stream *stream = sim_stream_new_default(device);

    if (!stream)
        return NULL;
    stream->handle = sim_handle_new(SIM_KIND_STREAM, stream);
    if (!stream->handle) {
        stream->destroyed = true;
        reap(stream);
        return NULL;
    }
    stream->flags = flags;
    stream->blocking = !(flags & CU_STREAM_NON_BLOCKING);
    stream->priority = priority < SIM_PRIORITY_GREATEST ? SIM_PRIORITY_GREATEST
                       : priority > SIM_PRIORITY_LEAST  ? SIM_PRIORITY_LEAST
                                                        : priority;
    sim_devices[device].counts.live.streams++;
    return stream;
}

sim_stream *sim_stream_of(CUstream handle)
{
    int device = sim_current_device();
    sim_stream **own = &sim_self()->default_streams[device];

    if (handle == NULL || handle == CU_STREAM_LEGACY)
        return sim_devices[device].legacy;
    if (handle != CU_STREAM_PER_THREAD)
        return sim_handle_get(SIM_HANDLE(handle), SIM_KIND_STREAM);
    if (!*own)
        *own = sim_stream_new_default(device);
    return *own;
}

bool sim_stream_idle(const sim_stream *stream)
{
    return !stream->head;
}

uint64_t sim_pending(int device)
{
    uint64_t count = 0;

    for (const sim_stream *stream = sim_streams; stream && pending; stream = stream->next)
        if (stream->device == device)
            for (const sim_operation *operation = stream->head; operation; operation = operation->next)
                count++;
    return count;
}

void sim_streams_lose(uintptr_t at, size_t size)
{
    for (sim_stream *stream = pending ? sim_streams : NULL; stream; stream = stream->next)
        for (sim_operation *operation = stream->head; operation; operation = operation->next)
            operation->lost |= sim_work_touches(operation->work, at, size);
}

/* ---- order -------------------------------------------------------------------------------------------- */
/* The stream whose head must run before this one's, or NULL. */
static sim_stream *blocker(const sim_stream *stream)
{
    const sim_operation *head = stream->head;
    sim_stream *legacy = sim_devices[stream->device].legacy;

    if (head->work->kind == SIM_WORK_WAIT && head->mark && !head->mark->reached)
        return head->mark->stream;
    if (stream->blocking)
        return legacy->head && legacy->head->ticket < head->ticket ? legacy : NULL;
    if (stream == legacy)
        for (sim_stream *other = sim_streams; other; other = other->next)
            if (other->device == stream->device && other->blocking && other->head &&
                other->head->ticket < head->ticket)
                return other;
    return NULL;
}

/* Runs the head, which nothing blocks. The operation stays the head while it runs, so that others see that it
 * is not done. */
static void run_head(sim_stream *stream)
{
    sim_operation *operation = stream->head;

    stream->running = true;
    if (operation->lost)
        sim_device_fault(stream->device);
    else
        sim_work_run(operation->work);
    stream->running = false;
    if (operation->mark) {
        if (operation->work->kind == SIM_WORK_RECORD)
            operation->mark->reached = true;
        sim_mark_release(operation->mark);
    }
    stream->head = operation->next;
    if (!stream->head)
        stream->tail = NULL;
    pending--;
    sim_work_release(operation->work);
    free(operation);
    reap(stream);
}

/* Runs one operation on which the stream's head depends, or the head; or waits for one that runs. */
static void advance(sim_stream *stream)
{
    sim_stream *at = stream;

    for (sim_stream *before; (before = blocker(at));)
        at = before;
    if (at->running)
        sim_wait_for_user_code();
    else
        run_head(at);
}

static void run_all_that_can(void)
{
again:
    for (sim_stream *stream = pending ? sim_streams : NULL; stream; stream = stream->next)
        if (stream->head && !stream->running && !blocker(stream)) {
            run_head(stream);
            goto again; /* the list may have changed */
        }
}

static void count_copy(simcuda_counts *counts, const sim_work *work, bool side)
{
    const uint64_t bytes = work->copy.width * work->copy.rows;
    const bool to_device = work->copy.to_kind == SIM_ACCESS_DEVICE;

    counts->copied_bytes += bytes;
    if (to_device == (work->copy.from_kind == SIM_ACCESS_DEVICE))
        return;
    *(to_device ? &counts->to_device : &counts->to_host) += bytes;
    if (side)
        *(to_device ? &counts->side_to_device : &counts->side_to_host) += bytes;
}

CUresult sim_stream_submit(sim_stream *stream, sim_work *work, sim_mark *mark)
{
    CUresult result = sim_capture_check_submit(stream);

    if (result == CUDA_SUCCESS && stream->capture) {
        result = sim_capture_add(stream, work);
        sim_mark_release(mark);
        return result;
    }
    sim_operation *operation = result == CUDA_SUCCESS ? malloc(sizeof *operation) : NULL;
    if (!operation) {
        sim_work_release(work);
        sim_mark_release(mark);
        return result == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : result;
    }
    *operation = (sim_operation){.work = work, .mark = mark, .ticket = ++tickets};
    asked = 0;
    sim_clock_queue(stream, work);
    if (mark && work->kind == SIM_WORK_RECORD) {
        mark->stream = stream;
        mark->when = stream->finish;
    }
    if (stream->tail)
        stream->tail->next = operation;
    else
        stream->head = operation;
    stream->tail = operation;
    pending++;

    simcuda_counts *counts = &sim_devices[stream->device].counts;
    if (work->kind == SIM_WORK_KERNEL)
        counts->launches++;
    if (work->kind == SIM_WORK_SET)
        counts->memsets++;
    if (work->kind == SIM_WORK_COPY) {
        counts->copies++;
        count_copy(counts, work, stream->handle != 0);
    }
    if (!sim_lazy)
        run_all_that_can();
    return CUDA_SUCCESS;
}

CUresult sim_host_submit(sim_work_kind kind, sim_stream *stream, CUhostFn function, CUstreamCallback callback,
                         CUstream handle, void *data)
{
    sim_work *work = sim_work_new(kind, stream->device);

    if (!work)
        return CUDA_ERROR_OUT_OF_MEMORY;
    work->host.function = function;
    work->host.callback = callback;
    work->host.stream = handle;
    work->host.data = data;
    return sim_stream_submit(stream, work, NULL);
}

CUresult sim_stream_synchronize(sim_stream *stream)
{
    uint64_t last = stream->tail ? stream->tail->ticket : 0;

    sim_host_until(stream->finish);
    sim_stream_hold(stream);
    while (stream->head && stream->head->ticket <= last)
        advance(stream);
    sim_stream_release(stream);
    return sim_fault;
}

CUresult sim_device_synchronize(int device)
{
    uint64_t last = tickets;

    sim_host_until(sim_devices[device].finish);
again:
    for (sim_stream *stream = pending ? sim_streams : NULL; stream; stream = stream->next)
        if (stream->device == device && stream->head && stream->head->ticket <= last) {
            advance(stream);
            goto again;
        }
    return sim_fault;
}

bool sim_mark_query(sim_mark *mark)
{
    if (!mark->reached && ++asked >= SIMCUDA_PATIENCE) {
        asked = 0;
        sim_mark_synchronize(mark);
    }
    if (mark->reached)
        sim_host_until(mark->when);
    return mark->reached;
}

CUresult sim_mark_synchronize(sim_mark *mark)
{
    mark->references++;
    sim_host_until(mark->when);
    while (!mark->reached)
        advance(mark->stream);
    sim_mark_release(mark);
    return sim_fault;
}

/* ---- control ------------------------------------------------------------------------------------------ */
void simcuda_set_lazy(int on)
{
    sim_lock();
    sim_lazy = on != 0;
    if (!sim_lazy && !sim_forked())
        run_all_that_can();
    sim_unlock();
}

int simcuda_progress(void *handle, int n)
{
    int ran = 0;

    sim_lock();
    if (sim_activated() && !sim_forked()) {
        sim_stream *only = handle ? sim_stream_of(handle) : NULL;
        bool moved = !handle || only;

        while (moved && (n < 0 || ran < n)) {
            moved = false;
            for (sim_stream *stream = sim_streams; stream; stream = stream->next)
                if ((!only || stream == only) && stream->head && !stream->running && !blocker(stream)) {
                    run_head(stream);
                    ran++;
                    moved = true;
                    break; /* the list may have changed */
                }
        }
    }
    sim_unlock();
    return ran;
}
