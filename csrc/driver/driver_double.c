#include "driver/driver_double.h"

#include <stdlib.h>
#include <string.h>

/* Everything that has an identity is a block; a list is plenty for a test. */
typedef enum block_kind { RESERVATION, HANDLE, MAPPING, SEGMENT, EVENT } block_kind;

struct mo_double_block {
    block_kind kind;
    mo_double_block *next;
    mo_address address;      /* all but HANDLE and EVENT */
    size_t size;             /* all but EVENT */
    uint64_t id;             /* HANDLE */
    bool released, granted;  /* HANDLE; MAPPING */
    size_t mappings;         /* HANDLE */
    mo_double_block *handle; /* MAPPING */
    mo_double_stream *on;    /* EVENT: recorded there, NULL if never */
    uint64_t mark;           /* EVENT: over when on->completed >= mark */
};

/* A wait in a stream's queue: operation number `at` needs `on` to have completed `mark`. */
typedef struct queued_wait {
    uint64_t at;
    mo_double_stream *on;
    uint64_t mark;
} queued_wait;

struct mo_double_stream {
    mo_stream name;
    mo_double_stream *next;
    uint64_t submitted, completed, capture;
    queued_wait *waits;
    size_t wait_count;
};

static mo_double *self(mo_driver *driver)
{
    return (mo_double *)driver;
}

static void *must(void *block)
{
    if (!block)
        abort(); /* the test's own memory ran out: nothing to test any more */
    return block;
}

static mo_status leave(mo_driver *driver, mo_status status)
{
    mo_lock_give(&self(driver)->lock);
    return status;
}

/* Counts a call and asks the plan. MO_OK: go on, the lock is held, leave() it. */
static mo_status enter(mo_driver *driver, mo_double_call which, mo_detail *detail)
{
    mo_double *d = self(driver);
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
    return leave(driver,
                 mo_fail(detail, d->plan[which].status, 0, "%s: failed by plan", mo_double_call_name(which)));
}

static mo_status refuse(mo_driver *driver, mo_detail *detail, const char *why)
{
    return leave(driver, mo_fail(detail, MO_INVALID, 0, "%s", why));
}

/* ---- blocks --------------------------------------------------------------------------------------------------- */

static mo_double_block *add(mo_double *d, mo_double_block block)
{
    mo_double_block *b = must(malloc(sizeof *b));
    *b = block;
    b->next = d->blocks;
    return d->blocks = b;
}

static void drop(mo_double *d, mo_double_block *block)
{
    for (mo_double_block **link = &d->blocks; *link; link = &(*link)->next)
        if (*link == block) {
            *link = block->next;
            free(block);
            return;
        }
}

/* The first block of a kind that overlaps [address, address + size). */
static mo_double_block *overlap(mo_double *d, block_kind kind, mo_address address, size_t size)
{
    for (mo_double_block *b = d->blocks; b; b = b->next)
        if (b->kind == kind && b->address < address + size && address < b->address + b->size)
            return b;
    return NULL;
}

static mo_double_block *exact(mo_double *d, block_kind kind, mo_address address, size_t size)
{
    mo_double_block *b = overlap(d, kind, address, 1);
    return b && b->address == address && (!size || b->size == size) ? b : NULL;
}

static mo_double_block *handle_of(mo_double *d, mo_physical id)
{
    for (mo_double_block *b = d->blocks; b; b = b->next)
        if (b->kind == HANDLE && b->id == id && !b->released)
            return b;
    return NULL;
}

static mo_double_block *event_of(mo_double *d, const mo_event *event)
{
    for (mo_double_block *b = d->blocks; b; b = b->next)
        if (b->kind == EVENT && (const mo_event *)b == event)
            return b;
    return NULL;
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
    drop(d, handle);
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
    mo_double *d = self(driver);
    mo_status status = enter(driver, MO_DOUBLE_reserve, detail);
    if (status)
        return status;
    if (!whole(d, size))
        return refuse(driver, detail, "reserve: size is no multiple of the granularity");
    if (size > MOST_ADDRESSES)
        return leave(driver, mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "reserve: no such range of addresses"));
    *out = add(d, (mo_double_block){.kind = RESERVATION, .address = fresh_address(d, size), .size = size})
               ->address;
    return leave(driver, MO_OK);
}

