/* Plain allocation, copies, sets, pinned host memory, pools, pointers and contexts by the driver API. */
#include "device.h"

static CUdeviceptr alloc(size_t size)
{
    CUdeviceptr address;

    OK(cuMemAlloc_v2(&address, size));
    return address;
}

TEST(small_allocations_share_frames_and_are_aligned)
{
    open_device();
    simcuda_live before = live_now();
    CUdeviceptr block[100];

    for (int i = 0; i < 100; i++) {
        block[i] = alloc(1 + (size_t)i * 37);
        CHECK_EQ(block[i] % 512, 0);
        OK(cuMemsetD8_v2(block[i], (unsigned char)i, 1 + (size_t)i * 37));
    }
    CHECK_EQ(live_now().bytes, before.bytes + FRAME);
    for (int i = 0; i < 100; i++)
        CHECK_EQ(*(unsigned char *)(block[i] + (size_t)i * 37), i);
    for (int i = 0; i < 100; i++)
        OK(cuMemFree_v2(block[i]));
    CHECK(!touchable((void *)block[50], false)); /* the last one out gives the frame back */
    CHECK_LIVE(before);
}

TEST(freed_memory_faults_and_cannot_be_freed_again)
{
    open_device();
    simcuda_live before = live_now();
    CUdeviceptr address = alloc(4 * MIB);
    int local;

    IS(cuMemFree_v2(address + 512), INVALID_VALUE);                  /* interior */
    IS(cuMemFree_v2((CUdeviceptr)(uintptr_t)&local), INVALID_VALUE); /* foreign */
    OK(cuMemFree_v2(address));
    CHECK(!touchable((void *)address, false));
    IS(cuMemFree_v2(address), INVALID_VALUE);
    IS(cuMemsetD8_v2(address, 0, 1), INVALID_VALUE);
    OK(cuMemFree_v2(0)); /* nothing to do, as documented */
    IS(cuMemAlloc_v2(&address, 0), INVALID_VALUE);
    IS(cuMemAlloc_v2(NULL, 512), INVALID_VALUE);
    CHECK_LIVE(before);
}

TEST(a_full_device_refuses_and_recovers)
{
    open_device();
    simcuda_live before = live_now();
    CUdeviceptr big = alloc(62 * MIB), more;
    size_t free_bytes, total;

    OK(cuMemGetInfo_v2(&free_bytes, &total));
    CHECK(free_bytes == 2 * MIB && total == 64 * MIB);
    IS(cuMemAlloc_v2(&more, 2 * MIB + 1), OUT_OF_MEMORY);
    more = alloc(2 * MIB);
    IS(cuMemAlloc_v2(&big, 512), OUT_OF_MEMORY);
    OK(cuMemFree_v2(more));
    OK(cuMemFree_v2(big));
    IS(cuMemAlloc_v2(&more, SIZE_MAX), OUT_OF_MEMORY);
    IS(cuMemAlloc_v2(&more, SIZE_MAX - FRAME), OUT_OF_MEMORY);
    CHECK_EQ(counts_now(0).bytes_peak, 64 * MIB);
    simcuda_reset_peak(0);
    CHECK_EQ(counts_now(0).bytes_peak, before.bytes);
    CHECK_LIVE(before);
}

TEST(taking_memory_away_leaves_what_is_held)
{
    open_device();
    CUdeviceptr held = alloc(32 * MIB), more;
    size_t free_bytes, total;

    CHECK_EQ(simcuda_set_memory(0, 16 * MIB), 0);
    OK(cuMemGetInfo_v2(&free_bytes, &total));
    CHECK(free_bytes == 0 && total == 16 * MIB);
    IS(cuMemAlloc_v2(&more, 512), OUT_OF_MEMORY);
    OK(cuMemFree_v2(held));
    more = alloc(16 * MIB);
    OK(cuMemFree_v2(more));
    CHECK_EQ(simcuda_set_memory(0, 65 * MIB + FRAME), -1); /* more than it was activated with */
    CHECK_EQ(simcuda_set_memory(2, MIB), -1);
    CHECK_EQ(simcuda_set_memory(0, 64 * MIB), 0);
}

