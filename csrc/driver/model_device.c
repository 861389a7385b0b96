#include "driver/model_device.h"

#include <search.h>
#include <stdlib.h>
#include <string.h>

#include "driver/model_device_parts.h"

void *mo_model_device_must(void *block)
{
    if (!block)
        abort();
    return block;
}

mo_status mo_model_device_leave(mo_driver *driver, mo_status status)
{
    mo_lock_give(&mo_model_device_of(driver)->lock);
    return status;
}

mo_status mo_model_device_enter(mo_driver *driver, mo_model_device_call which, mo_detail *detail)
{
    mo_model_device *d = mo_model_device_of(driver);
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
    return mo_model_device_leave(driver, mo_fail(detail, d->plan[which].status, 0, "%s: failed by plan",
                                                 mo_model_device_call_name(which)));
}

mo_status mo_model_device_refuse(mo_driver *driver, mo_detail *detail, const char *why)
{
    return mo_model_device_leave(driver, mo_fail(detail, MO_INVALID, 0, "%s", why));
}

/* ---- blocks --------------------------------------------------------------------------------------------------- */

/* Overlapping keys compare equal, so that a tree of blocks that do not overlap finds one by any part of it. */
static int compare(const void *left, const void *right)
{
    const mo_model_device_block *a = left, *b = right;
    return a->high <= b->low ? -1 : a->low >= b->high;
}

mo_model_device_block *mo_model_device_add(mo_model_device *d, mo_model_device_kind kind,
                                           mo_model_device_block block)
{
    mo_model_device_block *b = mo_model_device_must(malloc(sizeof *b));
    *b = block;
    if (kind == MO_MODEL_DEVICE_EVENT) {
        b->low = (uintptr_t)b;
        b->high = b->low + 1;
    }
    mo_model_device_must(tsearch(b, &d->blocks[kind].tree, compare));
    d->blocks[kind].live++;
    return b;
}

static void free_block(void *block)
{
    mo_model_device_block *b = block;
    free(b->clock.over);
    free(b->uses);
    free(b);
}

static void free_pinned(void *block)
{
    free((void *)((mo_model_device_block *)block)->low);
    free_block(block);
}

void mo_model_device_drop(mo_model_device *d, mo_model_device_kind kind, mo_model_device_block *block)
{
    tdelete(block, &d->blocks[kind].tree, compare);
    d->blocks[kind].live--;
    free_block(block);
}

mo_model_device_block *mo_model_device_find(mo_model_device *d, mo_model_device_kind kind, uintptr_t low,
                                            uintptr_t high)
{
    const mo_model_device_block probe = {.low = low, .high = high};
    mo_model_device_block *const *found = tfind(&probe, &d->blocks[kind].tree, compare);
    return found ? *found : NULL;
}

/* size 0: any. */
static mo_model_device_block *exact(mo_model_device *d, mo_model_device_kind kind, mo_address address,
                                    size_t size)
{
    mo_model_device_block *b = mo_model_device_find(d, kind, address, address + 1);
    return b && b->low == address && (!size || b->size == size) ? b : NULL;
}

static mo_model_device_block *handle_of(mo_model_device *d, mo_physical id)
{
    mo_model_device_block *b = mo_model_device_find(d, MO_MODEL_DEVICE_HANDLE, id, id + 1);
    return b && !b->released ? b : NULL;
}

static mo_model_device_block *add_range(mo_model_device *d, mo_model_device_kind kind, mo_address address,
                                        size_t size)
{
    return mo_model_device_add(d, kind,
                               (mo_model_device_block){.low = address, .high = address + size, .size = size});
}

static bool take(mo_model_device *d, size_t size)
{
    if (size > d->capacity - d->used)
        return false;
    d->used += size;
    if (d->used > d->peak)
        d->peak = d->used;
    return true;
}

static void settle(mo_model_device *d, mo_model_device_block *handle)
{
    if (!handle->released || handle->mappings)
        return;
    d->used -= handle->size;
    mo_model_device_drop(d, MO_MODEL_DEVICE_HANDLE, handle);
}

