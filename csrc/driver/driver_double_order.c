#include "driver/driver_double_parts.h"

#include <stdlib.h>
#include <string.h>

/* ---- streams -------------------------------------------------------------------------------------------------- */

mo_double_stream *mo_double_stream_of(mo_double *d, mo_stream name)
{
    mo_double_stream *s = d->streams;
    while (s && s->name != name)
        s = s->next;
    if (!s) {
        s = mo_double_must(calloc(1, sizeof *s));
        s->name = name;
        s->index = d->streams ? d->streams->index + 1 : 0;
        s->next = d->streams;
        d->streams = s;
    }
    return s;
}

static void add_wait(mo_double_stream *s, mo_double_wait wait)
{
    if (s->first_wait == s->wait_count)
        s->first_wait = s->wait_count = 0;
    if (s->wait_count == s->wait_places) {
        s->wait_places = s->wait_places * 2 + 4;
        s->waits = mo_double_must(realloc(s->waits, s->wait_places * sizeof *s->waits));
    }
    s->waits[s->wait_count++] = wait;
}

static size_t complete(mo_double_stream *s, size_t n)
{
    const uint64_t start = s->completed;
    const uint64_t end = n < s->submitted - start ? start + n : s->submitted;

    while (s->completed < end) {
        const mo_double_wait *w = s->first_wait < s->wait_count ? &s->waits[s->first_wait] : NULL;
        if (w && w->at == s->completed) {
            if (w->on->completed < w->mark)
                break;
            s->first_wait++;
            s->completed++;
        } else {
            s->completed = w && w->at < end ? w->at : end;
        }
    }
    return s->completed - start;
}

void mo_double_drain(mo_double *d)
{
    /* A wait's mark was submitted before the wait, so there is always one that can go on. */
    for (bool moved = true; moved;) {
        moved = false;
        for (mo_double_stream *s = d->streams; s; s = s->next)
            moved |= complete(s, SIZE_MAX) > 0;
    }
    for (mo_double_stream *s = d->streams; d->watched && s; s = s->next)
        mo_double_clock_raise(d->host, s, s->submitted);
}

/* ---- events --------------------------------------------------------------------------------------------------- */

static mo_double_block *event_of(mo_double *d, const mo_event *event)
{
    const uintptr_t at = (uintptr_t)event;
    mo_double_block *e = mo_double_find(d, MO_DOUBLE_EVENT, at, at + 1);
    return e && e->low == at ? e : NULL;
}

static mo_status double_event_create(mo_driver *driver, mo_detail *detail, mo_event **out)
{
    mo_status status = mo_double_enter(driver, MO_DOUBLE_event_create, detail);
    if (status)
        return status;
    *out = (mo_event *)mo_double_add(mo_double_of(driver), MO_DOUBLE_EVENT, (mo_double_block){0});
    return mo_double_leave(driver, MO_OK);
}

static mo_status double_event_destroy(mo_driver *driver, mo_event *event, mo_detail *detail)
{
    mo_double_block *e;
    mo_status status = mo_double_enter(driver, MO_DOUBLE_event_destroy, detail);
    if (status)
        return status;
    e = event_of(mo_double_of(driver), event);
    if (!e)
        return mo_double_refuse(driver, detail, "event_destroy: no such event");
    mo_double_drop(mo_double_of(driver), MO_DOUBLE_EVENT, e);
    return mo_double_leave(driver, MO_OK);
}

static mo_status double_event_record(mo_driver *driver, mo_event *event, mo_stream stream, mo_detail *detail)
{
    mo_double *d = mo_double_of(driver);
    mo_double_block *e;
    mo_status status = mo_double_enter(driver, MO_DOUBLE_event_record, detail);
    if (status)
        return status;
    e = event_of(d, event);
    if (!e)
        return mo_double_refuse(driver, detail, "event_record: no such event");
    e->on = mo_double_stream_of(d, stream);
    mo_double_uses_order(d, e->on, "event_record");
    e->mark = e->on->submitted;
    if (d->watched) {
        e->clock.count = 0;
        mo_double_clock_join(&e->clock, &e->on->behind);
        mo_double_clock_raise(&e->clock, e->on, e->mark);
    }
    return mo_double_leave(driver, MO_OK);
}

