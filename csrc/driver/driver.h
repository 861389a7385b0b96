/* The device as the engines see it: one table of functions a device, and nothing else of CUDA. An engine that
 * holds a mo_driver cannot tell the CUDA driver (driver_cuda.h) from the model device (model_device.h).
 *
 * For every function:
 *   - pointers are non-NULL, `detail` alone may be NULL; result parameters come last and are written on MO_OK only;
 *   - sizes are > 0, and multiples of `granularity` where virtual memory is meant; so are addresses;
 *   - device addresses are numbers: no code of ours reads through one;
 *   - MO_OK on success; a call that fails has changed nothing;
 *   - any thread may call, with or without the GIL; no function takes a lock of ours, allocates host memory that
 *     outlives the call (events excepted) or calls Python (test_aliases loads memopt's kernels, under the lock of those);
 *   - none waits for the device, except those marked WAITS;
 *   - after the driver was shut down (an exiting process) everything that releases answers MO_OK, since the
 *     memory is gone with the context, and everything that acquires answers MO_DRIVER.
 *
 * Physical memory (handles) and addresses are apart:
 *
 *     reserve ─► address range ─┐
 *                               ├─ map ─► grant ─► usable          (each map is undone by one unmap of the whole)
 *     create  ─► handle ────────┘
 *
 * A handle's memory returns to the device when it was released *and* its last mapping is gone, in either order. */
#ifndef MO_DRIVER_H
#define MO_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* Devices of a process, more than any machine has; a table may be an array. An ordinal past it is MO_NO_DEVICE. */
#define MO_MAX_DEVICES 64

typedef uintptr_t mo_address;     /* a device address */
typedef uint64_t mo_physical;     /* a handle of physical memory, never 0 */
typedef void *mo_stream;          /* a CUstream; NULL is the legacy default stream */
typedef struct mo_event mo_event; /* the driver's own */

#define MO_STREAM_PER_THREAD                                                                                 \
    ((mo_stream)2) /* CU_STREAM_PER_THREAD: the calling thread's, under one name for all */

typedef struct mo_driver mo_driver;
struct mo_driver {
    int device;         /* ordinal, as torch counts, < MO_MAX_DEVICES */
    size_t granularity; /* bytes of the smallest physical block; 0: no virtual memory here, only segments */

    /* ---- addresses ------------------------------------------------------------------------------------- */
    mo_status (*reserve)(mo_driver *, size_t size, mo_detail *, mo_address *out);
    /* The range must be whole, as reserved, with nothing mapped in it. */
    mo_status (*unreserve)(mo_driver *, mo_address address, size_t size, mo_detail *);

    /* ---- physical memory ------------------------------------------------------------------------------- */
    /* MO_NO_DEVICE_MEMORY when the device has no room. */
    mo_status (*create)(mo_driver *, size_t size, mo_detail *, mo_physical *out);
    mo_status (*release)(mo_driver *, mo_physical handle, mo_detail *);

    /* ---- mappings -------------------------------------------------------------------------------------- */
    /* The whole handle (its size) at address; nothing may be mapped there. Not accessible until granted. */
    mo_status (*map)(mo_driver *, mo_address address, size_t size, mo_physical handle, mo_detail *);
    /* Whole mappings only, one or several in a row. Work that uses them must be over: the caller's duty. */
    mo_status (*unmap)(mo_driver *, mo_address address, size_t size, mo_detail *);
    /* Read and write, from this device and from those of the process that can reach it (peers.h), over whole mappings
     * in a row. Again: for those that have come since. */
    mo_status (*grant)(mo_driver *, mo_address address, size_t size, mo_detail *);

    /* Whether memory mapped at two addresses is coherent, in stream order. MO_OK: it is. MO_CORRUPT: what was written by
     * one address was not read by the other. Else it could not be found out. WAITS, for its own work alone. */
    mo_status (*test_aliases)(mo_driver *, mo_detail *);

    /* ---- segments: memory and address in one, where there is no virtual memory ---------------------------- */
    mo_status (*segment_alloc)(mo_driver *, size_t size, mo_detail *, mo_address *out);
    mo_status (*segment_free)(mo_driver *, mo_address address, mo_detail *); /* WAITS for the whole device */

    /* ---- order ----------------------------------------------------------------------------------------- */
    mo_status (*event_create)(mo_driver *, mo_detail *, mo_event **out);
    mo_status (*event_destroy)(mo_driver *, mo_event *, mo_detail *); /* pending or not */
    /* Marks all that was queued on the stream so far. Recording again moves the mark. */
    mo_status (*event_record)(mo_driver *, mo_event *, mo_stream, mo_detail *);
    /* MO_OK: what the mark stands for is over (or nothing was ever recorded). MO_NOT_READY: not yet. */
    mo_status (*event_query)(mo_driver *, mo_event *, mo_detail *);
    /* What is queued on the stream from now on runs after the mark; the host goes on. */
    mo_status (*stream_wait)(mo_driver *, mo_stream, mo_event *, mo_detail *);
    /* 0: the stream is not being captured into a graph; else a number that is the same for all of one capture. */
    mo_status (*capture_id)(mo_driver *, mo_stream, mo_detail *, uint64_t *out);
    mo_status (*synchronize)(mo_driver *, mo_detail *); /* WAITS for the whole device */

    /* ---- copies: beside the computation, on streams of their own ------------------------------------------- */
    /* A stream that the legacy default stream does not wait for. */
    mo_status (*stream_create)(mo_driver *, mo_detail *, mo_stream *out);
    mo_status (*stream_destroy)(mo_driver *, mo_stream, mo_detail *); /* what is queued on it is still done */
    /* Host memory that the device reaches by itself: page-locked, page-aligned, exactly size bytes. MO_NO_HOST_MEMORY. */
    mo_status (*pinned_alloc)(mo_driver *, size_t size, mo_detail *, void **out);
    mo_status (*pinned_free)(mo_driver *, void *block, mo_detail *); /* WAITS for the whole device */
    /* Queued on the stream; both ends stay as they are until it is over. */
    mo_status (*copy_to_host)(mo_driver *, mo_stream, void *to, mo_address from, size_t size, mo_detail *);
    mo_status (*copy_to_device)(mo_driver *, mo_stream, mo_address to, const void *from, size_t size,
                                mo_detail *);

    /* ---- what is there ----------------------------------------------------------------------------------- */
    mo_status (*memory_info)(mo_driver *, mo_detail *, size_t *free_bytes, size_t *total_bytes);

    /* ---- the clock, so that a test's time is a variable ------------------------------------------------------ */
    uint64_t (*now)(mo_driver *);                  /* nanoseconds, monotonic */
    void (*pause)(mo_driver *, uint64_t duration); /* the calling thread rests for about that long; WAITS */
};

#endif
