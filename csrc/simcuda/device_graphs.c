#include "capture.h"
#include "context.h"
#include "events.h"
#include "handles.h"

#include <stdlib.h>
#include <string.h>

sim_graph *sim_graph_new(void)
{
    sim_graph *graph = calloc(1, sizeof *graph);

    if (!graph)
        return NULL;
    graph->device = sim_current_device();
    graph->handle = sim_handle_new(SIM_KIND_GRAPH, graph);
    if (!graph->handle) {
        free(graph);
        return NULL;
    }
    sim_devices[graph->device].counts.live.graphs++;
    return graph;
}

sim_graph *sim_graph_of(CUgraph handle)
{
    return sim_handle_get(SIM_HANDLE(handle), SIM_KIND_GRAPH);
}

void sim_graph_destroy(sim_graph *graph)
{
    for (size_t i = 0; i < graph->count; i++) {
        sim_node *node = graph->nodes[i];
        sim_handle_drop(node->handle);
        sim_work_release(node->work);
        free(node->dependencies);
        free(node);
    }
    sim_handle_drop(graph->handle);
    sim_devices[graph->device].counts.live.graphs--;
    free(graph->nodes);
    free(graph);
}

CUresult sim_graph_add(sim_graph *graph, sim_work *work, sim_node *const *dependencies, size_t count,
                       sim_node **out)
{
    sim_node *node = calloc(1, sizeof *node);

    if (!node)
        goto fail;
    node->work = work;
    node->dependency_count = count;
    node->dependencies = malloc((count + 1) * sizeof *node->dependencies);
    if (!node->dependencies)
        goto fail;
    if (count)
        memcpy(node->dependencies, dependencies, count * sizeof *dependencies);
    if (graph->count == graph->capacity) {
        size_t capacity = graph->capacity ? 2 * graph->capacity : 16;
        sim_node **grown = realloc(graph->nodes, capacity * sizeof *grown);
        if (!grown)
            goto fail;
        graph->nodes = grown;
        graph->capacity = capacity;
    }
    node->handle = sim_handle_new(SIM_KIND_NODE, node);
    if (!node->handle)
        goto fail;
    graph->nodes[graph->count++] = node;
    *out = node;
    return CUDA_SUCCESS;

fail:
    if (node)
        free(node->dependencies);
    free(node);
    sim_work_release(work);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* CUDA's convention of listings: with no array *count is the number there is; with one, as many as fit are
 * written, the rest of the array is set to NULL, and *count is the number written. */
static CUresult list(sim_node *const *nodes, size_t have, CUgraphNode *out, size_t *count)
{
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    size_t room = out ? *count : 0;
    for (size_t i = 0; i < room; i++)
        out[i] = i < have ? (CUgraphNode)(uintptr_t)nodes[i]->handle : NULL;
    *count = out && room < have ? room : have;
    return CUDA_SUCCESS;
}

CUresult sim_graph_nodes(CUgraph handle, CUgraphNode *nodes, size_t *count)
{
    const sim_graph *graph = sim_graph_of(handle);

    return graph ? list(graph->nodes, graph->count, nodes, count) : CUDA_ERROR_INVALID_VALUE;
}

CUresult sim_graph_dependencies(CUgraphNode handle, CUgraphNode *nodes, size_t *count)
{
    const sim_node *node = sim_handle_get(SIM_HANDLE(handle), SIM_KIND_NODE);

    return node ? list(node->dependencies, node->dependency_count, nodes, count) : CUDA_ERROR_INVALID_VALUE;
}

/* ---- executable graphs -------------------------------------------------------------------------------- */
CUresult sim_exec_new(CUgraph handle, unsigned long long flags, sim_exec **out)
{
    const sim_graph *graph = sim_graph_of(handle);
    const unsigned long long known = 0xF; /* auto free on launch, upload, device launch, node priority */

    if (!graph || flags & ~known || graph->capture)
        return CUDA_ERROR_INVALID_VALUE;
    sim_exec *exec = malloc(sizeof *exec + graph->count * sizeof *exec->work);
    if (!exec)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *exec = (sim_exec){.device = graph->device, .count = graph->count};
    exec->handle = sim_handle_new(SIM_KIND_EXEC, exec);
    if (!exec->handle) {
        free(exec);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    for (size_t i = 0; i < graph->count; i++) {
        exec->work[i] = graph->nodes[i]->work;
        exec->work[i]->references++;
    }
    sim_devices[exec->device].counts.live.graphs++;
    *out = exec;
    return CUDA_SUCCESS;
}

sim_exec *sim_exec_of(CUgraphExec handle)
{
    return sim_handle_get(SIM_HANDLE(handle), SIM_KIND_EXEC);
}

void sim_exec_destroy(sim_exec *exec)
{
    sim_handle_drop(exec->handle);
    for (size_t i = 0; i < exec->count; i++)
        sim_work_release(exec->work[i]);
    sim_devices[exec->device].counts.live.graphs--;
    free(exec);
}

/* An event node works on the event as it is at each launch. A launch into a capturing stream copies the
 * nodes. */
static CUresult submit(sim_work *work, sim_stream *stream)
{
    if (work->kind == SIM_WORK_RECORD && !stream->capture)
        return work->event->device == stream->device
                   ? sim_event_record(work->event, stream, CU_EVENT_RECORD_DEFAULT)
                   : CUDA_ERROR_INVALID_HANDLE;
    if (work->kind == SIM_WORK_WAIT && !stream->capture)
        return sim_event_wait(work->event, stream, CU_EVENT_WAIT_DEFAULT);
    work->references++;
    return sim_stream_submit(stream, work, NULL);
}

CUresult sim_exec_launch(sim_exec *exec, sim_stream *stream)
{
    CUresult result = sim_capture_check_submit(stream);
    size_t count = exec->count;
    sim_work **work = NULL;

    if (result != CUDA_SUCCESS || !count)
        return result;
    /* Eager work lets go of the lock: keep what is to run, whatever happens to the graph meanwhile. */
    work = malloc(count * sizeof *work);
    if (!work)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(work, exec->work, count * sizeof *work);
    for (size_t i = 0; i < count; i++)
        work[i]->references++;
    sim_stream_hold(stream);
    for (size_t i = 0; i < count; i++) {
        if (result == CUDA_SUCCESS)
            result = submit(work[i], stream);
        sim_work_release(work[i]);
    }
    sim_stream_release(stream);
    free(work);
    return result;
}
