/* What the files of the model device share; nobody else includes it.
 *
 *     model_device.c         the table's memory: reservations, handles, mappings, segments; the fault plan
 *     model_device_order.c   streams, events, captures, the clock
 *     model_device_copies.c streams of our own, pinned memory, copies
 *     model_device_uses.c    who uses which memory, and behind what: the checking mode
 *
 *     a block's key is [low, high): blocks of one kind never overlap, so a tree a kind finds by any part of it
 *     handle.mappings = mappings whose handle it is
 *
 * Everything here is called with the device's lock held, but mo_model_device_enter(). */
#ifndef MO_MODEL_DEVICE_PARTS_H
#define MO_MODEL_DEVICE_PARTS_H

#include "driver/model_device.h"

/* Operations that are over, one number a stream (mo_model_device_stream.index): none past count. */
typedef struct mo_model_device_clock {
    size_t count;
    uint64_t *over;
} mo_model_device_clock;

/* Bytes [from, to) of a handle or segment, last used by operation number `at` of a stream. */
typedef struct mo_model_device_use_record {
    mo_model_device_stream *on;
    uint64_t at, owner;
    size_t from, to;
} mo_model_device_use_record;

struct mo_model_device_block {
    uintptr_t low, high; /* addresses; HANDLE: its number and the next; EVENT: where this lies */
    size_t size;
    bool released, granted;        /* HANDLE; MAPPING */
    size_t mappings;               /* HANDLE */
    mo_model_device_block *handle; /* MAPPING */
    mo_model_device_stream *on;    /* EVENT: recorded there, NULL if never */
    uint64_t mark;                 /* EVENT: over when on->completed >= mark */
    mo_model_device_clock clock; /* EVENT: what is over with it; MAPPING: the last use through it, a stream */
    mo_model_device_use_record
        *uses; /* HANDLE, SEGMENT, PINNED; where two overlap, neither is behind the other */
    size_t use_count, use_places; /* places: of the array */
};

/* A wait in a stream's queue: operation number `at` needs `on` to have completed `mark`. */
typedef struct mo_model_device_wait {
    uint64_t at;
    mo_model_device_stream *on;
    uint64_t mark;
} mo_model_device_wait;

struct mo_model_device_stream {
    mo_stream name;
    mo_model_device_stream *next;
    size_t index; /* counted from 0 */
    uint64_t submitted, completed, capture;
    mo_model_device_wait *waits; /* those that are not over, in order of `at`, from first_wait on */
    size_t first_wait, wait_count, wait_places;
    mo_model_device_clock
        behind; /* of other streams: what is over before anything that is queued from now on */
};

static inline mo_model_device *mo_model_device_of(mo_driver *driver)
{
    return (mo_model_device *)driver;
}

/* block, or the end of the process: the test's own memory ran out, and there is nothing to test any more. */
void *mo_model_device_must(void *block);

/* Counts a call and asks the plan. MO_OK: go on, the lock is held, leave it by one of the next two. */
mo_status mo_model_device_enter(mo_driver *driver, mo_model_device_call which, mo_detail *detail);
mo_status mo_model_device_leave(mo_driver *driver, mo_status status);
mo_status mo_model_device_refuse(mo_driver *driver, mo_detail *detail, const char *why);

/* ---- blocks (model_device.c) ---------------------------------------------------------------------------- */

mo_model_device_block *mo_model_device_add(mo_model_device *device, mo_model_device_kind kind,
                                           mo_model_device_block block);
void mo_model_device_drop(mo_model_device *device, mo_model_device_kind kind, mo_model_device_block *block);
/* A block of a kind that overlaps [low, high), or NULL. */
mo_model_device_block *mo_model_device_find(mo_model_device *device, mo_model_device_kind kind, uintptr_t low,
                                            uintptr_t high);

/* ---- order (model_device_order.c) ----------------------------------------------------------------------- */

/* Puts its functions into the table. */
void mo_model_device_order_fill(mo_driver *table);
void mo_model_device_order_close(mo_model_device *device);
mo_model_device_stream *mo_model_device_stream_of(mo_model_device *device, mo_stream name);
/* Every stream to its end, and the host knows it. */
void mo_model_device_drain(mo_model_device *device);

/* ---- copies (model_device_copies.c) ---------------------------------------------------------------------- */

void mo_model_device_copies_fill(mo_driver *table);

/* ---- uses (model_device_uses.c) ------------------------------------------------------------------------- */

uint64_t mo_model_device_clock_at(const mo_model_device_clock *clock, const mo_model_device_stream *stream);
void mo_model_device_clock_raise(mo_model_device_clock *clock, const mo_model_device_stream *stream,
                                 uint64_t over);
void mo_model_device_clock_join(mo_model_device_clock *clock, const mo_model_device_clock *other);

/* Work through the mapping that the host does not know to be over? Said of an unmap that is about to be done. */
void mo_model_device_uses_unmap(mo_model_device *device, const mo_model_device_block *mapping);
/* Of an event_record or stream_wait on a stream: is it being captured? */
void mo_model_device_uses_order(mo_model_device *device, const mo_model_device_stream *stream,
                                const char *call);
/* Of a map that is about to be done: counts it in maps_in_use. */
void mo_model_device_uses_map(mo_model_device *device, const mo_model_device_block *handle);
/* Queues a copy between [host, host + size) of a pinned block and the same of the device. It is an owner of its own: all
 * other users of either range must be ordered. */
void mo_model_device_uses_copy(mo_model_device *device, mo_model_device_stream *stream,
                               mo_model_device_block *pinned, uintptr_t host, mo_address address,
                               size_t size);

#endif