static mo_status double_event_query(mo_driver *driver, mo_event *event, mo_detail *detail)
{
    mo_double *d = mo_double_of(driver);
    mo_double_block *e;
    mo_status status = mo_double_enter(driver, MO_DOUBLE_event_query, detail);
    if (status)
        return status;
    e = event_of(d, event);
    if (!e)
        return mo_double_refuse(driver, detail, "event_query: no such event");
    if (e->on && e->on->completed < e->mark)
        return mo_double_leave(driver, MO_NOT_READY);
    if (d->watched)
        mo_double_clock_join(d->host, &e->clock);
    return mo_double_leave(driver, MO_OK);
}

static mo_status double_stream_wait(mo_driver *driver, mo_stream stream, mo_event *event, mo_detail *detail)
{
    mo_double *d = mo_double_of(driver);
    mo_double_block *e;
    mo_status status = mo_double_enter(driver, MO_DOUBLE_stream_wait, detail);
    if (status)
        return status;
    e = event_of(d, event);
    if (!e)
        return mo_double_refuse(driver, detail, "stream_wait: no such event");
    if (e->on) {
        mo_double_stream *s = mo_double_stream_of(d, stream);
        mo_double_uses_order(d, s, "stream_wait");
        add_wait(s, (mo_double_wait){s->submitted, e->on, e->mark});
        s->submitted++; /* the wait is an operation of its own */
        if (d->watched)
            mo_double_clock_join(&s->behind, &e->clock);
    }
    return mo_double_leave(driver, MO_OK);
}

static mo_status double_capture_id(mo_driver *driver, mo_stream stream, mo_detail *detail, uint64_t *out)
{
    mo_status status = mo_double_enter(driver, MO_DOUBLE_capture_id, detail);
    if (status)
        return status;
    *out = mo_double_stream_of(mo_double_of(driver), stream)->capture;
    return mo_double_leave(driver, MO_OK);
}

static mo_status double_synchronize(mo_driver *driver, mo_detail *detail)
{
    mo_status status = mo_double_enter(driver, MO_DOUBLE_synchronize, detail);
    if (status)
        return status;
    mo_double_drain(mo_double_of(driver));
    return mo_double_leave(driver, MO_OK);
}

/* ---- time ----------------------------------------------------------------------------------------------------- */

static uint64_t double_now(mo_driver *driver)
{
    mo_lock_take(&mo_double_of(driver)->lock);
    uint64_t now = mo_double_of(driver)->clock;
    mo_lock_give(&mo_double_of(driver)->lock);
    return now;
}

static void double_pause(mo_driver *driver, uint64_t duration)
{
    mo_double *d = mo_double_of(driver);
    mo_lock_take(&d->lock);
    d->clock += duration;
    for (mo_double_stream *s = d->streams; s && d->work_per_pause; s = s->next)
        complete(s, d->work_per_pause);
    mo_lock_give(&d->lock);
}

/* ---- the test's side ------------------------------------------------------------------------------------------- */

void mo_double_order_fill(mo_driver *table)
{
    table->event_create = double_event_create;
    table->event_destroy = double_event_destroy;
    table->event_record = double_event_record;
    table->event_query = double_event_query;
    table->stream_wait = double_stream_wait;
    table->capture_id = double_capture_id;
    table->synchronize = double_synchronize;
    table->now = double_now;
    table->pause = double_pause;
}

void mo_double_order_close(mo_double *device)
{
    for (mo_double_stream *s = device->streams, *next; s; s = next) {
        next = s->next;
        free(s->waits);
        free(s->behind.over);
        free(s);
    }
    device->streams = NULL;
    if (device->host)
        free(device->host->over);
    free(device->host);
    device->host = NULL;
    device->watched = false;
}

void mo_double_submit(mo_double *device, mo_stream stream)
{
    mo_lock_take(&device->lock);
    mo_double_stream_of(device, stream)->submitted++;
    mo_lock_give(&device->lock);
}

size_t mo_double_complete(mo_double *device, mo_stream stream, size_t n)
{
    mo_lock_take(&device->lock);
    size_t done = complete(mo_double_stream_of(device, stream), n);
    mo_lock_give(&device->lock);
    return done;
}

void mo_double_progress(mo_double *device, mo_stream stream, uint64_t *queued, uint64_t *over)
{
    mo_lock_take(&device->lock);
    const mo_double_stream *s = mo_double_stream_of(device, stream);
    *queued = s->submitted;
    *over = s->completed;
    mo_lock_give(&device->lock);
}

void mo_double_capture(mo_double *device, mo_stream stream, uint64_t id)
{
    mo_lock_take(&device->lock);
    mo_double_stream_of(device, stream)->capture = id;
    mo_lock_give(&device->lock);
}
