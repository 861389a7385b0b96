#include "driver/model_device_parts.h"

#include <stdlib.h>
#include <string.h>

/* ---- streams -------------------------------------------------------------------------------------------------- */

mo_model_device_stream *mo_model_device_stream_of(mo_model_device *d, mo_stream name)
{
    mo_model_device_stream *s = d->streams;
    while (s && s->name != name)
        s = s->next;
    if (!s) {
        s = mo_model_device_must(calloc(1, sizeof *s));
        s->name = name;
        s->index = d->streams ? d->streams->index + 1 : 0;
        s->next = d->streams;
        d->streams = s;
    }
    return s;
}

static void add_wait(mo_model_device_stream *s, mo_model_device_wait wait)
{
    if (s->first_wait == s->wait_count)
        s->first_wait = s->wait_count = 0;
    if (s->wait_count == s->wait_places) {
        s->wait_places = s->wait_places * 2 + 4;
        s->waits = mo_model_device_must(realloc(s->waits, s->wait_places * sizeof *s->waits));
    }
    s->waits[s->wait_count++] = wait;
}

static size_t complete(mo_model_device_stream *s, size_t n)
{
    const uint64_t start = s->completed;
    const uint64_t end = n < s->submitted - start ? start + n : s->submitted;

    while (s->completed < end) {
        const mo_model_device_wait *w = s->first_wait < s->wait_count ? &s->waits[s->first_wait] : NULL;
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

void mo_model_device_drain(mo_model_device *d)
{
    /* A wait's mark was submitted before the wait, so there is always one that can go on. */
    for (bool moved = true; moved;) {
        moved = false;
        for (mo_model_device_stream *s = d->streams; s; s = s->next)
            moved |= complete(s, SIZE_MAX) > 0;
    }
    for (mo_model_device_stream *s = d->streams; d->watched && s; s = s->next)
        mo_model_device_clock_raise(d->host, s, s->submitted);
}

/* ---- events --------------------------------------------------------------------------------------------------- */

static mo_model_device_block *event_of(mo_model_device *d, const mo_event *event)
{
    const uintptr_t at = (uintptr_t)event;
    mo_model_device_block *e = mo_model_device_find(d, MO_MODEL_DEVICE_EVENT, at, at + 1);
    return e && e->low == at ? e : NULL;
}

static mo_status model_event_create(mo_driver *driver, mo_detail *detail, mo_event **out)
{
    mo_status status = mo_model_device_enter(driver, MO_MODEL_DEVICE_event_create, detail);
    if (status)
        return status;
    *out = (mo_event *)mo_model_device_add(mo_model_device_of(driver), MO_MODEL_DEVICE_EVENT,
                                           (mo_model_device_block){0});
    return mo_model_device_leave(driver, MO_OK);
}

static mo_status model_event_destroy(mo_driver *driver, mo_event *event, mo_detail *detail)
{
    mo_model_device_block *e;
    mo_status status = mo_model_device_enter(driver, MO_MODEL_DEVICE_event_destroy, detail);
    if (status)
        return status;
    e = event_of(mo_model_device_of(driver), event);
    if (!e)
        return mo_model_device_refuse(driver, detail, "event_destroy: no such event");
    mo_model_device_drop(mo_model_device_of(driver), MO_MODEL_DEVICE_EVENT, e);
    return mo_model_device_leave(driver, MO_OK);
}

static mo_status model_event_record(mo_driver *driver, mo_event *event, mo_stream stream, mo_detail *detail)
{
    mo_model_device *d = mo_model_device_of(driver);
    mo_model_device_block *e;
    mo_status status = mo_model_device_enter(driver, MO_MODEL_DEVICE_event_record, detail);
    if (status)
        return status;
    e = event_of(d, event);
    if (!e)
        return mo_model_device_refuse(driver, detail, "event_record: no such event");
    e->on = mo_model_device_stream_of(d, stream);
    mo_model_device_uses_order(d, e->on, "event_record");
    e->mark = e->on->submitted;
    if (d->watched) {
        e->clock.count = 0;
        mo_model_device_clock_join(&e->clock, &e->on->behind);
        mo_model_device_clock_raise(&e->clock, e->on, e->mark);
    }
    return mo_model_device_leave(driver, MO_OK);
}

static mo_status model_event_query(mo_driver *driver, mo_event *event, mo_detail *detail)
{
    mo_model_device *d = mo_model_device_of(driver);
    mo_model_device_block *e;
    mo_status status = mo_model_device_enter(driver, MO_MODEL_DEVICE_event_query, detail);
    if (status)
        return status;
    e = event_of(d, event);
    if (!e)
        return mo_model_device_refuse(driver, detail, "event_query: no such event");
    if (e->on && e->on->completed < e->mark)
        return mo_model_device_leave(driver, MO_NOT_READY);
    if (d->watched)
        mo_model_device_clock_join(d->host, &e->clock);
    return mo_model_device_leave(driver, MO_OK);
}

static mo_status model_stream_wait(mo_driver *driver, mo_stream stream, mo_event *event, mo_detail *detail)
{
    mo_model_device *d = mo_model_device_of(driver);
    mo_model_device_block *e;
    mo_status status = mo_model_device_enter(driver, MO_MODEL_DEVICE_stream_wait, detail);
    if (status)
        return status;
    e = event_of(d, event);
    if (!e)
        return mo_model_device_refuse(driver, detail, "stream_wait: no such event");
    if (e->on) {
        mo_model_device_stream *s = mo_model_device_stream_of(d, stream);
        mo_model_device_uses_order(d, s, "stream_wait");
        add_wait(s, (mo_model_device_wait){s->submitted, e->on, e->mark});
        s->submitted++; /* the wait is an operation of its own */
        if (d->watched)
            mo_model_device_clock_join(&s->behind, &e->clock);
    }
    return mo_model_device_leave(driver, MO_OK);
}

static mo_status model_capture_id(mo_driver *driver, mo_stream stream, mo_detail *detail, uint64_t *out)
{
    mo_status status = mo_model_device_enter(driver, MO_MODEL_DEVICE_capture_id, detail);
    if (status)
        return status;
    *out = mo_model_device_stream_of(mo_model_device_of(driver), stream)->capture;
    return mo_model_device_leave(driver, MO_OK);
}

static mo_status model_synchronize(mo_driver *driver, mo_detail *detail)
{
    mo_status status = mo_model_device_enter(driver, MO_MODEL_DEVICE_synchronize, detail);
    if (status)
        return status;
    mo_model_device_drain(mo_model_device_of(driver));
    return mo_model_device_leave(driver, MO_OK);
}

/* ---- time ----------------------------------------------------------------------------------------------------- */

static uint64_t model_now(mo_driver *driver)
{
    mo_lock_take(&mo_model_device_of(driver)->lock);
    uint64_t now = mo_model_device_of(driver)->clock;
    mo_lock_give(&mo_model_device_of(driver)->lock);
    return now;
}

static void model_pause(mo_driver *driver, uint64_t duration)
{
    mo_model_device *d = mo_model_device_of(driver);
    mo_lock_take(&d->lock);
    d->clock += duration;
    for (mo_model_device_stream *s = d->streams; s && d->work_per_pause; s = s->next)
        complete(s, d->work_per_pause);
    mo_lock_give(&d->lock);
}

/* ---- the test's side ------------------------------------------------------------------------------------------- */

void mo_model_device_order_fill(mo_driver *table)
{
    table->event_create = model_event_create;
    table->event_destroy = model_event_destroy;
    table->event_record = model_event_record;
    table->event_query = model_event_query;
    table->stream_wait = model_stream_wait;
    table->capture_id = model_capture_id;
    table->synchronize = model_synchronize;
    table->now = model_now;
    table->pause = model_pause;
}

void mo_model_device_order_close(mo_model_device *device)
{
    for (mo_model_device_stream *s = device->streams, *next; s; s = next) {
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

void mo_model_device_submit(mo_model_device *device, mo_stream stream)
{
    mo_lock_take(&device->lock);
    mo_model_device_stream_of(device, stream)->submitted++;
    mo_lock_give(&device->lock);
}

size_t mo_model_device_complete(mo_model_device *device, mo_stream stream, size_t n)
{
    mo_lock_take(&device->lock);
    size_t done = complete(mo_model_device_stream_of(device, stream), n);
    mo_lock_give(&device->lock);
    return done;
}

void mo_model_device_progress(mo_model_device *device, mo_stream stream, uint64_t *queued, uint64_t *over)
{
    mo_lock_take(&device->lock);
    const mo_model_device_stream *s = mo_model_device_stream_of(device, stream);
    *queued = s->submitted;
    *over = s->completed;
    mo_lock_give(&device->lock);
}

void mo_model_device_capture(mo_model_device *device, mo_stream stream, uint64_t id)
{
    mo_lock_take(&device->lock);
    mo_model_device_stream_of(device, stream)->capture = id;
    mo_lock_give(&device->lock);
}
