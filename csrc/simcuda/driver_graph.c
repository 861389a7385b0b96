/* Capture and graphs by the driver API. */
#include "capture.h"
#include "driver_api.h"
#include "handles.h"

/* The listing that cuStreamGetCaptureInfo gives out stays valid until the stream's next call, as documented:
 * it is the stream's own, made from its frontier on each question. */
CUresult sim_capture_info(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                          const CUgraphNode **dependencies, const CUgraphEdgeData **edges, size_t *count)
{
    static _Thread_local CUgraphNode listing[64];
    sim_stream *stream = sim_stream_of(handle);

    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!status)
        return CUDA_ERROR_INVALID_VALUE;
    if (!stream->capture && stream == sim_devices[stream->device].legacy) {
        CUresult result = sim_capture_check_submit(stream);
        if (result != CUDA_SUCCESS)
            return result;
    }
    *status = sim_capture_status(stream);
    if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        return CUDA_SUCCESS;
    size_t have = stream->frontier_count;
    if (dependencies && have > sizeof listing / sizeof *listing)
        return CUDA_ERROR_NOT_SUPPORTED;
    for (size_t i = 0; dependencies && i < have; i++)
        listing[i] = (CUgraphNode)(uintptr_t)stream->frontier[i]->handle;
    if (id)
        *id = stream->capture->id;
    if (graph)
        *graph = (CUgraph)(uintptr_t)stream->capture->graph->handle;
    if (dependencies)
        *dependencies = listing;
    if (edges)
        *edges = NULL; /* every edge is a plain one */
    if (count)
        *count = have;
    return CUDA_SUCCESS;
}

CUresult sim_capture_begin_into(CUstream handle, CUgraph graph_handle, const CUgraphNode *dependencies,
                                size_t count, CUstreamCaptureMode mode)
{
    sim_stream *stream = sim_stream_of(handle);
    sim_graph *graph = sim_graph_of(graph_handle);
    sim_node *nodes[64];

    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!graph || count > sizeof nodes / sizeof *nodes || (count && !dependencies))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (!(nodes[i] = sim_handle_get(SIM_HANDLE(dependencies[i]), SIM_KIND_NODE)))
            return CUDA_ERROR_INVALID_VALUE;
    return sim_capture_begin(stream, graph, nodes, count, mode);
}

CUresult sim_capture_update(CUstream handle, const CUgraphNode *dependencies, size_t count, unsigned flags)
{
    sim_stream *stream = sim_stream_of(handle);
    sim_node *nodes[64];

    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!stream->capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (flags > CU_STREAM_SET_CAPTURE_DEPENDENCIES || count > sizeof nodes / sizeof *nodes ||
        (count && !dependencies))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (!(nodes[i] = sim_handle_get(SIM_HANDLE(dependencies[i]), SIM_KIND_NODE)))
            return CUDA_ERROR_INVALID_VALUE;
    return sim_capture_set_frontier(stream, nodes, count, flags == CU_STREAM_ADD_CAPTURE_DEPENDENCIES);
}

CUresult sim_capture_exchange_mode(CUstreamCaptureMode *mode)
{
    sim_thread *self = sim_self();

    if (!mode || (unsigned)*mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    CUstreamCaptureMode before = self->capture_mode;
    self->capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_CONTEXT, cuStreamBeginCapture_v2, (CUstream handle, CUstreamCaptureMode mode), (handle, mode))
{
    sim_stream *stream = sim_stream_of(handle);

    return stream ? sim_capture_begin(stream, NULL, NULL, 0, mode) : CUDA_ERROR_INVALID_HANDLE;
}

SIM_DRIVER(SIM_CONTEXT, cuStreamBeginCaptureToGraph,
           (CUstream handle, CUgraph graph, const CUgraphNode *dependencies, const CUgraphEdgeData *edges,
            size_t count, CUstreamCaptureMode mode),
           (handle, graph, dependencies, edges, count, mode))
{
    (void)edges; /* every edge is taken for a plain one */
    return sim_capture_begin_into(handle, graph, dependencies, count, mode);
}

SIM_DRIVER(SIM_CONTEXT, cuStreamEndCapture, (CUstream handle, CUgraph *out), (handle, out))
{
    sim_stream *stream = sim_stream_of(handle);
    sim_graph *graph = NULL;

    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_capture_end(stream, &graph);
    *out = graph ? (CUgraph)(uintptr_t)graph->handle : NULL;
    return result;
}

SIM_DRIVER(SIM_CONTEXT, cuStreamIsCapturing, (CUstream handle, CUstreamCaptureStatus *status),
           (handle, status))
{
    return sim_capture_info(handle, status, NULL, NULL, NULL, NULL, NULL);
}

SIM_DRIVER(SIM_CONTEXT, cuStreamGetCaptureInfo_v2,
           (CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
            const CUgraphNode **dependencies, size_t *count),
           (handle, status, id, graph, dependencies, count))
{
    return sim_capture_info(handle, status, id, graph, dependencies, NULL, count);
}

SIM_DRIVER(SIM_CONTEXT, cuStreamGetCaptureInfo_v3,
           (CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
            const CUgraphNode **dependencies, const CUgraphEdgeData **edges, size_t *count),
           (handle, status, id, graph, dependencies, edges, count))
{
    return sim_capture_info(handle, status, id, graph, dependencies, edges, count);
}

SIM_DRIVER(SIM_CONTEXT, cuStreamUpdateCaptureDependencies_v2,
           (CUstream handle, CUgraphNode *dependencies, const CUgraphEdgeData *edges, size_t count,
            unsigned flags),
           (handle, dependencies, edges, count, flags))
{
    (void)edges;
    return sim_capture_update(handle, dependencies, count, flags);
}

SIM_DRIVER(SIM_INITIALISED, cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode * mode), (mode))
{
    return sim_capture_exchange_mode(mode);
}

