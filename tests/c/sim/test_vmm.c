/* Virtual memory management: what may be mapped where, who may touch it, and every misuse CUDA's
 * documentation names. */
#include "device.h"

static const CUmemAllocationProp on_device_0 = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
static const CUmemAccessDesc rw_0 = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
static const CUmemAccessDesc rw_1 = {{CU_MEM_LOCATION_TYPE_DEVICE, 1}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
static const CUmemAccessDesc none_0 = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_NONE};

static CUdeviceptr reserve(size_t frames)
{
    CUdeviceptr address;

    OK(cuMemAddressReserve(&address, frames * FRAME, 0, 0, 0));
    return address;
}

static CUmemGenericAllocationHandle create(size_t frames)
{
    CUmemGenericAllocationHandle handle;

    OK(cuMemCreate(&handle, frames * FRAME, &on_device_0, 0));
    return handle;
}

static size_t free_memory(void)
{
    size_t free_bytes, total;

    OK(cuMemGetInfo_v2(&free_bytes, &total));
    return free_bytes;
}

TEST(granularity_is_two_mebibytes)
{
    open_device();
    CUmemAllocationProp properties = on_device_0;
    size_t granularity = 0;

    OK(cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    CHECK_EQ(granularity, FRAME);
    OK(cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    IS(cuMemGetAllocationGranularity(NULL, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM), INVALID_VALUE);
    IS(cuMemGetAllocationGranularity(&granularity, NULL, CU_MEM_ALLOC_GRANULARITY_MINIMUM), INVALID_VALUE);
    properties.location.id = 2;
    IS(cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
       INVALID_DEVICE);
    properties.type = CU_MEM_ALLOCATION_TYPE_INVALID;
    IS(cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
       INVALID_VALUE);
}

TEST(reservation_takes_no_memory_and_refuses_bad_sizes)
{
    open_device();
    simcuda_live before = live_now();
    CUdeviceptr address;

    OK(cuMemAddressReserve(&address, (size_t)1 << 32, 0, 0, 0)); /* far larger than the device */
    CHECK_EQ(live_now().bytes, before.bytes);
    CHECK_EQ(live_now().reserved_bytes, (uint64_t)1 << 32);
    OK(cuMemAddressFree(address, (size_t)1 << 32));
    OK(cuMemAddressReserve(&address, FRAME, 64 * MIB, 0, 0));
    CHECK_EQ(address % (64 * MIB), 0);
    OK(cuMemAddressFree(address, FRAME));

    IS(cuMemAddressReserve(NULL, FRAME, 0, 0, 0), INVALID_VALUE);
    IS(cuMemAddressReserve(&address, 0, 0, 0, 0), INVALID_VALUE);
    IS(cuMemAddressReserve(&address, FRAME + 4096, 0, 0, 0), INVALID_VALUE);
    IS(cuMemAddressReserve(&address, FRAME, 3 * FRAME, 0, 0), INVALID_VALUE); /* not a power of two */
    IS(cuMemAddressReserve(&address, FRAME, 0, 0, 1), INVALID_VALUE);
    IS(cuMemAddressReserve(&address, SIZE_MAX - FRAME + 1, 0, 0, 0), OUT_OF_MEMORY);
    CHECK_LIVE(before);
}

TEST(freeing_addresses_needs_the_whole_unmapped_reservation)
{
    open_device();
    simcuda_live before = live_now();
    CUdeviceptr address = reserve(4);
    CUmemGenericAllocationHandle handle = create(1);

    OK(cuMemMap(address + FRAME, FRAME, 0, handle, 0));
    IS(cuMemAddressFree(address, 4 * FRAME), INVALID_VALUE); /* still mapped */
    OK(cuMemUnmap(address + FRAME, FRAME));
    IS(cuMemAddressFree(address, 2 * FRAME), INVALID_VALUE);
    IS(cuMemAddressFree(address + FRAME, 3 * FRAME), INVALID_VALUE);
    IS(cuMemAddressFree(address + 64 * FRAME, 4 * FRAME), INVALID_VALUE);
    OK(cuMemAddressFree(address, 4 * FRAME));
    IS(cuMemAddressFree(address, 4 * FRAME), INVALID_VALUE);
    OK(cuMemRelease(handle));
    CHECK_LIVE(before);
}

TEST(create_refuses_what_the_documentation_forbids)
{
    open_device();
    simcuda_live before = live_now();
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp properties = on_device_0;

    IS(cuMemCreate(NULL, FRAME, &properties, 0), INVALID_VALUE);
    IS(cuMemCreate(&handle, FRAME, NULL, 0), INVALID_VALUE);
    IS(cuMemCreate(&handle, 0, &properties, 0), INVALID_VALUE);
    IS(cuMemCreate(&handle, FRAME + 1, &properties, 0), INVALID_VALUE);
    IS(cuMemCreate(&handle, FRAME, &properties, 1), INVALID_VALUE);
    properties.location.id = -1;
    IS(cuMemCreate(&handle, FRAME, &properties, 0), INVALID_DEVICE);
    properties.location.id = 2;
    IS(cuMemCreate(&handle, FRAME, &properties, 0), INVALID_DEVICE);
    properties = on_device_0;
    properties.location.type = CU_MEM_LOCATION_TYPE_HOST;
    IS(cuMemCreate(&handle, FRAME, &properties, 0), NOT_SUPPORTED);
    properties = on_device_0;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_FABRIC;
    IS(cuMemCreate(&handle, FRAME, &properties, 0), NOT_SUPPORTED);

    uint64_t ooms = counts_now(0).ooms;
    IS(cuMemCreate(&handle, 66 * MIB, &on_device_0, 0), OUT_OF_MEMORY);
    CHECK_EQ(counts_now(0).ooms, ooms + 1);
    CHECK_LIVE(before);
}

TEST(memory_lives_until_handles_and_mappings_are_gone)
{
    open_device();
    simcuda_live before = live_now();
    size_t free_before = free_memory();
    CUdeviceptr a = reserve(4), b = reserve(4);
    CUmemGenericAllocationHandle handle = create(2), again;

    CHECK_EQ(free_before - free_memory(), 2 * FRAME);
    OK(cuMemMap(a, 2 * FRAME, 0, handle, 0));
    OK(cuMemMap(b + FRAME, 2 * FRAME, 0, handle, 0)); /* the same memory at a second address */
    OK(cuMemSetAccess(a, 2 * FRAME, &rw_0, 1));
    OK(cuMemSetAccess(b + FRAME, 2 * FRAME, &rw_0, 1));
    OK(cuMemsetD8_v2(a, 7, 2 * FRAME));
    CHECK_EQ(*(char *)(b + 2 * FRAME), 7);

    OK(cuMemRelease(handle));
    IS(cuMemRelease(handle), INVALID_VALUE); /* twice */
    IS(cuMemMap(a + 2 * FRAME, FRAME, 0, handle, 0), INVALID_VALUE);
    CHECK_EQ(free_before - free_memory(), 2 * FRAME);
    OK(cuMemUnmap(a, 2 * FRAME));
    CHECK_EQ(*(char *)(b + 2 * FRAME), 7);

    OK(cuMemRetainAllocationHandle(&again, (void *)(b + 2 * FRAME + 5)));
    CHECK(again != handle);
    OK(cuMemMap(a, 2 * FRAME, 0, again, 0));
    OK(cuMemUnmap(a, 2 * FRAME));
    OK(cuMemUnmap(b + FRAME, 2 * FRAME));
    CHECK_EQ(free_before - free_memory(), 2 * FRAME); /* the retained handle holds it */
    OK(cuMemRelease(again));
    CHECK_EQ(free_before, free_memory());
    OK(cuMemAddressFree(a, 4 * FRAME));
    OK(cuMemAddressFree(b, 4 * FRAME));
    CHECK_LIVE(before);
}

TEST(retain_counts_and_gives_the_same_handle)
{
    open_device();
    simcuda_live before = live_now();
    CUdeviceptr address = reserve(1);
    CUmemGenericAllocationHandle handle = create(1), same;
    CUmemAllocationProp properties;

    OK(cuMemMap(address, FRAME, 0, handle, 0));
    OK(cuMemRetainAllocationHandle(&same, (void *)address));
    CHECK(same == handle);
    OK(cuMemGetAllocationPropertiesFromHandle(&properties, same));
    CHECK_EQ(properties.location.id, 0);
    OK(cuMemRelease(handle));
    OK(cuMemGetAllocationPropertiesFromHandle(&properties, same));
    OK(cuMemRelease(same));
    IS(cuMemGetAllocationPropertiesFromHandle(&properties, same), INVALID_VALUE);
    IS(cuMemRetainAllocationHandle(NULL, (void *)address), INVALID_VALUE);
    OK(cuMemUnmap(address, FRAME));
    IS(cuMemRetainAllocationHandle(&same, (void *)address), INVALID_VALUE);
    OK(cuMemAddressFree(address, FRAME));
    CHECK_LIVE(before);
}

TEST(map_refuses_misplaced_mappings)
{
    open_device();
    simcuda_live before = live_now();
    CUdeviceptr address = reserve(4), outside;
    CUmemGenericAllocationHandle handle = create(2);

    IS(cuMemMap(address, 2 * FRAME, FRAME, handle, 0), INVALID_VALUE); /* offset must be 0 */
    IS(cuMemMap(address, 3 * FRAME, 0, handle, 0), INVALID_VALUE);     /* more than there is */
    IS(cuMemMap(address, 0, 0, handle, 0), INVALID_VALUE);
    IS(cuMemMap(address, MIB, 0, handle, 0), INVALID_VALUE);
    IS(cuMemMap(address + MIB, FRAME, 0, handle, 0), INVALID_VALUE);
    IS(cuMemMap(address, FRAME, 0, handle, 1), INVALID_VALUE);
    IS(cuMemMap(address, FRAME, 0, 0, 0), INVALID_VALUE);
    IS(cuMemMap(address, FRAME, 0, handle + 16, 0), INVALID_VALUE);            /* no such handle */
    IS(cuMemMap(address + 3 * FRAME, 2 * FRAME, 0, handle, 0), INVALID_VALUE); /* past the reservation */
    IS(cuMemMap(0x700000000000, FRAME, 0, handle, 0), INVALID_VALUE);          /* reserved by nobody */
    OK(cuMemAlloc_v2(&outside, FRAME));
    IS(cuMemMap(outside, FRAME, 0, handle, 0), INVALID_VALUE);
    OK(cuMemFree_v2(outside));

    OK(cuMemMap(address + FRAME, 2 * FRAME, 0, handle, 0));
    IS(cuMemMap(address, 2 * FRAME, 0, handle, 0), INVALID_VALUE); /* over a mapping */
    IS(cuMemMap(address + 2 * FRAME, FRAME, 0, handle, 0), INVALID_VALUE);
    OK(cuMemUnmap(address + FRAME, 2 * FRAME));
    OK(cuMemRelease(handle));
    OK(cuMemAddressFree(address, 4 * FRAME));
    CHECK_LIVE(before);
}

TEST(a_mapping_may_be_shorter_than_its_memory_and_holds_all_of_it)
{
    open_device();
    simcuda_live before = live_now();
    CUdeviceptr address = reserve(5);
    CUmemGenericAllocationHandle handle = create(3);

    OK(cuMemMap(address, FRAME, 0, handle, 0));                    /* its beginning, */
    OK(cuMemMap(address + FRAME, 3 * FRAME, 0, handle, 0));        /* all of it, */
    IS(cuMemMap(address, 4 * FRAME, 0, handle, 0), INVALID_VALUE); /* never more */
    OK(cuMemSetAccess(address, 4 * FRAME, &rw_0, 1));
    *(char *)address = 5;
    CHECK_EQ(*(char *)(address + FRAME), 5);
    OK(cuMemUnmap(address + FRAME, 3 * FRAME));
    OK(cuMemRelease(handle));
    CHECK_EQ(live_now().bytes, before.bytes + 3 * FRAME);
    OK(cuMemUnmap(address, FRAME));
    OK(cuMemAddressFree(address, 5 * FRAME));
    CHECK_LIVE(before);
}

TEST(unmap_takes_whole_mappings_and_any_number_of_them)
{
    open_device();
    simcuda_live before = live_now();
    CUdeviceptr address = reserve(5);
    CUmemGenericAllocationHandle two = create(2), one = create(1);

    OK(cuMemMap(address, 2 * FRAME, 0, two, 0));
    OK(cuMemMap(address + 2 * FRAME, FRAME, 0, one, 0));
    IS(cuMemUnmap(address, FRAME), INVALID_VALUE); /* a part */
    IS(cuMemUnmap(address + FRAME, 2 * FRAME), INVALID_VALUE);
    IS(cuMemUnmap(address, 4 * FRAME), INVALID_VALUE); /* with a hole at the end */
    IS(cuMemUnmap(address + 3 * FRAME, FRAME), INVALID_VALUE);
    IS(cuMemUnmap(address, 0), INVALID_VALUE);
    CHECK_EQ(live_now().mappings, before.mappings + 2);
    OK(cuMemUnmap(address, 3 * FRAME));
    IS(cuMemUnmap(address, 3 * FRAME), INVALID_VALUE);
    OK(cuMemRelease(one));
    OK(cuMemRelease(two));
    OK(cuMemAddressFree(address, 5 * FRAME));
    CHECK_LIVE(before);
}

TEST(access_is_refused_before_it_is_granted_and_after_it_is_taken_away)
{
    open_device();
    simcuda_live before = live_now();
    CUdeviceptr address = reserve(2);
    CUmemGenericAllocationHandle handle = create(1);
    unsigned long long flags;
    CUmemLocation location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    char byte = 1;

    CHECK(!touchable((void *)address, false)); /* reserved */
    IS(cuMemsetD8_v2(address, 1, 1), INVALID_VALUE);
    IS(cuMemSetAccess(address, FRAME, &rw_0, 1), INVALID_VALUE); /* nothing mapped */
    OK(cuMemMap(address, FRAME, 0, handle, 0));
    CHECK(!touchable((void *)address, false)); /* mapped */
    IS(cuMemsetD8_v2(address, 1, 1), INVALID_VALUE);
    IS(cuMemcpyDtoH_v2(&byte, address, 1), INVALID_VALUE);
    OK(cuMemGetAccess(&flags, &location, address));
    CHECK_EQ(flags, CU_MEM_ACCESS_FLAGS_PROT_NONE);

    OK(cuMemSetAccess(address, FRAME, &rw_0, 1));
    CHECK(touchable((void *)address, true));
    OK(cuMemsetD8_v2(address, 9, FRAME));
    OK(cuMemcpyDtoH_v2(&byte, address + FRAME - 1, 1));
    CHECK_EQ(byte, 9);
    IS(cuMemcpyDtoH_v2(&byte, address + FRAME, 1), INVALID_VALUE); /* beyond the mapping */

    CUmemAccessDesc read_only = {location, CU_MEM_ACCESS_FLAGS_PROT_READ};
    OK(cuMemSetAccess(address, FRAME, &read_only, 1));
    CHECK(touchable((void *)address, false));
    CHECK(!touchable((void *)address, true));
    OK(cuMemcpyDtoH_v2(&byte, address, 1));
    IS(cuMemsetD8_v2(address, 1, 1), INVALID_VALUE);

    OK(cuMemSetAccess(address, FRAME, &none_0, 1));
    IS(cuMemcpyDtoH_v2(&byte, address, 1), INVALID_VALUE);
    OK(cuMemUnmap(address, FRAME));
    CHECK(!touchable((void *)address, false));
    OK(cuMemRelease(handle));
    OK(cuMemAddressFree(address, 2 * FRAME));
    CHECK_LIVE(before);
}

TEST(access_is_set_for_whole_mappings_of_known_devices)
{
    open_device();
    simcuda_live before = live_now();
    CUdeviceptr address = reserve(4);
    CUmemGenericAllocationHandle handle = create(2);
    CUmemAccessDesc bad = rw_0;

    OK(cuMemMap(address, 2 * FRAME, 0, handle, 0));
    IS(cuMemSetAccess(address, FRAME, &rw_0, 1), INVALID_VALUE);
    IS(cuMemSetAccess(address, 3 * FRAME, &rw_0, 1), INVALID_VALUE);
    IS(cuMemSetAccess(address, 2 * FRAME, NULL, 1), INVALID_VALUE);
    IS(cuMemSetAccess(address, 2 * FRAME, &rw_0, 0), INVALID_VALUE);
    IS(cuMemSetAccess(address, 0, &rw_0, 1), INVALID_VALUE);
    bad.location.id = 2;
    IS(cuMemSetAccess(address, 2 * FRAME, &bad, 1), INVALID_DEVICE);
    bad = rw_0;
    bad.flags = (CUmemAccess_flags)2;
    IS(cuMemSetAccess(address, 2 * FRAME, &bad, 1), INVALID_VALUE);
    bad = rw_0;
    bad.location.type = CU_MEM_LOCATION_TYPE_HOST;
    IS(cuMemSetAccess(address, 2 * FRAME, &bad, 1), INVALID_VALUE);
    OK(cuMemUnmap(address, 2 * FRAME));
    OK(cuMemRelease(handle));
    OK(cuMemAddressFree(address, 4 * FRAME));
    CHECK_LIVE(before);
}

TEST(a_copy_may_cross_from_one_mapping_into_the_next)
{
    open_device();
    simcuda_live before = live_now();
    CUdeviceptr address = reserve(2);
    CUmemGenericAllocationHandle first = create(1), second = create(1);

    OK(cuMemMap(address, FRAME, 0, first, 0));
    OK(cuMemMap(address + FRAME, FRAME, 0, second, 0));
    OK(cuMemSetAccess(address, FRAME, &rw_0, 1));
    IS(cuMemsetD8_v2(address, 1, 2 * FRAME), INVALID_VALUE); /* no right to the second */
    OK(cuMemSetAccess(address, 2 * FRAME, &rw_0, 1));
    OK(cuMemsetD8_v2(address, 1, 2 * FRAME));
    CHECK_EQ(*(char *)(address + 2 * FRAME - 1), 1);
    OK(cuMemUnmap(address, 2 * FRAME));
    OK(cuMemRelease(first));
    OK(cuMemRelease(second));
    OK(cuMemAddressFree(address, 2 * FRAME));
    CHECK_LIVE(before);
}

TEST(each_device_has_rights_of_its_own)
{
    open_device();
    simcuda_live before = live_now();
    CUdeviceptr address = reserve(1), on_1;
    CUmemGenericAllocationHandle handle = create(1);
    CUcontext context_1;
    CUstream stream_1;

    OK(cuMemMap(address, FRAME, 0, handle, 0));
    OK(cuMemSetAccess(address, FRAME, &rw_0, 1));
    OK(cuMemsetD8_v2(address, 5, 64));

    OK(cuDevicePrimaryCtxRetain(&context_1, 1));
    OK(cuCtxPushCurrent_v2(context_1));
    OK(cuStreamCreate(&stream_1, CU_STREAM_NON_BLOCKING));
    OK(cuMemAlloc_v2(&on_1, 64));
    IS(cuMemcpyDtoDAsync_v2(on_1, address, 64, stream_1), INVALID_VALUE); /* device 1 was not let in */
    IS(cuMemsetD8Async(address, 1, 64, stream_1), INVALID_VALUE);
    OK(cuMemSetAccess(address, FRAME, &rw_1, 1));
    OK(cuMemcpyDtoDAsync_v2(on_1, address, 64, stream_1));
    OK(cuStreamSynchronize(stream_1));
    CHECK_EQ(*(char *)(on_1 + 63), 5);
    OK(cuMemSetAccess(address, FRAME, &none_0, 1)); /* taking 0's rights leaves 1's */
    OK(cuMemsetD8Async(address, 6, 64, stream_1));
    OK(cuMemFree_v2(on_1));
    OK(cuStreamDestroy_v2(stream_1));
    OK(cuCtxPopCurrent_v2(&context_1));
    OK(cuDevicePrimaryCtxRelease_v2(1));

    IS(cuMemsetD8_v2(address, 1, 1), INVALID_VALUE);
    OK(cuMemUnmap(address, FRAME));
    OK(cuMemRelease(handle));
    OK(cuMemAddressFree(address, FRAME));
    CHECK_LIVE(before);
}

static void kernel_that_never_runs(void **arguments, const unsigned grid[3], const unsigned block[3])
{
    (void)arguments, (void)grid, (void)block;
}

TEST(unmapping_under_queued_work_is_an_illegal_address)
{
    open_device();
    simcuda_live before = live_now();
    CUdeviceptr address = reserve(1);
    CUmemGenericAllocationHandle handle = create(1);
    CUstream stream;
    size_t free_bytes, total;

    OK(cuMemMap(address, FRAME, 0, handle, 0));
    OK(cuMemSetAccess(address, FRAME, &rw_0, 1));
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    simcuda_set_lazy(1);
    OK(cuMemsetD8Async(address, 1, 64, stream));
    OK(cuMemUnmap(address, FRAME));
    IS(cuStreamSynchronize(stream), ILLEGAL_ADDRESS);
    IS(cuMemGetInfo_v2(&free_bytes, &total), ILLEGAL_ADDRESS); /* sticky */
    IS(cuMemRelease(handle), ILLEGAL_ADDRESS);
    CHECK_EQ(counts_now(0).faults, 1);
    simcuda_forget_fault();
    OK(cuMemRelease(handle));
    OK(cuMemAddressFree(address, FRAME));
    OK(cuStreamDestroy_v2(stream));
    CHECK_LIVE(before);
}

/* On a GPU it might find the new memory, the old, or nothing. */
TEST(queued_work_whose_memory_was_unmapped_faults_though_other_memory_is_mapped_there_since)
{
    static const size_t sizes[] = {sizeof(int), sizeof(CUdeviceptr)};
    static const char image[] =
        "//\n.version 8.0\n.target sm_80\n.address_size 64\n.visible .entry adds() { ret; }\n";
    char *host;
    int one = 1;

    for (int what = 0; what < 5; what++) {
        open_device();
        simcuda_live before = live_now();
        const uint64_t faults = counts_now(0).faults;
        CUdeviceptr address = reserve(2), inside = address + 8;
        CUmemGenericAllocationHandle old = create(1), new = create(1), other = create(1);
        CUstream stream;
        CUmodule module;
        CUfunction function;
        void *arguments[] = {&one, &inside};

        OK(cuMemHostAlloc((void **)&host, 8, 0)); /* a copy from pageable memory would wait */
        OK(cuModuleLoadData(&module, image));
        OK(cuModuleGetFunction(&function, module, "adds"));
        CHECK_EQ(simcuda_emulate("adds", kernel_that_never_runs, 2, sizes), 0);
        OK(cuMemMap(address, FRAME, 0, old, 0));
        OK(cuMemMap(address + FRAME, FRAME, 0, other, 0));
        OK(cuMemSetAccess(address, 2 * FRAME, &rw_0, 1));
        OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        simcuda_set_lazy(1);
        if (what == 0)
            OK(cuMemsetD8Async(address + FRAME - 1, 1, 2, stream)); /* one byte of it is enough */
        if (what == 1)
            OK(cuMemcpyDtoHAsync_v2(host, inside, 8, stream));
        if (what == 2)
            OK(cuMemcpyDtoDAsync_v2(inside, address + FRAME, 8, stream));
        if (what == 3)
            OK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, NULL));
        if (what == 4)
            OK(cuMemsetD8Async(address + FRAME, 1, 64, stream)); /* the neighbour, which stays */
        OK(cuMemUnmap(address, FRAME));
        OK(cuMemMap(address, FRAME, 0, new, 0));
        OK(cuMemSetAccess(address, FRAME, &rw_0, 1));
        CHECK_EQ(cuStreamSynchronize(stream), what == 4 ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS);
        CHECK_EQ(counts_now(0).faults - faults, what != 4);
        simcuda_forget_fault();
        OK(cuMemUnmap(address, 2 * FRAME));
        OK(cuMemRelease(old));
        OK(cuMemRelease(new));
        OK(cuMemRelease(other));
        OK(cuMemAddressFree(address, 2 * FRAME));
        OK(cuStreamDestroy_v2(stream));
        OK(cuModuleUnload(module));
        OK(cuMemFreeHost(host));
        CHECK_LIVE(before);
    }
}

