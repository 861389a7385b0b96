#include "driver/driver_double.h"

#include <search.h>
#include <stdlib.h>
#include <string.h>

#include "driver/driver_double_parts.h"

void *mo_double_must(void *block)
{
    if (!block)
        abort();
    return block;
}

mo_status mo_double_leave(mo_driver *driver, mo_status status)
{
    mo_lock_give(&mo_double_of(driver)->lock);
    return status;
}

mo_status mo_double_enter(mo_driver *driver, mo_double_call which, mo_detail *detail)
{
    mo_double *d = mo_double_of(driver);
    mo_lock_take(&d->lock);
    d->clock++;
    d->calls[which]++;
    if (d->plan[which].after) {
        d->plan[which].after--;
        return MO_OK;
    }
    if (!d->plan[which].count)
        return MO_OK;
    d->plan[which].count--;
    return mo_double_leave(
        driver, mo_fail(detail, d->plan[which].status, 0, "%s: failed by plan", mo_double_call_name(which)));
}

mo_status mo_double_refuse(mo_driver *driver, mo_detail *detail, const char *why)
{
    return mo_double_leave(driver, mo_fail(detail, MO_INVALID, 0, "%s", why));
}

/* ---- blocks --------------------------------------------------------------------------------------------------- */

/* Overlapping keys compare equal, so that a tree of blocks that do not overlap finds one by any part of it. */
static int compare(const void *left, const void *right)
{
    const mo_double_block *a = left, *b = right;
    return a->high <= b->low ? -1 : a->low >= b->high;
}

mo_double_block *mo_double_add(mo_double *d, mo_double_kind kind, mo_double_block block)
{
    mo_double_block *b = mo_double_must(malloc(sizeof *b));
    *b = block;
    if (kind == MO_DOUBLE_EVENT) {
        b->low = (uintptr_t)b;
        b->high = b->low + 1;
    }
    mo_double_must(tsearch(b, &d->blocks[kind].tree, compare));
    d->blocks[kind].live++;
    return b;
}

static void free_block(void *block)
{
    mo_double_block *b = block;
    free(b->clock.over);
    free(b->uses);
    free(b);
}

static void free_pinned(void *block)
{
    free((void *)((mo_double_block *)block)->low);
    free_block(block);
}

void mo_double_drop(mo_double *d, mo_double_kind kind, mo_double_block *block)
{
    tdelete(block, &d->blocks[kind].tree, compare);
    d->blocks[kind].live--;
    free_block(block);
}

mo_double_block *mo_double_find(mo_double *d, mo_double_kind kind, uintptr_t low, uintptr_t high)
{
    const mo_double_block probe = {.low = low, .high = high};
    mo_double_block *const *found = tfind(&probe, &d->blocks[kind].tree, compare);
    return found ? *found : NULL;
}

/* size 0: any. */
static mo_double_block *exact(mo_double *d, mo_double_kind kind, mo_address address, size_t size)
{
    mo_double_block *b = mo_double_find(d, kind, address, address + 1);
    return b && b->low == address && (!size || b->size == size) ? b : NULL;
}

static mo_double_block *handle_of(mo_double *d, mo_physical id)
{
    mo_double_block *b = mo_double_find(d, MO_DOUBLE_HANDLE, id, id + 1);
    return b && !b->released ? b : NULL;
}

static mo_double_block *add_range(mo_double *d, mo_double_kind kind, mo_address address, size_t size)
{
    return mo_double_add(d, kind, (mo_double_block){.low = address, .high = address + size, .size = size});
}

static bool take(mo_double *d, size_t size)
{
    if (size > d->capacity - d->used)
        return false;
    d->used += size;
    if (d->used > d->peak)
        d->peak = d->used;
    return true;
}

static void settle(mo_double *d, mo_double_block *handle)
{
    if (!handle->released || handle->mappings)
        return;
    d->used -= handle->size;
    mo_double_drop(d, MO_DOUBLE_HANDLE, handle);
}

/* A reservation beyond this is refused, as a GPU's 49 bits would; the sum of a test's stays far below 64 bits. */
static const size_t MOST_ADDRESSES = (size_t)1 << 49;

static mo_address fresh_address(mo_double *d, size_t size)
{
    const size_t step = d->table.granularity ? d->table.granularity : 2u << 20;
    mo_address at = d->next_address;
    /* An unowned gap behind each: off by one is seen. */
    d->next_address += (size + step) / step * step + step;
    return at;
}

static bool whole(const mo_double *d, size_t n)
{
    return d->table.granularity && n && n % d->table.granularity == 0;
}

/* ---- virtual memory ---------------------------------------------------------------------------------------------- */

