/* Small tables on their way to the device: a kernel's arguments that are too many for its parameters.
 *
 * A copy from pinned memory is only queued when the call returns, so both ends of it must stay as they are
 * until the kernel that reads the table has run. A slot is such a pair of buffers with an event behind its
 * last use:
 *
 *     free slot = not in flight = never used, or its event has been seen complete
 *                                 (cuEventQuery: the host does not wait for it)
 *
 * At most MO_STAGING_SLOTS are kept a device. Where all are in flight the host is that many launches ahead of
 * the device, and waits for the oldest: the only wait in here, and the bound on what is held.
 *
 * A table that equals the slot's last one, bytes for bytes, and goes to the same stream is not copied again:
 * with gradients that keep their addresses from step to step the upload falls away. A handle does not prove that the
 * stream is the same (CU_STREAM_PER_THREAD is another one in each thread, a destroyed stream's handle may return), so
 * the stream is made to wait for the slot's event, which costs the device nothing where it is the same after all.
 *
 * A captured launch is replayed from the same two buffers at any later time, so a slot taken during a capture
 * belongs to the graph and, since nothing tells when the last copy of a graph is destroyed, is never reused
 * or freed; counts.captured counts them.
 *
 * The caller holds a lock of its own around every call, and has the device's context current
 * (driver/context.h). */
#ifndef MO_STAGING_H
#define MO_STAGING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "driver/driver_cuda.h"

#define MO_STAGING_SLOTS 8

typedef struct mo_staging_slot {
    void *host;         /* pinned, capacity bytes; NULL: an unused slot */
    CUdeviceptr device; /* capacity bytes */
    CUevent done;       /* behind the last launch that read it */
    size_t capacity;    /* at least the table and the kernel's room behind it */
    size_t size;        /* of the table that lies in it; 0: none that could be used again */
    CUstream stream;    /* where it was last used */
    bool in_flight;     /* done has not been seen complete since it was last recorded */
    uint64_t turn;      /* of its last use; the least is the oldest */
} mo_staging_slot;

typedef struct mo_staging {
    mo_staging_slot slots[MO_STAGING_SLOTS];
    uint64_t turn;
    struct {
        uint64_t uploads;        /* tables copied */
        uint64_t repeats;        /* launches that found theirs in place */
        uint64_t waits;          /* times the host had to wait for a slot */
        uint64_t captured;       /* tables that belong to graphs */
        uint64_t captured_bytes; /* their size, on the device and pinned each */
    } counts;
} mo_staging;

/* Puts a table of size > 0 bytes where work queued on stream after this call reads it at *out. Behind it, at *out + size,
 * are `room` bytes that belong to that work alone until it has run, uninitialised. The work may change the table itself if
 * it puts back what was there: a repeat finds the table as the last work left it.
 *
 * The caller queues that work and then calls mo_staging_used with *out_slot, on failure too once mo_staging_put has
 * succeeded. */
mo_status mo_staging_put(mo_staging *staging, const mo_cuda_api *api, CUstream stream, const void *table,
                         size_t size, size_t room, mo_staging_slot **out_slot, CUdeviceptr *out,
                         mo_detail *detail);

/* Says that the work is queued. NULL (a captured table) needs nothing. */
mo_status mo_staging_used(const mo_cuda_api *api, mo_staging_slot *slot, mo_detail *detail);

/* Waits for every slot and gives all back, captured ones excepted; for tests and shutdown. */
mo_status mo_staging_clear(mo_staging *staging, const mo_cuda_api *api, mo_detail *detail);

#endif
