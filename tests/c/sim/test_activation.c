/* Before activation there is no device; activation happens once, understands its settings or says which it
 * does not, and refuses to live beside a real driver. Each in a process of its own. */
#include "../child.h"

#include "device.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

static void sees_no_device(void)
{
    int count = 7;
    CUdeviceptr address;
    CUcontext context;
    void *block;
    simcuda_counts counts;

    IS(cuInit(0), NO_DEVICE);
    IS(cuDeviceGetCount(&count), NOT_INITIALIZED);
    IS(cuMemAlloc_v2(&address, 512), NOT_INITIALIZED);
    IS(cuDevicePrimaryCtxRetain(&context, 0), NOT_INITIALIZED);
    CHECK_EQ(cudaGetDeviceCount(&count), cudaErrorNoDevice);
    CHECK_EQ(count, 0);
    IS(cuDeviceGetCount(&count), NOT_INITIALIZED); /* nor does asking initialise the driver */
    CHECK_EQ(cudaMalloc(&block, 512), cudaErrorNoDevice);
    CHECK_EQ(cudaSetDevice(0), cudaErrorNoDevice);
    CHECK_EQ(cudaGetLastError(), cudaErrorNoDevice);
    CHECK_EQ(cudaDriverGetVersion(&count), cudaSuccess);
    CHECK_EQ(count, 0);
    CHECK_EQ(simcuda_stats(0, &counts), -1);
    CHECK_EQ(simcuda_setting("devices"), 0);
    CHECK_EQ(simcuda_progress(NULL, -1), 0);
}

TEST(there_is_no_device_before_activation)
{
    CHECK_CHILD(sees_no_device);
}

static void needs_cu_init(void)
{
    int count;

    CHECK(!simcuda_activate(""));
    IS(cuDeviceGetCount(&count), NOT_INITIALIZED);
    IS(cuInit(1), INVALID_VALUE);
    OK(cuInit(0));
    OK(cuDeviceGetCount(&count));
    CHECK_EQ(count, 1);
}

TEST(the_driver_api_needs_cuInit_even_then)
{
    CHECK_CHILD(needs_cu_init);
}

static void activates_twice(void)
{
    CHECK(!simcuda_activate("memory=67108864"));
    CHECK(strstr(simcuda_activate("memory=67108864"), "already") != NULL);
}

TEST(a_second_activation_is_refused)
{
    CHECK_CHILD(activates_twice);
}

static void reads_settings(void)
{
    size_t free_bytes, total;
    int value;
    struct cudaDeviceProp properties;

    CHECK(
        !simcuda_activate("  memory=104857600 devices=3  cc=90 sms=132 context=10485760 cudnn_workspace=5 "));
    CHECK_EQ(cudaGetDeviceCount(&value), cudaSuccess);
    CHECK_EQ(value, 3);
    CHECK_EQ(cudaMemGetInfo(&free_bytes, &total), cudaSuccess);
    CHECK(total == 100 * MIB && free_bytes == 90 * MIB); /* the context's bytes are taken */
#if SIM_CUDA_MAJOR == 12
    CHECK_EQ(cudaGetDeviceProperties_v2(&properties, 2), cudaSuccess);
#else
    CHECK_EQ(cudaGetDeviceProperties(&properties, 2), cudaSuccess);
#endif
    CHECK(properties.major == 9 && properties.minor == 0 && properties.multiProcessorCount == 132);
    CHECK_EQ(properties.totalGlobalMem, 100 * MIB);
    CHECK_EQ(simcuda_setting_reads("cudnn_workspace"), 0);
    CHECK_EQ(simcuda_setting("cudnn_workspace"), 5);
    CHECK_EQ(simcuda_setting_reads("cudnn_workspace"), 1);
    CHECK_EQ(simcuda_setting_reads("nonsense"), 0);
    CHECK_EQ(simcuda_setting("memory"), 100 * MIB);
    CHECK_EQ(simcuda_setting("nonsense"), 0);
}

TEST(settings_are_read)
{
    CHECK_CHILD(reads_settings);
}