/* A reservation beyond this is refused, as a GPU's 49 bits would; the sum of a test's stays far below 64 bits. */
static const size_t MOST_ADDRESSES = (size_t)1 << 49;

static mo_address fresh_address(mo_model_device *d, size_t size)
{
    const size_t step = d->table.granularity ? d->table.granularity : 2u << 20;
    mo_address at = d->next_address;
    /* An unowned gap behind each: off by one is seen. */
    d->next_address += (size + step) / step * step + step;
    return at;
}

static bool whole(const mo_model_device *d, size_t n)
{
    return d->table.granularity && n && n % d->table.granularity == 0;
}

/* ---- virtual memory ---------------------------------------------------------------------------------------------- */

static mo_status model_reserve(mo_driver *driver, size_t size, mo_detail *detail, mo_address *out)
{
    mo_model_device *d = mo_model_device_of(driver);
    mo_status status = mo_model_device_enter(driver, MO_MODEL_DEVICE_reserve, detail);
    if (status)
        return status;
    if (!whole(d, size))
        return mo_model_device_refuse(driver, detail, "reserve: size is no multiple of the granularity");
    if (size > MOST_ADDRESSES)
        return mo_model_device_leave(
            driver, mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "reserve: no such range of addresses"));
    *out = add_range(d, MO_MODEL_DEVICE_RESERVATION, fresh_address(d, size), size)->low;
    return mo_model_device_leave(driver, MO_OK);
}

static mo_status model_unreserve(mo_driver *driver, mo_address address, size_t size, mo_detail *detail)
{
    mo_model_device *d = mo_model_device_of(driver);
    mo_model_device_block *range;
    mo_status status = mo_model_device_enter(driver, MO_MODEL_DEVICE_unreserve, detail);
    if (status)
        return status;
    range = exact(d, MO_MODEL_DEVICE_RESERVATION, address, size);
    if (!range || !size)
        return mo_model_device_refuse(driver, detail, "unreserve: not a whole reservation");
    if (mo_model_device_find(d, MO_MODEL_DEVICE_MAPPING, address, address + size))
        return mo_model_device_refuse(driver, detail, "unreserve: something is still mapped there");
    mo_model_device_drop(d, MO_MODEL_DEVICE_RESERVATION, range);
    return mo_model_device_leave(driver, MO_OK);
}

static mo_status model_create(mo_driver *driver, size_t size, mo_detail *detail, mo_physical *out)
{
    mo_model_device *d = mo_model_device_of(driver);
    mo_status status = mo_model_device_enter(driver, MO_MODEL_DEVICE_create, detail);
    if (status)
        return status;
    if (!whole(d, size))
        return mo_model_device_refuse(driver, detail, "create: size is no multiple of the granularity");
    if (!take(d, size))
        return mo_model_device_leave(
            driver, mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "create: the model device is full"));
    *out = d->next_id++;
    mo_model_device_add(d, MO_MODEL_DEVICE_HANDLE,
                        (mo_model_device_block){.low = *out, .high = *out + 1, .size = size});
    return mo_model_device_leave(driver, MO_OK);
}

static mo_status model_release(mo_driver *driver, mo_physical id, mo_detail *detail)
{
    mo_model_device *d = mo_model_device_of(driver);
    mo_model_device_block *handle;
    mo_status status = mo_model_device_enter(driver, MO_MODEL_DEVICE_release, detail);
    if (status)
        return status;
    handle = handle_of(d, id);
    if (!handle)
        return mo_model_device_refuse(driver, detail, "release: no such handle, or released before");
    handle->released = true;
    settle(d, handle);
    return mo_model_device_leave(driver, MO_OK);
}

