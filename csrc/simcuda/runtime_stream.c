/* Streams, events and host functions by the runtime API. */
#include "capture.h"
#include "clock.h"
#include "context.h"
#include "cudart_api.h"
#include "events.h"

static CUresult create(cudaStream_t *out, unsigned flags, int priority)
{
    if (!out || flags & ~(unsigned)CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    sim_stream *stream = sim_stream_new(sim_current_device(), flags, priority);
    if (!stream)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = (cudaStream_t)(uintptr_t)stream->handle;
    return CUDA_SUCCESS;
}

SIM_RUNTIME(SIM_CONTEXT, cudaStreamCreate, (cudaStream_t * out), (out))
{
    return create(out, CU_STREAM_DEFAULT, 0);
}

SIM_RUNTIME(SIM_CONTEXT, cudaStreamCreateWithFlags, (cudaStream_t * out, unsigned flags), (out, flags))
{
    return create(out, flags, 0);
}

SIM_RUNTIME(SIM_CONTEXT, cudaStreamCreateWithPriority, (cudaStream_t * out, unsigned flags, int priority),
            (out, flags, priority))
{
    return create(out, flags, priority);
}

SIM_RUNTIME(SIM_CONTEXT, cudaStreamDestroy, (cudaStream_t handle), (handle))
{
    sim_stream *stream = sim_stream_of(handle);

    if (!stream || !stream->handle)
        return CUDA_ERROR_INVALID_HANDLE;
    sim_stream_destroy(stream);
    return CUDA_SUCCESS;
}

SIM_RUNTIME(SIM_CONTEXT, cudaStreamGetPriority, (cudaStream_t handle, int *out), (handle, out))
{
    const sim_stream *stream = sim_stream_of(handle);

    if (!stream || !out)
        return stream ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    *out = stream->priority;
    return CUDA_SUCCESS;
}

SIM_RUNTIME(SIM_CONTEXT, cudaStreamGetFlags, (cudaStream_t handle, unsigned *out), (handle, out))
{
    const sim_stream *stream = sim_stream_of(handle);

    if (!stream || !out)
        return stream ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    *out = stream->flags;
    return CUDA_SUCCESS;
}

SIM_RUNTIME(SIM_CONTEXT, cudaStreamQuery, (cudaStream_t handle), (handle))
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

SIM_RUNTIME(SIM_CONTEXT, cudaStreamSynchronize, (cudaStream_t handle), (handle))
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

SIM_RUNTIME(SIM_CONTEXT, cudaStreamWaitEvent, (cudaStream_t handle, cudaEvent_t event_handle, unsigned flags),
            (handle, event_handle, flags))
{
    sim_stream *stream = sim_stream_of(handle);
    sim_event *event = sim_event_of(event_handle);

    return stream && event ? sim_event_wait(event, stream, flags) : CUDA_ERROR_INVALID_HANDLE;
}

SIM_RUNTIME(SIM_CONTEXT, cudaLaunchHostFunc, (cudaStream_t handle, cudaHostFn_t function, void *data),
            (handle, function, data))
{
    sim_stream *stream = sim_stream_of(handle);

    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    return function ? sim_host_submit(SIM_WORK_HOST, stream, function, NULL, handle, data)
                    : CUDA_ERROR_INVALID_VALUE;
}

SIM_RUNTIME(SIM_CONTEXT, cudaStreamAddCallback,
            (cudaStream_t handle, cudaStreamCallback_t callback, void *data, unsigned flags),
            (handle, callback, data, flags))
{
    sim_stream *stream = sim_stream_of(handle);

    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!callback || flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->capture) {
        stream->capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    /* The two callback types differ in the name of the status's type alone. */
    return sim_host_submit(SIM_WORK_CALLBACK, stream, NULL, (CUstreamCallback)(void (*)(void))callback,
                           handle, data);
}

/* ---- events ------------------------------------------------------------------------------------------- */
static CUresult create_event(cudaEvent_t *out, unsigned flags)
{
    sim_event *event;

    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_event_new(flags, &event);
    if (result == CUDA_SUCCESS)
        *out = (cudaEvent_t)(uintptr_t)event->handle;
    return result;
}

SIM_RUNTIME(SIM_CONTEXT, cudaEventCreate, (cudaEvent_t * out), (out))
{
    return create_event(out, CU_EVENT_DEFAULT);
}

SIM_RUNTIME(SIM_CONTEXT, cudaEventCreateWithFlags, (cudaEvent_t * out, unsigned flags), (out, flags))
{
    return create_event(out, flags);
}

SIM_RUNTIME(SIM_CONTEXT, cudaEventDestroy, (cudaEvent_t handle), (handle))
{
    sim_event *event = sim_event_of(handle);

    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    sim_event_destroy(event);
    return CUDA_SUCCESS;
}

static CUresult record(cudaEvent_t event_handle, cudaStream_t handle, unsigned flags)
{
    sim_stream *stream = sim_stream_of(handle);
    sim_event *event = sim_event_of(event_handle);

    return stream && event ? sim_event_record(event, stream, flags) : CUDA_ERROR_INVALID_HANDLE;
}

SIM_RUNTIME(SIM_CONTEXT, cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), (event, stream))
{
    return record(event, stream, CU_EVENT_RECORD_DEFAULT);
}

SIM_RUNTIME(SIM_CONTEXT, cudaEventRecordWithFlags, (cudaEvent_t event, cudaStream_t stream, unsigned flags),
            (event, stream, flags))
{
    return record(event, stream, flags);
}

SIM_RUNTIME(SIM_CONTEXT | SIM_UNSAFE, cudaEventQuery, (cudaEvent_t handle), (handle))
{
    sim_event *event = sim_event_of(handle);

    return event ? sim_event_query(event) : CUDA_ERROR_INVALID_HANDLE;
}

SIM_RUNTIME(SIM_CONTEXT | SIM_UNSAFE, cudaEventSynchronize, (cudaEvent_t handle), (handle))
{
    sim_event *event = sim_event_of(handle);

    return event ? sim_event_synchronize(event) : CUDA_ERROR_INVALID_HANDLE;
}

SIM_RUNTIME(SIM_CONTEXT, cudaEventElapsedTime, (float *milliseconds, cudaEvent_t from, cudaEvent_t to),
            (milliseconds, from, to))
{
    sim_event *first = sim_event_of(from), *second = sim_event_of(to);

    return first && second ? sim_event_elapsed(first, second, milliseconds) : CUDA_ERROR_INVALID_HANDLE;
}
