/* Streams: queues of work, and the order in which it runs.
 *
 * Every operation gets a ticket when it is queued; a stream's queue is in ticket order. The head of a stream
 * may run unless one of these, all of which have smaller tickets, must run first:
 *
 *     - it waits for a mark (an event's record) that is not reached: that stream's head;
 *     - it is in the legacy stream and a blocking stream of its device has an older head: that one;
 *     - it is in a blocking stream and the legacy stream of its device has an older head: that one.
 *
 * So there is always a head that may run and no order can deadlock. Normally work runs as soon as it may,
 * within the call that queues it; in lazy mode only when something waits for it (and then only what that
 * needs; asking again and again is waiting too), or at simcuda_progress. A mark is one record of an event:
 * recording again makes another, destroying the event leaves the marks to those who wait for them. */
#ifndef SIM_STREAMS_H
#define SIM_STREAMS_H

#include "device.h"
#include "work.h"

enum { SIM_PRIORITY_LEAST = 0, SIM_PRIORITY_GREATEST = -5 };

typedef struct sim_mark {
    unsigned references;
    bool reached;
    uint64_t when;             /* nanoseconds: when it is reached, on the virtual clock (clock.h) */
    struct sim_stream *stream; /* where it is queued; meaningless once reached */
} sim_mark;

typedef struct sim_operation {
    sim_work *work;
    sim_mark *mark; /* of SIM_WORK_RECORD and SIM_WORK_WAIT */
    uint64_t ticket;
    bool lost; /* memory that it uses was unmapped meanwhile: a fault, whatever is mapped there since */
    struct sim_operation *next;
} sim_operation;

typedef struct sim_stream {
    uint64_t handle; /* 0 for default streams */
    uint64_t id;     /* cuStreamGetId */
    int device, priority;
    unsigned flags;
    bool blocking;    /* ordered against the legacy stream; the legacy stream itself is not */
    bool destroyed;   /* no handle any more; freed when it is drained and nobody holds it */
    bool running;     /* its head is user code that runs now, on some thread, without the lock */
    unsigned holders; /* threads that wait on it */
    uint64_t finish;  /* when all that is queued is done, on the virtual clock */
    sim_operation *head, *tail;
    struct sim_capture *capture; /* NULL unless it is capturing; see capture.h */
    struct sim_node **frontier;  /* the nodes its next node depends on */
    size_t frontier_count;
    struct sim_stream *next; /* of all streams */
} sim_stream;

/* All streams of all devices, default streams and destroyed ones that still have work included. */
extern sim_stream *sim_streams;

sim_stream *sim_stream_new(int device, unsigned flags,
                           int priority);       /* with a handle, unless out of memory */
sim_stream *sim_stream_new_default(int device); /* a per-thread or legacy stream */
void sim_stream_destroy(sim_stream *stream);
/* Between these the stream stays, whoever destroys it while the lock is released. */
void sim_stream_hold(sim_stream *stream);
void sim_stream_release(sim_stream *stream);

/* What a caller's CUstream names, for the calling thread and its current device; NULL when it is not live. */
sim_stream *sim_stream_of(CUstream handle);

/* Queues work, which it takes over, or captures it. A WAIT or RECORD comes with a mark, whose reference it
 * takes over too. Only capture can refuse; the work is dropped then. */
CUresult sim_stream_submit(sim_stream *stream, sim_work *work, sim_mark *mark);

/* Queues a host function or a callback; `handle` is what the callback is told. */
CUresult sim_host_submit(sim_work_kind kind, sim_stream *stream, CUhostFn function, CUstreamCallback callback,
                         CUstream handle, void *data);

bool sim_stream_idle(const sim_stream *stream);

/* Run what is needed until everything queued so far in one stream, or on one device, is done. They return the
 * sticky error. The lock may be released meanwhile. */
CUresult sim_stream_synchronize(sim_stream *stream);
CUresult sim_device_synchronize(int device);
CUresult sim_mark_synchronize(sim_mark *mark);

/* Whether it is reached. A host that asks SIMCUDA_PATIENCE times in a row and queues nothing meanwhile is waiting, in
 * its way, and would ask for ever on a lazy device: then the mark is run to. The lock may be released meanwhile. */
bool sim_mark_query(sim_mark *mark);

sim_mark *sim_mark_new(void); /* one reference; NULL when out of memory */
void sim_mark_release(sim_mark *mark);

/* Operations queued and not finished, on one device. */
uint64_t sim_pending(int device);

/* [at, at + size) is unmapped: queued work that will touch it, as far as addresses are known, is lost. */
void sim_streams_lose(uintptr_t at, size_t size);

#endif
