#include "alloc/passthrough.h"

#include <stdatomic.h>

typedef struct counters {
    atomic_uint_least64_t allocations, frees, out_of_memory, failed_frees;
    atomic_uint_least64_t live_bytes, live_blocks, peak_bytes;
} counters;

static counters of_device[MO_MAX_DEVICES];

static void bump(atomic_uint_least64_t *counter)
{
    atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
}

static void raise_peak(counters *c, uint64_t live)
{
    uint64_t peak = atomic_load_explicit(&c->peak_bytes, memory_order_relaxed);
    while (live > peak && !atomic_compare_exchange_weak_explicit(
                              &c->peak_bytes, &peak, live, memory_order_relaxed, memory_order_relaxed)) {
    }
}

mo_status mo_passthrough_alloc(mo_driver *driver, size_t size, mo_detail *detail, mo_address *out)
{
    counters *c = &of_device[driver->device];
    mo_status status;

    if (!size) {
        *out = 0;
        return MO_OK;
    }
    status = driver->segment_alloc(driver, size, detail, out);
    if (status) {
        if (status == MO_NO_DEVICE_MEMORY)
            bump(&c->out_of_memory);
        return status;
    }
    bump(&c->allocations);
    bump(&c->live_blocks);
    raise_peak(c, atomic_fetch_add_explicit(&c->live_bytes, size, memory_order_relaxed) + size);
    return MO_OK;
}

mo_status mo_passthrough_free(mo_driver *driver, mo_address address, size_t size, mo_detail *detail)
{
    counters *c = &of_device[driver->device];
    mo_status status;

    if (!address)
        return MO_OK;
    status = driver->segment_free(driver, address, detail);
    if (status) {
        bump(&c->failed_frees);
        return status;
    }
    bump(&c->frees);
    atomic_fetch_sub_explicit(&c->live_blocks, 1, memory_order_relaxed);
    atomic_fetch_sub_explicit(&c->live_bytes, size, memory_order_relaxed);
    return MO_OK;
}

void mo_passthrough_read(int device, mo_passthrough_stats *out)
{
    *out = (mo_passthrough_stats){0};
    if (device < 0 || device >= MO_MAX_DEVICES)
        return;
    counters *c = &of_device[device];
    *out = (mo_passthrough_stats){
        .allocations = atomic_load(&c->allocations),
        .frees = atomic_load(&c->frees),
        .out_of_memory = atomic_load(&c->out_of_memory),
        .failed_frees = atomic_load(&c->failed_frees),
        .live_bytes = atomic_load(&c->live_bytes),
        .live_blocks = atomic_load(&c->live_blocks),
        .peak_bytes = atomic_load(&c->peak_bytes),
    };
}
