#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "driver/model_device_parts.h"

/* ---- clocks ----------------------------------------------------------------------------------------------------- */

uint64_t mo_model_device_clock_at(const mo_model_device_clock *clock, const mo_model_device_stream *stream)
{
    return stream->index < clock->count ? clock->over[stream->index] : 0;
}

static void reach(mo_model_device_clock *clock, size_t count)
{
    if (count <= clock->count)
        return;
    clock->over = mo_model_device_must(realloc(clock->over, count * sizeof *clock->over));
    while (clock->count < count)
        clock->over[clock->count++] = 0;
}

void mo_model_device_clock_raise(mo_model_device_clock *clock, const mo_model_device_stream *stream,
                                 uint64_t over)
{
    reach(clock, stream->index + 1);
    if (clock->over[stream->index] < over)
        clock->over[stream->index] = over;
}

void mo_model_device_clock_join(mo_model_device_clock *clock, const mo_model_device_clock *other)
{
    reach(clock, other->count);
    for (size_t i = 0; i < other->count; i++)
        if (clock->over[i] < other->over[i])
            clock->over[i] = other->over[i];
}

/* ---- violations ------------------------------------------------------------------------------------------------- */

static void violate(mo_model_device *d, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void violate(mo_model_device *d, const char *format, ...)
{
    va_list values;
    if (d->violations++)
        return;
    va_start(values, format);
    vsnprintf(d->violation, sizeof d->violation, format, values);
    va_end(values);
}

/* Whether what is queued on `stream` from now on is behind operation number `at` of `on`. */
static bool is_behind(const mo_model_device *d, const mo_model_device_stream *stream,
                      const mo_model_device_stream *on, uint64_t at)
{
    return stream == on || at <= mo_model_device_clock_at(&stream->behind, on) ||
           at <= mo_model_device_clock_at(d->host, on);
}

/* ---- uses of a handle or segment ---------------------------------------------------------------------------------- */

static void add_use(mo_model_device_block *memory, mo_model_device_use_record use)
{
    if (memory->use_count == memory->use_places) {
        memory->use_places = memory->use_places * 2 + 4;
        memory->uses = mo_model_device_must(realloc(memory->uses, memory->use_places * sizeof *memory->uses));
    }
    memory->uses[memory->use_count++] = use;
}

/* What is behind this use is behind all that this one is behind: only the parts beside it need to be kept of those. */
static void supersede(mo_model_device_block *memory, size_t i, size_t from, size_t to)
{
    mo_model_device_use_record *use = &memory->uses[i], rest = *use;
    const bool before = use->from<from, after = use->to> to;

    if (before)
        use->to = from;
    rest.from = to;
    if (before && after)
        add_use(memory, rest); /* moves the array: use is gone */
    else if (after)
        *use = rest;
    else if (!before)
        *use = memory->uses[--memory->use_count];
}

static void use_bytes(mo_model_device *d, mo_model_device_block *memory, mo_address address,
                      mo_model_device_use_record now)
{
    for (size_t i = memory->use_count; i-- > 0;) {
        const mo_model_device_use_record *then = &memory->uses[i];
        if (then->to <= now.from || now.to <= then->from)
            continue;
        if (is_behind(d, now.on, then->on, then->at)) {
            supersede(memory, i, now.from, now.to);
        } else if (then->owner != now.owner) {
            const size_t from = then->from > now.from ? then->from : now.from;
            violate(d,
                    "use: operation %" PRIu64 " of stream %p (owner %" PRIu64
                    ") uses %#zx, and is not behind "
                    "operation %" PRIu64 " of stream %p (owner %" PRIu64 ") that used that memory before",
                    now.at, now.on->name, now.owner, (size_t)address + from - now.from, then->at,
                    then->on->name, then->owner);
        }
    }
    add_use(memory, now);
}

/* The mapping or segment, usable, that holds address. */
static mo_model_device_block *usable_at(mo_model_device *d, mo_address address)
{
    mo_model_device_block *b = mo_model_device_find(d, MO_MODEL_DEVICE_MAPPING, address, address + 1);
    if (b)
        return b->granted ? b : NULL;
    return mo_model_device_find(d, MO_MODEL_DEVICE_SEGMENT, address, address + 1);
}

/* ---- what the table's calls say ------------------------------------------------------------------------------------ */

void mo_model_device_uses_unmap(mo_model_device *d, const mo_model_device_block *mapping)
{
    for (mo_model_device_stream *s = d->streams; d->watched && s; s = s->next) {
        const uint64_t at = mo_model_device_clock_at(&mapping->clock, s);
        if (at > mo_model_device_clock_at(d->host, s))
            violate(d,
                    "unmap: operation %" PRIu64
                    " of stream %p uses memory at %#zx, and the host does not know it "
                    "to be over",
                    at, s->name, (size_t)mapping->low);
    }
}

void mo_model_device_uses_order(mo_model_device *d, const mo_model_device_stream *stream, const char *call)
{
    if (d->watched && stream->capture)
        violate(d, "%s: stream %p is being captured, and what was meant for now would be done at each replay",
                call, stream->name);
}

void mo_model_device_uses_map(mo_model_device *d, const mo_model_device_block *handle)
{
    for (size_t i = 0; d->watched && i < handle->use_count; i++)
        if (handle->uses[i].at > mo_model_device_clock_at(d->host, handle->uses[i].on)) {
            d->maps_in_use++;
            return;
        }
}

/* ---- the test's side ------------------------------------------------------------------------------------------------ */

void mo_model_device_watch(mo_model_device *device)
{
    mo_lock_take(&device->lock);
    if (!device->host)
        device->host = mo_model_device_must(calloc(1, sizeof *device->host));
    device->watched = true;
    mo_lock_give(&device->lock);
}

/* The operation that was queued last on the stream uses these bytes of the device. */
static void use_range(mo_model_device *device, mo_model_device_stream *s, mo_address address, size_t size,
                      uint64_t owner)
{
    const mo_address end = address + size;
    while (device->watched && address < end) {
        mo_model_device_block *b = usable_at(device, address);
        if (!b) {
            violate(device,
                    "use: operation %" PRIu64 " of stream %p (owner %" PRIu64 ") uses %#zx, where nothing is "
                    "mapped and granted",
                    s->submitted, s->name, owner, (size_t)address);
            break;
        }
        const mo_address stop = end < b->high ? end : b->high;
        use_bytes(device, b->handle ? b->handle : b, address,
                  (mo_model_device_use_record){s, s->submitted, owner, address - b->low, stop - b->low});
        mo_model_device_clock_raise(&b->clock, s, s->submitted);
        address = stop;
    }
}

void mo_model_device_use(mo_model_device *device, mo_stream stream, mo_address address, size_t size,
                         uint64_t owner)
{
    mo_lock_take(&device->lock);
    mo_model_device_stream *s = mo_model_device_stream_of(device, stream);
    s->submitted++;
    use_range(device, s, address, size, owner);
    mo_lock_give(&device->lock);
}

void mo_model_device_uses_copy(mo_model_device *d, mo_model_device_stream *stream,
                               mo_model_device_block *pinned, uintptr_t host, mo_address address, size_t size)
{
    const uint64_t owner = UINT64_MAX - d->next_id++;
    const size_t from = host - pinned->low;
    stream->submitted++;
    use_range(d, stream, address, size, owner);
    if (d->watched)
        use_bytes(d, pinned, host,
                  (mo_model_device_use_record){stream, stream->submitted, owner, from, from + size});
}

bool mo_model_device_ordered(mo_model_device *device, mo_stream before, mo_stream after)
{
    mo_lock_take(&device->lock);
    const mo_model_device_stream *on = mo_model_device_stream_of(device, before);
    const mo_model_device_stream *stream = mo_model_device_stream_of(device, after);
    const bool ordered = device->watched && is_behind(device, stream, on, on->submitted);
    mo_lock_give(&device->lock);
    return ordered;
}

/* [from, to) of a handle or segment. */
static bool is_idle(const mo_model_device *d, const mo_model_device_block *memory, size_t from, size_t to)
{
    for (size_t i = 0; i < memory->use_count; i++) {
        const mo_model_device_use_record *use = &memory->uses[i];
        if (use->from < to && from < use->to && use->at > mo_model_device_clock_at(d->host, use->on))
            return false;
    }
    return true;
}

bool mo_model_device_idle(mo_model_device *device, mo_address address, size_t size)
{
    const mo_address end = address + size;
    bool idle = true;
    mo_lock_take(&device->lock);
    while (device->watched && address < end && idle) {
        const mo_model_device_block *b = usable_at(device, address);
        if (!b)
            break;
        const mo_address stop = end < b->high ? end : b->high;
        idle = is_idle(device, b->handle ? b->handle : b, address - b->low, stop - b->low);
        address = stop;
    }
    mo_lock_give(&device->lock);
    return idle;
}

bool mo_model_device_usable(mo_model_device *device, mo_address address, size_t size)
{
    const mo_address end = address + size;
    mo_lock_take(&device->lock);
    while (address < end) {
        const mo_model_device_block *b = usable_at(device, address);
        if (!b)
            break;
        address = b->high;
    }
    mo_lock_give(&device->lock);
    return address >= end;
}

mo_physical mo_model_device_behind(mo_model_device *device, mo_address address)
{
    mo_lock_take(&device->lock);
    const mo_model_device_block *m =
        mo_model_device_find(device, MO_MODEL_DEVICE_MAPPING, address, address + 1);
    const mo_physical handle = m ? m->handle->low : 0;
    mo_lock_give(&device->lock);
    return handle;
}
