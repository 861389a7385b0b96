#include "capture.h"

#include "handles.h"

#include <stdlib.h>
#include <string.h>

static sim_capture *captures; /* that have not ended */

sim_capture *sim_capture_retain(sim_capture *capture)
{
    capture->references++;
    return capture;
}

void sim_capture_release(sim_capture *capture)
{
    if (capture && --capture->references == 0)
        free(capture);
}

CUstreamCaptureStatus sim_capture_status(const sim_stream *stream)
{
    if (!stream->capture)
        return CU_STREAM_CAPTURE_STATUS_NONE;
    return stream->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

/* ---- what is forbidden -------------------------------------------------------------------------------- */
/* cudaThreadExchangeStreamCaptureMode: a thread in relaxed mode may do anything; else its own captures that
 * were not begun relaxed forbid, and, in global mode, those that other threads began in global mode. */
CUresult sim_capture_check_unsafe(void)
{
    const sim_thread *self = sim_self();
    CUresult result = CUDA_SUCCESS;

    if (self->capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_SUCCESS;
    for (sim_capture *capture = captures; capture; capture = capture->next) {
        bool own = capture->thread == self->id && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
        bool others = capture->thread != self->id && capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                      self->capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (own || others) {
            capture->invalid = true;
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return result;
}

CUresult sim_capture_check_submit(sim_stream *stream)
{
    CUresult result = CUDA_SUCCESS;

    if (stream->capture)
        return stream->capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
    if (!captures || stream != sim_devices[stream->device].legacy)
        return CUDA_SUCCESS;
    for (sim_stream *other = sim_streams; other; other = other->next)
        if (other->capture && other->blocking && other->device == stream->device) {
            other->capture->invalid = true;
            result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    return result;
}

CUresult sim_capture_check_wait(sim_stream *stream)
{
    if (!stream->capture)
        return sim_capture_check_submit(stream);
    if (stream->capture->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    stream->capture->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

/* ---- frontiers ---------------------------------------------------------------------------------------- */
sim_node **sim_capture_frontier(const sim_stream *stream)
{
    sim_node **copy = malloc((stream->frontier_count + 1) * sizeof *copy);

    if (copy && stream->frontier_count)
        memcpy(copy, stream->frontier, stream->frontier_count * sizeof *copy);
    return copy;
}

CUresult sim_capture_set_frontier(sim_stream *stream, sim_node *const *nodes, size_t count, bool keep)
{
    size_t kept = keep ? stream->frontier_count : 0, used = kept;
    sim_node **frontier = malloc((kept + count + 1) * sizeof *frontier);

    if (!frontier)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (kept)
        memcpy(frontier, stream->frontier, kept * sizeof *frontier);
    for (size_t i = 0; i < count; i++) {
        bool present = false;
        for (size_t k = 0; k < used && !present; k++)
            present = frontier[k] == nodes[i];
        if (!present)
            frontier[used++] = nodes[i];
    }
    free(stream->frontier);
    stream->frontier = frontier;
    stream->frontier_count = used;
    return CUDA_SUCCESS;
}

static void leave(sim_stream *stream)
{
    free(stream->frontier);
    stream->frontier = NULL;
    stream->frontier_count = 0;
    sim_capture_release(stream->capture);
    stream->capture = NULL;
}

/* ---- begin, add, wait, end ---------------------------------------------------------------------------- */
CUresult sim_capture_begin(sim_stream *stream, sim_graph *into, sim_node *const *dependencies, size_t count,
                           CUstreamCaptureMode mode)
{
    static uint64_t ids;

    if ((unsigned)mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream == sim_devices[stream->device].legacy)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture || (into && into->capture))
        return CUDA_ERROR_ILLEGAL_STATE;

    sim_capture *capture = calloc(1, sizeof *capture);
    sim_graph *graph = into ? into : sim_graph_new();
    if (!capture || !graph || sim_capture_set_frontier(stream, dependencies, count, false) != CUDA_SUCCESS)
        goto fail;
    *capture = (sim_capture){.references = 1,
                             .id = ++ids,
                             .thread = sim_self()->id,
                             .mode = mode,
                             .origin = stream,
                             .graph = graph,
                             .own_graph = !into,
                             .next = captures};
    captures = capture;
    graph->capture = capture;
    graph->device = stream->device;
    stream->capture = capture;
    return CUDA_SUCCESS;

fail:
    free(capture);
    if (graph && !into)
        sim_graph_destroy(graph);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult sim_capture_add(sim_stream *stream, sim_work *work)
{
    sim_node *node;

    if (work->kind == SIM_WORK_FREE) { /* memory nodes are not simulated */
        sim_work_release(work);
        stream->capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    CUresult result =
        sim_graph_add(stream->capture->graph, work, stream->frontier, stream->frontier_count, &node);
    if (result == CUDA_SUCCESS)
        result = sim_capture_set_frontier(stream, &node, 1, false);
    if (result != CUDA_SUCCESS)
        stream->capture->invalid = true;
    return result;
}

CUresult sim_capture_wait(sim_stream *stream, sim_capture *of, sim_node *const *point, size_t count,
                          bool recorded_outside)
{
    sim_capture *into = stream->capture;

    if (into && into->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!of) {
        if (!recorded_outside)
            return CUDA_SUCCESS; /* never recorded: complete */
        into->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (!of->graph) { /* its capture has ended */
        if (into)
            into->invalid = true;
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    if (of->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (into && into != of) {
        into->invalid = of->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    if (stream == sim_devices[stream->device].legacy) {
        of->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    CUresult result = sim_capture_set_frontier(stream, point, count, true);
    if (result == CUDA_SUCCESS && !into)
        stream->capture = sim_capture_retain(of);
    return result;
}

/* Every node must lead to the origin's frontier, or work of a forked stream would be lost. */
static bool all_joined(const sim_capture *capture)
{
    sim_graph *graph = capture->graph;
    size_t unseen = 0;

    for (size_t i = 0; i < graph->count; i++)
        graph->nodes[i]->seen = false;
    for (size_t i = 0; i < capture->origin->frontier_count; i++)
        capture->origin->frontier[i]->seen = true;
    for (size_t i = graph->count; i-- > 0;) { /* dependents come later in the order, so one pass suffices */
        const sim_node *node = graph->nodes[i];
        if (!node->seen)
            unseen++;
        for (size_t k = 0; node->seen && k < node->dependency_count; k++)
            node->dependencies[k]->seen = true;
    }
    return unseen == 0 || !capture->own_graph;
}

static void finish(sim_capture *capture)
{
    for (sim_capture **link = &captures; *link; link = &(*link)->next)
        if (*link == capture) {
            *link = capture->next;
            break;
        }
    sim_capture_retain(capture);
    for (sim_stream *stream = sim_streams; stream; stream = stream->next)
        if (stream->capture == capture)
            leave(stream);
    capture->graph->capture = NULL;
    capture->graph = NULL;
    sim_capture_release(capture);
}

CUresult sim_capture_end(sim_stream *stream, sim_graph **out)
{
    sim_capture *capture = stream->capture;
    CUresult result = CUDA_SUCCESS;

    if (!capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream)
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != sim_self()->id)
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;

    sim_graph *graph = capture->graph;
    bool own = capture->own_graph;
    if (capture->invalid)
        result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    else if (!all_joined(capture))
        result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    finish(capture);
    if (result != CUDA_SUCCESS) {
        if (own)
            sim_graph_destroy(graph);
        graph = NULL;
    }
    *out = graph;
    return result;
}

void sim_capture_stream_gone(sim_stream *stream)
{
    sim_capture *capture = stream->capture;

    if (!capture)
        return;
    capture->invalid = true;
    if (capture->origin != stream) {
        leave(stream);
        return;
    }
    sim_graph *graph = capture->graph;
    bool own = capture->own_graph;
    finish(capture);
    if (own)
        sim_graph_destroy(graph);
}
