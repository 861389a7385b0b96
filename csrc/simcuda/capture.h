/* Stream capture, and the graphs it makes.
 *
 * A capture has an origin stream and those that joined it by waiting for an event recorded in it. Each
 * capturing stream has a frontier: the nodes that its next node depends on.
 *
 *     a node's dependencies were added before it, so a graph's order of nodes is a valid order of execution
 *
 * An executable graph is the list of its work in that order; a launch queues all of it in one stream. Unsafe
 * calls and forbidden dependencies invalidate the capture, as CUDA's documentation states. */
#ifndef SIM_CAPTURE_H
#define SIM_CAPTURE_H

#include "streams.h"

typedef struct sim_node {
    uint64_t handle;
    sim_work *work;
    size_t dependency_count;
    struct sim_node **dependencies;
    bool seen; /* scratch of the search for nodes that were not joined */
} sim_node;

typedef struct sim_graph {
    uint64_t handle;
    int device;
    size_t count, capacity;
    sim_node **nodes;
    struct sim_capture *capture; /* while one adds to it */
} sim_graph;

typedef struct sim_exec {
    uint64_t handle;
    int device;
    size_t count;
    sim_work *work[];
} sim_exec;

typedef struct sim_capture {
    unsigned references; /* streams and events */
    uint64_t id, thread;
    CUstreamCaptureMode mode;
    sim_stream *origin;
    sim_graph *graph; /* NULL once ended */
    bool own_graph;   /* made for this capture, given to the caller at the end */
    bool invalid;
    struct sim_capture *next; /* of those that have not ended */
} sim_capture;

CUresult sim_capture_begin(sim_stream *stream, sim_graph *into, sim_node *const *dependencies, size_t count,
                           CUstreamCaptureMode mode);
CUresult sim_capture_end(sim_stream *stream, sim_graph **out);

/* May this thread make a potentially unsafe call now? If not, the captures that forbid it are invalid. */
CUresult sim_capture_check_unsafe(void);
/* May work be put into the stream? Not into an invalid capture, nor into the legacy stream while a blocking
 * stream captures. */
CUresult sim_capture_check_submit(sim_stream *stream);
/* May the stream be waited for or asked? Not while it captures; doing so invalidates. */
CUresult sim_capture_check_wait(sim_stream *stream);

CUresult sim_capture_add(sim_stream *stream, sim_work *work); /* takes the work over */
/* A wait for an event that was recorded in a capture, or in a capturing stream for any event. */
CUresult sim_capture_wait(sim_stream *stream, sim_capture *of, sim_node *const *point, size_t count,
                          bool recorded_outside);
CUresult sim_capture_set_frontier(sim_stream *stream, sim_node *const *nodes, size_t count, bool keep);
sim_node **sim_capture_frontier(const sim_stream *stream); /* a copy, the caller's; NULL when out of memory */
void sim_capture_stream_gone(sim_stream *stream);
sim_capture *sim_capture_retain(sim_capture *capture);
void sim_capture_release(sim_capture *capture);
CUstreamCaptureStatus sim_capture_status(const sim_stream *stream);

/* By handle, as both APIs have them. */
CUresult sim_capture_info(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                          const CUgraphNode **dependencies, const CUgraphEdgeData **edges, size_t *count);
CUresult sim_capture_begin_into(CUstream stream, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                CUstreamCaptureMode mode);
CUresult sim_capture_update(CUstream stream, const CUgraphNode *dependencies, size_t count, unsigned flags);
CUresult sim_capture_exchange_mode(CUstreamCaptureMode *mode);

sim_graph *sim_graph_new(void);
sim_graph *sim_graph_of(CUgraph handle);
void sim_graph_destroy(sim_graph *graph);
/* Takes the work over. */
CUresult sim_graph_add(sim_graph *graph, sim_work *work, sim_node *const *dependencies, size_t count,
                       sim_node **out);
CUresult sim_graph_nodes(CUgraph graph, CUgraphNode *nodes, size_t *count);
CUresult sim_graph_dependencies(CUgraphNode node, CUgraphNode *nodes, size_t *count);

CUresult sim_exec_new(CUgraph graph, unsigned long long flags, sim_exec **out);
sim_exec *sim_exec_of(CUgraphExec handle);
void sim_exec_destroy(sim_exec *exec);
CUresult sim_exec_launch(sim_exec *exec, sim_stream *stream);

#endif
