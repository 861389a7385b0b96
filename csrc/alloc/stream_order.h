/* The order of work on streams, as far as a pool knows it.
 *
 * Time is the pool's own tick, which grows with every free. What may still be using a piece of memory is a mo_last_use: a set
 * of streams and the tick of the last of their frees. Merged memory has the union of the sets and the later tick.
 *
 *     stream t is over at tick x      <=>  done[t] >= x            the host has seen an event of t, recorded at x or later
 *     stream s is behind t at tick x  <=>  behind[s][t] >= x       s was made to wait for such an event
 *     s may have memory of use u      <=>  for each t of u, t == s, or t is over, or s is behind t, at u.tick or, where
 *                                          that is earlier, at t's last use: a union's tick is another stream's, maybe
 *
 * Nothing is recorded before it is needed: an event marks all that is queued on its stream, so one recorded late says
 * more than was asked, never less. One stream by itself needs no event at all.
 *
 * A stream that is being captured into a graph neither records nor waits, and what a graph captures runs at every
 * replay, after whatever: for it only memory whose every use is over will do (`captured`).
 *
 * A stream *lasts* if it is never destroyed, as torch's own do. Any other is *borrowed*: it may be destroyed at any time, also
 * before memory that was used on it is freed, and CUDA follows a handle wherever it points. So the driver is given a borrowed
 * stream's handle only in a call of the pool that names the stream (a request for it, record_stream) and, as torch's own
 * allocator does, in the free of memory that recorded it. What its other uses left is over when the whole device is:
 *
 *     driver given handle of t  =>  t lasts, or t is the stream of the request, or t was recorded and this is the free
 *
 * Streams get numbers below MO_STREAMS as they appear; a number whose stream has no memory any more and is over goes to
 * the next stream that comes. Handles are never dereferenced. Nothing here waits: whoever does gives the pool's lock away
 * meanwhile (pool_wait.c). No locks: the pool's. */
#ifndef MO_STREAM_ORDER_H
#define MO_STREAM_ORDER_H

#include "driver/driver.h"

#define MO_STREAMS 64 /* bits of mo_last_use.streams */
#define MO_MARKS   8  /* events of a stream that are recorded and not yet seen over */
#define MO_PROBES  4  /* of them at most for mo_stream_order_probe */
/* An event is made only where none is spare, for a stream that has room for a mark: there are never more. */
#define MO_EVENTS (MO_STREAMS * MO_MARKS)

typedef struct mo_last_use {
    uint64_t streams; /* bit i: the stream numbered i */
    uint64_t tick;
} mo_last_use;

typedef struct mo_mark {
    uint64_t tick;
    mo_event *event;
} mo_mark;

typedef struct mo_stream_state {
    mo_stream handle;
    uint64_t done;
    uint64_t behind[MO_STREAMS];
    uint64_t last;           /* tick of its last use, so that its number can be given away */
    uint64_t users;          /* live blocks that belong to it or are used by it */
    mo_mark marks[MO_MARKS]; /* by ascending tick */
    unsigned mark_count;
} mo_stream_state;

typedef struct mo_stream_order {
    mo_driver *driver;
    uint64_t tick;
    unsigned count;
    unsigned recent;   /* the number asked for last */
    uint64_t borrowed; /* bit t: the stream numbered t does not last */
    /* Whether a stream lasts: asked when one is named that is not known to. NULL: all do. */
    bool (*lasts)(int device, mo_stream stream);
    mo_stream_state streams[MO_STREAMS];
    mo_event *spare[MO_EVENTS]; /* not in use, kept until the close: none is destroyed while that may fail */
    unsigned spare_count;
    uint64_t recorded, waited,
        synchronized; /* counts of events, stream waits and waits of the host (pool_wait.c) */
} mo_stream_order;

static inline mo_last_use mo_last_use_union(mo_last_use a, mo_last_use b)
{
    return (mo_last_use){a.streams | b.streams, a.tick > b.tick ? a.tick : b.tick};
}

/* Of two that both cover what a piece of memory was used by, what each leaves out need not be waited for. */
static inline mo_last_use mo_last_use_of_both(mo_last_use a, mo_last_use b)
{
    return (mo_last_use){a.streams & b.streams, a.tick < b.tick ? a.tick : b.tick};
}

