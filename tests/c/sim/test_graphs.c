/* Stream capture and graphs: what is recorded, how it is replayed, and what CUDA's documentation forbids
 * meanwhile. */
#include "device.h"

static CUstream new_stream(unsigned flags)
{
    CUstream stream;

    OK(cuStreamCreate(&stream, flags));
    return stream;
}

static CUdeviceptr alloc(size_t size)
{
    CUdeviceptr address;

    OK(cuMemAlloc_v2(&address, size));
    OK(cuMemsetD8_v2(address, 0, size));
    return address;
}

static unsigned char at(CUdeviceptr address)
{
    unsigned char byte;

    OK(cuMemcpyDtoH_v2(&byte, address, 1));
    return byte;
}

static CUstreamCaptureStatus status_of(CUstream stream)
{
    CUstreamCaptureStatus status;

    OK(cuStreamIsCapturing(stream, &status));
    return status;
}

static int ran;

static void count(void *unused)
{
    (void)unused;
    ran++;
}

TEST(captured_work_runs_at_each_replay_and_not_before)
{
    open_device();
    simcuda_live before = live_now();
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    CUdeviceptr a = alloc(512), b = alloc(512);
    CUgraph graph;
    CUgraphExec exec;
    size_t nodes = 0;

    ran = 0;
    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    CHECK_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    OK(cuMemcpyDtoDAsync_v2(b, a, 512, stream));
    OK(cuMemsetD8Async(a, 3, 512, stream));
    OK(cuLaunchHostFunc(stream, count, NULL));
    OK(cuStreamEndCapture(stream, &graph));
    CHECK_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_NONE);
    CHECK(ran == 0 && at(a) == 0);
    OK(cuGraphGetNodes(graph, NULL, &nodes));
    CHECK_EQ(nodes, 3);
    OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    OK(cuGraphDestroy(graph)); /* the executable graph does not need it */
    IS(cuGraphDestroy(graph), INVALID_VALUE);
    OK(cuGraphLaunch(exec, stream));
    OK(cuStreamSynchronize(stream));
    CHECK(at(a) == 3 && at(b) == 0 && ran == 1);
    OK(cuGraphLaunch(exec, stream));
    OK(cuStreamSynchronize(stream));
    CHECK(at(b) == 3 && ran == 2);
    simcuda_set_lazy(1);
    OK(cuGraphLaunch(exec, stream));
    CHECK_EQ(live_now().pending, 3);
    OK(cuGraphExecDestroy(exec)); /* with its work still queued */
    OK(cuStreamSynchronize(stream));
    CHECK_EQ(ran, 3);
    IS(cuGraphExecDestroy(exec), INVALID_VALUE);
    IS(cuGraphLaunch(exec, stream), INVALID_VALUE);
    OK(cuMemFree_v2(a));
    OK(cuMemFree_v2(b));
    OK(cuStreamDestroy_v2(stream));
    CHECK_LIVE(before);
}

