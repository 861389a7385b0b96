/* Virtual time: it is what the table of prices says of the calls that were made, and nothing else. */
#include "device.h"

enum { US = 1000, CALL = 7, KERNEL = 1000000 }; /* ns; the host is far ahead of a device with such kernels */

static CUfunction function;
static CUmodule module;

static uint64_t host(void)
{
    uint64_t h, d;

    CHECK_EQ(simcuda_clock(0, &h, &d), 0);
    return h;
}

static uint64_t device_done(int device)
{
    uint64_t h, d;

    CHECK_EQ(simcuda_clock(device, &h, &d), 0);
    return d;
}

/* Lazily, every call that the tests use at the same price. */
static void begin(void)
{
    static const char *const used[] = {"cuLaunchKernel",    "cuStreamSynchronize", "cuCtxSynchronize",
                                       "cuEventRecord",     "cuEventQuery",        "cuEventSynchronize",
                                       "cuStreamWaitEvent", "cuStreamQuery",       "cuMemcpyDtoDAsync",
                                       "cuMemcpyHtoDAsync", "cuMemsetD32Async"};
    static const char image[] =
        "//\n.version 8.0\n.target sm_80\n.address_size 64\n.visible .entry sleeps() { ret; }\n";

    open_device();
    for (size_t i = 0; i < sizeof used / sizeof *used; i++)
        CHECK(simcuda_price(used[i], CALL) >= 0);
    CHECK(simcuda_price("kernel", KERNEL) >= 0);
    OK(cuCtxSynchronize());
    OK(cuModuleLoadData(&module, image));
    OK(cuModuleGetFunction(&function, module, "sleeps"));
    simcuda_set_lazy(1);
}

static void end(void)
{
    simcuda_set_lazy(0);
    OK(cuModuleUnload(module));
}

static CUstream new_stream(unsigned flags)
{
    CUstream stream;

    OK(cuStreamCreate(&stream, flags));
    return stream;
}

static void launch(CUstream stream)
{
    OK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
}

TEST(a_call_costs_the_host_its_row_of_the_table)
{
    static const struct {
        const char *function;
        int64_t nanoseconds;
    } rows[] = {
        {"cuMemCreate", 29 * US},    {"cuMemMap", 2 * US},          {"cuMemSetAccess", 38 * US},
        {"cuMemUnmap", 34 * US},     {"cuMemRelease", 23 * US},     {"cuMemAddressReserve", 2 * US},
        {"cudaMalloc", 600 * US},    {"cudaFree", 600 * US},        {"cuLaunchKernelEx", 2500},
        {"cudaGraphLaunch", 2500},   {"cudaMemcpyAsync", 2500},     {"cudaMemsetAsync", 2500},
        {"cudaEventRecord", 1 * US}, {"cudaStreamWaitEvent", 1000}, {"cudaDeviceSynchronize", 1000},
        {"cudaGetDevice", 100},      {"device GiB", 690500},        {"link GiB", 42950000},
    };
    CUdeviceptr address;
    uint64_t before;

    CHECK_EQ(simcuda_clock(0, &before, &before), -1); /* not activated */
    CHECK_EQ(simcuda_price("cuMemMap", -1), -1);
    open_device();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        CHECK_EQ(simcuda_price(rows[i].function, -1), rows[i].nanoseconds);
    CHECK_EQ(simcuda_price("kernel", -1), 5 * US);
    CHECK_EQ(simcuda_price("cuNothing", -1), -1);
    CHECK_EQ(simcuda_price(NULL, 5), -1);
    CHECK_EQ(simcuda_clock(2, &before, &before), -1);

    before = host();
    OK(cuMemAddressReserve(&address, FRAME, 0, 0, 0));
    CHECK_EQ(host() - before, 2 * US);
    IS(cuMemUnmap(address, FRAME), INVALID_VALUE); /* a call that fails is a call */
    CHECK_EQ(host() - before, 36 * US);
    CHECK_EQ(simcuda_price("cuMemAddressFree", 5), 2 * US);
    CHECK_EQ(simcuda_price("cuMemAddressFree", -1), 5);
    OK(cuMemAddressFree(address, FRAME));
    CHECK_EQ(host() - before, 36 * US + 5);
    CHECK_EQ(host() - before, 36 * US + 5); /* it moves by calls alone */
}

