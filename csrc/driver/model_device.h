/* The model device behind mo_driver: a device of numbers, on which traces are replayed and tests run. No memory stands
 * behind its addresses, its clock moves when told to, work on its streams is over when its user says so, and any call can
 * be made to fail.
 *
 *     used  = sum of sizes of handles that are unreleased or mapped, and of segments   <= capacity
 *     a mapping lies in one reservation, holds a whole handle, overlaps no other
 *     a stream: completed <= submitted; an event's mark is over <=> completed >= its mark
 *
 * What CUDA calls an error is MO_INVALID here, with a sentence. What CUDA does not call one, because it is wrong data
 * or a fault on the device later, is a violation (mo_model_device_watch). Thread safe by one lock. Its own bookkeeping
 * comes from malloc, not from hostmem.h, so that a test of host memory failures is about the code under test alone. */
#ifndef MO_MODEL_DEVICE_H
#define MO_MODEL_DEVICE_H

#include "base/lock.h"
#include "driver/driver.h"

/* Every entry of the table that can fail. */
/* clang-format off */
#define MO_MODEL_DEVICE_CALLS(X)                                                                             \
    X(reserve) X(unreserve) X(create) X(release) X(map) X(unmap) X(grant) X(segment_alloc) X(segment_free)   \
    X(event_create) X(event_destroy) X(event_record) X(event_query) X(stream_wait) X(capture_id)             \
    X(synchronize) X(memory_info)                                                                            \
    X(stream_create) X(stream_destroy) X(pinned_alloc) X(pinned_free) X(copy_to_host) X(copy_to_device)
/* clang-format on */

typedef enum mo_model_device_call {
#define CALL_NAME(name) MO_MODEL_DEVICE_##name,
    MO_MODEL_DEVICE_CALLS(CALL_NAME)
#undef CALL_NAME
        MO_MODEL_DEVICE_CALL_COUNT
} mo_model_device_call;

/* What has an identity. */
typedef enum mo_model_device_kind {
    MO_MODEL_DEVICE_RESERVATION,
    MO_MODEL_DEVICE_HANDLE,
    MO_MODEL_DEVICE_MAPPING,
    MO_MODEL_DEVICE_SEGMENT,
    MO_MODEL_DEVICE_EVENT,
    MO_MODEL_DEVICE_STREAM, /* made by stream_create */
    MO_MODEL_DEVICE_PINNED,
    MO_MODEL_DEVICE_KIND_COUNT
} mo_model_device_kind;

typedef struct mo_model_device_block mo_model_device_block;
typedef struct mo_model_device_stream mo_model_device_stream;
typedef struct mo_model_device_clock mo_model_device_clock;

typedef struct mo_model_device {
    mo_driver table; /* first */
    mo_lock lock;
    size_t capacity, used, peak;
    mo_address next_address; /* addresses only grow: none is ever handed out twice */
    struct {
        void *tree; /* of mo_model_device_block */
        size_t live;
    } blocks[MO_MODEL_DEVICE_KIND_COUNT];
    mo_model_device_stream *streams;
    uint64_t clock; /* nanoseconds */
    uint64_t next_id;
    size_t work_per_pause;          /* operations of every stream that a pause() lets complete */
    size_t pinned, pinned_capacity; /* bytes of pinned host memory, real ones; at most (0: no limit) */
    uint64_t calls[MO_MODEL_DEVICE_CALL_COUNT];
    struct {
        uint64_t after, count; /* let `after` more pass, then fail `count` */
        mo_status status;
    } plan[MO_MODEL_DEVICE_CALL_COUNT];
    /* the checking mode */
    bool watched;
    mo_model_device_clock *host; /* what the host knows to be over */
    uint64_t violations;         /* so far */
    char violation[256];         /* the first of them, a sentence */
    mo_status aliases;           /* what test_aliases answers */
    uint64_t alias_tests;        /* how often it was asked */
    uint64_t maps_in_use; /* map() calls of a handle with work on it that the host does not know to be over */
} mo_model_device;

/* A device of `capacity` bytes; granularity 0 makes one without virtual memory. */
void mo_model_device_open(mo_model_device *device, size_t capacity, size_t granularity);

/* Forgets everything, whatever is still live. */
void mo_model_device_close(mo_model_device *device);

/* Live reservations + handles + mappings + segments + events + created streams + pinned blocks: what a test that
 * cleans up leaves at 0. */
size_t mo_model_device_live(mo_model_device *device);

/* Lets `after` more calls pass, then fails `count` of them with status (before anything changed). */
void mo_model_device_fail(mo_model_device *device, mo_model_device_call which, uint64_t after, uint64_t count,
                          mo_status status);
void mo_model_device_fail_never(mo_model_device *device);

/* Queues one operation on a stream. */
void mo_model_device_submit(mo_model_device *device, mo_stream stream);

/* Completes up to n operations of a stream, in order; stops at a wait whose mark is not over. Returns how many. */
size_t mo_model_device_complete(mo_model_device *device, mo_stream stream, size_t n);

/* Operations that were queued on a stream so far, and those of them that are over. */
void mo_model_device_progress(mo_model_device *device, mo_stream stream, uint64_t *queued, uint64_t *over);

/* From now on capture_id() says id for this stream; 0 ends it. */
void mo_model_device_capture(mo_model_device *device, mo_stream stream, uint64_t id);

const char *mo_model_device_call_name(mo_model_device_call which);

/* ---- the checking mode: who uses which memory, and behind what ---------------------------------------------
 *
 * Time is a partial order, and luck does not count. An operation is *behind* another if it was queued later on the
 * same stream, or its stream waited for an event which is behind the other, or the host had learned that the other is
 * over (event_query, synchronize, segment_free) before it queued this one. That the other happens to be over already
 * is nothing: on a slower device it would not be. Three things are violations, and the first of all is kept in words:
 *
 *     unmap    of a mapping through which an operation runs that the host does not know to be over
 *     use      of memory that is not mapped and granted; or, under whichever address, of a byte whose last user is of
 *              another owner, and this operation is not behind it (last: no later user of the byte is behind it)
 *     capture  of a stream which an event is recorded on, or which is made to wait for one: an allocator's order is
 *              about now, not about each replay
 */

/* From now on; before the first operation, best at once after open. */
void mo_model_device_watch(mo_model_device *device);

/* Queues one operation on a stream that reads and writes size (> 0) bytes at address. Operations with the same owner
 * may use the same bytes in any order: whose block that is (an allocation's number, say) is theirs to order. */
void mo_model_device_use(mo_model_device *device, mo_stream stream, mo_address address, size_t size,
                         uint64_t owner);

/* Whether what is queued on `after` from now on is behind all that is queued on `before` so far. */
bool mo_model_device_ordered(mo_model_device *device, mo_stream before, mo_stream after);

/* Whether every byte of the range can be used: mapped and granted, or in segments. */
bool mo_model_device_usable(mo_model_device *device, mo_address address, size_t size);

/* Whether the host knows every operation to be over that used bytes of the range, under whichever address: what memory
 * must be that a graph is given, whose replays come after nothing in particular. */
bool mo_model_device_idle(mo_model_device *device, mo_address address, size_t size);

/* The handle that is mapped at address, 0 where none is. */
mo_physical mo_model_device_behind(mo_model_device *device, mo_address address);

#endif