static mo_status double_unreserve(mo_driver *driver, mo_address address, size_t size, mo_detail *detail)
{
    mo_double *d = self(driver);
    mo_double_block *range;
    mo_status status = enter(driver, MO_DOUBLE_unreserve, detail);
    if (status)
        return status;
    range = exact(d, RESERVATION, address, size);
    if (!range || !size)
        return refuse(driver, detail, "unreserve: not a whole reservation");
    if (overlap(d, MAPPING, address, size))
        return refuse(driver, detail, "unreserve: something is still mapped there");
    drop(d, range);
    return leave(driver, MO_OK);
}

static mo_status double_create(mo_driver *driver, size_t size, mo_detail *detail, mo_physical *out)
{
    mo_double *d = self(driver);
    mo_status status = enter(driver, MO_DOUBLE_create, detail);
    if (status)
        return status;
    if (!whole(d, size))
        return refuse(driver, detail, "create: size is no multiple of the granularity");
    if (!take(d, size))
        return leave(driver, mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "create: the double is full"));
    *out = add(d, (mo_double_block){.kind = HANDLE, .size = size, .id = d->next_id++})->id;
    return leave(driver, MO_OK);
}

static mo_status double_release(mo_driver *driver, mo_physical id, mo_detail *detail)
{
    mo_double *d = self(driver);
    mo_double_block *handle;
    mo_status status = enter(driver, MO_DOUBLE_release, detail);
    if (status)
        return status;
    handle = handle_of(d, id);
    if (!handle)
        return refuse(driver, detail, "release: no such handle, or released before");
    handle->released = true;
    settle(d, handle);
    return leave(driver, MO_OK);
}

static mo_status double_map(mo_driver *driver, mo_address address, size_t size, mo_physical id,
                            mo_detail *detail)
{
    mo_double *d = self(driver);
    mo_double_block *range, *handle;
    mo_status status = enter(driver, MO_DOUBLE_map, detail);
    if (status)
        return status;
    range = overlap(d, RESERVATION, address, 1);
    handle = handle_of(d, id);
    if (!handle || handle->size != size)
        return refuse(driver, detail, "map: no such handle, or not its whole size");
    if (!whole(d, size) || address % d->table.granularity || !range ||
        address + size > range->address + range->size)
        return refuse(driver, detail, "map: not inside one reservation, or not aligned");
    if (overlap(d, MAPPING, address, size))
        return refuse(driver, detail, "map: something is mapped there");
    add(d, (mo_double_block){.kind = MAPPING, .address = address, .size = size, .handle = handle});
    handle->mappings++;
    return leave(driver, MO_OK);
}

/* [address, address + size) is a row of whole mappings, without a gap. */
static bool whole_mappings(mo_double *d, mo_address address, size_t size)
{
    mo_address at = address;
    while (at < address + size) {
        mo_double_block *m = exact(d, MAPPING, at, 0);
        if (!m)
            return false;
        at += m->size;
    }
    return at == address + size && size;
}

static mo_status double_unmap(mo_driver *driver, mo_address address, size_t size, mo_detail *detail)
{
    mo_double *d = self(driver);
    mo_status status = enter(driver, MO_DOUBLE_unmap, detail);
    if (status)
        return status;
    if (!whole_mappings(d, address, size))
        return refuse(driver, detail, "unmap: not a row of whole mappings");
    for (mo_address at = address; at < address + size;) {
        mo_double_block *m = exact(d, MAPPING, at, 0), *handle = m->handle;
        at += m->size;
        drop(d, m);
        handle->mappings--;
        settle(d, handle);
    }
    return leave(driver, MO_OK);
}

static mo_status double_grant(mo_driver *driver, mo_address address, size_t size, mo_detail *detail)
{
    mo_double *d = self(driver);
    mo_status status = enter(driver, MO_DOUBLE_grant, detail);
    if (status)
        return status;
    if (!whole_mappings(d, address, size))
        return refuse(driver, detail, "grant: not a row of whole mappings");
    for (mo_address at = address; at < address + size;) {
        mo_double_block *m = exact(d, MAPPING, at, 0);
        m->granted = true;
        at += m->size;
    }
    return leave(driver, MO_OK);
}