static mo_status double_reserve(mo_driver *driver, size_t size, mo_detail *detail, mo_address *out)
{
    mo_double *d = mo_double_of(driver);
    mo_status status = mo_double_enter(driver, MO_DOUBLE_reserve, detail);
    if (status)
        return status;
    if (!whole(d, size))
        return mo_double_refuse(driver, detail, "reserve: size is no multiple of the granularity");
    if (size > MOST_ADDRESSES)
        return mo_double_leave(
            driver, mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "reserve: no such range of addresses"));
    *out = add_range(d, MO_DOUBLE_RESERVATION, fresh_address(d, size), size)->low;
    return mo_double_leave(driver, MO_OK);
}

static mo_status double_unreserve(mo_driver *driver, mo_address address, size_t size, mo_detail *detail)
{
    mo_double *d = mo_double_of(driver);
    mo_double_block *range;
    mo_status status = mo_double_enter(driver, MO_DOUBLE_unreserve, detail);
    if (status)
        return status;
    range = exact(d, MO_DOUBLE_RESERVATION, address, size);
    if (!range || !size)
        return mo_double_refuse(driver, detail, "unreserve: not a whole reservation");
    if (mo_double_find(d, MO_DOUBLE_MAPPING, address, address + size))
        return mo_double_refuse(driver, detail, "unreserve: something is still mapped there");
    mo_double_drop(d, MO_DOUBLE_RESERVATION, range);
    return mo_double_leave(driver, MO_OK);
}

static mo_status double_create(mo_driver *driver, size_t size, mo_detail *detail, mo_physical *out)
{
    mo_double *d = mo_double_of(driver);
    mo_status status = mo_double_enter(driver, MO_DOUBLE_create, detail);
    if (status)
        return status;
    if (!whole(d, size))
        return mo_double_refuse(driver, detail, "create: size is no multiple of the granularity");
    if (!take(d, size))
        return mo_double_leave(driver, mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "create: the double is full"));
    *out = d->next_id++;
    mo_double_add(d, MO_DOUBLE_HANDLE, (mo_double_block){.low = *out, .high = *out + 1, .size = size});
    return mo_double_leave(driver, MO_OK);
}

static mo_status double_release(mo_driver *driver, mo_physical id, mo_detail *detail)
{
    mo_double *d = mo_double_of(driver);
    mo_double_block *handle;
    mo_status status = mo_double_enter(driver, MO_DOUBLE_release, detail);
    if (status)
        return status;
    handle = handle_of(d, id);
    if (!handle)
        return mo_double_refuse(driver, detail, "release: no such handle, or released before");
    handle->released = true;
    settle(d, handle);
    return mo_double_leave(driver, MO_OK);
}

static mo_status double_map(mo_driver *driver, mo_address address, size_t size, mo_physical id,
                            mo_detail *detail)
{
    mo_double *d = mo_double_of(driver);
    mo_double_block *range, *handle;
    mo_status status = mo_double_enter(driver, MO_DOUBLE_map, detail);
    if (status)
        return status;
    range = mo_double_find(d, MO_DOUBLE_RESERVATION, address, address + 1);
    handle = handle_of(d, id);
    if (!handle || handle->size != size)
        return mo_double_refuse(driver, detail, "map: no such handle, or not its whole size");
    if (!whole(d, size) || address % d->table.granularity || !range || address + size > range->high)
        return mo_double_refuse(driver, detail, "map: not inside one reservation, or not aligned");
    if (mo_double_find(d, MO_DOUBLE_MAPPING, address, address + size))
        return mo_double_refuse(driver, detail, "map: something is mapped there");
    mo_double_uses_map(d, handle);
    add_range(d, MO_DOUBLE_MAPPING, address, size)->handle = handle;
    handle->mappings++;
    return mo_double_leave(driver, MO_OK);
}

/* [address, address + size) is a row of whole mappings, without a gap. */
static bool whole_mappings(mo_double *d, mo_address address, size_t size)
{
    mo_address at = address;
    while (at < address + size) {
        mo_double_block *m = exact(d, MO_DOUBLE_MAPPING, at, 0);
        if (!m)
            return false;
        at += m->size;
    }
    return at == address + size && size;
}

static mo_status double_unmap(mo_driver *driver, mo_address address, size_t size, mo_detail *detail)
{
    mo_double *d = mo_double_of(driver);
    mo_status status = mo_double_enter(driver, MO_DOUBLE_unmap, detail);
    if (status)
        return status;
    if (!whole_mappings(d, address, size))
        return mo_double_refuse(driver, detail, "unmap: not a row of whole mappings");
    for (mo_address at = address; at < address + size;) {
        mo_double_block *m = exact(d, MO_DOUBLE_MAPPING, at, 0), *handle = m->handle;
        at += m->size;
        mo_double_uses_unmap(d, m);
        mo_double_drop(d, MO_DOUBLE_MAPPING, m);
        handle->mappings--;
        settle(d, handle);
    }
    return mo_double_leave(driver, MO_OK);
}