static void refuses_settings(void)
{
    static const struct {
        const char *text, *says;
    } bad[] = {
        {"memory=2GiB", "memory=2GiB"},
        {"memory=", "memory="},
        {"memory=-1", "memory=-1"},
        {"memory=99999999999999999999999999", "whole number"},
        {"memory", "'memory'"},
        {"memory=0", "memory=0"},
        {"devices=0", "1 to 8"},
        {"devices=9", "1 to 8"},
        {"colour=1", "colour"},
        {"=1", "unknown setting"},
        {"lazy=2", "0 to 1"},
        {"cc=80 cc=80", "twice"},
        {"memory=67108864 context=67108865", "context"},
    };
    int count;

    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const char *said = simcuda_activate(bad[i].text);
        if (!said || !strstr(said, bad[i].says))
            TEST_FAIL("'%s' gives '%s', not a word of '%s'", bad[i].text, said ? said : "success",
                      bad[i].says);
    }
    CHECK_EQ(cudaGetDeviceCount(&count), cudaErrorNoDevice);
    CHECK(!simcuda_activate("devices=2")); /* nothing is left of the attempts */
    CHECK_EQ(cudaGetDeviceCount(&count), cudaSuccess);
    CHECK_EQ(count, 2);
    CHECK_EQ(simcuda_setting("cc"), 80);
}

TEST(bad_settings_are_named_and_change_nothing)
{
    CHECK_CHILD(refuses_settings);
}

static void meets_a_real_driver(void)
{
    char folder[] = "/tmp/simcuda-XXXXXX", path[64];

    CHECK(mkdtemp(folder) != NULL);
    snprintf(path, sizeof path, "%s/libcuda.so.550.54", folder);
    int file = open(path, O_RDWR | O_CREAT, 0600);
    CHECK(file >= 0 && ftruncate(file, 4096) == 0);
    void *mapped = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, file, 0);
    const char *said = simcuda_activate("");
    unlink(path);
    rmdir(folder);
    CHECK(mapped != MAP_FAILED && said && strstr(said, "libcuda.so.550.54") &&
          strstr(said, "its own process"));
    munmap(mapped, 4096);
    CHECK(!simcuda_activate("")); /* and it may live once the other is gone */
}

TEST(it_refuses_to_live_beside_a_real_driver)
{
    CHECK_CHILD(meets_a_real_driver);
}

static void cannot_see_what_is_loaded(void)
{
    struct rlimit limit;

    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    struct rlimit none = {.rlim_cur = 0, .rlim_max = limit.rlim_max};
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    const char *said = simcuda_activate("");
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    CHECK(said && strstr(said, "/proc/self/maps cannot be read") && strstr(said, strerror(EMFILE)));
    IS(cuInit(0), NO_DEVICE);
    CHECK(!simcuda_activate(""));
}

TEST(it_refuses_where_it_cannot_see_what_is_loaded)
{
    CHECK_CHILD(cannot_see_what_is_loaded);
}

static void is_larger_than_the_host(void)
{
    CUdeviceptr address;

    open_device_with(
        "memory=1099511627776"); /* 1 TiB; an allocation that every sanitizer has addresses for */
    OK(cuMemAlloc_v2(&address, (size_t)1 << 34));
    OK(cuMemsetD8_v2(address + ((size_t)1 << 33), 1, 4096));
    OK(cuMemFree_v2(address));
}

TEST(a_device_may_be_larger_than_the_host)
{
    CHECK_CHILD(is_larger_than_the_host);
}

static void keeps_nothing(void)
{
    CUdeviceptr address;
    char host[64];

    open_device_with("memory=67108864 blank=1");
    OK(cuMemAlloc_v2(&address, 4096));
    memset(host, 7, sizeof host);
    OK(cuMemcpyHtoD_v2(address, host, sizeof host));
    OK(cuMemsetD8_v2(address, 7, 64));
    CHECK_EQ(*(char *)address, 0); /* dropped */
    OK(cuMemcpyDtoH_v2(host, address, sizeof host));
    CHECK(host[0] == 0 && host[63] == 0);
    IS(cuMemcpyDtoH_v2(host, address + 4096, 1), INVALID_VALUE); /* misuse is misuse still */
    OK(cuMemFree_v2(address));
}

TEST(a_blank_device_keeps_nothing_and_reads_zeros)
{
    CHECK_CHILD(keeps_nothing);
}

TEST_MAIN