/* ---- graphs ------------------------------------------------------------------------------------------- */
SIM_DRIVER(SIM_INITIALISED, cuGraphCreate, (CUgraph * out, unsigned flags), (out, flags))
{
    if (!out || flags)
        return CUDA_ERROR_INVALID_VALUE;
    sim_graph *graph = sim_graph_new();
    if (!graph)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = (CUgraph)(uintptr_t)graph->handle;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuGraphDestroy, (CUgraph handle), (handle))
{
    sim_graph *graph = sim_graph_of(handle);

    if (!graph || graph->capture)
        return CUDA_ERROR_INVALID_VALUE;
    sim_graph_destroy(graph);
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuGraphAddEmptyNode,
           (CUgraphNode * out, CUgraph handle, const CUgraphNode *dependencies, size_t count),
           (out, handle, dependencies, count))
{
    sim_graph *graph = sim_graph_of(handle);
    sim_node *nodes[64], *node;

    if (!out || !graph || count > sizeof nodes / sizeof *nodes || (count && !dependencies))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (!(nodes[i] = sim_handle_get(SIM_HANDLE(dependencies[i]), SIM_KIND_NODE)))
            return CUDA_ERROR_INVALID_VALUE;
    sim_work *work = sim_work_new(SIM_WORK_EMPTY, graph->device);
    if (!work)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = sim_graph_add(graph, work, nodes, count, &node);
    if (result == CUDA_SUCCESS)
        *out = (CUgraphNode)(uintptr_t)node->handle;
    return result;
}

SIM_DRIVER(SIM_INITIALISED, cuGraphGetNodes, (CUgraph graph, CUgraphNode *nodes, size_t *count),
           (graph, nodes, count))
{
    return sim_graph_nodes(graph, nodes, count);
}

SIM_DRIVER(SIM_INITIALISED, cuGraphNodeGetType, (CUgraphNode handle, CUgraphNodeType *out), (handle, out))
{
    static const CUgraphNodeType types[] = {
        [SIM_WORK_EMPTY] = CU_GRAPH_NODE_TYPE_EMPTY,     [SIM_WORK_KERNEL] = CU_GRAPH_NODE_TYPE_KERNEL,
        [SIM_WORK_COPY] = CU_GRAPH_NODE_TYPE_MEMCPY,     [SIM_WORK_SET] = CU_GRAPH_NODE_TYPE_MEMSET,
        [SIM_WORK_HOST] = CU_GRAPH_NODE_TYPE_HOST,       [SIM_WORK_RECORD] = CU_GRAPH_NODE_TYPE_EVENT_RECORD,
        [SIM_WORK_WAIT] = CU_GRAPH_NODE_TYPE_WAIT_EVENT,
    };
    const sim_node *node = sim_handle_get(SIM_HANDLE(handle), SIM_KIND_NODE);

    if (!node || !out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = types[node->work->kind];
    return CUDA_SUCCESS;
}

static CUresult instantiate(CUgraphExec *out, CUgraph graph, unsigned long long flags)
{
    sim_exec *exec;

    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_exec_new(graph, flags, &exec);
    if (result == CUDA_SUCCESS)
        *out = (CUgraphExec)(uintptr_t)exec->handle;
    return result;
}

SIM_DRIVER(SIM_CONTEXT, cuGraphInstantiateWithFlags,
           (CUgraphExec * out, CUgraph graph, unsigned long long flags), (out, graph, flags))
{
    return instantiate(out, graph, flags);
}

SIM_DRIVER(SIM_CONTEXT, cuGraphLaunch, (CUgraphExec exec_handle, CUstream handle), (exec_handle, handle))
{
    sim_stream *stream = sim_stream_of(handle);
    sim_exec *exec = sim_exec_of(exec_handle);

    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    return exec ? sim_exec_launch(exec, stream) : CUDA_ERROR_INVALID_VALUE;
}

SIM_DRIVER(SIM_CONTEXT, cuGraphUpload, (CUgraphExec exec, CUstream stream), (exec, stream))
{
    return sim_exec_of(exec) && sim_stream_of(stream) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

SIM_DRIVER(SIM_INITIALISED, cuGraphExecDestroy, (CUgraphExec handle), (handle))
{
    sim_exec *exec = sim_exec_of(handle);

    if (!exec)
        return CUDA_ERROR_INVALID_VALUE;
    sim_exec_destroy(exec);
    return CUDA_SUCCESS;
}
