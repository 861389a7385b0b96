#include "work.h"

#include "device.h"
#include "events.h"
#include "heap.h"
#include "ranges.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

sim_work *sim_work_new(sim_work_kind kind, int device)
{
    sim_work *work = calloc(1, sizeof *work);

    if (work)
        *work = (sim_work){.references = 1, .kind = kind, .device = device};
    return work;
}

void sim_work_release(sim_work *work)
{
    if (!work || --work->references)
        return;
    if (work->kind == SIM_WORK_KERNEL)
        free(work->kernel.sizes);
    if ((work->kind == SIM_WORK_RECORD || work->kind == SIM_WORK_WAIT) && work->event)
        sim_event_release(work->event);
    free(work);
}

static int rights_of(const sim_work *work, int device)
{
    return device < 0 ? work->device : device;
}

/* Kernel arguments have no types here. A word that is the address of device memory is taken for a pointer,
 * and must be one that this device may at least read. Wider structs are looked through word by word. */
static bool arguments_valid(const sim_work *work)
{
    for (int i = 0; i < work->kernel.count; i++)
        for (size_t at = 0; at + sizeof(uintptr_t) <= work->kernel.sizes[i]; at += sizeof(uintptr_t)) {
            uintptr_t word;
            memcpy(&word, (char *)work->kernel.arguments[i] + at, sizeof word);
            const sim_range *range = sim_range_at(&sim_ranges, word);
            if (range ? sim_range_on_device(range) && !sim_range_allows(range, work->device, false)
                      : sim_range_at(&sim_reserved, word) != NULL)
                return false;
        }
    return true;
}

/* Every row of one end. What the first row is, all must be. */
static sim_access end_access(const char *at, size_t pitch, const sim_work *work, int device, bool write)
{
    sim_access first = sim_range_access(at, work->copy.width, device, write);

    for (size_t row = 1; row < work->copy.rows && first != SIM_ACCESS_NO; row++)
        if (sim_range_access(at + row * pitch, work->copy.width, device, write) != first)
            return SIM_ACCESS_NO;
    return first;
}

static sim_access to_access(const sim_work *work)
{
    return end_access(work->copy.to, work->copy.to_pitch, work, rights_of(work, work->copy.to_device), true);
}

static sim_access from_access(const sim_work *work)
{
    return end_access(work->copy.from, work->copy.from_pitch, work, rights_of(work, work->copy.from_device),
                      false);
}

static bool copy_valid(const sim_work *work)
{
    return to_access(work) == work->copy.to_kind && from_access(work) == work->copy.from_kind;
}

static bool set_valid(const sim_work *work)
{
    for (size_t row = 0; row < work->set.rows; row++) {
        const char *at = work->set.to + row * work->set.pitch;
        size_t bytes = work->set.width * work->set.element;
        const sim_range *range = sim_range_at(&sim_ranges, (uintptr_t)at);

        /* Pinned host memory can be set too: it is mapped into the device's address space. */
        if (!range || (uintptr_t)at % work->set.element ||
            sim_range_access(at, bytes, work->device, true) == SIM_ACCESS_NO)
            return false;
        if (!sim_range_on_device(range) && bytes > range->base + range->size - (uintptr_t)at)
            return false;
    }
    return true;
}

bool sim_work_addresses_valid(sim_work *work)
{
    switch (work->kind) {
    case SIM_WORK_COPY:
        work->copy.to_kind = to_access(work);
        work->copy.from_kind = from_access(work);
        return work->copy.to_kind != SIM_ACCESS_NO && work->copy.from_kind != SIM_ACCESS_NO;
    case SIM_WORK_SET:
        return set_valid(work);
    default:
        return true;
    }
}

static bool rows_touch(const char *row, size_t rows, size_t pitch, size_t bytes, uintptr_t at, size_t size)
{
    for (; rows; rows--, row += pitch)
        if ((uintptr_t)row < at + size && at < (uintptr_t)row + bytes)
            return true;
    return false;
}

