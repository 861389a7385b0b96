/* What the runtime API adds to the driver's: devices of threads, last errors, kernels by address, symbols,
 * kinds. */
#include "device.h"

TEST(each_thread_has_a_device_and_the_context_follows)
{
    open_device();
    int device = -1;
    CUcontext context, primary;

    CHECK_EQ(cudaSetDevice(1), cudaSuccess);
    CHECK_EQ(cudaGetDevice(&device), cudaSuccess);
    CHECK_EQ(device, 1);
    OK(cuCtxGetCurrent(&context));
    OK(cuDevicePrimaryCtxRetain(&primary, 1));
    OK(cuDevicePrimaryCtxRelease_v2(1));
    CHECK(context == primary);
    CHECK_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
    CHECK_EQ(cudaSetDevice(-1), cudaErrorInvalidDevice);
    CHECK_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
    CHECK_EQ(cudaGetDevice(&device), cudaSuccess);
    CHECK_EQ(device, 1);
    CHECK_EQ(cudaSetDevice(0), cudaSuccess);
    CHECK_EQ(cudaGetDevice(NULL), cudaErrorInvalidValue);
    cudaGetLastError();
}

TEST(allocations_are_one_with_the_drivers)
{
    open_device();
    simcuda_live before = live_now();
    void *block;
    struct cudaPointerAttributes attributes;
    int local;

    CHECK_EQ(cudaMalloc(&block, 5 * MIB), cudaSuccess);
    CHECK_EQ(cudaPointerGetAttributes(&attributes, (char *)block + 5), cudaSuccess);
    CHECK(attributes.type == cudaMemoryTypeDevice && attributes.device == 0 &&
          attributes.hostPointer == NULL);
    OK(cuMemFree_v2((CUdeviceptr)(uintptr_t)block));
    CHECK_EQ(cudaFree(block), cudaErrorInvalidValue);
    CHECK_EQ(cudaFree(NULL), cudaSuccess);
    CHECK_EQ(cudaMalloc(&block, 0), cudaSuccess);
    CHECK(block == NULL);
    CHECK_EQ(cudaMalloc(NULL, 1), cudaErrorInvalidValue);
    CHECK_EQ(cudaMalloc(&block, 65 * MIB), cudaErrorMemoryAllocation);
    CHECK(block == NULL);
    CHECK_EQ(cudaPointerGetAttributes(&attributes, &local), cudaSuccess);
    CHECK(attributes.type == cudaMemoryTypeUnregistered && attributes.hostPointer == &local);
    CHECK_EQ(cudaHostAlloc(&block, 100, cudaHostAllocPortable), cudaSuccess);
    CHECK_EQ(cudaPointerGetAttributes(&attributes, block), cudaSuccess);
    CHECK_EQ(attributes.type, cudaMemoryTypeHost);
    CHECK_EQ(cudaFree(block), cudaErrorInvalidValue); /* pinned memory is not cudaFree's */
    CHECK_EQ(cudaFreeHost(block), cudaSuccess);
    CHECK_EQ(cudaHostAlloc(&block, 100, 128), cudaErrorInvalidValue);
    cudaGetLastError();
    CHECK_LIVE(before);
}

