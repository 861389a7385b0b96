#include "alloc/trace_stacks.h"

#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "base/hostmem.h"
#include "base/lock.h"

/* Values of bytes, each kept once: values[n - 1] has number n. `index` holds numbers by the hash of their value, at
 * most half full, open addressing. */
typedef struct value {
    char *bytes; /* terminated */
    size_t length;
    uint64_t hash;
} value;

typedef struct interner {
    value *values;
    size_t count, room;
    uint32_t *index;
    size_t index_size;
} interner;

typedef struct frame {
    uint32_t file, function, line;
} frame;

static mo_lock lock = MO_LOCK_INIT;
static interner texts, frames, stacks; /* under the lock */

static uint64_t hash_of(const char *bytes, size_t length)
{
    uint64_t hash = length, word;

    for (; length >= sizeof word; bytes += sizeof word, length -= sizeof word) {
        memcpy(&word, bytes, sizeof word);
        hash = (hash ^ word) * UINT64_C(0x9E3779B97F4A7C15);
        hash ^= hash >> 32;
    }
    word = 0;
    memcpy(&word, bytes, length);
    hash = (hash ^ word) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ hash >> 32;
}

static bool grow(interner *in)
{
    if (in->count == in->room) {
        const size_t room = in->room ? 2 * in->room : 64;
        void *fresh = mo_host_realloc(in->values, room * sizeof *in->values);
        if (!fresh)
            return false;
        in->values = fresh;
        in->room = room;
    }
    if (2 * in->count < in->index_size)
        return true;
    const size_t size = in->index_size ? 2 * in->index_size : 128;
    uint32_t *fresh = mo_host_calloc(size, sizeof *fresh);
    if (!fresh)
        return false;
    for (size_t n = 1; n <= in->count; n++) {
        size_t at = in->values[n - 1].hash & (size - 1);
        while (fresh[at])
            at = (at + 1) & (size - 1);
        fresh[at] = (uint32_t)n;
    }
    mo_host_free(in->index);
    in->index = fresh;
    in->index_size = size;
    return true;
}

static uint32_t number_of(interner *in, const char *bytes, size_t length)
{
    const uint64_t hash = hash_of(bytes, length);
    size_t at;

    if (in->count == UINT32_MAX - 1 || !grow(in))
        return 0;
    for (at = hash & (in->index_size - 1); in->index[at]; at = (at + 1) & (in->index_size - 1)) {
        const value *v = &in->values[in->index[at] - 1];
        if (v->hash == hash && v->length == length && memcmp(v->bytes, bytes, length) == 0)
            return in->index[at];
    }
    char *copy = mo_host_alloc(length + 1);
    if (!copy)
        return 0;
    memcpy(copy, bytes, length);
    copy[length] = 0;
    in->values[in->count++] = (value){copy, length, hash};
    return in->index[at] = (uint32_t)in->count;
}

static uint32_t number(interner *in, const void *bytes, size_t length)
{
    mo_lock_take(&lock);
    const uint32_t result = number_of(in, bytes, length);
    mo_lock_give(&lock);
    return result;
}

uint32_t mo_trace_text_number(const char *text, size_t length)
{
    return number(&texts, text, length);
}

uint32_t mo_trace_frame_number(uint32_t file, uint32_t function, uint32_t line)
{
    const frame f = {file, function, line};

    return number(&frames, &f, sizeof f);
}

uint32_t mo_trace_stack_number(const uint32_t *numbers, size_t count)
{
    return count ? number(&stacks, numbers, count * sizeof *numbers) : 0;
}

/* "" for a text that there was no memory for. */
static const char *text_of(uint32_t n)
{
    return n && n <= texts.count ? texts.values[n - 1].bytes : "";
}

size_t mo_trace_stack_frames(uint32_t stack, mo_trace_frame *out)
{
    size_t count = 0;

    mo_lock_take(&lock);
    if (stack && stack <= stacks.count) {
        const value *v = &stacks.values[stack - 1];
        for (; count < v->length / sizeof(uint32_t) && count < MO_TRACE_MAX_FRAMES; count++) {
            uint32_t n;
            frame f = {0};
            memcpy(&n, v->bytes + count * sizeof n, sizeof n);
            if (n && n <= frames.count)
                memcpy(&f, frames.values[n - 1].bytes, sizeof f);
            out[count] = (mo_trace_frame){text_of(f.file), text_of(f.function), f.line};
        }
    }
    mo_lock_give(&lock);
    return count;
}

size_t mo_trace_stack_count(void)
{
    mo_lock_take(&lock);
    const size_t count = stacks.count;
    mo_lock_give(&lock);
    return count;
}

static void clear(interner *in)
{
    for (size_t i = 0; i < in->count; i++)
        mo_host_free(in->values[i].bytes);
    mo_host_free(in->values);
    mo_host_free(in->index);
    *in = (interner){0};
}

void mo_trace_stacks_clear(void)
{
    mo_lock_take(&lock);
    clear(&texts);
    clear(&frames);
    clear(&stacks);
    mo_lock_give(&lock);
}

/* ---- the thread's own --------------------------------------------------------------------------------------- */

static _Thread_local uint32_t stack_of_thread;
static _Atomic(mo_trace_collector) collector;
static atomic_uint collecting; /* threads that may be inside it */

uint32_t mo_trace_stack_of_thread(void)
{
    return stack_of_thread;
}

void mo_trace_set_stack_of_thread(uint32_t stack)
{
    stack_of_thread = stack;
}

void mo_trace_collect_by(mo_trace_collector by)
{
    mo_trace_collector before = atomic_exchange(&collector, by);

    for (int i = 0; before && atomic_load(&collecting) && i < 10000; i++)
        usleep(100);
}

void mo_trace_collect(void)
{
    if (!atomic_load_explicit(&collector, memory_order_relaxed)) {
        stack_of_thread = 0;
        return;
    }
    /* Looked at once more: whoever took it away in the meantime sees the count, or is seen here. */
    atomic_fetch_add(&collecting, 1);
    mo_trace_collector by = atomic_load(&collector);
    stack_of_thread = by ? by() : 0;
    atomic_fetch_sub(&collecting, 1);
}
