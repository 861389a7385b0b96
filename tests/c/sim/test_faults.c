/* The fault plan and the counts; and, with them, that every failure of every call leaves the device whole. */
#include "device.h"

TEST(a_plan_fails_the_calls_it_names_and_no_others)
{
    open_device();
    simcuda_live before = live_now();
    CUdeviceptr a, b;
    uint64_t calls = simcuda_calls("cuMemAlloc_v2");

    CHECK_EQ(simcuda_fail("cuMemAlloc", 1, 2, 0), 0); /* the short name means the newest version */
    OK(cuMemAlloc_v2(&a, 512));
    IS(cuMemAlloc_v2(&b, 512), OUT_OF_MEMORY);
    IS(cuMemAlloc_v2(&b, 512), OUT_OF_MEMORY);
    OK(cuMemAlloc_v2(&b, 512));
    CHECK_EQ(simcuda_calls("cuMemAlloc_v2"), calls + 4);
    CHECK_EQ(simcuda_fail("cuMemFree_v2", 0, 1, CUDA_ERROR_LAUNCH_FAILED), 0);
    IS(cuMemFree_v2(a), LAUNCH_FAILED); /* did nothing */
    OK(cuMemFree_v2(a));
    simcuda_fail("cuMemFree_v2", 0, 100, 0);
    simcuda_fail_clear();
    OK(cuMemFree_v2(b));
    CHECK_EQ(simcuda_fail("cuNoSuchCall", 0, 1, 0), -1);
    CHECK_EQ(simcuda_fail(NULL, 0, 1, 0), -1);
    CHECK_EQ(simcuda_calls("cuNoSuchCall"), UINT64_MAX);
    CHECK_LIVE(before);
}

TEST(a_failed_runtime_allocation_is_the_last_error_until_it_is_taken)
{
    open_device();
    void *block = (void *)1;

    cudaGetLastError();
    simcuda_fail("cudaMalloc", 0, 1, 0);
    CHECK_EQ(cudaMalloc(&block, 512), cudaErrorMemoryAllocation);
    CHECK_EQ(cudaMalloc(&block, 512), cudaSuccess); /* success does not clear it */
    CHECK_EQ(cudaPeekAtLastError(), cudaErrorMemoryAllocation);
    CHECK_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
    CHECK_EQ(cudaGetLastError(), cudaSuccess);
    CHECK_EQ(cudaFree(block), cudaSuccess);
}

/* ---- N-th failure -------------------------------------------------------------------------------------- */
/* A little program that touches every part of the driver and, whatever fails, undoes what it has done. It
 * returns the first error. Undoing must not fail: the plans below fail one call of one function each. */