TEST(fragmented_frames_serve_a_large_allocation)
{
    open_device();
    simcuda_live before = live_now();
    CUdeviceptr block[32], big;

    for (int i = 0; i < 32; i++)
        block[i] = alloc(FRAME);
    for (int i = 0; i < 32; i += 2)
        OK(cuMemFree_v2(block[i]));
    big = alloc(16 * FRAME); /* sixteen holes, no two side by side */
    OK(cuMemsetD8_v2(big, 1, 16 * FRAME));
    for (int i = 1; i < 32; i += 2) {
        OK(cuMemsetD8_v2(block[i], 2, FRAME));
        OK(cuMemFree_v2(block[i]));
    }
    for (size_t i = 0; i < 16; i++)
        CHECK_EQ(*(char *)(big + i * FRAME), 1);
    OK(cuMemFree_v2(big));
    CHECK_LIVE(before);
}

TEST(copies_check_both_ends_and_their_whole_length)
{
    open_device();
    simcuda_live before = live_now();
    CUdeviceptr a = alloc(4 * MIB), b = alloc(4 * MIB);
    static char host[2048], back[2048];
    void *pinned;
    CUdeviceptr of_pinned;

    for (int i = 0; i < 2048; i++)
        host[i] = (char)i;
    OK(cuMemcpyHtoD_v2(a, host, 2048));
    OK(cuMemcpyDtoD_v2(b, a, 2048));
    OK(cuMemcpyDtoH_v2(back, b, 2048));
    CHECK(memcmp(host, back, 2048) == 0);
    OK(cuMemcpy(a, (CUdeviceptr)(uintptr_t)back, 2048)); /* unified addressing */
    IS(cuMemcpyHtoD_v2(a + 4 * MIB - 100, host, 101), INVALID_VALUE);
    IS(cuMemcpyDtoH_v2(host, a + 4 * MIB - 100, 101), INVALID_VALUE);
    IS(cuMemcpyHtoD_v2((CUdeviceptr)(uintptr_t)back, host, 8), INVALID_VALUE); /* no device memory */
    IS(cuMemcpyDtoH_v2(back, (CUdeviceptr)(uintptr_t)host, 8), INVALID_VALUE);
    IS(cuMemcpyHtoD_v2(a, NULL, 8), INVALID_VALUE);
    OK(cuMemcpyHtoD_v2(a, NULL, 0));
    OK(cuMemHostAlloc(&pinned, 4096, CU_MEMHOSTALLOC_PORTABLE));
    OK(cuMemcpyDtoHAsync_v2(pinned, b, 2048, NULL));
    OK(cuStreamSynchronize(NULL));
    CHECK(memcmp(host, pinned, 2048) == 0);
    OK(cuMemHostGetDevicePointer_v2(&of_pinned, pinned, 0));
    CHECK_EQ(of_pinned, (CUdeviceptr)(uintptr_t)pinned);
    OK(cuMemcpyHtoD_v2(of_pinned, host + 1, 2047)); /* a device pointer, though to host memory */
    OK(cuMemcpyDtoD_v2(a, of_pinned, 2047));
    OK(cuMemcpyDtoH_v2(back, of_pinned, 2047));
    CHECK(memcmp(host + 1, back, 2047) == 0 && memcmp((char *)a, back, 2047) == 0);
    OK(cuMemFreeHost(pinned));
    IS(cuMemcpyHtoD_v2(of_pinned, host, 8), INVALID_VALUE); /* no more */
    OK(cuMemFree_v2(a));
    OK(cuMemFree_v2(b));
    CHECK_LIVE(before);
}

TEST(pageable_copies_finish_before_they_return_and_pinned_ones_need_not)
{
    open_device();
    CUdeviceptr a = alloc(512);
    CUstream stream;
    char *pinned, pageable[512];

    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuMemHostAlloc((void **)&pinned, 512, 0));
    simcuda_set_lazy(1);
    memset(pinned, 1, 512);
    OK(cuMemcpyHtoDAsync_v2(a, pinned, 512, stream));
    memset(pinned, 2, 512); /* too early: the copy sees it */
    OK(cuMemcpyDtoHAsync_v2(pageable, a, 512, stream));
    CHECK_EQ(pageable[0], 2);
    OK(cuStreamQuery(stream));
    OK(cuMemFreeHost(pinned));
    OK(cuMemFree_v2(a));
    OK(cuStreamDestroy_v2(stream));
}

