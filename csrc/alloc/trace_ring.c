#include "alloc/trace_ring.h"

#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "alloc/trace_stacks.h"
#include "base/hostmem.h"

enum {
    RECORD = 64,
    WORDS = RECORD / 8,
    CHUNK = 4096, /* records: 256 KiB, whose page faults come to some 5 ns an event */
};
_Static_assert(sizeof(mo_trace_record) == RECORD, "a record is one cache line");

typedef struct slot {
    _Atomic uint64_t words[WORDS];
} slot;

/* No fences, which ThreadSanitizer does not know: `claimed` is raised before the words are stored, each with release;
 * a reader loads each with acquire and `claimed` after them. A reader that saw one word of event n + capacity therefore
 * sees claimed > n + capacity. On x86 all of it is plain moves. */
struct mo_trace {
    size_t capacity;
    size_t next; /* the writer's own: claimed % capacity, without a division */
    _Atomic uint64_t claimed, written, cleared, lost;
    _Atomic(slot *) chunks[]; /* NULL where the writer has not been yet */
};

mo_status mo_trace_open(size_t capacity, mo_detail *detail, mo_trace **out)
{
    if (!capacity || capacity > MO_TRACE_MAX_CAPACITY)
        return mo_fail(detail, MO_INVALID, 0, "a trace holds 1 to %zu events, not %zu", MO_TRACE_MAX_CAPACITY,
                       capacity);
    const size_t chunks = (capacity + CHUNK - 1) / CHUNK;
    mo_trace *ring = mo_host_calloc(1, sizeof *ring + chunks * sizeof *ring->chunks);
    if (!ring)
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory for a trace of %zu events", capacity);
    ring->capacity = capacity;
    *out = ring;
    return MO_OK;
}

/* A chunk on a line's boundary; the block that it lies in is noted before it. */
static slot *new_chunk(void)
{
    char *block = mo_host_alloc(RECORD + CHUNK * sizeof(slot));

    if (!block)
        return NULL;
    char *start = (char *)(((uintptr_t)block + RECORD) / RECORD * RECORD);
    memcpy(start - sizeof block, &block, sizeof block); /* malloc's 16 bytes of alignment leave room for it */
    return (slot *)start;
}

void mo_trace_close(mo_trace *ring)
{
    for (size_t i = 0; ring && i < (ring->capacity + CHUNK - 1) / CHUNK; i++) {
        slot *chunk = atomic_load_explicit(&ring->chunks[i], memory_order_relaxed);
        char *block = NULL;
        if (chunk)
            memcpy(&block, (char *)chunk - sizeof block, sizeof block);
        mo_host_free(block);
    }
    mo_host_free(ring);
}

/* ---- the writer -------------------------------------------------------------------------------------------- */

static slot *next_slot(mo_trace *ring)
{
    _Atomic(slot *) *place = &ring->chunks[ring->next / CHUNK];
    slot *chunk = atomic_load_explicit(place, memory_order_relaxed);

    if (!chunk) {
        chunk = new_chunk();
        if (!chunk)
            return NULL;
        atomic_store_explicit(place, chunk, memory_order_release);
    }
    return &chunk[ring->next % CHUNK];
}

static uint64_t wall_clock(void)
{
    struct timespec t;

    clock_gettime(CLOCK_REALTIME, &t); /* no system call: the vDSO's */
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void mo_trace_put(mo_trace *ring, int device, mo_trace_op op, uint64_t serial, mo_address address,
                  size_t size, mo_stream stream, mo_arena_id arena)
{
    const mo_trace_record record = {
        .time = wall_clock(),
        .serial = serial,
        .address = address,
        .size = size,
        .stream = stream,
        .arena = arena,
        .stack = mo_trace_stack_of_thread(),
        .op = (uint16_t)op,
        .device = (uint16_t)device,
    };
    uint64_t words[WORDS];
    slot *s = next_slot(ring);

    if (!s) {
        atomic_fetch_add_explicit(&ring->lost, 1, memory_order_relaxed);
        return;
    }
    memcpy(words, &record, sizeof words);
    const uint64_t number = atomic_load_explicit(&ring->claimed, memory_order_relaxed);
    atomic_store_explicit(&ring->claimed, number + 1, memory_order_relaxed);
    for (int i = 0; i < WORDS; i++)
        atomic_store_explicit(&s->words[i], words[i], memory_order_release);
    atomic_store_explicit(&ring->written, number + 1, memory_order_release);
    if (++ring->next == ring->capacity)
        ring->next = 0;
}

/* ---- readers ----------------------------------------------------------------------------------------------- */

size_t mo_trace_capacity(const mo_trace *ring)
{
    return ring->capacity;
}

uint64_t mo_trace_written(const mo_trace *ring)
{
    return atomic_load_explicit(&ring->written, memory_order_acquire);
}

uint64_t mo_trace_lost(const mo_trace *ring)
{
    return atomic_load_explicit(&ring->lost, memory_order_relaxed);
}

void mo_trace_clear(mo_trace *ring)
{
    atomic_store_explicit(&ring->cleared, mo_trace_written(ring), memory_order_relaxed);
}

static void copy(const mo_trace *ring, uint64_t number, mo_trace_record *out)
{
    const size_t at = (size_t)(number % ring->capacity);
    const slot *chunk = atomic_load_explicit(&ring->chunks[at / CHUNK], memory_order_acquire);
    uint64_t words[WORDS];

    for (int i = 0; i < WORDS; i++)
        words[i] = atomic_load_explicit(&chunk[at % CHUNK].words[i], memory_order_acquire);
    memcpy(out, words, sizeof words);
}

/* The oldest event whose slot the writer has not touched again. */
static uint64_t oldest(const mo_trace *ring)
{
    const uint64_t claimed = atomic_load_explicit(&ring->claimed, memory_order_relaxed);

    return claimed > ring->capacity ? claimed - ring->capacity : 0;
}

size_t mo_trace_read(const mo_trace *ring, uint64_t from, mo_trace_record *out, size_t room, uint64_t *first)
{
    const uint64_t end = mo_trace_written(ring);
    const uint64_t cleared = atomic_load_explicit(&ring->cleared, memory_order_relaxed);
    uint64_t start = oldest(ring);

    start = start > cleared ? start : cleared;
    start = start > from ? start : from;
    if (start > end)
        start = end;
    const size_t count = end - start < room ? (size_t)(end - start) : room;
    for (size_t i = 0; i < count; i++)
        copy(ring, start + i, &out[i]);
    const uint64_t valid = oldest(ring);
    const size_t overtaken = valid <= start ? 0 : valid - start < count ? (size_t)(valid - start) : count;
    memmove(out, out + overtaken, (count - overtaken) * sizeof *out);
    *first = start + overtaken;
    return count - overtaken;
}
