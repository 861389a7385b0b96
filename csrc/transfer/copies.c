#include "transfer/copies.h"

#include <stdatomic.h>
#include <string.h>

#include "base/size.h"
#include "driver/driver_cuda.h"
#include "driver/forked.h"

static mo_ticket ticket_of(mo_way way, uint64_t number)
{
    return number << 1 | way;
}

static mo_line *line_of(mo_copies *copies, mo_ticket ticket, uint64_t *number)
{
    *number = ticket >> 1;
    return &copies->lines[ticket & 1];
}

/* Of a ticket that no copy has been given: the marks know nothing of it. */
static mo_status refuse_unknown(const mo_line *line, mo_ticket ticket, mo_detail *detail)
{
    return mo_fail(detail, MO_INVALID, 0,
                   "%llu is not the ticket of a copy of this device: %llu copies have begun in that "
                   "direction; pass the ticket that a copy returned, and its device",
                   (unsigned long long)ticket, (unsigned long long)line->begun);
}

/* ---- its life ------------------------------------------------------------------------------------------------------ */

mo_status mo_copies_open(mo_driver *driver, mo_copies *out, mo_detail *detail)
{
    mo_copies c = {.driver = driver, .lock = MO_LOCK_INIT};
    mo_status status = driver->event_create(driver, detail, &c.begin);

    for (int way = 0; way < MO_WAYS && !status; way++) {
        mo_line *line = &c.lines[way];
        status = driver->stream_create(driver, detail, &line->stream);
        for (int i = 0; i < MO_COPY_MARKS && !status; i++)
            status = driver->event_create(driver, detail, &line->marks[i]);
    }
    if (status)
        goto fail;
    *out = c;
    return MO_OK;
fail:
    mo_copies_close(&c, NULL);
    return status;
}

mo_status mo_copies_close(mo_copies *copies, mo_detail *detail)
{
    mo_driver *driver = copies->driver;
    mo_status status = MO_OK, last;
#define RELEASE(kind, what)                                                                                  \
    do {                                                                                                     \
        last = (what) ? driver->kind##_destroy(driver, (what), status ? NULL : detail) : MO_OK;              \
        status = status ? status : last;                                                                     \
    } while (0)

    RELEASE(event, copies->begin);
    for (int way = 0; way < MO_WAYS; way++) {
        for (int i = 0; i < MO_COPY_MARKS; i++)
            RELEASE(event, copies->lines[way].marks[i]);
        RELEASE(stream, copies->lines[way].stream);
    }
#undef RELEASE
    return status;
}

mo_status mo_copies_get(int device, mo_copies **out, mo_detail *detail)
{
    static mo_copies all[MO_MAX_DEVICES];
    static _Atomic(mo_copies *) ready[MO_MAX_DEVICES];
    static mo_lock lock = MO_LOCK_INIT;
    mo_driver *driver;
    mo_copies *found;
    mo_status status =
        mo_driver_cuda_get(device, &driver, detail); /* refuses a device that is none, and a fork */

    if (status)
        return status;
    found = atomic_load_explicit(&ready[device], memory_order_acquire);
    if (!found) {
        if (mo_forked())
            return mo_forked_refuse("opening a device's copies", detail);
        mo_lock_take(&lock);
        found = atomic_load(&ready[device]);
        if (!found) {
            status = mo_copies_open(driver, &all[device], detail);
            if (!status) {
                found = &all[device];
                atomic_store_explicit(&ready[device], found, memory_order_release);
            }
        }
        mo_lock_give(&lock);
    }
    if (!status)
        *out = found;
    return status;
}

/* ---- a copy ---------------------------------------------------------------------------------------------------------- */

static mo_status await_locked(mo_copies *copies, mo_stream stream, mo_ticket ticket, mo_detail *detail)
{
    uint64_t number;
    const mo_line *line = line_of(copies, ticket, &number);

    MO_ASSERT(mo_lock_held(&copies->lock));
    if (number > line->begun)
        return refuse_unknown(line, ticket, detail);
    if (number <= line->over)
        return MO_OK;
    return copies->driver->stream_wait(copies->driver, stream, line->marks[number % MO_COPY_MARKS], detail);
}