/* ---- streams and events -------------------------------------------------------------------------------------------- */

static mo_double_stream *stream_of(mo_double *d, mo_stream name)
{
    mo_double_stream *s = d->streams;
    while (s && s->name != name)
        s = s->next;
    if (!s) {
        s = must(calloc(1, sizeof *s));
        s->name = name;
        s->next = d->streams;
        d->streams = s;
    }
    return s;
}

static size_t complete(mo_double_stream *s, size_t n)
{
    size_t done = 0;
    for (; done < n && s->completed < s->submitted; done++) {
        for (size_t i = 0; i < s->wait_count; i++)
            if (s->waits[i].at == s->completed && s->waits[i].on->completed < s->waits[i].mark)
                return done;
        s->completed++;
    }
    return done;
}

/* Every stream to its end. A wait's mark was submitted before the wait, so there is always one that can go on. */
static void drain(mo_double *d)
{
    for (bool moved = true; moved;) {
        moved = false;
        for (mo_double_stream *s = d->streams; s; s = s->next)
            moved |= complete(s, SIZE_MAX) > 0;
    }
}

static mo_status double_event_create(mo_driver *driver, mo_detail *detail, mo_event **out)
{
    mo_status status = enter(driver, MO_DOUBLE_event_create, detail);
    if (status)
        return status;
    *out = (mo_event *)add(self(driver), (mo_double_block){.kind = EVENT});
    return leave(driver, MO_OK);
}

static mo_status double_event_destroy(mo_driver *driver, mo_event *event, mo_detail *detail)
{
    mo_double_block *e;
    mo_status status = enter(driver, MO_DOUBLE_event_destroy, detail);
    if (status)
        return status;
    e = event_of(self(driver), event);
    if (!e)
        return refuse(driver, detail, "event_destroy: no such event");
    drop(self(driver), e);
    return leave(driver, MO_OK);
}

static mo_status double_event_record(mo_driver *driver, mo_event *event, mo_stream stream, mo_detail *detail)
{
    mo_double_block *e;
    mo_status status = enter(driver, MO_DOUBLE_event_record, detail);
    if (status)
        return status;
    e = event_of(self(driver), event);
    if (!e)
        return refuse(driver, detail, "event_record: no such event");
    e->on = stream_of(self(driver), stream);
    e->mark = e->on->submitted;
    return leave(driver, MO_OK);
}

static mo_status double_event_query(mo_driver *driver, mo_event *event, mo_detail *detail)
{
    mo_double_block *e;
    mo_status status = enter(driver, MO_DOUBLE_event_query, detail);
    if (status)
        return status;
    e = event_of(self(driver), event);
    if (!e)
        return refuse(driver, detail, "event_query: no such event");
    return leave(driver, !e->on || e->on->completed >= e->mark ? MO_OK : MO_NOT_READY);
}

static mo_status double_stream_wait(mo_driver *driver, mo_stream stream, mo_event *event, mo_detail *detail)
{
    mo_double_stream *s;
    mo_double_block *e;
    mo_status status = enter(driver, MO_DOUBLE_stream_wait, detail);
    if (status)
        return status;
    e = event_of(self(driver), event);
    if (!e)
        return refuse(driver, detail, "stream_wait: no such event");
    s = stream_of(self(driver), stream);
    if (e->on) {
        s->waits = must(realloc(s->waits, (s->wait_count + 1) * sizeof *s->waits));
        s->waits[s->wait_count++] = (queued_wait){s->submitted, e->on, e->mark};
        s->submitted++; /* the wait is an operation of its own */
    }
    return leave(driver, MO_OK);
}

static mo_status double_capture_id(mo_driver *driver, mo_stream stream, mo_detail *detail, uint64_t *out)
{
    mo_status status = enter(driver, MO_DOUBLE_capture_id, detail);
    if (status)
        return status;
    *out = stream_of(self(driver), stream)->capture;
    return leave(driver, MO_OK);
}

static mo_status double_synchronize(mo_driver *driver, mo_detail *detail)
{
    mo_status status = enter(driver, MO_DOUBLE_synchronize, detail);
    if (status)
        return status;
    drain(self(driver));
    return leave(driver, MO_OK);
}

/* ---- segments, memory, time -------------------------------------------------------------------------------------------- */

