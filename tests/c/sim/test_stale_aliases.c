/* A device that breaks the rule that two mappings of one piece of memory show the same bytes: a mapping beside another has
 * a copy. Memory with one mapping at a time is as it is elsewhere. */
#include "device.h"

static const CUmemAllocationProp on_device_0 = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
static const CUmemAccessDesc rw_0 = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};

static CUdeviceptr range; /* of 8 frames */
static CUmemGenericAllocationHandle handle;

static simcuda_live start(void)
{
    open_device_with("memory=67108864 devices=2 stale_aliases=1");
    const simcuda_live before = live_now();
    OK(cuMemAddressReserve(&range, 8 * FRAME, 0, 0, 0));
    OK(cuMemCreate(&handle, 2 * FRAME, &on_device_0, 0));
    return before;
}

static volatile char *map(size_t frame)
{
    const CUdeviceptr at = range + frame * FRAME;
    OK(cuMemMap(at, 2 * FRAME, 0, handle, 0));
    CHECK(!touchable((void *)at, false));
    OK(cuMemSetAccess(at, 2 * FRAME, &rw_0, 1));
    return (volatile char *)at;
}

static void unmap(volatile char *at)
{
    OK(cuMemUnmap((CUdeviceptr)at, 2 * FRAME));
    CHECK(!touchable((const void *)at, false));
}

static void finish(simcuda_live before)
{
    OK(cuMemRelease(handle));
    OK(cuMemAddressFree(range, 8 * FRAME));
    CHECK_LIVE(before);
}

/* What torch or memopt with double_map=False does with it is right. */
TEST(memory_with_one_mapping_at_a_time_keeps_its_bytes)
{
    const simcuda_live before = start();
    volatile char *a = map(0);

    a[5] = 1;
    OK(cuMemsetD8_v2((CUdeviceptr)a + FRAME, 9, FRAME));
    unmap(a);
    a = map(4);
    CHECK(a[5] == 1 && a[0] == 0 && a[FRAME] == 9 && a[2 * FRAME - 1] == 9);
    unmap(a);
    finish(before);
}

TEST(a_write_by_one_address_is_not_seen_by_the_other)
{
    const simcuda_live before = start();
    volatile char *a = map(0), *b, *c;
    char byte = 0;

    a[5] = 1;
    a[2 * FRAME - 1] = 2;
    b = map(4); /* which sees what was there before it */
    CHECK(b[5] == 1 && b[2 * FRAME - 1] == 2);
    a[5] = 3;
    CHECK_EQ(b[5], 1);
    OK(cuMemsetD8_v2((CUdeviceptr)b, 7, FRAME));
    CHECK(b[5] == 7 && a[5] == 3 && a[0] == 0);
    OK(cuMemcpyDtoH_v2(&byte, (CUdeviceptr)a, 1));
    CHECK_EQ(byte, 0);
    OK(cuMemcpyDtoH_v2(&byte, (CUdeviceptr)b, 1));
    CHECK_EQ(byte, 7);
    c = map(6);
    CHECK(c[5] == 3 && c[2 * FRAME - 1] == 2);
    c[5] = 4;
    CHECK(a[5] == 3 && b[5] == 7);
    unmap(b);
    unmap(c);
    CHECK_EQ(a[5], 3);
    unmap(a);
    finish(before);
}

TEST_MAIN