TEST(sets_write_elements_and_want_aligned_device_memory)
{
    open_device();
    CUdeviceptr a = alloc(512);
    uint32_t word;
    unsigned short half;
    char local[8];

    OK(cuMemsetD32_v2(a, 0x01020304, 4));
    OK(cuMemcpyDtoH_v2(&word, a + 12, 4));
    CHECK_EQ(word, 0x01020304);
    OK(cuMemsetD16_v2(a, 0xABCD, 1));
    OK(cuMemcpyDtoH_v2(&half, a, 2));
    CHECK_EQ(half, 0xABCD);
    OK(cuStreamWriteValue32_v2(NULL, a + 4, 77, 0));
    OK(cuMemcpyDtoH_v2(&word, a + 4, 4));
    CHECK_EQ(word, 77);
    IS(cuStreamWriteValue32_v2(NULL, a + 2, 77, 0), INVALID_VALUE);
    IS(cuMemsetD32_v2(a + 2, 0, 1), INVALID_VALUE);
    IS(cuMemsetD32_v2(a, 0, 129), INVALID_VALUE);
    IS(cuMemsetD32_v2(a, 0, SIZE_MAX / 2), INVALID_VALUE);
    IS(cuMemsetD8_v2((CUdeviceptr)(uintptr_t)local, 0, 8), INVALID_VALUE);
    OK(cuMemFree_v2(a));
}

TEST(host_memory_is_known_once_registered_and_until_it_is_not)
{
    open_device();
    simcuda_live before = live_now();
    static char block[8192];
    void *pinned;
    CUdeviceptr alias;
    unsigned type;

    IS(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)(uintptr_t)block),
       INVALID_VALUE);
    OK(cuMemHostRegister_v2(block, 4096, 0));
    OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)(uintptr_t)block + 9));
    CHECK_EQ(type, CU_MEMORYTYPE_HOST);
    OK(cuMemHostGetDevicePointer_v2(&alias, block, 0));
    CHECK_EQ(alias, (uintptr_t)block);
    IS(cuMemHostRegister_v2(block + 2048, 4096, 0), HOST_MEMORY_ALREADY_REGISTERED);
    IS(cuMemHostUnregister(block + 1), HOST_MEMORY_NOT_REGISTERED);
    IS(cuMemFreeHost(block), INVALID_VALUE); /* registered, not allocated */
    OK(cuMemHostUnregister(block));
    IS(cuMemHostUnregister(block), HOST_MEMORY_NOT_REGISTERED);
    OK(cuMemHostAlloc(&pinned, 100, 0));
    IS(cuMemHostUnregister(pinned), HOST_MEMORY_NOT_REGISTERED);
    OK(cuMemFreeHost(pinned));
    IS(cuMemFreeHost(pinned), INVALID_VALUE);
    IS(cuMemHostAlloc(&pinned, 0, 0), INVALID_VALUE);
    IS(cuMemHostAlloc(&pinned, 8, 64), INVALID_VALUE);
    IS(cuMemHostRegister_v2(NULL, 8, 0), INVALID_VALUE);
    CHECK_LIVE(before);
}

TEST(pointers_tell_what_they_point_to)
{
    open_device();
    CUdeviceptr a = alloc(1000), start = 0;
    size_t size = 0;
    unsigned type = 0;
    int ordinal = -1, local;
    unsigned long long id = 0, other_id = 0;
    CUcontext context;
    CUpointer_attribute asked[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                   CU_POINTER_ATTRIBUTE_RANGE_SIZE};
    void *answers[] = {&type, &ordinal, &size};

    OK(cuMemGetAddressRange_v2(&start, &size, a + 999));
    CHECK(start == a && size == 1000);
    IS(cuMemGetAddressRange_v2(&start, &size, a + 1000), NOT_FOUND);
    IS(cuMemGetAddressRange_v2(&start, &size, (CUdeviceptr)(uintptr_t)&local), NOT_FOUND);
    OK(cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, a));
    CHECK(context != NULL);
    OK(cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, a));
    IS(cuPointerGetAttribute(NULL, CU_POINTER_ATTRIBUTE_BUFFER_ID, a), INVALID_VALUE);
    OK(cuPointerGetAttributes(3, asked, answers, a + 10));
    CHECK(type == CU_MEMORYTYPE_DEVICE && ordinal == 0 && size == 1000);
    OK(cuPointerGetAttributes(3, asked, answers,
                              (CUdeviceptr)(uintptr_t)&local)); /* unknown: no error, no answer */
    CHECK(type == 0 && ordinal == -2 && size == 0);
    OK(cuMemFree_v2(a));
    a = alloc(1000);
    OK(cuPointerGetAttribute(&other_id, CU_POINTER_ATTRIBUTE_BUFFER_ID, a));
    CHECK(id != other_id); /* whether or not the address is the same */
    OK(cuMemFree_v2(a));
}