TEST(copies_check_the_kind_they_are_told)
{
    open_device();
    void *a;
    char host[64] = "text", back[64];

    CHECK_EQ(cudaMalloc(&a, 64), cudaSuccess);
    CHECK_EQ(cudaMemcpy(a, host, 64, cudaMemcpyHostToDevice), cudaSuccess);
    CHECK_EQ(cudaMemcpy(back, a, 64, cudaMemcpyDefault), cudaSuccess);
    CHECK_STR(back, "text");
    CHECK_EQ(cudaMemcpy(back, host, 64, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    CHECK_EQ(cudaMemcpy(back, host, 64, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    CHECK_EQ(cudaMemcpy(a, host, 64, (enum cudaMemcpyKind)9), cudaErrorInvalidMemcpyDirection);
    CHECK_EQ(cudaMemcpy(a, host, 65, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    CHECK_EQ(cudaMemset(a, 1, 65), cudaErrorInvalidValue);
    CHECK_EQ(cudaMemset(a, 0x101, 64), cudaSuccess); /* the low byte counts */
    CHECK_EQ(*(char *)a, 1);
    CHECK_EQ(cudaMemcpy2DAsync(back, 8, a, 16, 4, 4, cudaMemcpyDeviceToHost, NULL), cudaSuccess);
    CHECK(back[0] == 1 && back[3] == 1 && back[4] == 0 && back[8] == 1 && back[27] == 1 && back[28] == 0);
    CHECK_EQ(cudaMemcpy2DAsync(back, 2, a, 16, 4, 4, cudaMemcpyDeviceToHost, NULL),
             cudaErrorInvalidPitchValue);
    CHECK_EQ(cudaMemcpy2DAsync(back, 8, a, 32, 4, 4, cudaMemcpyDeviceToHost, NULL), cudaErrorInvalidValue);
    CHECK_EQ(cudaMemcpyPeerAsync(a, 2, a, 0, 8, NULL), cudaErrorInvalidDevice);
    CHECK_EQ(cudaFree(a), cudaSuccess);
    cudaGetLastError();
}

/* ---- kernels as nvcc's code registers and launches them ------------------------------------------------ */
static void host_stub(void)
{
}

static void unregistered_stub(void)
{
}

static int symbol_shadow;
static int sum;

static void add(void **arguments, const unsigned grid[3], const unsigned block[3])
{
    sum += *(int *)arguments[0] * (int)grid[0] * (int)block[0];
}

static const dim3 one = {1, 1, 1};

static void register_once(void)
{
    static bool done;
    static void **image; /* for the process's life */
    static const size_t sizes[] = {sizeof(int)};

    open_device();
    if (done)
        return;
    done = true;
    image = __cudaRegisterFatBinary(NULL);
    char *name = "_Z3addi";
    __cudaRegisterFunction(image, (const char *)host_stub, name, name, -1, NULL, NULL, NULL, NULL, NULL);
    __cudaRegisterVar(image, (char *)&symbol_shadow, "shadow", "shadow", 0, 16, 0, 0);
    __cudaRegisterFatBinaryEnd(image);
    CHECK_EQ(simcuda_emulate("_Z3addi", add, 1, sizes), 0);
}

TEST(kernels_are_launched_by_the_address_of_their_host_function)
{
    register_once();
    int value = 3;
    void *arguments[] = {&value};
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream = (cudaStream_t)1;
    cudaKernel_t kernel;
    const void *stub = (const void *)host_stub;

    sum = 0;
    CHECK_STR(simcuda_kernel_name(stub), "_Z3addi");
    CHECK(simcuda_kernel_name((const void *)unregistered_stub) == NULL);
    CHECK_EQ(__cudaPushCallConfiguration((dim3){2, 1, 1}, (dim3){5, 1, 1}, 7, NULL), 0);
    CHECK_EQ(__cudaPopCallConfiguration(&grid, &block, &shared, &stream), cudaSuccess);
    CHECK(grid.x == 2 && block.x == 5 && shared == 7 && stream == NULL);
    CHECK_EQ(__cudaPopCallConfiguration(&grid, &block, &shared, &stream), cudaErrorMissingConfiguration);
    CHECK_EQ(cudaLaunchKernel(stub, grid, block, arguments, shared, stream), cudaSuccess);
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    CHECK_EQ(sum, 30);
    CHECK_EQ(__cudaGetKernel(&kernel, stub), cudaSuccess);
    CHECK_EQ(__cudaLaunchKernel(kernel, one, one, arguments, 0, NULL), cudaSuccess);
    CHECK_EQ(sum, 33);
    cudaLaunchConfig_t config = {.gridDim = one, .blockDim = one};
    CHECK_EQ(cudaLaunchKernelExC(&config, stub, arguments), cudaSuccess);
    CHECK_EQ(sum, 36);
    CHECK_EQ(cudaLaunchKernel((const void *)unregistered_stub, one, one, arguments, 0, NULL),
             cudaErrorInvalidDeviceFunction);
    CHECK_EQ(cudaLaunchKernel(stub, (dim3){0, 1, 1}, one, arguments, 0, NULL), cudaErrorInvalidConfiguration);
    CHECK_EQ(cudaLaunchKernel(stub, one, (dim3){2048, 1, 1}, arguments, 0, NULL),
             cudaErrorInvalidConfiguration);
    CHECK_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
}

TEST(dynamic_shared_memory_is_allowed_up_to_what_was_asked)
{
    register_once();
    const void *stub = (const void *)host_stub;
    struct cudaFuncAttributes attributes;
    int value = 0, blocks;
    void *arguments[] = {&value};

    CHECK_EQ(cudaLaunchKernel(stub, one, one, arguments, 65536, NULL), cudaErrorInvalidConfiguration);
    CHECK_EQ(cudaFuncSetAttribute(stub, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536), cudaSuccess);
    CHECK_EQ(cudaLaunchKernel(stub, one, one, arguments, 65536, NULL), cudaSuccess);
    CHECK_EQ(cudaFuncGetAttributes(&attributes, stub), cudaSuccess);
    CHECK_EQ(attributes.maxDynamicSharedSizeBytes, 65536);
    CHECK_EQ(cudaFuncSetAttribute(stub, cudaFuncAttributeMaxDynamicSharedMemorySize, 1 << 20),
             cudaErrorInvalidValue);
    CHECK_EQ(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, stub, 128, 65536), cudaSuccess);
    CHECK_EQ(blocks, 2);
    CHECK_EQ(cudaFuncGetAttributes(&attributes, (const void *)unregistered_stub),
             cudaErrorInvalidDeviceFunction);
    cudaGetLastError();
}

/* A fatbin of machine code without bytes, for each of these architectures. */
typedef struct members {
    uint32_t magic;
    uint16_t version, header_size;
    uint64_t size;
    struct {
        uint16_t kind, version;
        uint32_t header_size;
        uint64_t size;
        uint32_t compressed_size, options;
        uint16_t minor, major;
        uint32_t architecture, name_offset, name_size;
        uint64_t flags, reserved, decompressed_size;
    } member[3];
} members;

static members make_members(int kind, uint32_t first, uint32_t second, uint32_t third)
{
    members made = {.magic = 0xBA55ED50, .version = 1, .header_size = 16, .size = sizeof made.member};
    const uint32_t architectures[] = {first, second, third};

    for (int i = 0; i < 3; i++) {
        made.member[i].kind = (uint16_t)kind;
        made.member[i].header_size = sizeof made.member[i];
        made.member[i].architecture = architectures[i];
    }
    return made;
}

static void stub_of_an_older_one(void)
{
}

static void stub_of_ptx(void)
{
}

static void stub_of_others(void)
{
}

TEST(a_kernel_says_for_which_architecture_it_was_made)
{
    open_device();                     /* compute capability 8.0 */
    static members older, ptx, others; /* for as long as their kernels are registered */
    older = make_members(2, 70, 80, 86);
    ptx = make_members(1, 70, 75, 90);
    others = make_members(2, 75, 86, 90);
    const struct {
        members *image;
        const void *stub;
        cudaError_t result;
        int made_for;
    } cases[] = {
        {&older, (const void *)stub_of_an_older_one, cudaSuccess, 80},
        {&ptx, (const void *)stub_of_ptx, cudaSuccess, 75},
        {&others, (const void *)stub_of_others, cudaErrorNoKernelImageForDevice, 0},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct cudaFuncAttributes attributes = {.ptxVersion = 0};
        char *name = "_Z4madev";
        struct {
            uint32_t magic, version;
            const void *data;
            void *unused;
        } wrapper = {0x466243B1, 1, cases[i].image, NULL};
        static void *wrappers[3][3]; /* as large, and as long there as the kernels */

        memcpy(wrappers[i], &wrapper, sizeof wrapper);
        void **handle = __cudaRegisterFatBinary(wrappers[i]);
        __cudaRegisterFunction(handle, cases[i].stub, name, name, -1, NULL, NULL, NULL, NULL, NULL);
        __cudaRegisterFatBinaryEnd(handle);
        CHECK_EQ(cudaFuncGetAttributes(&attributes, cases[i].stub), cases[i].result);
        CHECK_EQ(attributes.ptxVersion, cases[i].made_for);
        CHECK_EQ(attributes.binaryVersion, cases[i].made_for);
        __cudaUnregisterFatBinary(handle);
    }
    cudaGetLastError();
}

TEST(symbols_have_device_memory_of_the_registered_size)
{
    register_once();
    void *address, *again;
    int words[4] = {1, 2, 3, 4}, back[4];

    CHECK_EQ(cudaGetSymbolAddress(&address, &symbol_shadow), cudaSuccess);
    CHECK_EQ(cudaMemcpyToSymbol(&symbol_shadow, words, 16, 0, cudaMemcpyHostToDevice), cudaSuccess);
    CHECK_EQ(cudaMemcpy(back, address, 16, cudaMemcpyDeviceToHost), cudaSuccess);
    CHECK_EQ(back[3], 4);
    CHECK_EQ(cudaMemcpyToSymbol(&symbol_shadow, words, 16, 4, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    CHECK_EQ(cudaGetSymbolAddress(&again, &symbol_shadow), cudaSuccess);
    CHECK(again == address);
    CHECK_EQ(cudaGetSymbolAddress(&again, words), cudaErrorInvalidSymbol);
    cudaGetLastError();
}

TEST(sticky_errors_stay_and_others_go)
{
    open_device();
    void *block;
    cudaStream_t stream;

    CHECK_EQ(cudaStreamCreateWithFlags(&stream, 1), cudaSuccess);
    CHECK_EQ(cudaMallocAsync(&block, 4 * MIB, stream), cudaSuccess);
    simcuda_set_lazy(1);
    CHECK_EQ(cudaFreeAsync(block, stream), cudaSuccess);
    CHECK_EQ(cudaMemsetAsync(block, 0, 16, stream), cudaSuccess); /* runs after the free */
    CHECK_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
    CHECK_EQ(cudaGetLastError(), cudaErrorNotReady);
    CHECK_EQ(cudaStreamSynchronize(stream), cudaErrorIllegalAddress);
    CHECK_EQ(cudaMalloc(&block, 16), cudaErrorIllegalAddress);
    CHECK_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
    CHECK_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
    CHECK_EQ(cudaStreamDestroy(stream), cudaErrorIllegalAddress);
    simcuda_forget_fault();
    cudaGetLastError();
    CHECK_EQ(cudaGetLastError(), cudaSuccess);
    CHECK_EQ(cudaStreamDestroy(stream), cudaSuccess);
    CHECK_STR(cudaGetErrorName(cudaErrorIllegalAddress), "cudaErrorIllegalAddress");
    CHECK_STR(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory");
    CHECK_STR(cudaGetErrorName((cudaError_t)4242), "unrecognized error code");
}

TEST(graphs_replay_kernels_copies_and_sets)
{
    register_once();
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    void *a;
    int value = 2;
    void *arguments[] = {&value};
    size_t nodes = 0;

    CHECK_EQ(cudaMalloc(&a, 64), cudaSuccess);
    CHECK_EQ(cudaMemset(a, 0, 64), cudaSuccess);
    CHECK_EQ(cudaStreamCreateWithPriority(&stream, 1, 0), cudaSuccess);
    CHECK_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    CHECK_EQ(cudaLaunchKernel((const void *)host_stub, one, one, arguments, 0, stream), cudaSuccess);
    CHECK_EQ(cudaMemsetAsync(a, 5, 64, stream), cudaSuccess);
    CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    CHECK_EQ(cudaGraphGetNodes(graph, NULL, &nodes), cudaSuccess);
    CHECK_EQ(nodes, 2);
    CHECK_EQ(cudaGraphInstantiateWithFlags(&exec, graph, 0), cudaSuccess);
    sum = 0;
    value = 100; /* the copy made at capture counts */
    CHECK_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    CHECK(sum == 2 && *(char *)a == 5);
    CHECK_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
    CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
    CHECK_EQ(cudaStreamDestroy(stream), cudaSuccess);
    CHECK_EQ(cudaFree(a), cudaSuccess);
}

TEST(driver_functions_are_found_through_the_runtime)
{
    open_device();
    void *function;
    enum cudaDriverEntryPointQueryResult status;

    CHECK_EQ(cudaGetDriverEntryPointByVersion("cuMemMap", &function, 12000, 0, &status), cudaSuccess);
    CHECK(status == cudaDriverEntryPointSuccess && function == (void *)cuMemMap);
    CHECK_EQ(cudaGetDriverEntryPoint("cuNothing", &function, 0, &status), cudaSuccess);
    CHECK(status == cudaDriverEntryPointSymbolNotFound && function == NULL);
    CHECK_EQ(cudaGetDriverEntryPoint("cuNothing", &function, 0, NULL), cudaErrorSymbolNotFound);
    cudaGetLastError();
}

/* ---- threads ------------------------------------------------------------------------------------------ */
static void *churn(void *seed)
{
    uint64_t state = (uintptr_t)seed;
    void *block[8] = {NULL};
    cudaStream_t stream;
    cudaEvent_t event;
    uintptr_t bad = 0;

    if (cudaStreamCreateWithFlags(&stream, 1) != cudaSuccess ||
        cudaEventCreateWithFlags(&event, 2) != cudaSuccess)
        return (void *)1;
    for (int i = 0; i < test_rounds(300, 30000); i++) {
        int at = (int)(test_random(&state) % 8);
        if (block[at]) {
            bad += cudaMemsetAsync(block[at], at, 64, stream) != cudaSuccess;
            bad += cudaEventRecord(event, stream) != cudaSuccess;
            bad += cudaStreamWaitEvent(NULL, event, 0) != cudaSuccess;
            bad += cudaFree(block[at]) != cudaSuccess;
            block[at] = NULL;
        } else {
            bad += cudaMalloc(&block[at], 64 + test_random(&state) % 100000) != cudaSuccess;
        }
    }
    for (int at = 0; at < 8; at++)
        bad += cudaFree(block[at]) != cudaSuccess;
    bad += cudaEventDestroy(event) != cudaSuccess;
    bad += cudaStreamDestroy(stream) != cudaSuccess;
    return (void *)bad;
}

TEST(threads_use_the_device_together)
{
    open_device();
    simcuda_live before = live_now();
    pthread_t threads[4];
    void *bad;
    uint64_t seed = test_seed();

    for (int lazy = 0; lazy < 2; lazy++) {
        simcuda_set_lazy(lazy);
        for (uintptr_t i = 0; i < 4; i++)
            CHECK_EQ(pthread_create(&threads[i], NULL, churn, (void *)(uintptr_t)(seed + i)), 0);
        for (int i = 0; i < 4; i++) {
            pthread_join(threads[i], &bad);
            CHECK_EQ((uintptr_t)bad, 0);
        }
    }
    simcuda_set_lazy(0);
    CHECK_LIVE(before);
}

TEST_MAIN