static mo_status double_segment_alloc(mo_driver *driver, size_t size, mo_detail *detail, mo_address *out)
{
    mo_double *d = self(driver);
    mo_status status = enter(driver, MO_DOUBLE_segment_alloc, detail);
    if (status)
        return status;
    if (!size)
        return refuse(driver, detail, "segment_alloc: no bytes");
    if (!take(d, size))
        return leave(driver, mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "segment_alloc: the double is full"));
    *out =
        add(d, (mo_double_block){.kind = SEGMENT, .address = fresh_address(d, size), .size = size})->address;
    return leave(driver, MO_OK);
}

static mo_status double_segment_free(mo_driver *driver, mo_address address, mo_detail *detail)
{
    mo_double *d = self(driver);
    mo_double_block *segment;
    mo_status status = enter(driver, MO_DOUBLE_segment_free, detail);
    if (status)
        return status;
    segment = exact(d, SEGMENT, address, 0);
    if (!segment)
        return refuse(driver, detail, "segment_free: not the start of a live segment");
    drain(d);
    d->used -= segment->size;
    drop(d, segment);
    return leave(driver, MO_OK);
}

static mo_status double_memory_info(mo_driver *driver, mo_detail *detail, size_t *free_bytes,
                                    size_t *total_bytes)
{
    mo_status status = enter(driver, MO_DOUBLE_memory_info, detail);
    if (status)
        return status;
    *free_bytes = self(driver)->capacity - self(driver)->used;
    *total_bytes = self(driver)->capacity;
    return leave(driver, MO_OK);
}

static uint64_t double_now(mo_driver *driver)
{
    mo_lock_take(&self(driver)->lock);
    uint64_t now = self(driver)->clock;
    mo_lock_give(&self(driver)->lock);
    return now;
}

static void double_pause(mo_driver *driver, uint64_t duration)
{
    mo_double *d = self(driver);
    mo_lock_take(&d->lock);
    d->clock += duration;
    for (mo_double_stream *s = d->streams; s && d->work_per_pause; s = s->next)
        complete(s, d->work_per_pause);
    mo_lock_give(&d->lock);
}

/* ---- the test's side ---------------------------------------------------------------------------------------------------- */

void mo_double_open(mo_double *device, size_t capacity, size_t granularity)
{
    *device = (mo_double){
        .table =
            {
                .granularity = granularity,
#define ENTRY(name) .name = double_##name,
                MO_DOUBLE_CALLS(ENTRY)
#undef ENTRY
                    .now = double_now,
                .pause = double_pause,
            },
        .lock = MO_LOCK_INIT,
        .capacity = capacity,
        .next_address = UINT64_C(0x10000000000),
        .next_id = 1,
    };
}

void mo_double_close(mo_double *device)
{
    for (mo_double_block *b = device->blocks, *next; b; b = next) {
        next = b->next;
        free(b);
    }
    for (mo_double_stream *s = device->streams, *next; s; s = next) {
        next = s->next;
        free(s->waits);
        free(s);
    }
    device->blocks = NULL;
    device->streams = NULL;
}

size_t mo_double_live(mo_double *device)
{
    size_t n = 0;
    mo_lock_take(&device->lock);
    for (mo_double_block *b = device->blocks; b; b = b->next)
        n++;
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

void mo_double_submit(mo_double *device, mo_stream stream)
{
    mo_lock_take(&device->lock);
    stream_of(device, stream)->submitted++;
    mo_lock_give(&device->lock);
}

size_t mo_double_complete(mo_double *device, mo_stream stream, size_t n)
{
    mo_lock_take(&device->lock);
    size_t done = complete(stream_of(device, stream), n);
    mo_lock_give(&device->lock);
    return done;
}

void mo_double_capture(mo_double *device, mo_stream stream, uint64_t id)
{
    mo_lock_take(&device->lock);
    stream_of(device, stream)->capture = id;
    mo_lock_give(&device->lock);
}

const char *mo_double_call_name(mo_double_call which)
{
#define NAME(name) #name,
    static const char *const names[] = {MO_DOUBLE_CALLS(NAME)};
#undef NAME
    return (unsigned)which < MO_DOUBLE_CALL_COUNT ? names[which] : "?";
}
