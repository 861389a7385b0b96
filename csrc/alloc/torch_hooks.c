/* Built with -fexceptions: memopt_malloc and a few others are left by one. */
#include "alloc/torch_hooks.h"

#include <stdatomic.h>
#include <string.h>

#include "alloc/out_of_memory.h"
#include "alloc/torch_throw.h"
#include "alloc/trace_stacks.h"
#include "base/hostmem.h"
#include "base/lock.h"
#include "driver/driver_cuda.h"
#include "driver/forked.h"

static _Atomic(double) fractions[MO_MAX_DEVICES]; /* 1 - the fraction, so that 0 means all */
static atomic_bool current;
static _Atomic(mo_torch_observer) observer;

static struct {
    atomic_uint_least64_t in_child, foreign_frees, foreign_streams, unbalanced, failed;
} counts;

static void count(atomic_uint_least64_t *counter)
{
    atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
}

static bool in_child(void)
{
    if (!mo_forked())
        return false;
    count(&counts.in_child);
    return true;
}

/* ---- the pool of a device ------------------------------------------------------------------------------- */

/* The text of an out-of-memory error that no pool could word: the context, or the preallocation, had no room. */
static mo_status no_room(int device, size_t wanted, mo_driver *driver, mo_detail *detail)
{
    mo_out_of_memory facts = {.device = device, .wanted = wanted};

    if (driver && driver->memory_info(driver, NULL, &facts.free_bytes, &facts.total_bytes))
        facts.total_bytes = 0;
    facts.largest_allocatable = facts.free_bytes;
    detail->status = MO_NO_DEVICE_MEMORY;
    detail->code = 0;
    mo_out_of_memory_text(detail->text, sizeof detail->text, &facts);
    return MO_NO_DEVICE_MEMORY;
}

/* Opens it where this is the first use of the device. */
static mo_status pool_of(int device, size_t wanted, mo_pool **out, mo_detail *detail)
{
    mo_driver *driver = NULL;
    mo_status status;

    if (mo_forked())
        return mo_forked_refuse("memopt's allocator", detail);
    *out = mo_pool_if_open(device);
    if (*out)
        return MO_OK;
    status = mo_driver_cuda_get(device, &driver, detail);
    if (status == MO_NO_DEVICE_MEMORY)
        return no_room(device, wanted, NULL, detail);
    if (!status)
        status = mo_pool_of_device(device, out, detail);
    if (status == MO_NO_DEVICE_MEMORY)
        return no_room(device, mo_pool_defaults().preallocate, driver, detail);
    return status;
}

static void throw(const mo_detail *detail) __attribute__((noreturn));
static void throw(const mo_detail *detail)
{
    if (detail->status == MO_NO_DEVICE_MEMORY)
        mo_torch_throw_out_of_memory(detail->text);
    mo_torch_throw_error(detail->text);
}

void mo_torch_hooks_observe(mo_torch_observer by)
{
    atomic_store(&observer, by);
}

static void tell_observer(int device, size_t wanted)
{
    static _Thread_local bool telling;
    const mo_torch_observer by = atomic_load(&observer);
    mo_driver *driver = NULL;
    size_t free_bytes = 0, total = 0;

    if (!by || telling)
        return;
    if (mo_driver_cuda_get(device, &driver, NULL) || driver->memory_info(driver, NULL, &free_bytes, &total))
        free_bytes = total = 0;
    telling = true;
    by(device, wanted, total, free_bytes);
    telling = false;
}

/* ---- memory --------------------------------------------------------------------------------------------- */

void *memopt_malloc(ssize_t size, int device, void *stream)
{
    mo_pool *pool = NULL;
    mo_address address = 0;
    mo_detail detail;
    mo_status status;

    if (size < 0)
        status = mo_fail(&detail, MO_INVALID, 0, "memopt_malloc: the size %zd is negative", size);
    else
        status = pool_of(device, (size_t)size, &pool, &detail);
    if (!status) {
        mo_trace_collect();
        status = mo_pool_alloc(pool, (size_t)size, stream, &detail, &address);
    }
    if (status == MO_NO_DEVICE_MEMORY)
        tell_observer(device, (size_t)size);
    if (status)
        throw(&detail);
    return (void *)address;
}

void memopt_free(void *address, ssize_t size, int device, void *stream)
{
    mo_pool *pool;

    (void)size, (void)stream;
    if (!address || in_child())
        return;
    pool = mo_pool_if_open(device);
    if (pool)
        mo_pool_free(pool, (mo_address)address, NULL); /* it counts what it refuses */
    else
        count(&counts.foreign_frees);
}

/* The pool with a live block that holds address, or NULL. */
static mo_pool *holder(void *address, mo_address *base, size_t *size)
{
    for (int device = 0; device < MO_MAX_DEVICES; device++) {
        mo_pool *pool = mo_pool_if_open(device);
        if (pool && mo_pool_base(pool, (mo_address)address, NULL, base, size) == MO_OK)
            return pool;
    }
    return NULL;
}

void *mo_torch_hook_base(void *address, size_t *size)
{
    mo_address base;
    size_t bytes;

    if (in_child() || !holder(address, &base, &bytes))
        return address;
    if (size)
        *size = bytes;
    return (void *)base;
}

void mo_torch_hook_record_stream(void *address, void *stream)
{
    mo_address base;
    size_t bytes;
    mo_pool *pool;
    mo_status status;

    if (!address || in_child())
        return;
    pool = holder(address, &base, &bytes);
    if (!pool) {
        count(&counts.foreign_streams);
        return;
    }
    status = mo_pool_record_stream(pool, base, stream, NULL);
    if (status && status != MO_INVALID) /* freed meanwhile: the pool has counted it */
        count(&counts.failed);
}

/* ---- limits --------------------------------------------------------------------------------------------- */

