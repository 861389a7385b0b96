/* Slots in a row of bytes, given in order and taken back in any: who has which part of pinned memory, or of a file. The
 * bytes are the caller's; here are only numbers.
 *
 *     slots lie in [0, capacity) in the order in which they were given, each at a multiple of the alignment; behind the
 *     end they go on at 0, and never overlap
 *
 *            oldest                newest
 *     ──────┤■■■■■│□□□│■■■│□□□□□│■■■├──────      ■ used   □ given back, still between used ones
 *
 *     the oldest and the newest slot are used: what is given back at either end is free at once
 *
 * So slots that are given back in their order (a queue) leave nothing behind, and neither do those that are given back
 * backwards, as a backward pass does. held = bytes from slot to slot's end, summed over the slots that are there.
 *
 * Nobody's copy may still read or fill what is given again: give says by a mark which copy was the last, take which one
 * to wait for. Not thread safe: the caller's lock. */
#ifndef MO_RING_H
#define MO_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct mo_slot {
    size_t offset, size; /* size: rounded up to the alignment */
    bool used;
} mo_slot;

typedef struct mo_ring {
    size_t capacity, alignment; /* alignment: a power of two */
    mo_slot *slots;             /* places of them, a power of two; the oldest at [first & (places - 1)] */
    size_t places, count;
    uint64_t first; /* number of the oldest slot */
    uint64_t mark;  /* the last of all that slots were given back with */
    size_t held, peak;
} mo_ring;

/* capacity > 0. Takes no memory. */
void mo_ring_init(mo_ring *ring, size_t capacity, size_t alignment);
void mo_ring_fini(mo_ring *ring);

/* size > 0 bytes behind the newest slot, or at 0. *out: the slot's number; *offset: where it lies; *after: the mark that
 * its first user must come behind. MO_NO_HOST_MEMORY: no room (a bounded ring's ordinary answer, without a detail), or
 * no memory for the slot itself. */
mo_status mo_ring_take(mo_ring *ring, size_t size, uint64_t *out, size_t *offset, uint64_t *after);

/* mark: the last copy that used it; marks are compared as numbers, a later copy's is greater. MO_INVALID for a number
 * that is no used slot's. */
mo_status mo_ring_give(mo_ring *ring, uint64_t slot, uint64_t mark);

/* Whether all that is said above holds; for MO_CHECK and tests. */
bool mo_ring_is_valid(const mo_ring *ring);

#endif
