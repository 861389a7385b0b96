#include "alloc/stream_order.h"

#include <string.h>

void mo_stream_order_close(mo_stream_order *order)
{
    for (unsigned t = 0; t < order->count; t++)
        for (unsigned i = 0; i < order->streams[t].mark_count; i++)
            order->driver->event_destroy(order->driver, order->streams[t].marks[i].event, NULL);
    for (unsigned i = 0; i < order->spare_count; i++)
        order->driver->event_destroy(order->driver, order->spare[i], NULL);
    order->count = order->spare_count = 0;
}

/* ---- numbers ------------------------------------------------------------------------------------------- */

static bool borrowed(const mo_stream_order *order, unsigned t)
{
    return order->borrowed >> t & 1;
}

/* Stream t is named: it may have been found to last since. */
static mo_status named(mo_stream_order *order, unsigned t, unsigned *out)
{
    const bool lasts = !order->lasts || order->lasts(order->driver->device, order->streams[t].handle);

    order->borrowed = (order->borrowed & ~(1ull << t)) | (uint64_t)!lasts << t;
    *out = order->recent = t;
    return MO_OK;
}

static bool idle(const mo_stream_state *state)
{
    return !state->users && state->done >= state->last;
}

/* Memory of a reused number may still name it, with a tick that `done` of the new stream must cover: so a number keeps
 * its done, and only what was recorded for it is forgotten. */
static void renumber(mo_stream_order *order, unsigned t, mo_stream stream)
{
    mo_stream_state *state = &order->streams[t];

    state->handle = stream;
    memset(state->behind, 0, sizeof state->behind);
    for (unsigned s = 0; s < order->count; s++)
        order->streams[s].behind[t] = 0;
}

mo_status mo_stream_order_find(mo_stream_order *order, mo_stream stream, mo_detail *detail, unsigned *out)
{
    bool unused = false;

    for (unsigned t = 0; t < order->count; t++)
        if (order->streams[t].handle == stream) {
            *out = order->recent = t;
            return borrowed(order, t) ? named(order, t, out) : MO_OK;
        }
    if (order->count < MO_STREAMS) {
        order->streams[order->count] = (mo_stream_state){.handle = stream};
        return named(order, order->count++, out);
    }
    for (unsigned t = 0; t < MO_STREAMS; t++) {
        if (idle(&order->streams[t])) {
            renumber(order, t, stream);
            return named(order, t, out);
        }
        unused |= !order->streams[t].users;
    }
    if (unused)
        return mo_fail(detail, MO_NOT_READY, 0, "a stream whose number is needed has unfinished work");
    return mo_fail(detail, MO_UNSUPPORTED, 0,
                   "%d streams have live memory, the most that memopt's allocator can distinguish: use "
                   "fewer streams",
                   MO_STREAMS);
}

/* ---- events -------------------------------------------------------------------------------------------- */

typedef enum capture { NOT_CAPTURED, CAPTURED, CANNOT_ASK /* the driver is gone */ } capture;

static capture capture_of(mo_stream_order *order, unsigned t)
{
    uint64_t id = 0;

    if (order->driver->capture_id(order->driver, order->streams[t].handle, NULL, &id))
        return CANNOT_ASK;
    return id ? CAPTURED : NOT_CAPTURED;
}

/* A stream that cannot be asked is left alone like one under capture. */
static bool is_captured(mo_stream_order *order, unsigned t)
{
    return capture_of(order, t) != NOT_CAPTURED;
}

bool mo_stream_order_capturing(mo_stream_order *order)
{
    for (unsigned t = 0; t < order->count; t++)
        if (!borrowed(order, t) && capture_of(order, t) == CAPTURED)
            return true;
    return false;
}

static void forget_mark(mo_stream_order *order, mo_stream_state *state, unsigned i)
{
    mo_event *event = state->marks[i].event;

    state->mark_count--;
    memmove(state->marks + i, state->marks + i + 1, (state->mark_count - i) * sizeof *state->marks);
    order->spare[order->spare_count++] = event;
}

/* A mark of t at the present tick. The newest gives way where there is no room: its event moves on. */
static mo_status mark_now(mo_stream_order *order, unsigned t, mo_detail *detail)
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

mo_status mo_stream_order_mark(mo_stream_order *order, uint64_t streams, uint64_t tick, mo_detail *detail)
{
    for (; streams; streams &= streams - 1) {
        unsigned t = (unsigned)__builtin_ctzll(streams);
        mo_stream_state *state = &order->streams[t];
        mo_status status;

        if (state->done >= tick || (state->mark_count == MO_MARKS && !borrowed(order, t)) ||
            (state->mark_count && state->marks[state->mark_count - 1].tick >= tick) || is_captured(order, t))
            continue;
        status = mark_now(order, t, detail);
        if (status)
            return status;
    }
    return MO_OK;
}

static mo_status poll(mo_stream_order *order, mo_detail *detail)
{
    mo_status failed = MO_OK;

    for (unsigned t = 0; t < order->count; t++) {
        mo_stream_state *state = &order->streams[t];
        mo_status status = MO_OK;

        while (state->mark_count && !status) {
            status = order->driver->event_query(order->driver, state->marks[0].event, failed ? NULL : detail);
            if (!status) {
                state->done = state->marks[0].tick;
                forget_mark(order, state, 0);
            }
        }
        if (status && status != MO_NOT_READY && !failed)
            failed = status;
    }
    return failed;
}