/* ---- stream-ordered pools ----------------------------------------------------------------------------- */
static uint64_t pool_number(CUmemoryPool pool, CUmemPool_attribute attribute)
{
    uint64_t value;

    OK(cuMemPoolGetAttribute(pool, attribute, &value));
    return value;
}

TEST(pool_numbers_are_true)
{
    open_device();
    simcuda_live before = live_now();
    CUmemoryPool pool;
    CUdeviceptr a, b;
    uint64_t threshold = 8 * MIB, zero = 0, one = 1;

    OK(cuDeviceGetDefaultMemPool(&pool, 0));
    OK(cuMemAllocAsync(&a, 3 * MIB, NULL));
    CHECK_EQ(pool_number(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 4 * MIB);
    CHECK_EQ(pool_number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 4 * MIB);
    OK(cuMemFreeAsync(a, NULL)); /* threshold 0: nothing is kept */
    CHECK_EQ(pool_number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 0);
    CHECK_EQ(pool_number(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH), 4 * MIB);
    CHECK_LIVE(before);

    OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
    OK(cuMemAllocAsync(&a, 3 * MIB, NULL));
    OK(cuMemFreeAsync(a, NULL));
    CHECK_EQ(pool_number(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 0);
    CHECK_EQ(pool_number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 4 * MIB);
    CHECK_EQ(counts_now(0).pool_reserved, 4 * MIB);
    IS(cuMemFreeAsync(a, NULL), INVALID_VALUE); /* the pool's, not the caller's */
    IS(cuMemFree_v2(a), INVALID_VALUE);
    OK(cuMemAllocAsync(&b, 4 * MIB, NULL)); /* the same size once padded: taken from the pool */
    CHECK_EQ(a, b);
    OK(cuMemFree_v2(b)); /* allowed, waits */
    OK(cuMemPoolTrimTo(pool, 0));
    CHECK_EQ(pool_number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 0);
    OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &zero));
    CHECK_EQ(pool_number(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH), 0);
    IS(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &one), INVALID_VALUE);
    IS(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &zero), INVALID_VALUE);
    OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &zero));
    IS(cuMemAllocAsync(&a, 0, NULL), INVALID_VALUE);
    CHECK_LIVE(before);
}

TEST(a_pool_gives_its_reserve_up_before_memory_runs_out)
{
    open_device();
    simcuda_live before = live_now();
    CUmemoryPool pool;
    CUdeviceptr a, b;
    uint64_t threshold = UINT64_MAX, zero = 0;

    OK(cuDeviceGetDefaultMemPool(&pool, 0));
    OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
    OK(cuMemAllocAsync(&a, 40 * MIB, NULL));
    OK(cuMemFreeAsync(a, NULL));
    OK(cuMemAllocAsync(&b, 60 * MIB, NULL));
    OK(cuMemFreeAsync(b, NULL));
    OK(cuMemPoolTrimTo(pool, 0));
    OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &zero));
    CHECK_LIVE(before);
}

TEST(freeing_in_stream_order_happens_in_stream_order)
{
    open_device();
    simcuda_live before = live_now();
    CUstream stream;
    CUdeviceptr a;

    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    simcuda_set_lazy(1);
    OK(cuMemAllocAsync(&a, 3 * MIB, stream));
    OK(cuMemsetD8Async(a, 1, 3 * MIB, stream));
    OK(cuMemFreeAsync(a, stream));
    CHECK_EQ(live_now().bytes, before.bytes + 4 * MIB);
    IS(cuMemFreeAsync(a, stream), INVALID_VALUE);
    OK(cuStreamSynchronize(stream));
    OK(cuStreamDestroy_v2(stream));
    simcuda_set_lazy(0);
    CHECK_LIVE(before);
}

TEST(a_pool_of_ones_own_lives_until_its_last_block)
{
    open_device();
    simcuda_live before = live_now();
    CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0},
                                 .maxSize = 8 * MIB};
    CUmemoryPool pool, standard, of_block, current;
    CUdeviceptr a, b;

    OK(cuDeviceGetDefaultMemPool(&standard, 0));
    OK(cuMemPoolCreate(&pool, &properties));
    OK(cuDeviceSetMemPool(0, pool));
    OK(cuDeviceGetMemPool(&current, 0));
    CHECK(current == pool);
    OK(cuMemAllocAsync(&a, 6 * MIB, NULL));
    OK(cuPointerGetAttribute(&of_block, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, a));
    CHECK(of_block == pool);
    IS(cuMemAllocFromPoolAsync(&b, 4 * MIB, pool, NULL), OUT_OF_MEMORY); /* beyond maxSize */
    IS(cuDeviceSetMemPool(1, pool), INVALID_VALUE);
    IS(cuMemPoolDestroy(standard), INVALID_VALUE);
    OK(cuMemPoolDestroy(pool));
    IS(cuMemPoolTrimTo(pool, 0), INVALID_VALUE);
    OK(cuDeviceGetMemPool(&current, 0));
    CHECK(current == standard);
    OK(cuMemsetD8_v2(a, 1, 6 * MIB));
    OK(cuMemFreeAsync(a, NULL));
    CHECK_LIVE(before);
}