/* Work that has run needs its memory no more, and handles that are released leave mappings be. */
TEST(unmapping_after_the_work_and_releasing_before_it_are_no_fault)
{
    open_device();
    simcuda_live before = live_now();
    const uint64_t faults = counts_now(0).faults;
    CUdeviceptr address = reserve(1);
    CUmemGenericAllocationHandle handle = create(1);
    CUstream stream;

    OK(cuMemMap(address, FRAME, 0, handle, 0));
    OK(cuMemSetAccess(address, FRAME, &rw_0, 1));
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    simcuda_set_lazy(1);
    OK(cuMemsetD8Async(address, 1, 64, stream));
    OK(cuMemRelease(handle));
    OK(cuStreamSynchronize(stream));
    OK(cuMemUnmap(address, FRAME));
    CHECK_EQ(counts_now(0).faults, faults);
    OK(cuMemAddressFree(address, FRAME));
    OK(cuStreamDestroy_v2(stream));
    CHECK_LIVE(before);
}

TEST(pointer_attributes_tell_reservation_from_mapping)
{
    open_device();
    CUdeviceptr address = reserve(4), start;
    CUmemGenericAllocationHandle handle = create(1);
    size_t size;
    unsigned char mapped;
    int ordinal;
    CUcontext context = (CUcontext)1;

    OK(cuMemMap(address + FRAME, FRAME, 0, handle, 0));
    OK(cuPointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address + FRAME + 3));
    OK(cuPointerGetAttribute(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, address + FRAME + 3));
    CHECK(start == address && size == 4 * FRAME);
    OK(cuPointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, address + FRAME + 3));
    OK(cuPointerGetAttribute(&size, CU_POINTER_ATTRIBUTE_MAPPING_SIZE, address + FRAME + 3));
    CHECK(start == address + FRAME && size == FRAME);
    OK(cuPointerGetAttribute(&mapped, CU_POINTER_ATTRIBUTE_MAPPED, address + FRAME));
    CHECK_EQ(mapped, 1);
    OK(cuPointerGetAttribute(&mapped, CU_POINTER_ATTRIBUTE_MAPPED, address));
    CHECK_EQ(mapped, 0);
    OK(cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, address + FRAME));
    CHECK(context == NULL); /* virtual memory belongs to no context */
    IS(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address), INVALID_VALUE);
    OK(cuMemGetAddressRange_v2(&start, &size, address + FRAME + 7));
    CHECK(start == address + FRAME && size == FRAME);
    OK(cuMemUnmap(address + FRAME, FRAME));
    OK(cuMemRelease(handle));
    OK(cuMemAddressFree(address, 4 * FRAME));
}

