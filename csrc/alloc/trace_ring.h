/* The last events of a pool, for snapshots, traces and replay. Written under the pool's lock, so in order; read by
 * anyone at any time, without it: a reader that was overtaken by the writer sees that, and drops what it lost.
 *
 *     written = events put so far         kept = the last min(written, capacity), less what was cleared
 *     event n lies in slot n % capacity; the writer has touched that slot for n + capacity  <=>  claimed > n + capacity
 *     written <= claimed <= written + 1
 *
 * A record is 64 bytes, one cache line. Off costs the pool one branch. The memory of a ring is taken as it fills, in
 * chunks, so that a large capacity costs nothing before it is used. */
#ifndef MO_TRACE_RING_H
#define MO_TRACE_RING_H

#include "alloc/pool.h"

/* Records: 16 GiB of them. */
#define MO_TRACE_MAX_CAPACITY ((size_t)1 << 28)

typedef enum mo_trace_op {
    MO_TRACE_ALLOC,
    MO_TRACE_FREE,
    MO_TRACE_RECORD_STREAM,
    MO_TRACE_WAIT, /* stream waits for the stream whose handle is `address` (made by memopt itself) */
    MO_TRACE_STEP,
    MO_TRACE_MAP,   /* memory came to an address: size bytes */
    MO_TRACE_UNMAP, /* and left it, for another address or the device */
    MO_TRACE_OOM,   /* size bytes could not be had, while the device had `address` bytes free */
} mo_trace_op;

typedef struct mo_trace_record {
    uint64_t time;   /* nanoseconds, CLOCK_REALTIME */
    uint64_t serial; /* of the block (mo_block_view), 0 where there is none */
    mo_address address;
    size_t size; /* as requested */
    mo_stream stream;
    mo_arena_id arena;
    uint32_t stack; /* trace_stacks.h, 0: none */
    uint16_t op;    /* mo_trace_op */
    uint16_t device;
} mo_trace_record;

/* A ring of `capacity` records, 1 to MO_TRACE_MAX_CAPACITY. */
mo_status mo_trace_open(size_t capacity, mo_detail *detail, mo_trace **out);

/* Nobody may be writing or reading any more. NULL is fine. */
void mo_trace_close(mo_trace *ring);

/* Puts one record; called with the pool's lock held. The stack is the calling thread's (mo_trace_stack_of_thread). An
 * event for which there was no host memory is lost, and counted. */
void mo_trace_put(mo_trace *ring, int device, mo_trace_op op, uint64_t serial, mo_address address,
                  size_t size, mo_stream stream, mo_arena_id arena);

size_t mo_trace_capacity(const mo_trace *ring);
uint64_t mo_trace_written(const mo_trace *ring);
uint64_t mo_trace_lost(const mo_trace *ring);

/* What was written so far is no longer given to readers. */
void mo_trace_clear(mo_trace *ring);

/* Copies up to `room` records in order, from number `from` on, or from the oldest kept one after it. Returns how many
 * there are in out[], the first of them being event number *first; those that the writer has overtaken in the meantime
 * are not among them. To read on, pass *first + the number returned. */
size_t mo_trace_read(const mo_trace *ring, uint64_t from, mo_trace_record *out, size_t room, uint64_t *first);

#endif
