/* The host kernel refuses the device what it asks for: each refusal is an error that changes nothing, or costs
 * frames that nobody gets again, and never lets two pieces share memory or one find another's bytes. */
#include "device.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>

/* The system calls of the device come here, as the linker takes a program's own function first. So do a
 * sanitizer's, before it can stand being called itself. Of each, `after` more pass and then `refusals` fail. */
#define UNSANITIZED __attribute__((no_sanitize_thread, no_sanitize_address))

typedef struct plan {
    int after, refusals, error;
} plan;

static plan of_mprotect, of_mmap, of_fallocate;

UNSANITIZED static bool refuses(plan *of)
{
    if (!of->refusals || of->after-- > 0)
        return false;
    of->refusals--;
    errno = of->error;
    return true;
}

UNSANITIZED int mprotect(void *address, size_t size, int protection)
{
    return refuses(&of_mprotect) ? -1 : (int)syscall(SYS_mprotect, address, size, protection);
}

UNSANITIZED int fallocate(int file, int mode, off_t offset, off_t size)
{
    return refuses(&of_fallocate) ? -1 : (int)syscall(SYS_fallocate, file, mode, offset, size);
}

/* Only what the device puts in a place of its choice: a sanitizer's own calls are none of this test's. */
UNSANITIZED void *mmap(void *address, size_t size, int protection, int flags, int file, off_t offset)
{
    if (flags & MAP_FIXED && refuses(&of_mmap))
        return MAP_FAILED;
    return (void *)syscall(SYS_mmap, address, size, protection, flags, file, offset);
}

static const CUmemAllocationProp on_device_0 = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
static const CUmemAccessDesc rw_0 = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
static const CUmemAccessDesc read_0 = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READ};

static CUdeviceptr reserve(size_t frames)
{
    CUdeviceptr address;

    OK(cuMemAddressReserve(&address, frames * FRAME, 0, 0, 0));
    return address;
}

static CUmemGenericAllocationHandle create(void)
{
    CUmemGenericAllocationHandle handle;

    OK(cuMemCreate(&handle, FRAME, &on_device_0, 0));
    return handle;
}

static unsigned long long rights_of(CUdeviceptr address)
{
    unsigned long long flags;

    OK(cuMemGetAccess(&flags, &rw_0.location, address));
    return flags;
}

/* All that is free, in one allocation: it reads as zeros, so it is no one's and holds nothing old. */
static void check_free_frames_are_fresh(size_t frames)
{
    CUdeviceptr all;

    OK(cuMemAlloc_v2(&all, frames * FRAME));
    for (size_t i = 0; i < frames; i++)
        CHECK_EQ(*(char *)(all + i * FRAME), 0);
    OK(cuMemFree_v2(all));
}

TEST(access_refused_for_one_mapping_is_granted_to_none)
{
    open_device();
    simcuda_live before = live_now();
    CUdeviceptr address = reserve(3);
    CUmemGenericAllocationHandle handle[3];

    for (size_t i = 0; i < 3; i++) {
        handle[i] = create();
        OK(cuMemMap(address + i * FRAME, FRAME, 0, handle[i], 0));
    }
    OK(cuMemSetAccess(address + FRAME, FRAME, &read_0, 1));
    for (int after = 0; after < 3; after++) {
        of_mprotect = (plan){after, 1, ENOMEM};
        IS(cuMemSetAccess(address, 3 * FRAME, &rw_0, 1), OUT_OF_MEMORY);
        CHECK_EQ(of_mprotect.refusals, 0);
        for (size_t i = 0; i < 3; i++) {
            CHECK_EQ(rights_of(address + i * FRAME), i == 1 ? CU_MEM_ACCESS_FLAGS_PROT_READ : 0u);
            CHECK_EQ(touchable((void *)(address + i * FRAME), false), i == 1);
            CHECK(!touchable((void *)(address + i * FRAME), true));
        }
    }
    OK(cuMemSetAccess(address, 3 * FRAME, &rw_0, 1));
    for (size_t i = 0; i < 3; i++) {
        CHECK(touchable((void *)(address + i * FRAME), true));
        OK(cuMemRelease(handle[i]));
    }
    OK(cuMemUnmap(address, 3 * FRAME));
    OK(cuMemAddressFree(address, 3 * FRAME));
    CHECK_LIVE(before);
}

