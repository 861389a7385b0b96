#include "alloc/order.h"

#include <string.h>

#define POLL_NS 20000 /* between two looks at an event while the host waits */

void mo_order_close(mo_order *order)
{
    for (unsigned t = 0; t < order->count; t++)
        for (unsigned i = 0; i < order->streams[t].mark_count; i++)
            order->driver->event_destroy(order->driver, order->streams[t].marks[i].event, NULL);
    for (unsigned i = 0; i < order->spare_count; i++)
        order->driver->event_destroy(order->driver, order->spare[i], NULL);
    order->count = order->spare_count = 0;
}

/* ---- numbers ------------------------------------------------------------------------------------------- */

static bool idle(const mo_stream_state *state)
{
    return !state->users && state->done >= state->last;
}

/* Memory of a reused number may still name it, with a tick that `done` of the new stream must cover: so a number keeps
 * its done, and only what was recorded for it is forgotten. */
static void renumber(mo_order *order, unsigned t, mo_stream stream)
{
    mo_stream_state *state = &order->streams[t];

    state->handle = stream;
    memset(state->behind, 0, sizeof state->behind);
    for (unsigned s = 0; s < order->count; s++)
        order->streams[s].behind[t] = 0;
}

mo_status mo_order_find(mo_order *order, mo_stream stream, mo_detail *detail, unsigned *out)
{
    for (unsigned t = 0; t < order->count; t++)
        if (order->streams[t].handle == stream) {
            *out = order->recent = t;
            return MO_OK;
        }
    if (order->count < MO_STREAMS) {
        order->streams[order->count] = (mo_stream_state){.handle = stream};
        *out = order->recent = order->count++;
        return MO_OK;
    }
    for (int synchronized = 0; synchronized < 2; synchronized++) {
        for (unsigned t = 0; t < MO_STREAMS; t++)
            if (idle(&order->streams[t])) {
                renumber(order, t, stream);
                *out = order->recent = t;
                return MO_OK;
            }
        if (!synchronized) {
            mo_status status = mo_order_synchronize(order, detail);

            if (status)
                return status;
        }
    }
    return mo_fail(detail, MO_UNSUPPORTED, 0,
                   "%d streams have live memory, and memopt's allocator tells no more of them apart: let "
                   "some streams share their work",
                   MO_STREAMS);
}

/* ---- events -------------------------------------------------------------------------------------------- */

static bool is_captured(mo_order *order, unsigned t)
{
    uint64_t id = 0;

    /* A stream that cannot be asked (destroyed, or the driver is gone) is taken for captured: left alone. */
    return order->driver->capture_id(order->driver, order->streams[t].handle, NULL, &id) != MO_OK || id;
}

static void forget_mark(mo_order *order, mo_stream_state *state, unsigned i)
{
    mo_event *event = state->marks[i].event;

    state->mark_count--;
    memmove(state->marks + i, state->marks + i + 1, (state->mark_count - i) * sizeof *state->marks);
    order->spare[order->spare_count++] = event;
}

/* A mark of t at the present tick. The newest gives way where there is no room: its event moves on. */
static mo_status mark_now(mo_order *order, unsigned t, mo_detail *detail)
{
    mo_stream_state *state = &order->streams[t];
    mo_event *event = NULL;
    bool reused = state->mark_count == MO_MARKS;
    mo_status status = MO_OK;

    if (reused)
        event = state->marks[MO_MARKS - 1].event;
    else if (order->spare_count)
        event = order->spare[--order->spare_count];
    else
        status = order->driver->event_create(order->driver, detail, &event);
    if (status)
        return status;
    status = order->driver->event_record(order->driver, event, state->handle, detail);
    if (status) {
        if (!reused)
            order->spare[order->spare_count++] = event;
        return status;
    }
    order->recorded++;
    if (reused)
        state->mark_count--;
    state->marks[state->mark_count++] = (mo_mark){order->tick, event};
    return MO_OK;
}

mo_status mo_order_mark(mo_order *order, uint64_t streams, uint64_t tick, mo_detail *detail)
{
    for (; streams; streams &= streams - 1) {
        unsigned t = (unsigned)__builtin_ctzll(streams);
        mo_stream_state *state = &order->streams[t];
        mo_status status;

        if (state->done >= tick || state->mark_count == MO_MARKS ||
            (state->mark_count && state->marks[state->mark_count - 1].tick >= tick) || is_captured(order, t))
            continue;
        status = mark_now(order, t, detail);
        if (status)
            return status;
    }
    return MO_OK;
}

void mo_order_poll(mo_order *order)
{
    for (unsigned t = 0; t < order->count; t++) {
        mo_stream_state *state = &order->streams[t];

        while (state->mark_count &&
               order->driver->event_query(order->driver, state->marks[0].event, NULL) == MO_OK) {
            state->done = state->marks[0].tick;
            forget_mark(order, state, 0);
        }
    }
}

