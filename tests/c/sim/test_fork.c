/* fork(): the child has no device and says so, and nothing hangs whatever other threads were doing. */
#include "device.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

/* Is any of the device's memory in this process? The kernel may have put something else at its addresses. */
static bool maps_the_device(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    bool found = false;

    while (maps && !found && fgets(line, sizeof line, maps))
        found = strstr(line, "memfd:simulated-device") != NULL;
    if (maps)
        fclose(maps);
    return found || !maps;
}

/* What a child saw, as its exit status: 0 when all is as it should be, else the number of the first check. */
static int child_sees(CUdeviceptr address, CUstream stream)
{
    size_t free_bytes, total;
    CUdeviceptr out;
    int count;
    void *block;

    alarm(600); /* a hang ends as a signal */
    if (cuInit(0) != CUDA_ERROR_NOT_INITIALIZED)
        return 1;
    if (cuMemAlloc_v2(&out, 512) != CUDA_ERROR_NOT_INITIALIZED ||
        cuMemFree_v2(address) != CUDA_ERROR_NOT_INITIALIZED)
        return 2;
    if (cuStreamSynchronize(stream) != CUDA_ERROR_NOT_INITIALIZED)
        return 3;
    if (cuMemGetInfo_v2(&free_bytes, &total) != CUDA_ERROR_NOT_INITIALIZED)
        return 4;
    if (cudaMalloc(&block, 512) != cudaErrorInitializationError ||
        cudaGetLastError() != cudaErrorInitializationError)
        return 5;
    if (cudaGetDeviceCount(&count) != cudaErrorInitializationError)
        return 6;
    if (maps_the_device())
        return 7;
    if (!simcuda_activate("memory=67108864"))
        return 8;
    return 0;
}

static int in_child(CUdeviceptr address, CUstream stream)
{
    int status;
    pid_t child = fork();

    if (child == 0)
        _exit(child_sees(address, stream));
    CHECK(child > 0);
    CHECK_EQ(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

/* Before anything uses the device: each then has its own, though both take the first memory there is. The parent's
 * answer; in a process of its own, since the other tests' has used the device for good. */
static int device_each(void)
{
    unsigned char byte = 0;
    CUdeviceptr address;
    int status;

    if (simcuda_activate("memory=67108864"))
        return 1;
    const pid_t child = fork();
    CUcontext context;

    alarm(600);
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context) ||
        cuMemAlloc_v2(&address, 4 * MIB) || cuMemsetD8_v2(address, child ? 1 : 2, 4 * MIB))
        return 2;
    if (child && (waitpid(child, &status, 0) != child || status))
        return 3;
    if (cuMemcpyDtoH_v2(&byte, address, 1) || byte != (child ? 1 : 2))
        return 4;
    return 0;
}

TEST(parent_and_child_have_a_device_each_where_none_was_in_use_before)
{
    int status;
    const pid_t parent = fork();

    if (parent == 0)
        _exit(device_each());
    CHECK_EQ(waitpid(parent, &status, 0), parent);
    CHECK_EQ(status, 0);
}

TEST(a_child_has_no_device)
{
    open_device();
    simcuda_live before = live_now();
    CUdeviceptr address;
    CUstream stream;

    OK(cuMemAlloc_v2(&address, 4 * MIB));
    OK(cuStreamCreate(&stream, 0));
    simcuda_set_lazy(1);
    CHECK(maps_the_device());
    OK(cuMemsetD8Async(address, 1, 512, stream)); /* pending, which the child must not run */
    CHECK_EQ(in_child(address, stream), 0);
    OK(cuStreamSynchronize(stream)); /* the parent goes on */
    CHECK_EQ(*(char *)address, 1);
    OK(cuStreamDestroy_v2(stream));
    OK(cuMemFree_v2(address));
    CHECK_LIVE(before);
}

static int stop;

static void *busy(void *context)
{
    CUdeviceptr address;

    cuCtxSetCurrent(context);
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED))
        if (cuMemAlloc_v2(&address, 512) == CUDA_SUCCESS)
            cuMemFree_v2(address);
    return NULL;
}

TEST(forking_while_other_threads_call_never_hangs)
{
    open_device();
    CUdeviceptr address;
    CUstream stream;
    CUcontext context;
    pthread_t threads[2];

    OK(cuCtxGetCurrent(&context));
    OK(cuMemAlloc_v2(&address, 4 * MIB));
    OK(cuStreamCreate(&stream, 0));
    stop = 0;
    for (int i = 0; i < 2; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, busy, context), 0);
    for (int i = 0, rounds = test_rounds(20, 1000); i < rounds; i++)
        CHECK_EQ(in_child(address, stream), 0);
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    OK(cuStreamDestroy_v2(stream));
    OK(cuMemFree_v2(address));
}

static int forked_inside = -1;

static void forks(void *address)
{
    int status;
    pid_t child = fork();

    if (child == 0)
        _exit(child_sees((CUdeviceptr)(uintptr_t)address, NULL));
    waitpid(child, &status, 0);
    forked_inside = WIFEXITED(status) ? WEXITSTATUS(status) : 1000;
}

TEST(forking_inside_a_host_function_is_no_different)
{
    open_device();
    CUdeviceptr address;

    OK(cuMemAlloc_v2(&address, 4 * MIB));
    OK(cuLaunchHostFunc(NULL, forks, (void *)(uintptr_t)address));
    OK(cuStreamSynchronize(NULL));
    CHECK_EQ(forked_inside, 0);
    OK(cuMemFree_v2(address));
}

TEST_MAIN
