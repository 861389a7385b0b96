#include "events.h"

#include "capture.h"
#include "clock.h"
#include "context.h"
#include "handles.h"

#include <stdlib.h>

CUresult sim_event_new(unsigned flags, sim_event **out)
{
    const unsigned known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;

    /* An interprocess event must not keep time (cuEventCreate's documentation). */
    if (flags & ~known || (flags & CU_EVENT_INTERPROCESS && !(flags & CU_EVENT_DISABLE_TIMING)))
        return CUDA_ERROR_INVALID_VALUE;
    sim_event *event = calloc(1, sizeof *event);
    if (!event)
        return CUDA_ERROR_OUT_OF_MEMORY;
    event->references = 1;
    event->device = sim_current_device();
    event->flags = flags;
    event->handle = sim_handle_new(SIM_KIND_EVENT, event);
    if (!event->handle) {
        free(event);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    sim_devices[event->device].counts.live.events++;
    *out = event;
    return CUDA_SUCCESS;
}

sim_event *sim_event_of(CUevent handle)
{
    return sim_handle_get(SIM_HANDLE(handle), SIM_KIND_EVENT);
}

static void forget(sim_event *event)
{
    sim_mark_release(event->mark);
    event->mark = NULL;
    sim_capture_release(event->capture);
    event->capture = NULL;
    free(event->point);
    event->point = NULL;
    event->point_count = 0;
}

static void name(sim_event *event, sim_mark *mark, sim_capture *capture, sim_node **point, size_t count)
{
    event->mark = mark;
    event->capture = capture;
    event->point = point;
    event->point_count = count;
}

void sim_event_release(sim_event *event)
{
    if (--event->references)
        return;
    forget(event);
    free(event);
}

void sim_event_destroy(sim_event *event)
{
    sim_handle_drop(event->handle);
    event->handle = 0;
    sim_devices[event->device].counts.live.events--;
    sim_event_release(event);
}

static CUresult add_external(sim_event *event, sim_stream *stream, sim_work_kind kind)
{
    sim_work *work = sim_work_new(kind, stream->device);

    if (!work)
        return CUDA_ERROR_OUT_OF_MEMORY;
    work->event = event;
    event->references++;
    return sim_stream_submit(stream, work, NULL);
}

CUresult sim_event_record(sim_event *event, sim_stream *stream, unsigned flags)
{
    if (flags & ~(unsigned)CU_EVENT_RECORD_EXTERNAL)
        return CUDA_ERROR_INVALID_VALUE;
    if (event->device != stream->device)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = sim_capture_check_submit(stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (stream->capture) {
        if (flags & CU_EVENT_RECORD_EXTERNAL)
            return add_external(event, stream, SIM_WORK_RECORD);
        struct sim_node **point = sim_capture_frontier(stream);
        if (!point)
            return CUDA_ERROR_OUT_OF_MEMORY;
        forget(event);
        event->point = point;
        event->point_count = stream->frontier_count;
        event->capture = sim_capture_retain(stream->capture);
        return CUDA_SUCCESS;
    }

    sim_mark *mark = sim_mark_new();
    sim_work *work = sim_work_new(SIM_WORK_RECORD, stream->device);
    if (!mark || !work) {
        sim_mark_release(mark);
        sim_work_release(work);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    /* The event names the new mark before it is queued, since queueing may run user code with the lock
     * released. */
    sim_event before = *event;
    mark->references++; /* one for the queue, one for the event */
    event->references++;
    name(event, mark, NULL, NULL, 0);
    result = sim_stream_submit(stream, work, mark);
    if (result == CUDA_SUCCESS) {
        forget(&before);
    } else {
        sim_mark_release(mark);
        name(event, before.mark, before.capture, before.point, before.point_count);
    }
    sim_event_release(event);
    return result;
}

CUresult sim_event_wait(sim_event *event, sim_stream *stream, unsigned flags)
{
    if (flags & ~(unsigned)CU_EVENT_WAIT_EXTERNAL)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->capture && flags & CU_EVENT_WAIT_EXTERNAL)
        return add_external(event, stream, SIM_WORK_WAIT);
    if (event->capture || stream->capture)
        return sim_capture_wait(stream, event->capture, event->point, event->point_count,
                                event->mark != NULL);
    CUresult result = sim_capture_check_submit(stream);
    if (result != CUDA_SUCCESS || !event->mark)
        return result; /* an event never recorded counts as complete */
    sim_stream_after(stream, event->mark->when);
    if (event->mark->reached)
        return result;

    sim_work *work = sim_work_new(SIM_WORK_WAIT, stream->device);
    if (!work)
        return CUDA_ERROR_OUT_OF_MEMORY;
    event->mark->references++;
    return sim_stream_submit(stream, work, event->mark);
}

CUresult sim_event_query(sim_event *event)
{
    if (event->capture)
        return CUDA_ERROR_CAPTURED_EVENT;
    return !event->mark || sim_mark_query(event->mark) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult sim_event_synchronize(sim_event *event)
{
    if (event->capture)
        return CUDA_ERROR_CAPTURED_EVENT;
    sim_devices[event->device].counts.syncs++;
    return event->mark ? sim_mark_synchronize(event->mark) : CUDA_SUCCESS;
}

CUresult sim_event_elapsed(sim_event *from, sim_event *to, float *milliseconds)
{
    if (!milliseconds)
        return CUDA_ERROR_INVALID_VALUE;
    if (from->capture || to->capture)
        return CUDA_ERROR_CAPTURED_EVENT;
    if (!from->mark || !to->mark || (from->flags | to->flags) & CU_EVENT_DISABLE_TIMING ||
        from->device != to->device)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!from->mark->reached || !to->mark->reached)
        return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)((double)(int64_t)(to->mark->when - from->mark->when) * 1e-6);
    return CUDA_SUCCESS;
}