static mo_status model_map(mo_driver *driver, mo_address address, size_t size, mo_physical id,
                           mo_detail *detail)
{
    mo_model_device *d = mo_model_device_of(driver);
    mo_model_device_block *range, *handle;
    mo_status status = mo_model_device_enter(driver, MO_MODEL_DEVICE_map, detail);
    if (status)
        return status;
    range = mo_model_device_find(d, MO_MODEL_DEVICE_RESERVATION, address, address + 1);
    handle = handle_of(d, id);
    if (!handle || handle->size != size)
        return mo_model_device_refuse(driver, detail, "map: no such handle, or not its whole size");
    if (!whole(d, size) || address % d->table.granularity || !range || address + size > range->high)
        return mo_model_device_refuse(driver, detail, "map: not inside one reservation, or not aligned");
    if (mo_model_device_find(d, MO_MODEL_DEVICE_MAPPING, address, address + size))
        return mo_model_device_refuse(driver, detail, "map: something is mapped there");
    mo_model_device_uses_map(d, handle);
    add_range(d, MO_MODEL_DEVICE_MAPPING, address, size)->handle = handle;
    handle->mappings++;
    return mo_model_device_leave(driver, MO_OK);
}

/* [address, address + size) is a row of whole mappings, without a gap. */
static bool whole_mappings(mo_model_device *d, mo_address address, size_t size)
{
    mo_address at = address;
    while (at < address + size) {
        mo_model_device_block *m = exact(d, MO_MODEL_DEVICE_MAPPING, at, 0);
        if (!m)
            return false;
        at += m->size;
    }
    return at == address + size && size;
}

static mo_status model_unmap(mo_driver *driver, mo_address address, size_t size, mo_detail *detail)
{
    mo_model_device *d = mo_model_device_of(driver);
    mo_status status = mo_model_device_enter(driver, MO_MODEL_DEVICE_unmap, detail);
    if (status)
        return status;
    if (!whole_mappings(d, address, size))
        return mo_model_device_refuse(driver, detail, "unmap: not a row of whole mappings");
    for (mo_address at = address; at < address + size;) {
        mo_model_device_block *m = exact(d, MO_MODEL_DEVICE_MAPPING, at, 0), *handle = m->handle;
        at += m->size;
        mo_model_device_uses_unmap(d, m);
        mo_model_device_drop(d, MO_MODEL_DEVICE_MAPPING, m);
        handle->mappings--;
        settle(d, handle);
    }
    return mo_model_device_leave(driver, MO_OK);
}

static mo_status model_grant(mo_driver *driver, mo_address address, size_t size, mo_detail *detail)
{
    mo_model_device *d = mo_model_device_of(driver);
    mo_status status = mo_model_device_enter(driver, MO_MODEL_DEVICE_grant, detail);
    if (status)
        return status;
    if (!whole_mappings(d, address, size))
        return mo_model_device_refuse(driver, detail, "grant: not a row of whole mappings");
    for (mo_address at = address; at < address + size;) {
        mo_model_device_block *m = exact(d, MO_MODEL_DEVICE_MAPPING, at, 0);
        m->granted = true;
        at += m->size;
    }
    return mo_model_device_leave(driver, MO_OK);
}

static mo_status model_test_aliases(mo_driver *driver, mo_detail *detail)
{
    mo_model_device *d = mo_model_device_of(driver);
    mo_status status;

    mo_lock_take(&d->lock);
    d->alias_tests++;
    status = d->aliases;
    mo_lock_give(&d->lock);
    return status ? mo_fail(detail, status, 0, "test_aliases: %s", mo_status_text(status)) : MO_OK;
}

/* ---- segments, memory -------------------------------------------------------------------------------------------- */

static mo_status model_segment_alloc(mo_driver *driver, size_t size, mo_detail *detail, mo_address *out)
{
    mo_model_device *d = mo_model_device_of(driver);
    mo_status status = mo_model_device_enter(driver, MO_MODEL_DEVICE_segment_alloc, detail);
    if (status)
        return status;
    if (!size)
        return mo_model_device_refuse(driver, detail, "segment_alloc: no bytes");
    if (!take(d, size))
        return mo_model_device_leave(
            driver, mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "segment_alloc: the model device is full"));
    *out = add_range(d, MO_MODEL_DEVICE_SEGMENT, fresh_address(d, size), size)->low;
    return mo_model_device_leave(driver, MO_OK);
}