TEST(forked_streams_join_the_capture_and_must_be_joined_again)
{
    open_device();
    simcuda_live before = live_now();
    CUstream origin = new_stream(CU_STREAM_NON_BLOCKING), fork = new_stream(CU_STREAM_NON_BLOCKING);
    CUdeviceptr a = alloc(512);
    CUevent event;
    CUgraph graph;
    size_t nodes;

    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    for (int join = 0; join < 2; join++) {
        OK(cuStreamBeginCapture_v2(origin, CU_STREAM_CAPTURE_MODE_GLOBAL));
        OK(cuMemsetD8Async(a, 1, 512, origin));
        OK(cuEventRecord(event, origin));
        OK(cuStreamWaitEvent(fork, event, 0));
        CHECK_EQ(status_of(fork), CU_STREAM_CAPTURE_STATUS_ACTIVE);
        OK(cuMemsetD8Async(a, 2, 512, fork));
        IS(cuStreamEndCapture(fork, &graph), STREAM_CAPTURE_UNMATCHED);
        if (join) {
            OK(cuEventRecord(event, fork));
            OK(cuStreamWaitEvent(origin, event, 0));
        }
        CHECK_EQ(cuStreamEndCapture(origin, &graph),
                 join ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
        CHECK((graph != NULL) == join);
        CHECK_EQ(status_of(fork), CU_STREAM_CAPTURE_STATUS_NONE);
    }
    OK(cuGraphGetNodes(graph, NULL, &nodes));
    CHECK_EQ(nodes, 2);
    IS(cuEventQuery(event), CAPTURED_EVENT);
    IS(cuEventSynchronize(event), CAPTURED_EVENT);
    IS(cuStreamWaitEvent(fork, event, 0), CAPTURED_EVENT);
    OK(cuGraphDestroy(graph));
    OK(cuEventDestroy_v2(event));
    OK(cuMemFree_v2(a));
    OK(cuStreamDestroy_v2(origin));
    OK(cuStreamDestroy_v2(fork));
    CHECK_LIVE(before);
}

TEST(dependencies_are_reported_and_can_be_replaced)
{
    open_device();
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    CUdeviceptr a = alloc(512);
    CUstreamCaptureStatus status;
    cuuint64_t id = 0, again = 0;
    CUgraph graph, ended;
    const CUgraphNode *dependencies;
    const CUgraphEdgeData *edges;
    CUgraphNode nodes[4], empty, first;
    CUgraphNodeType type;
    size_t count_;

    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cuStreamGetCaptureInfo_v3(stream, &status, &id, &graph, &dependencies, &edges, &count_));
    CHECK(id != 0 && count_ == 0);
    OK(cuMemsetD8Async(a, 1, 512, stream));
    OK(cuStreamGetCaptureInfo_v2(stream, &status, &again, &graph, &dependencies, &count_));
    CHECK(id == again && count_ == 1);
    first = dependencies[0];
    OK(cuGraphAddEmptyNode(&empty, graph, dependencies, count_));
    OK(cuStreamUpdateCaptureDependencies_v2(stream, &empty, NULL, 1, CU_STREAM_SET_CAPTURE_DEPENDENCIES));
    OK(cuMemsetD8Async(a, 2, 512, stream));
    OK(cuStreamEndCapture(stream, &ended));
    CHECK(ended == graph);
    count_ = 4;
    OK(cuGraphGetNodes(graph, nodes, &count_));
    CHECK(count_ == 3 && nodes[0] == first && nodes[1] == empty && nodes[3] == NULL);
    OK(cuGraphNodeGetType(nodes[1], &type));
    CHECK_EQ(type, CU_GRAPH_NODE_TYPE_EMPTY);
    OK(cuGraphNodeGetType(nodes[2], &type));
    CHECK_EQ(type, CU_GRAPH_NODE_TYPE_MEMSET);
    IS(cuStreamUpdateCaptureDependencies_v2(stream, nodes, NULL, 1, 0), ILLEGAL_STATE);
    OK(cuGraphDestroy(graph));
    IS(cuGraphNodeGetType(nodes[1], &type), INVALID_VALUE); /* nodes go with their graph */
    OK(cuMemFree_v2(a));
    OK(cuStreamDestroy_v2(stream));
}

/* What an unsafe call answers while `stream` captures in a mode; the capture is ended again. */
static CUresult unsafe_call_during(CUstreamCaptureMode mode, CUresult *at_end)
{
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    CUdeviceptr address = 0;
    CUgraph graph;

    OK(cuStreamBeginCapture_v2(stream, mode));
    CUresult result = cuMemAlloc_v2(&address, 512);
    *at_end = cuStreamEndCapture(stream, &graph);
    if (*at_end == CUDA_SUCCESS)
        OK(cuGraphDestroy(graph));
    if (address)
        OK(cuMemFree_v2(address));
    OK(cuStreamDestroy_v2(stream));
    return result;
}

