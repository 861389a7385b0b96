/* Streams, events and capture by the driver API. */
#include "capture.h"
#include "clock.h"
#include "context.h"
#include "driver_api.h"
#include "events.h"
#include "handles.h"

/* ---- streams ------------------------------------------------------------------------------------------ */
static CUresult create(CUstream *out, unsigned flags, int priority)
{
    if (!out || flags & ~(unsigned)CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    sim_stream *stream = sim_stream_new(sim_current_device(), flags, priority);
    if (!stream)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = (CUstream)(uintptr_t)stream->handle;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_CONTEXT, cuStreamCreate, (CUstream * out, unsigned flags), (out, flags))
{
    return create(out, flags, 0);
}

SIM_DRIVER(SIM_CONTEXT, cuStreamCreateWithPriority, (CUstream * out, unsigned flags, int priority),
           (out, flags, priority))
{
    return create(out, flags, priority);
}

SIM_DRIVER(SIM_CONTEXT, cuStreamDestroy_v2, (CUstream handle), (handle))
{
    sim_stream *stream = sim_stream_of(handle);

    if (!stream || !stream->handle) /* default streams can't be destroyed */
        return CUDA_ERROR_INVALID_HANDLE;
    sim_stream_destroy(stream);
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_CONTEXT, cuStreamQuery, (CUstream handle), (handle))
{
    sim_stream *stream = sim_stream_of(handle);

    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = sim_capture_check_wait(stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (!sim_stream_idle(stream))
        return CUDA_ERROR_NOT_READY;
    sim_host_until(stream->finish);
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_CONTEXT, cuStreamSynchronize, (CUstream handle), (handle))
{
    sim_stream *stream = sim_stream_of(handle);

    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = sim_capture_check_wait(stream);
    if (result != CUDA_SUCCESS)
        return result;
    sim_devices[stream->device].counts.syncs++;
    return sim_stream_synchronize(stream);
}

SIM_DRIVER(SIM_CONTEXT, cuStreamGetPriority, (CUstream handle, int *out), (handle, out))
{
    sim_stream *stream = sim_stream_of(handle);

    if (!stream || !out)
        return stream ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    *out = stream->priority;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_CONTEXT, cuStreamGetFlags, (CUstream handle, unsigned *out), (handle, out))
{
    sim_stream *stream = sim_stream_of(handle);

    if (!stream || !out)
        return stream ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    *out = stream->flags;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_CONTEXT, cuStreamGetId, (CUstream handle, unsigned long long *out), (handle, out))
{
    sim_stream *stream = sim_stream_of(handle);

    if (!stream || !out)
        return stream ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    *out = stream->id;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_CONTEXT, cuStreamGetCtx, (CUstream handle, CUcontext *out), (handle, out))
{
    sim_stream *stream = sim_stream_of(handle);

    if (!stream || !out)
        return stream ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    sim_context *primary = sim_context_primary(stream->device);
    *out = primary ? (CUcontext)(uintptr_t)primary->handle : NULL;
    return primary ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

SIM_DRIVER(SIM_CONTEXT, cuStreamWaitEvent, (CUstream handle, CUevent event_handle, unsigned flags),
           (handle, event_handle, flags))
{
    sim_stream *stream = sim_stream_of(handle);
    sim_event *event = sim_event_of(event_handle);

    if (!stream || !event)
        return CUDA_ERROR_INVALID_HANDLE;
    return sim_event_wait(event, stream, flags);
}

SIM_DRIVER(SIM_CONTEXT, cuLaunchHostFunc, (CUstream handle, CUhostFn function, void *data),
           (handle, function, data))
{
    sim_stream *stream = sim_stream_of(handle);

    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!function)
        return CUDA_ERROR_INVALID_VALUE;
    return sim_host_submit(SIM_WORK_HOST, stream, function, NULL, handle, data);
}

SIM_DRIVER(SIM_CONTEXT, cuStreamAddCallback,
           (CUstream handle, CUstreamCallback callback, void *data, unsigned flags),
           (handle, callback, data, flags))
{
    sim_stream *stream = sim_stream_of(handle);

    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!callback || flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->capture) { /* callbacks can not be captured, host functions can */
        stream->capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return sim_host_submit(SIM_WORK_CALLBACK, stream, NULL, callback, handle, data);
}

/* ---- events ------------------------------------------------------------------------------------------- */
SIM_DRIVER(SIM_CONTEXT, cuEventCreate, (CUevent * out, unsigned flags), (out, flags))
{
    sim_event *event;

    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_event_new(flags, &event);
    if (result == CUDA_SUCCESS)
        *out = (CUevent)(uintptr_t)event->handle;
    return result;
}

SIM_DRIVER(SIM_INITIALISED, cuEventDestroy_v2, (CUevent handle), (handle))
{
    sim_event *event = sim_event_of(handle);

    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    sim_event_destroy(event);
    return CUDA_SUCCESS;
}

static CUresult record(CUevent event_handle, CUstream handle, unsigned flags)
{
    sim_stream *stream = sim_stream_of(handle);
    sim_event *event = sim_event_of(event_handle);

    if (!stream || !event)
        return CUDA_ERROR_INVALID_HANDLE;
    return sim_event_record(event, stream, flags);
}

SIM_DRIVER(SIM_CONTEXT, cuEventRecord, (CUevent event, CUstream stream), (event, stream))
{
    return record(event, stream, CU_EVENT_RECORD_DEFAULT);
}

SIM_DRIVER(SIM_CONTEXT, cuEventRecordWithFlags, (CUevent event, CUstream stream, unsigned flags),
           (event, stream, flags))
{
    return record(event, stream, flags);
}

SIM_DRIVER(SIM_INITIALISED | SIM_UNSAFE, cuEventQuery, (CUevent handle), (handle))
{
    sim_event *event = sim_event_of(handle);

    return event ? sim_event_query(event) : CUDA_ERROR_INVALID_HANDLE;
}

SIM_DRIVER(SIM_INITIALISED | SIM_UNSAFE, cuEventSynchronize, (CUevent handle), (handle))
{
    sim_event *event = sim_event_of(handle);

    return event ? sim_event_synchronize(event) : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult elapsed(float *milliseconds, CUevent from, CUevent to)
{
    sim_event *first = sim_event_of(from), *second = sim_event_of(to);

    return first && second ? sim_event_elapsed(first, second, milliseconds) : CUDA_ERROR_INVALID_HANDLE;
}

SIM_DRIVER(SIM_INITIALISED, cuEventElapsedTime, (float *milliseconds, CUevent from, CUevent to),
           (milliseconds, from, to))
{
    return elapsed(milliseconds, from, to);
}

SIM_DRIVER(SIM_INITIALISED, cuEventElapsedTime_v2, (float *milliseconds, CUevent from, CUevent to),
           (milliseconds, from, to))
{
    return elapsed(milliseconds, from, to);
}
