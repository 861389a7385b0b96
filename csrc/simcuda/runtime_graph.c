/* Capture and graphs by the runtime API. */
#include "capture.h"
#include "cudart_api.h"

SIM_RUNTIME(SIM_CONTEXT, cudaStreamBeginCapture, (cudaStream_t handle, enum cudaStreamCaptureMode mode),
            (handle, mode))
{
    sim_stream *stream = sim_stream_of(handle);

    return stream ? sim_capture_begin(stream, NULL, NULL, 0, (CUstreamCaptureMode)mode)
                  : CUDA_ERROR_INVALID_HANDLE;
}

SIM_RUNTIME(SIM_CONTEXT, cudaStreamBeginCaptureToGraph,
            (cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t *dependencies,
             const cudaGraphEdgeData *edges, size_t count, enum cudaStreamCaptureMode mode),
            (stream, graph, dependencies, edges, count, mode))
{
    (void)edges; /* every edge is taken for a plain one */
    return sim_capture_begin_into(stream, graph, dependencies, count, (CUstreamCaptureMode)mode);
}

SIM_RUNTIME(SIM_CONTEXT, cudaStreamEndCapture, (cudaStream_t handle, cudaGraph_t *out), (handle, out))
{
    sim_stream *stream = sim_stream_of(handle);
    sim_graph *graph = NULL;

    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_capture_end(stream, &graph);
    *out = graph ? (cudaGraph_t)(uintptr_t)graph->handle : NULL;
    return result;
}

SIM_RUNTIME(SIM_CONTEXT, cudaStreamIsCapturing, (cudaStream_t stream, enum cudaStreamCaptureStatus *status),
            (stream, status))
{
    return sim_capture_info(stream, (CUstreamCaptureStatus *)status, NULL, NULL, NULL, NULL, NULL);
}

/* CUDA 13 dropped the form without edges and took the plain name for the other. */
#if SIM_CUDA_MAJOR == 12
SIM_RUNTIME(SIM_CONTEXT, cudaStreamGetCaptureInfo_v2,
            (cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
             cudaGraph_t *graph, const cudaGraphNode_t **dependencies, size_t *count),
            (stream, status, id, graph, dependencies, count))
{
    return sim_capture_info(stream, (CUstreamCaptureStatus *)status, (cuuint64_t *)id, graph, dependencies,
                            NULL, count);
}

SIM_RUNTIME(SIM_CONTEXT, cudaStreamGetCaptureInfo_v3,
            (cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
             cudaGraph_t *graph, const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
             size_t *count),
            (stream, status, id, graph, dependencies, edges, count))
#else
SIM_RUNTIME(SIM_CONTEXT, cudaStreamGetCaptureInfo,
            (cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
             cudaGraph_t *graph, const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
             size_t *count),
            (stream, status, id, graph, dependencies, edges, count))
#endif
{
    return sim_capture_info(stream, (CUstreamCaptureStatus *)status, (cuuint64_t *)id, graph, dependencies,
                            (const CUgraphEdgeData **)edges, count);
}

#if SIM_CUDA_MAJOR == 12
SIM_RUNTIME(SIM_CONTEXT, cudaStreamUpdateCaptureDependencies,
            (cudaStream_t stream, cudaGraphNode_t *dependencies, size_t count, unsigned flags),
            (stream, dependencies, count, flags))
{
    return sim_capture_update(stream, dependencies, count, flags);
}
#else
SIM_RUNTIME(SIM_CONTEXT, cudaStreamUpdateCaptureDependencies,
            (cudaStream_t stream, cudaGraphNode_t *dependencies, const cudaGraphEdgeData *edges, size_t count,
             unsigned flags),
            (stream, dependencies, edges, count, flags))
{
    (void)edges;
    return sim_capture_update(stream, dependencies, count, flags);
}
#endif

SIM_RUNTIME(SIM_QUERY, cudaThreadExchangeStreamCaptureMode, (enum cudaStreamCaptureMode * mode), (mode))
{
    return sim_capture_exchange_mode((CUstreamCaptureMode *)mode);
}

/* ---- graphs ------------------------------------------------------------------------------------------- */
SIM_RUNTIME(SIM_CONTEXT, cudaGraphCreate, (cudaGraph_t * out, unsigned flags), (out, flags))
{
    if (!out || flags)
        return CUDA_ERROR_INVALID_VALUE;
    sim_graph *graph = sim_graph_new();
    if (!graph)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = (cudaGraph_t)(uintptr_t)graph->handle;
    return CUDA_SUCCESS;
}

SIM_RUNTIME(SIM_QUERY, cudaGraphGetNodes, (cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count),
            (graph, nodes, count))
{
    return sim_graph_nodes(graph, nodes, count);
}

#if SIM_CUDA_MAJOR == 12
SIM_RUNTIME(SIM_QUERY, cudaGraphNodeGetDependencies,
            (cudaGraphNode_t node, cudaGraphNode_t *nodes, size_t *count), (node, nodes, count))
{
    return sim_graph_dependencies(node, nodes, count);
}
#else
SIM_RUNTIME(SIM_QUERY, cudaGraphNodeGetDependencies,
            (cudaGraphNode_t node, cudaGraphNode_t *nodes, cudaGraphEdgeData *edges, size_t *count),
            (node, nodes, edges, count))
{
    size_t room = nodes && count ? *count : 0;

    for (size_t i = 0; edges && i < room; i++)
        edges[i] = (cudaGraphEdgeData){0};
    return sim_graph_dependencies(node, nodes, count);
}
#endif

static CUresult instantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags)
{
    sim_exec *exec;

    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_exec_new(graph, flags, &exec);
    if (result == CUDA_SUCCESS)
        *out = (cudaGraphExec_t)(uintptr_t)exec->handle;
    return result;
}

SIM_RUNTIME(SIM_CONTEXT, cudaGraphInstantiate,
            (cudaGraphExec_t * out, cudaGraph_t graph, unsigned long long flags), (out, graph, flags))
{
    return instantiate(out, graph, flags);
}

SIM_RUNTIME(SIM_CONTEXT, cudaGraphInstantiateWithFlags,
            (cudaGraphExec_t * out, cudaGraph_t graph, unsigned long long flags), (out, graph, flags))
{
    return instantiate(out, graph, flags);
}

SIM_RUNTIME(SIM_CONTEXT, cudaGraphLaunch, (cudaGraphExec_t exec_handle, cudaStream_t handle),
            (exec_handle, handle))
{
    sim_stream *stream = sim_stream_of(handle);
    sim_exec *exec = sim_exec_of(exec_handle);

    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    return exec ? sim_exec_launch(exec, stream) : CUDA_ERROR_INVALID_VALUE;
}

SIM_RUNTIME(SIM_QUERY, cudaGraphDestroy, (cudaGraph_t handle), (handle))
{
    sim_graph *graph = sim_graph_of(handle);

    if (!graph || graph->capture)
        return CUDA_ERROR_INVALID_VALUE;
    sim_graph_destroy(graph);
    return CUDA_SUCCESS;
}

SIM_RUNTIME(SIM_QUERY, cudaGraphExecDestroy, (cudaGraphExec_t handle), (handle))
{
    sim_exec *exec = sim_exec_of(handle);

    if (!exec)
        return CUDA_ERROR_INVALID_VALUE;
    sim_exec_destroy(exec);
    return CUDA_SUCCESS;
}