/* All that comes before the copy itself. */
static mo_status order(mo_copies *copies, mo_way way, mo_stream user, mo_ticket after, mo_detail *detail)
{
    mo_driver *driver = copies->driver;
    const mo_line *line = &copies->lines[way];
    uint64_t capture = 0;
    mo_status status = driver->capture_id(driver, user, detail, &capture);

    if (status)
        return status;
    if (capture)
        return mo_fail(detail, MO_UNSUPPORTED, 0,
                       "a stream that is being captured into a graph cannot pass on tensors to be copied: "
                       "leave offloading and prefetching out of the captured region");
    status = driver->event_record(driver, copies->begin, user, detail);
    if (!status)
        status = driver->stream_wait(driver, line->stream, copies->begin, detail);
    if (!status && (after & 1) != (mo_ticket)way)
        status = await_locked(copies, line->stream, after, detail);
    return status;
}

static mo_status queue(mo_copies *copies, mo_way way, const mo_piece *piece, mo_detail *detail)
{
    mo_driver *driver = copies->driver;
    mo_stream stream = copies->lines[way].stream;

    return way == MO_OUT
               ? driver->copy_to_host(driver, stream, piece->host, piece->device, piece->size, detail)
               : driver->copy_to_device(driver, stream, piece->device, piece->host, piece->size, detail);
}

mo_status mo_copy_pieces(mo_copies *copies, mo_way way, mo_stream user, const mo_piece *pieces, size_t count,
                         mo_ticket after, mo_detail *detail, mo_ticket *out)
{
    mo_driver *driver = copies->driver;
    mo_line *line = &copies->lines[way];
    uint64_t bytes = 0;
    size_t queued = 0;
    mo_status status;

    MO_ASSERT(count);
    if (mo_forked())
        return mo_forked_refuse("a copy", detail);
    mo_lock_take(&copies->lock);
    const uint64_t number = line->begun + 1;
    status = order(copies, way, user, after, detail);
    for (; queued < count && !status; queued += !status) {
        status = queue(copies, way, &pieces[queued], detail);
        bytes += pieces[queued].size;
    }
    if (!status)
        status = driver->event_record(driver, line->marks[number % MO_COPY_MARKS], line->stream, detail);
    if (status && queued) { /* nothing would tell when those are over: the one wait in here */
        driver->synchronize(driver, NULL);
    } else if (!status) {
        line->begun = number;
        line->bytes += bytes;
        *out = ticket_of(way, number);
    }
    mo_lock_give(&copies->lock);
    return status;
}

mo_status mo_copy(mo_copies *copies, mo_way way, mo_stream user, mo_address device, void *host, size_t size,
                  mo_ticket after, mo_detail *detail, mo_ticket *out)
{
    const mo_piece piece = {device, host, size};

    return mo_copy_pieces(copies, way, user, &piece, 1, after, detail, out);
}

mo_status mo_copies_await(mo_copies *copies, mo_stream stream, mo_ticket ticket, mo_detail *detail)
{
    mo_status status;

    if (mo_forked())
        return mo_forked_refuse("waiting for a copy", detail);
    mo_lock_take(&copies->lock);
    status = await_locked(copies, stream, ticket, detail);
    mo_lock_give(&copies->lock);
    return status;
}

mo_status mo_copies_over(mo_copies *copies, mo_ticket ticket, mo_detail *detail, bool *out)
{
    mo_driver *driver = copies->driver;
    mo_status status = MO_OK;
    uint64_t number;
    mo_line *line;

    if (mo_forked())
        return mo_forked_refuse("querying a copy", detail);
    mo_lock_take(&copies->lock);
    line = line_of(copies, ticket, &number);
    if (number > line->begun) {
        status = refuse_unknown(line, ticket, detail);
    } else if (number > line->over) {
        status = driver->event_query(driver, line->marks[number % MO_COPY_MARKS], detail);
        if (!status) /* at least this one; the mark may be a later one's */
            line->over = number;
    }
    mo_lock_give(&copies->lock);
    if (status && status != MO_NOT_READY)
        return status;
    *out = !status;
    return MO_OK;
}

mo_status mo_copies_wait(mo_copies *copies, mo_ticket ticket, uint64_t nanoseconds, mo_detail *detail,
                         bool *out)
{
    const uint64_t shortest = 20000, longest = 1000000;
    mo_driver *driver = copies->driver;
    const uint64_t begin = driver->now(driver);
    bool over = false;

    for (uint64_t pause = shortest;; pause = mo_size_min(2 * pause, longest)) {
        mo_status status = mo_copies_over(copies, ticket, detail, &over);
        if (status)
            return status;
        const uint64_t passed = driver->now(driver) - begin;
        if (over || passed >= nanoseconds)
            break;
        driver->pause(driver, mo_size_min(pause, nanoseconds - passed));
    }
    *out = over;
    return MO_OK;
}