TEST(unsafe_calls_are_refused_and_invalidate_unless_relaxed)
{
    open_device();
    simcuda_live before = live_now();
    CUresult end;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;

    IS(unsafe_call_during(CU_STREAM_CAPTURE_MODE_GLOBAL, &end), STREAM_CAPTURE_UNSUPPORTED);
    IS(end, STREAM_CAPTURE_INVALIDATED);
    IS(unsafe_call_during(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, &end), STREAM_CAPTURE_UNSUPPORTED);
    IS(end, STREAM_CAPTURE_INVALIDATED);
    OK(unsafe_call_during(CU_STREAM_CAPTURE_MODE_RELAXED, &end));
    OK(end);
    OK(cuThreadExchangeStreamCaptureMode(&mode)); /* this thread takes the responsibility */
    CHECK_EQ(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
    OK(unsafe_call_during(CU_STREAM_CAPTURE_MODE_GLOBAL, &end));
    OK(end);
    OK(cuThreadExchangeStreamCaptureMode(&mode));
    mode = (CUstreamCaptureMode)3;
    IS(cuThreadExchangeStreamCaptureMode(&mode), INVALID_VALUE);
    CHECK_LIVE(before);
}

typedef struct elsewhere {
    CUcontext context;
    CUstream stream;
    CUresult unsafe, end;
} elsewhere;

static void *other_thread(void *of)
{
    elsewhere *self = of;
    CUdeviceptr address;
    CUgraph graph;

    cuCtxSetCurrent(self->context);
    self->unsafe = cuMemAlloc_v2(&address, 512);
    if (self->unsafe == CUDA_SUCCESS)
        cuMemFree_v2(address);
    self->end = cuStreamEndCapture(self->stream, &graph);
    return NULL;
}

TEST(a_global_capture_forbids_other_threads_too_and_a_local_one_does_not)
{
    open_device();
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    elsewhere other = {.stream = stream};
    pthread_t thread;
    CUgraph graph;

    OK(cuCtxGetCurrent(&other.context));
    for (int local = 0; local < 2; local++) {
        OK(cuStreamBeginCapture_v2(stream, local ? CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
                                                 : CU_STREAM_CAPTURE_MODE_GLOBAL));
        CHECK_EQ(pthread_create(&thread, NULL, other_thread, &other), 0);
        pthread_join(thread, NULL);
        CHECK_EQ(other.unsafe, local ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        IS(other.end, STREAM_CAPTURE_WRONG_THREAD);
        CHECK_EQ(cuStreamEndCapture(stream, &graph),
                 local ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    OK(cuGraphDestroy(graph));
    OK(cuStreamDestroy_v2(stream));
}

TEST(waiting_for_a_capturing_stream_is_refused_and_invalidates)
{
    open_device();
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    CUdeviceptr a = alloc(512);
    CUgraph graph = (CUgraph)1;

    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    IS(cuStreamSynchronize(stream), STREAM_CAPTURE_UNSUPPORTED);
    CHECK_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    IS(cuStreamQuery(stream), STREAM_CAPTURE_INVALIDATED);
    IS(cuMemsetD8Async(a, 1, 512, stream), STREAM_CAPTURE_INVALIDATED);
    IS(cuStreamEndCapture(stream, &graph), STREAM_CAPTURE_INVALIDATED);
    CHECK(graph == NULL);
    CHECK_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_NONE);
    OK(cuStreamSynchronize(stream)); /* an ordinary stream again */
    OK(cuMemFree_v2(a));
    OK(cuStreamDestroy_v2(stream));
}

TEST(the_legacy_stream_may_not_depend_on_a_capturing_blocking_stream)
{
    open_device();
    CUstream blocking = new_stream(CU_STREAM_DEFAULT), free_running = new_stream(CU_STREAM_NON_BLOCKING);
    CUdeviceptr a = alloc(512);
    CUgraph graph;

    OK(cuStreamBeginCapture_v2(blocking, CU_STREAM_CAPTURE_MODE_RELAXED));
    IS(cuMemsetD8Async(a, 1, 512, NULL), STREAM_CAPTURE_IMPLICIT);
    IS(cuStreamEndCapture(blocking, &graph), STREAM_CAPTURE_INVALIDATED);
    OK(cuStreamBeginCapture_v2(free_running, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cuMemsetD8Async(a, 1, 512, NULL)); /* no order between these two */
    OK(cuStreamEndCapture(free_running, &graph));
    OK(cuGraphDestroy(graph));
    IS(cuStreamBeginCapture_v2(NULL, CU_STREAM_CAPTURE_MODE_RELAXED), STREAM_CAPTURE_UNSUPPORTED);
    OK(cuMemFree_v2(a));
    OK(cuStreamDestroy_v2(blocking));
    OK(cuStreamDestroy_v2(free_running));
}

TEST(dependencies_on_uncaptured_work_and_between_captures_are_refused)
{
    open_device();
    simcuda_live before = live_now();
    CUstream a = new_stream(CU_STREAM_NON_BLOCKING), b = new_stream(CU_STREAM_NON_BLOCKING);
    CUevent outside, inside, never;
    CUgraph graph;

    OK(cuEventCreate(&outside, 0));
    OK(cuEventCreate(&inside, 0));
    OK(cuEventCreate(&never, 0));
    OK(cuEventRecord(outside, b));
    OK(cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cuStreamWaitEvent(a, never, 0));
    IS(cuStreamWaitEvent(a, outside, 0), STREAM_CAPTURE_ISOLATION);
    IS(cuStreamEndCapture(a, &graph), STREAM_CAPTURE_INVALIDATED);

    OK(cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cuStreamBeginCapture_v2(b, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cuEventRecord(inside, a));
    IS(cuStreamWaitEvent(b, inside, 0), STREAM_CAPTURE_MERGE);
    IS(cuStreamEndCapture(a, &graph), STREAM_CAPTURE_INVALIDATED);
    IS(cuStreamEndCapture(b, &graph), STREAM_CAPTURE_INVALIDATED);
    IS(cuStreamEndCapture(b, &graph), ILLEGAL_STATE);

    OK(cuEventDestroy_v2(outside));
    OK(cuEventDestroy_v2(inside));
    OK(cuEventDestroy_v2(never));
    OK(cuStreamDestroy_v2(a));
    OK(cuStreamDestroy_v2(b));
    CHECK_LIVE(before);
}

TEST(external_events_become_nodes_that_record_at_each_replay)
{
    open_device();
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    CUevent event;
    CUgraph graph;
    CUgraphExec exec;
    CUgraphNode node;
    CUgraphNodeType type;
    size_t nodes = 1;

    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(cuEventRecordWithFlags(event, stream, CU_EVENT_RECORD_EXTERNAL));
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphGetNodes(graph, &node, &nodes));
    OK(cuGraphNodeGetType(node, &type));
    CHECK_EQ(type, CU_GRAPH_NODE_TYPE_EVENT_RECORD);
    OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    simcuda_set_lazy(1);
    OK(cuGraphLaunch(exec, stream));
    IS(cuEventQuery(event), NOT_READY);
    OK(cuStreamSynchronize(stream));
    OK(cuEventQuery(event));
    OK(cuEventDestroy_v2(event)); /* the graph keeps it */
    OK(cuGraphLaunch(exec, stream));
    OK(cuStreamSynchronize(stream));
    OK(cuGraphExecDestroy(exec));
    OK(cuGraphDestroy(graph));
    OK(cuStreamDestroy_v2(stream));
}

TEST(memory_nodes_and_callbacks_are_refused_in_a_capture)
{
    open_device();
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    CUdeviceptr address;
    CUgraph graph;

    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    IS(cuMemAllocAsync(&address, 512, stream), STREAM_CAPTURE_UNSUPPORTED);
    IS(cuStreamEndCapture(stream, &graph), STREAM_CAPTURE_INVALIDATED);
    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    IS(cuStreamAddCallback(stream, (CUstreamCallback)(void (*)(void))count, NULL, 0),
       STREAM_CAPTURE_UNSUPPORTED);
    IS(cuStreamEndCapture(stream, &graph), STREAM_CAPTURE_INVALIDATED);
    OK(cuStreamDestroy_v2(stream));
}

TEST(a_stream_destroyed_while_it_captures_ends_the_capture)
{
    open_device();
    simcuda_live before = live_now();
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    CUdeviceptr a = alloc(512), b;

    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(cuMemsetD8Async(a, 1, 512, stream));
    OK(cuStreamDestroy_v2(stream));
    OK(cuMemAlloc_v2(&b, 512)); /* nothing captures any more */
    OK(cuMemFree_v2(a));
    OK(cuMemFree_v2(b));
    CHECK_LIVE(before);
}

TEST_MAIN
