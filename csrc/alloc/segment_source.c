#include "alloc/segment_source.h"

#include <stdatomic.h>

#include "base/lock.h"
#include "driver/forked.h"

typedef struct source {
    mo_pool *pool; /* NULL: not open */
    int device;
    mo_arena_id arena;
} source;

static mo_lock lock = MO_LOCK_INIT; /* over sources; never held while a pool is called */
static source sources[MO_SEGMENT_SOURCES];

/* Where segments go back to: set with the first source of a device, for ever. */
static _Atomic(mo_pool *) pools[MO_MAX_DEVICES];

static void *segment_of(unsigned number, ssize_t size, int device, void *stream)
{
    mo_address address = 0;
    source from;

    if (mo_forked())
        return NULL;
    mo_lock_take(&lock);
    from = sources[number];
    mo_lock_give(&lock);
    /* A MemPool may be begun on any device; memory of another is none that torch could use. */
    if (!from.pool || from.device != device || size <= 0)
        return NULL;
    /* Closed meanwhile, the arena may be gone: then this is refused. */
    if (mo_pool_alloc_in(from.pool, from.arena, (size_t)size, stream, NULL, &address))
        return NULL;
    return (void *)address;
}

/* The functions, numbered in octal: segment_00(…) { return segment_of(00, …); } to segment_077. */
/* clang-format off */
#define EIGHT(X, tens) X(tens##0) X(tens##1) X(tens##2) X(tens##3) X(tens##4) X(tens##5) X(tens##6) X(tens##7)
#define ALL_SOURCES(X) \
    EIGHT(X, 0) EIGHT(X, 01) EIGHT(X, 02) EIGHT(X, 03) EIGHT(X, 04) EIGHT(X, 05) EIGHT(X, 06) EIGHT(X, 07)
/* clang-format on */

#define SEGMENT_FUNCTION(octal)                                                                              \
    static void *segment_##octal(ssize_t size, int device, void *stream)                                     \
    {                                                                                                        \
        return segment_of(octal, size, device, stream);                                                      \
    }
ALL_SOURCES(SEGMENT_FUNCTION)

#define FUNCTION_NAME(octal) segment_##octal,
static const mo_segment_alloc functions[] = {ALL_SOURCES(FUNCTION_NAME)};
_Static_assert(sizeof functions / sizeof *functions == MO_SEGMENT_SOURCES, "a function for each source");

mo_segment_alloc mo_segment_source_function(unsigned number)
{
    MO_ASSERT(number < MO_SEGMENT_SOURCES);
    return functions[number];
}

mo_status mo_segment_source_open(mo_pool *pool, int device, mo_arena_id arena, mo_detail *detail,
                                 unsigned *out)
{
    unsigned number = 0;

    if (mo_forked())
        return mo_forked_refuse("a segment source", detail);
    MO_ASSERT(device >= 0 && device < MO_MAX_DEVICES);
    mo_lock_take(&lock);
    while (number < MO_SEGMENT_SOURCES && sources[number].pool)
        number++;
    if (number < MO_SEGMENT_SOURCES) {
        sources[number] = (source){pool, device, arena};
        atomic_store(&pools[device], pool);
    }
    mo_lock_give(&lock);
    if (number == MO_SEGMENT_SOURCES)
        return mo_fail(detail, MO_UNSUPPORTED, 0,
                       "all %d sources of segments are in use: close a pool that is no longer needed",
                       MO_SEGMENT_SOURCES);
    *out = number;
    return MO_OK;
}

void mo_segment_source_close(unsigned number)
{
    MO_ASSERT(number < MO_SEGMENT_SOURCES);
    if (mo_forked())
        return;
    mo_lock_take(&lock);
    sources[number].pool = NULL;
    mo_lock_give(&lock);
}

void mo_segment_free(void *address, ssize_t size, int device, void *stream)
{
    mo_pool *pool;
    size_t freed;

    (void)size;
    (void)stream;
    if (mo_forked() || device < 0 || device >= MO_MAX_DEVICES)
        return;
    pool = atomic_load(&pools[device]);
    /* torch gives back what the device is to have, and knows no way to ask us for more. */
    if (pool && mo_pool_free(pool, (mo_address)address, NULL) == MO_OK)
        mo_pool_trim(pool, 0, NULL, &freed);
}