/* Destroys the events. */
void mo_stream_order_close(mo_stream_order *order);

/* The rare half of mo_stream_order_number, which is inline: every request passes through it. */
mo_status mo_stream_order_find(mo_stream_order *order, mo_stream stream, mo_detail *detail, unsigned *out);
/* The number of a stream. MO_NOT_READY where MO_STREAMS others have theirs until the work of one is known to be over;
 * MO_UNSUPPORTED where they all have live memory. */
static inline mo_status mo_stream_order_number(mo_stream_order *order, mo_stream stream, mo_detail *detail,
                                               unsigned *out)
{
    if (order->recent >= order->count || order->streams[order->recent].handle != stream ||
        order->borrowed >> order->recent & 1)
        return mo_stream_order_find(order, stream, detail, out);
    *out = order->recent;
    return MO_OK;
}

/* Whether stream s alone ever used it: then it waits for nobody. */
static inline bool mo_stream_order_own(unsigned s, mo_last_use use)
{
    return !(use.streams & ~(1ull << s));
}

/* The tick that stream t of a use must have reached. */
static inline uint64_t mo_stream_order_tick(const mo_stream_order *order, unsigned t, mo_last_use use)
{
    return use.tick < order->streams[t].last ? use.tick : order->streams[t].last;
}

/* Drops from *use what is known to be over. */
static inline void mo_stream_order_settle(const mo_stream_order *order, mo_last_use *use)
{
    for (uint64_t rest = use->streams; rest; rest &= rest - 1) {
        unsigned t = (unsigned)__builtin_ctzll(rest);

        if (order->streams[t].done >= mo_stream_order_tick(order, t, *use))
            use->streams &= ~(1ull << t);
    }
}

/* The streams that s has yet to wait for before it may have memory of this use; captured: those that are not over. */
uint64_t mo_stream_order_missing(const mo_stream_order *order, unsigned s, bool captured, mo_last_use use);

/* Makes s wait, on the device, for what mo_stream_order_missing says. MO_NOT_READY, with nothing done, where one of the
 * streams is being captured, or s is, or one is borrowed and has no mark that would do. */
mo_status mo_stream_order_join(mo_stream_order *order, unsigned s, bool captured, mo_last_use use,
                               mo_detail *detail);

/* Records an event on each of these streams that has none since `tick`; they are alive. Streams under capture are left out,
 * and so is a stream with MO_MARKS marks (it has a later one to come; a borrowed one has not, and its newest moves on). */
mo_status mo_stream_order_mark(mo_stream_order *order, uint64_t streams, uint64_t tick, mo_detail *detail);

/* Looks, without waiting, which marks are over. */
void mo_stream_order_poll(mo_stream_order *order);

/* The same, in a request for stream s, and sees to it that more is known the next time: a stream that lasts, or is s, whose
 * last use is not over gets a mark, unless the newest of its marks is younger than a MO_PROBESth of all that is not over. So
 * what is known lags little behind what is. */
void mo_stream_order_probe(mo_stream_order *order, unsigned s);

/* Whether all of use is over, as far as is known. */
static inline bool mo_stream_order_over(const mo_stream_order *order, mo_last_use use)
{
    mo_stream_order_settle(order, &use);
    return !use.streams;
}

/* What a host that waits asks again and again: drops from *use what is over, and what is being captured and so has no end
 * to wait for. MO_NOT_READY: some of it is still to be waited for. MO_OK: none is; what *use has left are streams that
 * cannot be asked (borrowed ones), which are over when the whole device is. Else the driver's error. */
mo_status mo_stream_order_await(mo_stream_order *order, mo_last_use *use, mo_detail *detail);

/* Streams whose last use of any memory is not known to be over. */
mo_last_use mo_stream_order_pending(const mo_stream_order *order);

/* Whether any stream that lasts and has a number is being captured: then the device cannot be waited for as a whole. */
bool mo_stream_order_capturing(mo_stream_order *order);

/* The device has been waited for since `tick`: what was freed until then is over. */
void mo_stream_order_synchronized(mo_stream_order *order, uint64_t tick);

#endif