void mo_stream_order_poll(mo_stream_order *order)
{
    poll(order, NULL); /* what it fails to tell now it may tell later */
}

void mo_stream_order_probe(mo_stream_order *order, unsigned s)
{
    mo_stream_order_poll(order);
    for (unsigned t = 0; t < order->count; t++) {
        const mo_stream_state *state = &order->streams[t];
        const uint64_t newest = state->mark_count ? state->marks[state->mark_count - 1].tick : state->done;

        if ((t == s || !borrowed(order, t)) && state->last > newest && state->mark_count < MO_PROBES &&
            (order->tick - newest) * MO_PROBES >= order->tick - state->done)
            mo_stream_order_mark(order, 1ull << t, order->tick,
                                 NULL); /* what it fails to tell now it may tell later */
    }
    mo_stream_order_poll(order); /* an idle device has done it all */
}

/* ---- one stream behind others ---------------------------------------------------------------------------- */

uint64_t mo_stream_order_missing(const mo_stream_order *order, unsigned s, bool captured, mo_last_use use)
{
    uint64_t missing;

    mo_stream_order_settle(order, &use);
    if (captured)
        return use.streams;
    missing = use.streams & ~(1ull << s);
    for (uint64_t rest = missing; rest; rest &= rest - 1) {
        unsigned t = (unsigned)__builtin_ctzll(rest);

        if (order->streams[s].behind[t] >= mo_stream_order_tick(order, t, use))
            missing &= ~(1ull << t);
    }
    return missing;
}

/* Whether there is a mark of t that its part of this use is over by. */
static bool marked(const mo_stream_order *order, unsigned t, mo_last_use use)
{
    const mo_stream_state *state = &order->streams[t];

    return state->mark_count &&
           state->marks[state->mark_count - 1].tick >= mo_stream_order_tick(order, t, use);
}

/* Makes s wait for the first mark of t at tick or later, or for a new one. Only behind a new one is s also behind all that
 * t is behind now: what t waited for after an older mark was made, that mark does not stand for. */
static mo_status wait_for(mo_stream_order *order, unsigned s, unsigned t, uint64_t tick, mo_detail *detail)
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

mo_status mo_stream_order_join(mo_stream_order *order, unsigned s, bool captured, mo_last_use use,
                               mo_detail *detail)
{
    uint64_t missing = mo_stream_order_missing(order, s, captured, use);

    if (!missing)
        return MO_OK;
    if (captured || is_captured(order, s))
        return mo_fail(detail, MO_NOT_READY, 0, "a stream that is being captured cannot wait for another");
    for (uint64_t rest = missing; rest; rest &= rest - 1) {
        const unsigned t = (unsigned)__builtin_ctzll(rest);

        if (borrowed(order, t) ? !marked(order, t, use) : is_captured(order, t))
            return mo_fail(detail, MO_NOT_READY, 0,
                           "no stream can wait for a stream that is being captured or may be gone");
    }
    for (uint64_t rest = missing; rest; rest &= rest - 1) {
        const unsigned t = (unsigned)__builtin_ctzll(rest);
        mo_status status = wait_for(order, s, t, mo_stream_order_tick(order, t, use), detail);

        if (status)
            return status;
    }
    return MO_OK;
}

/* ---- the host waits -------------------------------------------------------------------------------------- */

mo_last_use mo_stream_order_pending(const mo_stream_order *order)
{
    mo_last_use use = {0, order->tick};

    for (unsigned t = 0; t < order->count; t++)
        if (order->streams[t].last > order->streams[t].done)
            use.streams |= 1ull << t;
    return use;
}

/* Sees to it that there is a mark to wait for. MO_NOT_READY: there is, or there will be, once one of many older ones is
 * over. */
static mo_status mark_for(mo_stream_order *order, unsigned t, mo_last_use *use, mo_detail *detail)
{
    mo_status status;

    if (order->streams[t].mark_count == MO_MARKS || marked(order, t, *use))
        return MO_NOT_READY;
    if (borrowed(order, t))
        return MO_OK;
    switch (capture_of(order, t)) {
    case NOT_CAPTURED:
        status = mark_now(order, t, detail);
        return status ? status : MO_NOT_READY;
    case CAPTURED:
        use->streams &= ~(1ull << t);
        return MO_OK;
    default:
        return MO_OK;
    }
}

mo_status mo_stream_order_await(mo_stream_order *order, mo_last_use *use, mo_detail *detail)
{
    uint64_t awaited = 0;
    mo_status status = poll(order, detail);

    mo_stream_order_settle(order, use);
    for (uint64_t rest = use->streams; rest && !status; rest &= rest - 1) {
        const unsigned t = (unsigned)__builtin_ctzll(rest);

        status = mark_for(order, t, use, detail);
        if (status == MO_NOT_READY) {
            awaited |= 1ull << t;
            status = MO_OK;
        }
    }
    if (!status && awaited)
        status = poll(order, detail); /* an idle device has done it all */
    mo_stream_order_settle(order, use);
    return status ? status : use->streams & awaited ? MO_NOT_READY : MO_OK;
}

void mo_stream_order_synchronized(mo_stream_order *order, uint64_t tick)
{
    for (unsigned t = 0; t < order->count; t++) {
        mo_stream_state *state = &order->streams[t];

        while (state->mark_count && state->marks[0].tick <= tick)
            forget_mark(order, state, 0);
        if (state->done < tick)
            state->done = tick;
    }
}