/* ---- contexts and devices ----------------------------------------------------------------------------- */
TEST(contexts_stack_and_misuse_is_an_error)
{
    open_device();
    CUcontext first, second, made;
    CUdevice device;
    CUdeviceptr address;
    unsigned flags;
    int active;

    OK(cuCtxGetCurrent(&first));
    OK(cuDevicePrimaryCtxRetain(&second, 1));
    OK(cuCtxPushCurrent_v2(second));
    OK(cuCtxGetDevice(&device));
    CHECK_EQ(device, 1);
    OK(cuDevicePrimaryCtxGetState(1, &flags, &active));
    CHECK_EQ(active, 1);
    OK(cuCtxPopCurrent_v2(NULL));
    OK(cuCtxCreate_v2(&made, 0, 0));
    OK(cuCtxDestroy_v2(made));
    IS(cuCtxDestroy_v2(made), INVALID_CONTEXT);
    IS(cuCtxSetCurrent(made), INVALID_CONTEXT);
    IS(cuCtxPushCurrent_v2((CUcontext)&device), INVALID_CONTEXT);
    OK(cuCtxSetCurrent(NULL));
    IS(cuMemAlloc_v2(&address, 512), INVALID_CONTEXT);
    IS(cuCtxGetDevice(&device), INVALID_CONTEXT);
    IS(cuCtxPopCurrent_v2(NULL), INVALID_CONTEXT);
    OK(cuCtxSetCurrent(first));
    OK(cuDevicePrimaryCtxRelease_v2(1));
    IS(cuDevicePrimaryCtxRelease_v2(1), INVALID_CONTEXT);
    IS(cuDevicePrimaryCtxRetain(&second, 2), INVALID_DEVICE);
    IS(cuDevicePrimaryCtxRetain(NULL, 0), INVALID_VALUE);
}

TEST(devices_answer_and_bad_ordinals_do_not)
{
    open_device();
    CUdevice device;
    CUuuid uuid, other;
    size_t total;
    int value;
    char name[64];
    const char *text;

    OK(cuDeviceGetCount(&value));
    CHECK_EQ(value, 2);
    OK(cuDeviceGet(&device, 1));
    IS(cuDeviceGet(&device, 2), INVALID_DEVICE);
    IS(cuDeviceGet(&device, -1), INVALID_DEVICE);
    IS(cuDeviceGet(NULL, 0), INVALID_VALUE);
    OK(cuDeviceGetName(name, sizeof name, 0));
    IS(cuDeviceGetName(name, 0, 0), INVALID_VALUE);
    OK(cuDeviceGetUuid_v2(&uuid, 0));
    OK(cuDeviceGetUuid_v2(&other, 1));
    CHECK(memcmp(&uuid, &other, sizeof uuid) != 0);
    OK(cuDeviceTotalMem_v2(&total, 0));
    CHECK_EQ(total, 64 * MIB);
    OK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0));
    CHECK_EQ(value, 8);
    IS(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 2), INVALID_DEVICE);
    IS(cuDeviceGetAttribute(NULL, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 0), INVALID_VALUE);
    OK(cuDeviceCanAccessPeer(&value, 0, 1));
    CHECK_EQ(value, 1);
    OK(cuDeviceCanAccessPeer(&value, 0, 0));
    CHECK_EQ(value, 0);
    OK(cuGetErrorName(CUDA_ERROR_ILLEGAL_ADDRESS, &text));
    CHECK_STR(text, "CUDA_ERROR_ILLEGAL_ADDRESS");
    OK(cuGetErrorString(CUDA_ERROR_OUT_OF_MEMORY, &text));
    CHECK_STR(text, "out of memory");
    IS(cuGetErrorName((CUresult)12345, &text), INVALID_VALUE);
}

TEST_MAIN
