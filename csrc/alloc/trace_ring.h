/* The last events of a pool, for snapshots, traces and replay. Written under the pool's lock, so in order; read by
 * anyone at any time, without it: a reader that was overtaken by the writer sees that, and drops what it lost.
 *
 *     written = events put so far         kept = the last min(written, capacity)
 *
 * A record is 64 bytes, one cache line. Off costs the pool one branch. */
#ifndef MO_TRACE_RING_H
#define MO_TRACE_RING_H

#include "alloc/pool.h"

typedef enum mo_trace_op {
    MO_TRACE_ALLOC,
    MO_TRACE_FREE,
    MO_TRACE_RECORD_STREAM,
    MO_TRACE_WAIT, /* stream waits for the stream whose handle is `address` (made by memopt itself) */
    MO_TRACE_STEP,
    MO_TRACE_MAP,   /* granules came to an address: size bytes */
    MO_TRACE_UNMAP, /* and left it */
    MO_TRACE_OOM,   /* size bytes could not be had */
} mo_trace_op;

typedef struct mo_trace_record {
    uint64_t time; /* nanoseconds, CLOCK_REALTIME */
    uint64_t serial;    /* of the block (mo_block_view), 0 where there is none */
    mo_address address;
    size_t size;   /* as requested */
    mo_stream stream;
    mo_arena_id arena;
    uint32_t stack; /* mo_trace_stack's, 0: none */
    uint16_t op;    /* mo_trace_op */
    uint16_t device;
} mo_trace_record;

/* Puts one record; called with the pool's lock held. The stack is the calling thread's mo_trace_stack. */
void mo_trace_put(mo_trace *ring, int device, mo_trace_op op, uint64_t serial, mo_address address, size_t size,
                  mo_stream stream, mo_arena_id arena);

#endif