/* ---- random operations against a model ---------------------------------------------------------------- */
enum { SPACE = 16, HANDLES = 8 };

typedef struct model {
    CUdeviceptr base;
    CUmemGenericAllocationHandle handle[HANDLES];
    size_t frames[HANDLES]; /* 0: no handle */
    int piece_of[SPACE];    /* which piece of memory is mapped at a frame, -1: none */
    size_t start[SPACE];    /* where its mapping begins */
    size_t size[SPACE];     /* and how long it is */
    bool access[SPACE];
} model;

/* Pieces in use: by handle or by mapping. */
static size_t model_frames_used(const model *m)
{
    size_t used = 0;

    for (int h = 0; h < HANDLES; h++) {
        bool mapped = false;
        for (size_t i = 0; i < SPACE; i++)
            mapped |= m->piece_of[i] == h;
        if (m->handle[h] || mapped)
            used += m->frames[h];
    }
    return used;
}

static void model_forget_dead(model *m)
{
    for (int h = 0; h < HANDLES; h++) {
        bool mapped = false;
        for (size_t i = 0; i < SPACE; i++)
            mapped |= m->piece_of[i] == h;
        if (!m->handle[h] && !mapped)
            m->frames[h] = 0;
    }
}

TEST(random_operations_agree_with_a_model)
{
    open_device();
    uint64_t state = test_seed();
    simcuda_live before = live_now();
    size_t free_before = free_memory();
    model m = {.base = reserve(SPACE)};
    for (size_t i = 0; i < SPACE; i++)
        m.piece_of[i] = -1;

    for (int round = 0, rounds = test_rounds(4000, 400000); round < rounds; round++) {
        int h = (int)(test_random(&state) % HANDLES);
        size_t at = test_random(&state) % SPACE, n = 1 + test_random(&state) % 4;
        CUdeviceptr address = m.base + at * FRAME;

        switch (test_random(&state) % 6) {
        case 0: /* create */
            if (m.frames[h])
                break;
            {
                size_t used = model_frames_used(&m);
                CUresult expected =
                    (used + n) * FRAME <= free_before ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
                CHECK_EQ(cuMemCreate(&m.handle[h], n * FRAME, &on_device_0, 0), expected);
                if (expected == CUDA_SUCCESS)
                    m.frames[h] = n;
            }
            break;
        case 1: /* release */
            CHECK_EQ(cuMemRelease(m.handle[h]), m.handle[h] ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
            m.handle[h] = 0;
            break;
        case 2: { /* map */
            bool fits = m.handle[h] && n <= m.frames[h] && at + n <= SPACE;
            for (size_t i = at; fits && i < at + n; i++)
                fits = m.piece_of[i] < 0;
            CHECK_EQ(cuMemMap(address, n * FRAME, 0, m.handle[h], 0),
                     fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
            for (size_t i = at; fits && i < at + n; i++) {
                m.piece_of[i] = h;
                m.start[i] = at;
                m.size[i] = n;
                m.access[i] = false;
            }
            break;
        }
        case 3:
        case 4: { /* unmap, or set access */
            bool whole = at + n <= SPACE;
            for (size_t i = at; whole && i < at + n; i += m.size[i])
                whole = m.piece_of[i] >= 0 && m.start[i] == i && i + m.size[i] <= at + n;
            if (test_random(&state) % 2) {
                CHECK_EQ(cuMemUnmap(address, n * FRAME), whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
                for (size_t i = at; whole && i < at + n; i++)
                    m.piece_of[i] = -1;
            } else {
                CHECK_EQ(cuMemSetAccess(address, n * FRAME, &rw_0, 1),
                         whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
                for (size_t i = at; whole && i < at + n; i++)
                    m.access[i] = true;
            }
            break;
        }
        case 5: { /* write the first byte of a mapping, and read it at every other address of the piece */
            bool may = m.piece_of[at] >= 0 && m.access[at];
            unsigned char value = (unsigned char)test_random(&state), read;
            CHECK_EQ(cuMemsetD8_v2(address, value, 1), may ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
            for (size_t i = 0; may && i < SPACE; i++)
                if (m.piece_of[i] == m.piece_of[at] && i - m.start[i] == at - m.start[at] && m.access[i]) {
                    OK(cuMemcpyDtoH_v2(&read, m.base + i * FRAME, 1));
                    CHECK_EQ(read, value);
                }
            break;
        }
        }
        CHECK_EQ(free_before - free_memory(), model_frames_used(&m) * FRAME);
        model_forget_dead(&m);
    }

    for (size_t i = 0; i < SPACE; i++)
        if (m.piece_of[i] >= 0 && m.start[i] == i)
            OK(cuMemUnmap(m.base + i * FRAME, m.size[i] * FRAME));
    for (int h = 0; h < HANDLES; h++)
        if (m.handle[h])
            OK(cuMemRelease(m.handle[h]));
    OK(cuMemAddressFree(m.base, SPACE * FRAME));
    CHECK_LIVE(before);
}

TEST_MAIN