TEST(work_takes_its_time_on_the_device_and_a_wait_brings_the_host_there)
{
    begin();
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    const uint64_t start = host();

    for (int i = 0; i < 3; i++)
        launch(stream);
    CHECK_EQ(host() - start, 3 * CALL);
    CHECK_EQ(device_done(0) - start, CALL + 3 * KERNEL); /* from the first launch on */
    CHECK_EQ(simcuda_progress(NULL, -1), 3);             /* that it really ran is another matter */
    CHECK_EQ(host() - start, 3 * CALL);
    OK(cuStreamSynchronize(stream));
    CHECK_EQ(host() - start, CALL + 3 * KERNEL);
    OK(cuStreamSynchronize(stream)); /* nothing to wait for */
    CHECK_EQ(host() - start, 2 * CALL + 3 * KERNEL);
    launch(stream); /* the device was idle: it begins when the host says so */
    CHECK_EQ(device_done(0), host() + KERNEL);
    OK(cuCtxSynchronize());
    CHECK_EQ(host(), device_done(0));
    OK(cuStreamDestroy_v2(stream));
    end();
}

TEST(streams_run_beside_each_other_but_for_events_and_the_legacy_stream)
{
    CUevent event;
    uint64_t start;

    begin();
    CUstream a = new_stream(CU_STREAM_NON_BLOCKING), b = new_stream(CU_STREAM_NON_BLOCKING);
    CUstream blocking = new_stream(CU_STREAM_DEFAULT);

    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    start = host();
    launch(a);
    launch(b);
    CHECK_EQ(device_done(0) - start, 2 * CALL + KERNEL);
    launch(b);
    OK(cuEventRecord(event, b));
    launch(b); /* after the event: not waited for */
    OK(cuStreamWaitEvent(a, event, 0));
    launch(a);
    OK(cuStreamSynchronize(a));
    CHECK_EQ(host() - start, 2 * CALL + 3 * KERNEL); /* two of b's, one of its own */
    OK(cuCtxSynchronize());

    start = host();
    launch(blocking);
    launch(NULL);     /* after blocking's */
    launch(blocking); /* after the legacy stream's */
    launch(a);        /* beside them */
    CHECK_EQ(device_done(0) - start, CALL + 3 * KERNEL);
    OK(cuStreamSynchronize(a));
    CHECK_EQ(host() - start, 4 * CALL + KERNEL);
    OK(cuCtxSynchronize());
    OK(cuEventDestroy_v2(event));
    OK(cuStreamDestroy_v2(a));
    OK(cuStreamDestroy_v2(b));
    OK(cuStreamDestroy_v2(blocking));
    end();
}

TEST(what_was_done_already_orders_later_work_in_time_too)
{
    CUevent event;

    begin();
    CUstream a = new_stream(CU_STREAM_NON_BLOCKING), b = new_stream(CU_STREAM_NON_BLOCKING);

    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    const uint64_t start = host();
    launch(a);
    OK(cuEventRecord(event, a));
    CHECK_EQ(simcuda_progress(NULL, -1), 2);
    OK(cuStreamWaitEvent(b, event, 0));
    launch(b);
    OK(cuStreamSynchronize(b));
    CHECK_EQ(host() - start, CALL + 2 * KERNEL);
    OK(cuEventDestroy_v2(event));
    OK(cuStreamDestroy_v2(a));
    OK(cuStreamDestroy_v2(b));
    end();
}

