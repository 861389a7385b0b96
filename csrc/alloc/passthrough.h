/* The allocator that adds nothing: every request is one segment of the driver, every free gives it back. A free
 * waits for the device, so no stream can still be using the memory, and torch's record_stream hook is not needed.
 * A captured graph could be, at every replay: torch_hooks.c refuses to allocate during a capture.
 * It is the baseline against which the pool is measured, and what first shows that the hooks work.
 *
 *     live_bytes = bytes asked for and not yet freed          live_blocks likewise
 *     allocations - frees = live_blocks                       peak_bytes = max of live_bytes
 *
 * State is process-wide and lives for ever: torch frees tensors after the interpreter has ended. No locks; the
 * counters are atomics, each right by itself, together only when no other thread allocates. */
#ifndef MO_PASSTHROUGH_H
#define MO_PASSTHROUGH_H

#include "driver/driver.h"

typedef struct mo_passthrough_stats {
    uint64_t allocations, frees, out_of_memory;
    uint64_t failed_frees; /* frees that the driver refused: a foreign pointer, a broken context */
    uint64_t live_bytes, live_blocks, peak_bytes;
} mo_passthrough_stats;

/* size bytes, 512-byte aligned as cuMemAlloc's are. A size of 0 gives address 0. */
mo_status mo_passthrough_alloc(mo_driver *driver, size_t size, mo_detail *detail, mo_address *out);

/* Address 0 is fine. size is what was asked for. */
mo_status mo_passthrough_free(mo_driver *driver, mo_address address, size_t size, mo_detail *detail);

/* All zero for a device that has never been used. */
void mo_passthrough_read(int device, mo_passthrough_stats *out);

#endif