TEST(a_refused_mapping_changes_nothing)
{
    open_device();
    simcuda_live before = live_now();
    CUdeviceptr address = reserve(1), other;
    CUmemGenericAllocationHandle handle = create();

    of_mmap = (plan){0, 1, ENOMEM};
    IS(cuMemMap(address, FRAME, 0, handle, 0), OUT_OF_MEMORY);
    of_mmap = (plan){0, 1, ENOMEM};
    IS(cuMemAlloc_v2(&other, FRAME), OUT_OF_MEMORY);
    OK(cuMemMap(address, FRAME, 0, handle, 0));
    OK(cuMemUnmap(address, FRAME));
    OK(cuMemRelease(handle));
    OK(cuMemAddressFree(address, FRAME));
    CHECK_LIVE(before);
}

TEST(memory_that_cannot_be_emptied_is_given_to_no_one)
{
    open_device();
    simcuda_live before = live_now();
    size_t frames = (counts_now(0).memory - before.bytes) / FRAME;
    CUdeviceptr address, all;

    OK(cuMemAlloc_v2(&address, FRAME));
    OK(cuMemsetD8_v2(address, 7, FRAME));
    of_fallocate = (plan){0, 1, EINTR}; /* asked again, it empties it */
    OK(cuMemFree_v2(address));
    CHECK_LIVE(before);
    check_free_frames_are_fresh(frames);

    OK(cuMemAlloc_v2(&address, FRAME));
    OK(cuMemsetD8_v2(address, 7, FRAME));
    of_fallocate = (plan){0, 1, ENOSPC};
    OK(cuMemFree_v2(address));
    CHECK_EQ(live_now().bytes, before.bytes + FRAME);
    IS(cuMemAlloc_v2(&all, frames * FRAME), OUT_OF_MEMORY);
    check_free_frames_are_fresh(frames - 1);
}

TEST(memory_that_cannot_be_unmapped_is_given_to_no_one)
{
    open_device();
    simcuda_live before = live_now();
    size_t frames = (counts_now(0).memory - before.bytes) / FRAME;
    CUdeviceptr address = reserve(1);
    CUmemGenericAllocationHandle handle = create();

    OK(cuMemMap(address, FRAME, 0, handle, 0));
    OK(cuMemSetAccess(address, FRAME, &rw_0, 1));
    OK(cuMemRelease(handle));
    of_mmap = (plan){0, 1, ENOMEM};
    OK(cuMemUnmap(address, FRAME));
    CHECK_EQ(live_now().bytes, before.bytes + FRAME);
    CHECK_EQ(live_now().mappings, before.mappings);
    *(char *)address = 9; /* a stray write reaches no other piece */
    check_free_frames_are_fresh(frames - 1);
    OK(cuMemAddressFree(address, FRAME));
    CHECK_EQ(live_now().reservations, before.reservations);
}

TEST(a_mapping_that_can_be_neither_made_nor_undone_keeps_its_memory)
{
    open_device();
    simcuda_live before = live_now();
    size_t frames = (counts_now(0).memory - before.bytes) / FRAME;
    CUdeviceptr address = reserve(1);
    CUmemGenericAllocationHandle handle = create();

    of_mmap = (plan){0, 2, ENOMEM};
    IS(cuMemMap(address, FRAME, 0, handle, 0), OUT_OF_MEMORY);
    CHECK_EQ(of_mmap.refusals, 0);
    OK(cuMemRelease(handle));
    CHECK_EQ(live_now().handles, before.handles);
    CHECK_EQ(live_now().bytes, before.bytes + FRAME);
    check_free_frames_are_fresh(frames - 1);
    OK(cuMemAddressFree(address, FRAME));
}

TEST_MAIN