void mo_order_probe(mo_order *order)
{
    mo_order_poll(order);
    for (unsigned t = 0; t < order->count; t++) {
        const mo_stream_state *state = &order->streams[t];
        const uint64_t newest = state->mark_count ? state->marks[state->mark_count - 1].tick : state->done;

        if (state->last > newest && state->mark_count < MO_PROBES &&
            (order->tick - newest) * MO_PROBES >= order->tick - state->done)
            mo_order_mark(order, 1ull << t, order->tick,
                          NULL); /* what it fails to tell now it may tell later */
    }
    mo_order_poll(order); /* an idle device has done it all */
}

/* ---- one stream behind others ---------------------------------------------------------------------------- */

uint64_t mo_order_missing(const mo_order *order, unsigned s, bool captured, mo_use use)
{
    uint64_t missing;

    mo_order_settle(order, &use);
    if (captured)
        return use.streams;
    missing = use.streams & ~(1ull << s);
    for (uint64_t rest = missing; rest; rest &= rest - 1) {
        unsigned t = (unsigned)__builtin_ctzll(rest);

        if (order->streams[s].behind[t] >= mo_order_tick(order, t, use))
            missing &= ~(1ull << t);
    }
    return missing;
}

/* Makes s wait for the first mark of t at tick or later, or for a new one. Only behind a new one is s also behind all that
 * t is behind now: what t waited for after an older mark was made, that mark does not stand for. */
static mo_status wait_for(mo_order *order, unsigned s, unsigned t, uint64_t tick, mo_detail *detail)
{
    mo_stream_state *waiter = &order->streams[s], *other = &order->streams[t];
    unsigned i = 0;
    bool made = false;
    mo_status status = MO_OK;

    while (i < other->mark_count && other->marks[i].tick < tick)
        i++;
    if (i == other->mark_count) {
        status = mark_now(order, t, detail);
        i = other->mark_count - 1;
        made = true;
    }
    if (!status)
        status = order->driver->stream_wait(order->driver, waiter->handle, other->marks[i].event, detail);
    if (status)
        return status;
    order->waited++;
    if (waiter->behind[t] < other->marks[i].tick)
        waiter->behind[t] = other->marks[i].tick;
    if (made)
        for (unsigned u = 0; u < order->count; u++)
            if (waiter->behind[u] < other->behind[u])
                waiter->behind[u] = other->behind[u];
    return MO_OK;
}

mo_status mo_order_join(mo_order *order, unsigned s, bool captured, mo_use use, mo_detail *detail)
{
    uint64_t missing = mo_order_missing(order, s, captured, use);

    if (!missing)
        return MO_OK;
    if (captured || is_captured(order, s))
        return mo_fail(detail, MO_NOT_READY, 0, "a stream under capture cannot wait for another");
    for (uint64_t rest = missing; rest; rest &= rest - 1)
        if (is_captured(order, (unsigned)__builtin_ctzll(rest)))
            return mo_fail(detail, MO_NOT_READY, 0, "a stream under capture cannot be waited for");
    for (uint64_t rest = missing; rest; rest &= rest - 1) {
        mo_status status = wait_for(order, s, (unsigned)__builtin_ctzll(rest), use.tick, detail);

        if (status)
            return status;
    }
    return MO_OK;
}

/* ---- the host waits -------------------------------------------------------------------------------------- */

mo_status mo_order_wait(mo_order *order, mo_use use, uint64_t nanoseconds, mo_detail *detail)
{
    mo_driver *driver = order->driver;
    uint64_t deadline = driver->now(driver) + nanoseconds;
    mo_status status;

    mo_order_poll(order);
    if (mo_order_over(order, use))
        return MO_OK;
    status = mo_order_mark(order, use.streams, use.tick, detail);
    if (status)
        return status;
    order->synchronized++;
    for (;;) {
        mo_order_poll(order);
        if (mo_order_over(order, use))
            return MO_OK;
        if (driver->now(driver) >= deadline)
            return mo_fail(detail, MO_NOT_READY, 0, "work that uses the memory has not ended");
        driver->pause(driver, POLL_NS);
        /* A stream whose marks were full, and all older than the use, has room once they are over. */
        status = mo_order_mark(order, use.streams, use.tick, detail);
        if (status)
            return status;
    }
}

mo_status mo_order_synchronize(mo_order *order, mo_detail *detail)
{
    mo_status status = order->driver->synchronize(order->driver, detail);

    if (status)
        return status;
    order->synchronized++;
    for (unsigned t = 0; t < order->count; t++) {
        while (order->streams[t].mark_count)
            forget_mark(order, &order->streams[t], 0);
        order->streams[t].done = order->tick;
    }
    return MO_OK;
}