static CUresult program(void)
{
    static const char image[] = "//\n.version 8.0\n.target sm_80\n.visible .entry nothing() { ret; }\n";
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemAccessDesc rw = {properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr range = 0, block = 0, ordered = 0;
    CUmemGenericAllocationHandle handle = 0;
    bool mapped = false;
    CUstream stream = NULL;
    CUevent event = NULL;
    CUmodule module = NULL;
    CUfunction function;
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    void *host = NULL;
    CUresult result;
    char byte;

#define TRY(call)                                                                                            \
    if ((result = (call)) != CUDA_SUCCESS)                                                                   \
    goto undo

    TRY(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    TRY(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    TRY(cuMemAlloc_v2(&block, 4096));
    TRY(cuMemHostAlloc(&host, 4096, 0));
    TRY(cuMemAddressReserve(&range, 2 * FRAME, 0, 0, 0));
    TRY(cuMemCreate(&handle, FRAME, &properties, 0));
    TRY(cuMemMap(range, FRAME, 0, handle, 0));
    mapped = true;
    TRY(cuMemSetAccess(range, FRAME, &rw, 1));
    TRY(cuMemsetD8Async(range, 1, 4096, stream));
    TRY(cuMemcpyDtoDAsync_v2(block, range, 4096, stream));
    TRY(cuMemcpyDtoHAsync_v2(host, block, 4096, stream));
    TRY(cuEventRecord(event, stream));
    TRY(cuStreamWaitEvent(NULL, event, 0));
    TRY(cuMemcpyDtoH_v2(&byte, block, 1));
    TRY(cuMemAllocAsync(&ordered, 4096, stream));
    TRY(cuModuleLoadData(&module, image));
    TRY(cuModuleGetFunction(&function, module, "nothing"));
    TRY(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
    TRY(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    result = cuMemsetD8Async(block, 2, 16, stream);
    CUresult end = cuStreamEndCapture(stream, &graph);
    if (end != CUDA_SUCCESS) /* refused by the plan: the stream captures still */
        cuStreamEndCapture(stream, &graph);
    if (result == CUDA_SUCCESS)
        result = end;
    if (result != CUDA_SUCCESS)
        goto undo;
    TRY(cuGraphInstantiateWithFlags(&exec, graph, 0));
    TRY(cuGraphLaunch(exec, stream));
    TRY(cuStreamSynchronize(stream));
    TRY(cuCtxSynchronize());
#undef TRY

undo:
    cuStreamSynchronize(
        stream);        /* nothing of this may run once its memory is gone; the plan may refuse one of the */
    cuCtxSynchronize(); /* two, not both */
    if (exec)
        cuGraphExecDestroy(exec);
    if (graph)
        cuGraphDestroy(graph);
    if (module)
        cuModuleUnload(module);
    if (ordered &&
        cuMemFreeAsync(ordered, stream) != CUDA_SUCCESS) /* queueing takes host memory, freeing does not */
        cuMemFree_v2(ordered);
    if (mapped)
        cuMemUnmap(range, FRAME);
    if (handle)
        cuMemRelease(handle);
    if (range)
        cuMemAddressFree(range, 2 * FRAME);
    if (host)
        cuMemFreeHost(host);
    if (block)
        cuMemFree_v2(block);
    if (event)
        cuEventDestroy_v2(event);
    if (stream)
        cuStreamDestroy_v2(stream);
    return result;
}

TEST(failing_any_call_at_any_time_leaks_nothing)
{
    static const char *const functions[] = {
        "cuStreamCreate",
        "cuEventCreate",
        "cuMemAlloc_v2",
        "cuMemHostAlloc",
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemsetD8Async",
        "cuMemcpyDtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuMemcpyDtoH_v2",
        "cuMemAllocAsync",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuLaunchKernel",
        "cuStreamBeginCapture_v2",
        "cuStreamEndCapture",
        "cuGraphInstantiateWithFlags",
        "cuGraphLaunch",
        "cuStreamSynchronize",
        "cuCtxSynchronize",
    };

    open_device();
    for (int lazy = 0; lazy < 2; lazy++) {
        for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
            CUresult result = CUDA_ERROR_UNKNOWN;
            int failed = 0;

            for (uint64_t n = 0; result != CUDA_SUCCESS; n++) {
                open_device();
                simcuda_set_lazy(lazy);
                simcuda_live before = live_now();
                CHECK_EQ(simcuda_fail(functions[i], n, 1, 0), 0);
                result = program();
                simcuda_set_lazy(0); /* runs what the destroyed stream still held */
                CHECK_LIVE(before);
                failed += result != CUDA_SUCCESS;
                CHECK(n < 10);
            }
            if (!failed)
                TEST_FAIL("%s is not called by the program", functions[i]);
        }
    }
}

/* Host memory running out inside the device: malloc itself fails. */
static uint64_t mallocs_left = UINT64_MAX;

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *block, size_t size);

static bool refuse(void)
{
    return mallocs_left != UINT64_MAX && mallocs_left-- == 0 ? (mallocs_left = UINT64_MAX, true) : false;
}

/* The sanitizers have allocators of their own, which these would bypass. */
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define OWN_MALLOC 1
void *malloc(size_t size)
{
    return refuse() ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    return refuse() ? NULL : __libc_calloc(count, size);
}

void *realloc(void *block, size_t size)
{
    return refuse() ? NULL : __libc_realloc(block, size);
}
#else
#define OWN_MALLOC 0
#endif

TEST(running_out_of_host_memory_anywhere_leaks_nothing)
{
    if (!OWN_MALLOC) {
        (void)refuse;
        TEST_SKIP("needs a build without a sanitizer's own malloc");
    }
    open_device();
    CHECK_EQ(program(), CUDA_SUCCESS); /* tables grow once */
    CUresult result = CUDA_ERROR_UNKNOWN;
    int failed = 0;
    for (uint64_t n = 0; result != CUDA_SUCCESS; n++) {
        open_device();
        simcuda_live before = live_now();
        mallocs_left = n;
        result = program();
        mallocs_left = UINT64_MAX;
        if (result != CUDA_SUCCESS) {
            failed++;
            IS(result, OUT_OF_MEMORY);
        }
        CHECK_LIVE(before);
        CHECK(n < 500);
    }
    CHECK(failed > 20);
}

TEST_MAIN