TEST(a_host_that_asks_is_not_moved_until_it_is_told_yes)
{
    CUevent event;
    int asked = 1;

    begin();
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);

    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    const uint64_t start = host();
    launch(stream);
    OK(cuEventRecord(event, stream));
    launch(stream);
    IS(cuEventQuery(event), NOT_READY);
    CHECK_EQ(host() - start, 4 * CALL);
    while (cuEventQuery(event) == CUDA_ERROR_NOT_READY)
        asked++;
    CHECK_EQ(asked + 1, SIMCUDA_PATIENCE);
    CHECK_EQ(host() - start, CALL + KERNEL);
    IS(cuStreamQuery(stream), NOT_READY);
    OK(cuEventSynchronize(event));
    CHECK_EQ(host() - start, 3 * CALL + KERNEL);
    OK(cuStreamSynchronize(stream));
    OK(cuStreamQuery(stream));
    CHECK_EQ(host() - start, 2 * CALL + 2 * KERNEL);
    OK(cuEventDestroy_v2(event));
    OK(cuStreamDestroy_v2(stream));
    end();
}

TEST(copies_and_memsets_take_what_their_bytes_take)
{
    enum { MIB_NS = 1024 }; /* of device memory; four times that over the link */
    static char pageable[FRAME];
    CUdeviceptr memory;

    begin();
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    const int64_t within = simcuda_price("device GiB", (int64_t)MIB_NS << 10);
    const int64_t link = simcuda_price("link GiB", (int64_t)MIB_NS << 12);
    uint64_t start, done;

    OK(cuMemAlloc_v2(&memory, 2 * FRAME));
    start = host();
    OK(cuMemcpyDtoDAsync_v2(memory, memory + FRAME, FRAME, stream)); /* read and written */
    CHECK_EQ(device_done(0) - start, CALL + 4 * MIB_NS);
    OK(cuMemsetD32Async(memory, 1, FRAME / 4, stream));
    CHECK_EQ(device_done(0) - start, CALL + 6 * MIB_NS);
    done = device_done(0);
    OK(cuMemcpyHtoDAsync_v2(memory, pageable, FRAME, stream));
    CHECK_EQ(device_done(0) - done, 8 * MIB_NS);
    OK(cuStreamSynchronize(stream));
    OK(cuMemFree_v2(memory));
    simcuda_price("device GiB", within);
    simcuda_price("link GiB", link);
    OK(cuStreamDestroy_v2(stream));
    end();
}

TEST(a_graph_costs_the_host_one_call_and_the_device_its_kernels)
{
    CUgraph graph;
    CUgraphExec exec;

    begin();
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);

    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    const uint64_t before = device_done(0);
    for (int i = 0; i < 5; i++)
        launch(stream);
    CHECK_EQ(device_done(0), before);
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    simcuda_price("cuGraphLaunch", CALL);
    const uint64_t start = host();
    OK(cuGraphLaunch(exec, stream));
    CHECK_EQ(host() - start, CALL);
    CHECK_EQ(device_done(0) - start, CALL + 5 * KERNEL);
    OK(cuStreamSynchronize(stream));
    OK(cuGraphExecDestroy(exec));
    OK(cuGraphDestroy(graph));
    OK(cuStreamDestroy_v2(stream));
    end();
}

TEST(each_device_has_a_finish_and_the_process_one_host)
{
    begin();
    CUcontext second;
    CUstream stream;
    const uint64_t first_done = device_done(0);

    OK(cuDevicePrimaryCtxRetain(&second, 1));
    OK(cuCtxPushCurrent_v2(second));
    stream = new_stream(CU_STREAM_NON_BLOCKING);
    launch(stream);
    CHECK_EQ(device_done(0), first_done);
    OK(cuStreamSynchronize(stream));
    CHECK_EQ(host(), device_done(1));
    OK(cuStreamDestroy_v2(stream));
    OK(cuCtxPopCurrent_v2(&second));
    OK(cuDevicePrimaryCtxRelease_v2(1));
    end();
}

TEST_MAIN
