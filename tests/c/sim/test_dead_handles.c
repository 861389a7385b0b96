/* A device that ends the process where a call is given the handle of a stream or event that was destroyed: CUDA follows
 * it, and what it then does is undefined. */
#include "device.h"

#include "../child.h"

static CUstream stream;
static CUevent event;

/* In the child itself: a fork of a process that has used the device is refused everything. */
static void open_and_destroy(void)
{
    open_device_with("memory=67108864 dead_handles=1");
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuEventCreate(&event, 0));
    OK(cuEventRecord(event, stream));
    OK(cuStreamDestroy_v2(stream));
    OK(cuEventDestroy_v2(event));
}

#define GIVEN_DEAD(name, expression)                                                                         \
    static void name(void)                                                                                   \
    {                                                                                                        \
        open_and_destroy();                                                                                  \
        (void)(expression);                                                                                  \
    }

GIVEN_DEAD(query, cuStreamQuery(stream))
GIVEN_DEAD(capture, cuStreamIsCapturing(stream, &(CUstreamCaptureStatus){0}))
GIVEN_DEAD(record, cuEventRecord(event, NULL))
GIVEN_DEAD(record_runtime, cudaEventRecord(NULL, stream))
GIVEN_DEAD(wait_for, cuStreamWaitEvent(NULL, event, 0))
GIVEN_DEAD(again, cuStreamDestroy_v2(stream))
GIVEN_DEAD(again_runtime, cudaEventDestroy(event))

static void after_the_slot_was_used_again(void)
{
    CUstream second;

    open_and_destroy();
    OK(cuStreamCreate(&second, CU_STREAM_NON_BLOCKING));
    CHECK(second != stream);
    cuStreamSynchronize(stream);
}

TEST(a_call_that_is_given_a_dead_handle_is_named_and_ends_the_process)
{
    static const struct {
        void (*body)(void);
        const char *call, *what;
    } cases[] = {
        {query, "cuStreamQuery was given 0x", "a destroyed stream"},
        {capture, "cuStreamIsCapturing was given 0x", "a destroyed stream"},
        {record, "cuEventRecord was given 0x", "a destroyed event"},
        {record_runtime, "cudaEventRecord was given 0x", "a destroyed stream"},
        {wait_for, "cuStreamWaitEvent was given 0x", "a destroyed event"},
        {again, "cuStreamDestroy_v2 was given 0x", "a destroyed stream"},
        {again_runtime, "cudaEventDestroy was given 0x", "a destroyed event"},
        {after_the_slot_was_used_again, "cuStreamSynchronize was given 0x", "a destroyed stream"},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const child_end end = in_child(cases[i].body);

        CHECK(child_aborted(&end));
        CHECK_SAID(&end, cases[i].call);
        CHECK_SAID(&end, cases[i].what);
    }
}

/* What was never a stream's is an error as elsewhere; work of a destroyed stream is done; the control interface may ask. */
static void no_trap(void)
{
    CUgraph graph;
    CUmodule module;
    static const char image[] =
        "//\n.version 8.0\n.target sm_80\n.address_size 64\n.visible .entry kernel() { ret; }\n";
    CUdeviceptr memory;

    open_and_destroy();
    OK(cuModuleLoadData(&module, image));
    IS(cuStreamQuery((CUstream)module), INVALID_HANDLE);
    IS(cuStreamQuery((CUstream)0x1234560), INVALID_HANDLE);
    IS(cuEventQuery((CUevent)(uintptr_t)&memory), INVALID_HANDLE);
    OK(cuModuleUnload(module));
    OK(cuGraphCreate(&graph, 0));
    OK(cuGraphDestroy(graph));
    IS(cuGraphDestroy(graph), INVALID_VALUE);
    OK(cuMemAlloc_v2(&memory, 64));
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    simcuda_set_lazy(1);
    OK(cuMemsetD8Async(memory, 1, 64, stream));
    OK(cuStreamDestroy_v2(stream));
    CHECK_EQ(live_now().pending, 1);
    CHECK_EQ(simcuda_progress(stream, -1), 0);
    OK(cuCtxSynchronize());
    CHECK_EQ(live_now().pending, 0);
    OK(cuMemFree_v2(memory));
}

TEST(all_else_is_as_on_any_device)
{
    CHECK_CHILD(no_trap);
}

static void by_default(void)
{
    open_device();
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuStreamDestroy_v2(stream));
    IS(cuStreamQuery(stream), INVALID_HANDLE);
}

TEST(without_the_setting_it_is_an_error)
{
    CHECK_CHILD(by_default);
}

TEST_MAIN