void mo_torch_hook_init(int devices)
{
    (void)devices;
    atomic_store(&current, true);
}

bool mo_torch_hooks_current(void)
{
    return atomic_load(&current);
}

void mo_torch_hook_reset(void)
{
    size_t freed;

    if (in_child())
        return;
    mo_trace_collect();
    for (int device = 0; device < MO_MAX_DEVICES; device++) {
        mo_pool *pool = mo_pool_if_open(device);
        if (pool)
            mo_pool_trim(pool, 0, NULL, &freed); /* it counts what the driver refuses */
    }
}

double mo_torch_hooks_fraction(int device)
{
    return device < 0 || device >= MO_MAX_DEVICES ? 1 : 1 - atomic_load(&fractions[device]);
}

/* All is no limit of its own. A fraction of nothing is one byte: 0 would be no limit. */
static size_t limit_of(double fraction, size_t total)
{
    const size_t budget = mo_pool_defaults().budget;
    size_t part;

    if (fraction >= 1)
        return budget;
    part = (size_t)(fraction * (double)total);
    if (budget && budget < part)
        return budget;
    return part ? part : 1;
}

void mo_torch_hook_fraction(double fraction, int device)
{
    mo_driver *driver = NULL;
    mo_pool *pool = NULL;
    size_t unused, total = 0;
    mo_detail detail;
    mo_status status;

    if (!(fraction >= 0 && fraction <= 1))
        status = mo_fail(&detail, MO_INVALID, 0, "a memory fraction must be from 0 to 1, not %g", fraction);
    else
        status = pool_of(device, 0, &pool, &detail);
    if (!status)
        status = mo_driver_cuda_get(device, &driver, &detail);
    if (!status)
        status = driver->memory_info(driver, &detail, &unused, &total);
    if (status)
        throw(&detail);
    mo_pool_limit(pool, limit_of(fraction, total));
    atomic_store(&fractions[device], 1 - fraction);
}

/* ---- private pools -------------------------------------------------------------------------------------- */

typedef struct member {
    mo_driver *driver;
    mo_stream_filter filter;
} member;

/* Under the pool's lock, which no exception may leave: see mo_stream_filter_accepts. */
static bool accepts(void *user, mo_stream stream)
{
    member *m = user;
    uint64_t capture;

    return m->driver->capture_id(m->driver, stream, NULL, &capture) == MO_OK &&
           mo_stream_filter_accepts(&m->filter, stream);
}

static void drop(void *user)
{
    member *m = user;
    mo_stream_filter_destroy(&m->filter);
    mo_host_free(m);
}

/* Takes over *filter, whatever comes of it. */
static mo_status begin_pool(int device, mo_arena_id id, mo_stream_filter *filter, mo_detail *detail)
{
    member *m = mo_host_alloc(sizeof *m);
    mo_pool *pool = NULL;
    mo_status status;

    if (!m) {
        mo_stream_filter_destroy(filter);
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory for a private pool");
    }
    m->filter = *filter;
    status = pool_of(device, 0, &pool, detail);
    if (!status)
        status = mo_driver_cuda_get(device, &m->driver, detail);
    if (!status)
        status = mo_pool_arena_retain(pool, id, true, 0, detail);
    if (status) {
        drop(m);
        return status;
    }
    status = mo_pool_route(pool, id, (mo_route){accepts, drop, m}, detail);
    if (status) {
        drop(m);
        mo_pool_arena_release(pool, id, NULL);
    }
    return status;
}

void mo_torch_hook_begin_pool(int device, mo_arena_id id, const mo_stream_filter *filter)
{
    mo_stream_filter own;
    mo_detail detail;

    mo_stream_filter_copy(&own, filter); /* may throw; nothing is held yet */
    if (begin_pool(device, id, &own, &detail))
        throw(&detail);
}

static void end_or_release(int device, mo_arena_id id, mo_status (*call)(mo_pool *, mo_arena_id, mo_detail *))
{
    mo_pool *pool;
    mo_status status;

    if (in_child())
        return;
    pool = mo_pool_if_open(device);
    status = pool ? call(pool, id, NULL) : MO_INVALID;
    if (status)
        count(status == MO_INVALID ? &counts.unbalanced : &counts.failed);
}

void mo_torch_hook_end_pool(int device, mo_arena_id id)
{
    end_or_release(device, id, mo_pool_unroute);
}

void mo_torch_hook_release_pool(int device, mo_arena_id id)
{
    end_or_release(device, id, mo_pool_arena_release);
}

/* ---- what Python asks ------------------------------------------------------------------------------------ */

const mo_torch_hook *mo_torch_hooks(void)
{
#define HOOK(name) ((void (*)(void))mo_torch_hook_##name)
    static const mo_torch_hook hooks[] = {
        {"set_init_fn", HOOK(init)},
        {"set_reset_fn", HOOK(reset)},
        {"set_memory_fraction_fn", HOOK(fraction)},
        {"set_base_alloc_fn", HOOK(base)},
        {"set_record_stream_fn", HOOK(record_stream)},
        {"set_begin_allocate_to_pool", HOOK(begin_pool)},
        {"set_end_allocate_to_pool_fn", HOOK(end_pool)},
        {"set_release_pool", HOOK(release_pool)},
        {NULL, NULL},
    };
#undef HOOK
    return hooks;
}

mo_torch_hook_counts mo_torch_hooks_read(void)
{
    return (mo_torch_hook_counts){.in_child = atomic_load(&counts.in_child),
                                  .foreign_frees = atomic_load(&counts.foreign_frees),
                                  .foreign_streams = atomic_load(&counts.foreign_streams),
                                  .unbalanced = atomic_load(&counts.unbalanced),
                                  .failed = atomic_load(&counts.failed)};
}