static mo_status model_segment_free(mo_driver *driver, mo_address address, mo_detail *detail)
{
    mo_model_device *d = mo_model_device_of(driver);
    mo_model_device_block *segment;
    mo_status status = mo_model_device_enter(driver, MO_MODEL_DEVICE_segment_free, detail);
    if (status)
        return status;
    segment = exact(d, MO_MODEL_DEVICE_SEGMENT, address, 0);
    if (!segment)
        return mo_model_device_refuse(driver, detail, "segment_free: not the start of a live segment");
    mo_model_device_drain(d);
    d->used -= segment->size;
    mo_model_device_drop(d, MO_MODEL_DEVICE_SEGMENT, segment);
    return mo_model_device_leave(driver, MO_OK);
}

static mo_status model_memory_info(mo_driver *driver, mo_detail *detail, size_t *free_bytes,
                                   size_t *total_bytes)
{
    mo_status status = mo_model_device_enter(driver, MO_MODEL_DEVICE_memory_info, detail);
    if (status)
        return status;
    *free_bytes = mo_model_device_of(driver)->capacity - mo_model_device_of(driver)->used;
    *total_bytes = mo_model_device_of(driver)->capacity;
    return mo_model_device_leave(driver, MO_OK);
}

/* ---- the test's side ---------------------------------------------------------------------------------------------------- */

void mo_model_device_open(mo_model_device *device, size_t capacity, size_t granularity)
{
    *device = (mo_model_device){
        .table =
            {
                .granularity = granularity,
                .reserve = model_reserve,
                .unreserve = model_unreserve,
                .create = model_create,
                .release = model_release,
                .map = model_map,
                .unmap = model_unmap,
                .grant = model_grant,
                .test_aliases = model_test_aliases,
                .segment_alloc = model_segment_alloc,
                .segment_free = model_segment_free,
                .memory_info = model_memory_info,
            },
        .lock = MO_LOCK_INIT,
        .capacity = capacity,
        .next_address = UINT64_C(0x10000000000),
        .next_id = 1,
    };
    mo_model_device_order_fill(&device->table);
    mo_model_device_copies_fill(&device->table);
}

void mo_model_device_close(mo_model_device *device)
{
    for (int kind = 0; kind < MO_MODEL_DEVICE_KIND_COUNT; kind++) {
        tdestroy(device->blocks[kind].tree, kind == MO_MODEL_DEVICE_PINNED ? free_pinned : free_block);
        device->blocks[kind].tree = NULL;
        device->blocks[kind].live = 0;
    }
    mo_model_device_order_close(device);
}

size_t mo_model_device_live(mo_model_device *device)
{
    size_t n = 0;
    mo_lock_take(&device->lock);
    for (int kind = 0; kind < MO_MODEL_DEVICE_KIND_COUNT; kind++)
        n += device->blocks[kind].live;
    mo_lock_give(&device->lock);
    return n;
}

void mo_model_device_fail(mo_model_device *device, mo_model_device_call which, uint64_t after, uint64_t count,
                          mo_status status)
{
    mo_lock_take(&device->lock);
    device->plan[which].after = after;
    device->plan[which].count = count;
    device->plan[which].status = status;
    mo_lock_give(&device->lock);
}

void mo_model_device_fail_never(mo_model_device *device)
{
    mo_lock_take(&device->lock);
    memset(device->plan, 0, sizeof device->plan);
    mo_lock_give(&device->lock);
}

const char *mo_model_device_call_name(mo_model_device_call which)
{
#define NAME(name) #name,
    static const char *const names[] = {MO_MODEL_DEVICE_CALLS(NAME)};
#undef NAME
    return (unsigned)which < MO_MODEL_DEVICE_CALL_COUNT ? names[which] : "?";
}
