/* Copies between one device and pinned host memory, beside the computation: a stream of their own each way, so that
 * neither way waits for the other. No function here but mo_copies_wait waits for the device.
 *
 *     mo_copy      the copy begins once all is done that `user` was given before: a tensor that goes out is whole, memory
 *                  that is filled is no longer used by what had it last. Of several pieces that is asked once
 *     await        what a stream is given afterwards comes after the copy: it may use what was filled, overwrite what
 *                  was read, or be given its memory
 *     over         the host may use what was filled
 *
 * A copy's ticket is its number among those of its way, from 1 on, with the way in the lowest bit; 0 is none: nothing
 * to wait for. Copies of one way are made in order of their tickets. Each ticket has a mark, an event behind its copy;
 * there are MO_COPY_MARKS of them, used in turn:
 *
 *     marks[n % MO_COPY_MARKS] was recorded last for a ticket m >= n, m % MO_COPY_MARKS = n % MO_COPY_MARKS
 *
 * so what waits for an old ticket may wait for a later one of its way, never for an earlier. over <= begun.
 *
 * Thread safe by one lock. Both ends of a copy are the caller's, who keeps them as they are until it is over. */
#ifndef MO_COPIES_H
#define MO_COPIES_H

#include "base/lock.h"
#include "driver/driver.h"

#define MO_COPY_MARKS 64

typedef enum mo_way { MO_OUT, MO_IN, MO_WAYS } mo_way; /* from the device; to it */

typedef uint64_t mo_ticket;

typedef struct mo_line {
    mo_stream stream;
    mo_event *marks[MO_COPY_MARKS];
    uint64_t begun, over; /* copies that were queued; those of them that the host knows to be over */
    uint64_t bytes;       /* queued so far */
} mo_line;

/* Memory on both sides, of equal size. host: pinned. */
typedef struct mo_piece {
    mo_address device;
    void *host;
    size_t size;
} mo_piece;

typedef struct mo_copies {
    mo_driver *driver;
    mo_lock lock;
    mo_event *begin; /* on the user's stream */
    mo_line lines[MO_WAYS];
} mo_copies;

mo_status mo_copies_open(mo_driver *driver, mo_copies *out, mo_detail *detail);

/* What is queued is still done; nothing may be awaited afterwards. The first failure, but all is released that can be. */
mo_status mo_copies_close(mo_copies *copies, mo_detail *detail);

/* The process's own for a CUDA device: opened at the first call, kept for ever. */
mo_status mo_copies_get(int device, mo_copies **out, mo_detail *detail);

/* Queues a copy of size bytes. after: it comes after that copy, too (of the other way, with the same host memory).
 * MO_UNSUPPORTED while `user` is captured into a graph: each replay would copy again, with memory that has long been
 * another's. On failure nothing is on its way. */
mo_status mo_copy(mo_copies *copies, mo_way way, mo_stream user, mo_address device, void *host, size_t size,
                  mo_ticket after, mo_detail *detail, mo_ticket *out);

/* The same for several pieces, in count + 4 calls of the driver (one more with `after`), with one ticket: they are awaited,
 * and over, together. count > 0. Where a call fails after the first copy was queued, it WAITS for the device: nothing would
 * tell when that copy is over. */
mo_status mo_copy_pieces(mo_copies *copies, mo_way way, mo_stream user, const mo_piece *pieces, size_t count,
                         mo_ticket after, mo_detail *detail, mo_ticket *out);

/* What is told a ticket that no copy has been given is MO_INVALID: another device's, or made up. */
mo_status mo_copies_await(mo_copies *copies, mo_stream stream, mo_ticket ticket, mo_detail *detail);

mo_status mo_copies_over(mo_copies *copies, mo_ticket ticket, mo_detail *detail, bool *out);

/* WAITS until the copy is over, for about `nanoseconds` at most; *out: whether it is. Polled, in pauses that grow from 20 us to
 * 1 ms: no lock is held meanwhile, and other threads' copies go on. Call without the GIL. */
mo_status mo_copies_wait(mo_copies *copies, mo_ticket ticket, uint64_t nanoseconds, mo_detail *detail,
                         bool *out);

#endif