bool sim_work_touches(const sim_work *work, uintptr_t at, size_t size)
{
    switch (work->kind) {
    case SIM_WORK_COPY:
        return rows_touch(work->copy.to, work->copy.rows, work->copy.to_pitch, work->copy.width, at, size) ||
               rows_touch(work->copy.from, work->copy.rows, work->copy.from_pitch, work->copy.width, at,
                          size);
    case SIM_WORK_SET:
        return rows_touch(work->set.to, work->set.rows, work->set.pitch, work->set.width * work->set.element,
                          at, size);
    case SIM_WORK_KERNEL:
        for (int i = 0; i < work->kernel.count; i++)
            for (size_t word = 0; word + sizeof(uintptr_t) <= work->kernel.sizes[i];
                 word += sizeof(uintptr_t)) {
                uintptr_t address;
                memcpy(&address, (char *)work->kernel.arguments[i] + word, sizeof address);
                if (address - at < size)
                    return true;
            }
        return false;
    default:
        return false;
    }
}

static bool on_device(const void *address)
{
    const sim_range *range = sim_range_at(&sim_ranges, (uintptr_t)address);
    return range && sim_range_on_device(range);
}

/* Pinned memory's whole pages are given back, and read as zeros: a blank device's tensors take none of the host's. */
static void clear(char *to, size_t size)
{
    const sim_range *range = sim_range_at(&sim_ranges, (uintptr_t)to);
    const size_t page = 4096, before = -(uintptr_t)to & (page - 1);

    if (range && range->kind == SIM_RANGE_HOST && size >= before + page) {
        const size_t whole = (size - before) & ~(page - 1);

        if (madvise(to + before, whole, MADV_DONTNEED) == 0) {
            memset(to, 0, before);
            to += before + whole;
            size -= before + whole;
        }
    }
    memset(to, 0, size);
}

static void copy(const sim_work *work)
{
    /* A blank device keeps nothing and reads as zeros. */
    bool drop = sim_blank && on_device(work->copy.to), zeros = sim_blank && on_device(work->copy.from);

    for (size_t row = 0; row < work->copy.rows && !drop; row++) {
        char *to = work->copy.to + row * work->copy.to_pitch;
        const char *from = work->copy.from + row * work->copy.from_pitch;
        if (zeros)
            clear(to, work->copy.width);
        else
            memmove(to, from, work->copy.width);
    }
}

static void set(const sim_work *work)
{
    for (size_t row = 0; row < work->set.rows; row++) {
        char *to = work->set.to + row * work->set.pitch;
        if (sim_blank && on_device(to))
            continue;
        if (work->set.element == 1)
            memset(to, (int)work->set.value, work->set.width);
        else
            for (size_t i = 0; i < work->set.width; i++)
                memcpy(to + i * work->set.element, &work->set.value, work->set.element); /* little endian */
    }
}

static void user_code(const sim_work *work)
{
    sim_user_code_begin();
    switch (work->kind) {
    case SIM_WORK_KERNEL:
        work->kernel.body(work->kernel.arguments, work->kernel.grid, work->kernel.block);
        break;
    case SIM_WORK_HOST:
        work->host.function(work->host.data);
        break;
    default:
        work->host.callback(work->host.stream, sim_fault, work->host.data);
    }
    sim_user_code_end();
}

void sim_work_run(const sim_work *work)
{
    /* After a fault a device does nothing more; only marks are reached, so that waits end. */
    if (sim_fault && work->kind != SIM_WORK_CALLBACK)
        return;
    switch (work->kind) {
    case SIM_WORK_COPY:
        if (copy_valid(work))
            copy(work);
        else
            sim_device_fault(work->device);
        break;
    case SIM_WORK_SET:
        if (set_valid(work))
            set(work);
        else
            sim_device_fault(work->device);
        break;
    case SIM_WORK_KERNEL:
        if (!work->kernel.body || sim_blank)
            break;
        if (arguments_valid(work))
            user_code(work);
        else
            sim_device_fault(work->device);
        break;
    case SIM_WORK_HOST:
    case SIM_WORK_CALLBACK:
        user_code(work);
        break;
    case SIM_WORK_FREE:
        sim_heap_free_now(work->address);
        break;
    case SIM_WORK_EMPTY:
    case SIM_WORK_RECORD:
    case SIM_WORK_WAIT:
        break;
    }
}