static mo_status double_grant(mo_driver *driver, mo_address address, size_t size, mo_detail *detail)
{
    mo_double *d = mo_double_of(driver);
    mo_status status = mo_double_enter(driver, MO_DOUBLE_grant, detail);
    if (status)
        return status;
    if (!whole_mappings(d, address, size))
        return mo_double_refuse(driver, detail, "grant: not a row of whole mappings");
    for (mo_address at = address; at < address + size;) {
        mo_double_block *m = exact(d, MO_DOUBLE_MAPPING, at, 0);
        m->granted = true;
        at += m->size;
    }
    return mo_double_leave(driver, MO_OK);
}

/* ---- segments, memory -------------------------------------------------------------------------------------------- */

static mo_status double_segment_alloc(mo_driver *driver, size_t size, mo_detail *detail, mo_address *out)
{
    mo_double *d = mo_double_of(driver);
    mo_status status = mo_double_enter(driver, MO_DOUBLE_segment_alloc, detail);
    if (status)
        return status;
    if (!size)
        return mo_double_refuse(driver, detail, "segment_alloc: no bytes");
    if (!take(d, size))
        return mo_double_leave(driver,
                               mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "segment_alloc: the double is full"));
    *out = add_range(d, MO_DOUBLE_SEGMENT, fresh_address(d, size), size)->low;
    return mo_double_leave(driver, MO_OK);
}

static mo_status double_segment_free(mo_driver *driver, mo_address address, mo_detail *detail)
{
    mo_double *d = mo_double_of(driver);
    mo_double_block *segment;
    mo_status status = mo_double_enter(driver, MO_DOUBLE_segment_free, detail);
    if (status)
        return status;
    segment = exact(d, MO_DOUBLE_SEGMENT, address, 0);
    if (!segment)
        return mo_double_refuse(driver, detail, "segment_free: not the start of a live segment");
    mo_double_drain(d);
    d->used -= segment->size;
    mo_double_drop(d, MO_DOUBLE_SEGMENT, segment);
    return mo_double_leave(driver, MO_OK);
}

static mo_status double_memory_info(mo_driver *driver, mo_detail *detail, size_t *free_bytes,
                                    size_t *total_bytes)
{
    mo_status status = mo_double_enter(driver, MO_DOUBLE_memory_info, detail);
    if (status)
        return status;
    *free_bytes = mo_double_of(driver)->capacity - mo_double_of(driver)->used;
    *total_bytes = mo_double_of(driver)->capacity;
    return mo_double_leave(driver, MO_OK);
}

/* ---- the test's side ---------------------------------------------------------------------------------------------------- */

void mo_double_open(mo_double *device, size_t capacity, size_t granularity)
{
    *device = (mo_double){
        .table =
            {
                .granularity = granularity,
                .reserve = double_reserve,
                .unreserve = double_unreserve,
                .create = double_create,
                .release = double_release,
                .map = double_map,
                .unmap = double_unmap,
                .grant = double_grant,
                .segment_alloc = double_segment_alloc,
                .segment_free = double_segment_free,
                .memory_info = double_memory_info,
            },
        .lock = MO_LOCK_INIT,
        .capacity = capacity,
        .next_address = UINT64_C(0x10000000000),
        .next_id = 1,
    };
    mo_double_order_fill(&device->table);
    mo_double_copies_fill(&device->table);
}

void mo_double_close(mo_double *device)
{
    for (int kind = 0; kind < MO_DOUBLE_KIND_COUNT; kind++) {
        tdestroy(device->blocks[kind].tree, kind == MO_DOUBLE_PINNED ? free_pinned : free_block);
        device->blocks[kind].tree = NULL;
        device->blocks[kind].live = 0;
    }
    mo_double_order_close(device);
}

size_t mo_double_live(mo_double *device)
{
    size_t n = 0;
    mo_lock_take(&device->lock);
    for (int kind = 0; kind < MO_DOUBLE_KIND_COUNT; kind++)
        n += device->blocks[kind].live;
    mo_lock_give(&device->lock);
    return n;
}

void mo_double_fail(mo_double *device, mo_double_call which, uint64_t after, uint64_t count, mo_status status)
{
    mo_lock_take(&device->lock);
    device->plan[which].after = after;
    device->plan[which].count = count;
    device->plan[which].status = status;
    mo_lock_give(&device->lock);
}

void mo_double_fail_never(mo_double *device)
{
    mo_lock_take(&device->lock);
    memset(device->plan, 0, sizeof device->plan);
    mo_lock_give(&device->lock);
}

const char *mo_double_call_name(mo_double_call which)
{
#define NAME(name) #name,
    static const char *const names[] = {MO_DOUBLE_CALLS(NAME)};
#undef NAME
    return (unsigned)which < MO_DOUBLE_CALL_COUNT ? names[which] : "?";
}
