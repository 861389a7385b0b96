#include "driver/peers.h"

#include <stdatomic.h>

enum { NOT_ASKED, CAN, CANNOT };

static atomic_bool joined[MO_MAX_DEVICES];
static CUdevice handles[MO_MAX_DEVICES];                   /* of those that have joined */
static atomic_uchar reach[MO_MAX_DEVICES][MO_MAX_DEVICES]; /* [peer][owner]: asked once */

void mo_peers_join(int ordinal, CUdevice handle)
{
    if (atomic_load_explicit(&joined[ordinal], memory_order_acquire))
        return;
    handles[ordinal] = handle;
    atomic_store_explicit(&joined[ordinal], true, memory_order_release);
}

static bool can_reach(const mo_driver_cuda *owner, int peer)
{
    atomic_uchar *known = &reach[peer][owner->table.device];
    unsigned char answer = atomic_load_explicit(known, memory_order_relaxed);
    int can = 0;

    if (answer == NOT_ASKED) {
        if (!owner->api->can_access_peer || owner->api->can_access_peer(&can, handles[peer], owner->handle))
            return false;
        answer = can ? CAN : CANNOT;
        atomic_store_explicit(known, answer, memory_order_relaxed);
    }
    return answer == CAN;
}

size_t mo_peers_access(const mo_driver_cuda *driver, CUmemAccessDesc out[MO_MAX_DEVICES])
{
    const CUmemAccessDesc own = {
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = driver->handle},
        .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    size_t count = 0;

    out[count++] = own;
    for (int peer = 0; peer < MO_MAX_DEVICES; peer++)
        if (peer != driver->table.device && atomic_load_explicit(&joined[peer], memory_order_acquire) &&
            can_reach(driver, peer)) {
            out[count] = own;
            out[count++].location.id = handles[peer];
        }
    return count;
}
