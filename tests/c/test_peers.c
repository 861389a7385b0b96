#include "driver/peers.h"

#include "test.h"

/* What has joined stays so: tests go on from each other, in this order. */

static int questions;
static bool silent;

static CUresult can_access(int *out, CUdevice device, CUdevice peer)
{
    questions++;
    if (silent)
        return CUDA_ERROR_NOT_INITIALIZED;
    *out = device + peer != 105; /* 102 and 3 do not reach each other */
    return CUDA_SUCCESS;
}

static mo_cuda_api api = {.can_access_peer = can_access};

/* Handles are not ordinals: CUDA_VISIBLE_DEVICES may make them differ. */
static mo_driver_cuda device_of(int ordinal, CUdevice handle)
{
    return (mo_driver_cuda){.table = {.device = ordinal}, .api = &api, .handle = handle};
}

static CUmemAccessDesc access[MO_MAX_DEVICES];

TEST(a_device_alone_has_access_alone_and_nobody_is_asked)
{
    const mo_driver_cuda zero = device_of(0, 100);

    CHECK_EQ(mo_peers_access(&zero, access), 1);
    mo_peers_join(0, 100);
    CHECK_EQ(mo_peers_access(&zero, access), 1);
    CHECK_EQ(access[0].location.id, 100);
    CHECK_EQ(access[0].location.type, CU_MEM_LOCATION_TYPE_DEVICE);
    CHECK_EQ(access[0].flags, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CHECK_EQ(questions, 0);
}

TEST(a_device_that_joins_is_granted_what_it_can_reach_and_is_asked_once)
{
    const mo_driver_cuda zero = device_of(0, 100), one = device_of(1, 101);

    mo_peers_join(0, 100);
    mo_peers_join(1, 101);
    mo_peers_join(1, 999); /* again: nothing changes */
    questions = 0;
    for (int again = 0; again < 2; again++) {
        CHECK_EQ(mo_peers_access(&zero, access), 2);
        CHECK_EQ(access[0].location.id, 100);
        CHECK_EQ(access[1].location.id, 101);
        CHECK_EQ(access[1].flags, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
        CHECK_EQ(mo_peers_access(&one, access), 2);
        CHECK_EQ(access[0].location.id, 101);
        CHECK_EQ(access[1].location.id, 100);
    }
    CHECK_EQ(questions, 2);
}

TEST(a_device_that_cannot_reach_another_is_left_out)
{
    const mo_driver_cuda two = device_of(2, 102), last = device_of(MO_MAX_DEVICES - 1, 3);

    mo_peers_join(2, 102);
    mo_peers_join(MO_MAX_DEVICES - 1, 3);
    for (size_t i = mo_peers_access(&two, access); i-- > 0;)
        CHECK(access[i].location.id != 3);
    for (size_t i = mo_peers_access(&last, access); i-- > 0;)
        CHECK(access[i].location.id != 102);
}

TEST(where_the_driver_does_not_say_nobody_is_granted_and_it_is_asked_again)
{
    const mo_driver_cuda five = device_of(5, 105);

    mo_peers_join(6, 106);
    silent = true;
    CHECK_EQ(mo_peers_access(&five, access), 1);
    silent = false;
    CHECK(mo_peers_access(&five, access) > 1);
    api.can_access_peer = NULL; /* a driver without the call */
    const mo_driver_cuda nine = device_of(9, 109);
    CHECK_EQ(mo_peers_access(&nine, access), 1);
    api.can_access_peer = can_access;
}

TEST_MAIN
