#include "heap.h"

#include "streams.h"
#include "capture.h"
#include "handles.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { UNIT = 512 };
#define UNITS     (SIM_FRAME / UNIT)
#define SMALL_MAX ((size_t)1 << 20)

typedef struct slab {
    uintptr_t base;
    sim_frames *frames;
    size_t used;                /* units */
    unsigned char taken[UNITS]; /* a byte a unit */
    struct slab *next;
} slab;

static slab *slabs;

static uintptr_t map_new(sim_store *store, size_t count, sim_frames **out)
{
    sim_frames *frames = sim_frames_take(store, count);
    uintptr_t base = frames ? sim_addresses_reserve(count * SIM_FRAME, SIM_FRAME, 0) : 0;

    if (base && sim_frames_map(frames, count, base, PROT_READ | PROT_WRITE)) {
        *out = frames;
        return base;
    }
    if (base)
        sim_addresses_free(base, count * SIM_FRAME);
    if (frames)
        sim_frames_release(frames);
    return 0;
}

static void unmap(sim_frames *frames, uintptr_t base)
{
    size_t size = frames->count * SIM_FRAME;

    sim_frames_unmap(frames, frames->count, base);
    sim_addresses_free(base, size);
}

/* First unit of a free run, or UNITS. */
static size_t find_units(const slab *in, size_t count)
{
    for (size_t i = 0, run = 0; i < UNITS; i++) {
        run = in->taken[i] ? 0 : run + 1;
        if (run == count)
            return i + 1 - count;
    }
    return UNITS;
}

static slab *slab_with_room(sim_store *store, size_t units, size_t *at)
{
    for (slab *in = slabs; in; in = in->next)
        if (in->frames->store == store && in->used + units <= UNITS && (*at = find_units(in, units)) < UNITS)
            return in;
    slab *fresh = calloc(1, sizeof *fresh);
    if (fresh && (fresh->base = map_new(store, 1, &fresh->frames))) {
        fresh->next = slabs;
        slabs = fresh;
        *at = 0;
        return fresh;
    }
    free(fresh);
    return NULL;
}

static void slab_give_back(const sim_range *range)
{
    for (slab **link = &slabs; *link; link = &(*link)->next) {
        slab *in = *link;
        if (range->base - in->base >= SIM_FRAME)
            continue;
        size_t units = (range->size + UNIT - 1) / UNIT;
        memset(in->taken + (range->base - in->base) / UNIT, 0, units);
        in->used -= units;
        if (in->used == 0) {
            *link = in->next;
            unmap(in->frames, in->base);
            free(in);
        }
        return;
    }
}

CUresult sim_heap_alloc(int device, size_t size, sim_pool *pool, uintptr_t *out)
{
    sim_store *store = &sim_devices[device].store;
    sim_range range = {.size = size, .device = device, .pool = pool};

    if (size <= SMALL_MAX) {
        size_t at = 0, units = (size + UNIT - 1) / UNIT;
        slab *in = slab_with_room(store, units, &at);
        if (!in)
            goto fail;
        memset(in->taken + at, 1, units);
        in->used += units;
        range.base = in->base + at * UNIT;
        range.kind = SIM_RANGE_PIECE;
        range.frames = in->frames;
        if (!sim_range_add(&sim_ranges, &range)) {
            slab_give_back(&range);
            goto fail;
        }
    } else {
        if (size > store->total * SIM_FRAME)
            goto fail;
        range.base = map_new(store, (size + SIM_FRAME - 1) / SIM_FRAME, &range.frames);
        range.kind = SIM_RANGE_ALLOCATION;
        if (!range.base)
            goto fail;
        if (!sim_range_add(&sim_ranges, &range)) {
            unmap(range.frames, range.base);
            goto fail;
        }
    }
    sim_devices[device].counts.live.allocations++;
    *out = range.base;
    return CUDA_SUCCESS;

fail:
    sim_devices[device].counts.ooms++;
    return CUDA_ERROR_OUT_OF_MEMORY;
}

sim_range *sim_heap_at(uintptr_t address)
{
    sim_range *range = sim_range_at(&sim_ranges, address);

    if (!range || range->base != address || range->kind > SIM_RANGE_PIECE)
        return NULL;
    return range;
}

/* ---- stream-ordered pools ----------------------------------------------------------------------------- */
/* A freed block that the pool keeps: still an allocation, but nobody's. */
typedef struct sim_cached {
    uintptr_t address;
    size_t size;
    struct sim_cached *next;
} sim_cached;

static size_t padded(size_t size)
{
    size_t unit = size <= SMALL_MAX ? UNIT : SIM_FRAME;
    return (size + unit - 1) / unit * unit;
}

static void heap_drop(sim_range *range)
{
    sim_range copy = *range;

    sim_range_remove(&sim_ranges, range);
    sim_devices[copy.device].counts.live.allocations--;
    if (copy.kind == SIM_RANGE_PIECE)
        slab_give_back(&copy);
    else
        unmap(copy.frames, copy.base);
}

void sim_heap_free_now(uintptr_t address)
{
    sim_range *range = sim_heap_at(address);

    if (!range)
        return;
    sim_pool *pool = range->pool;
    if (pool) {
        size_t size = padded(range->size);
        pool->used -= size;
        sim_cached *cached = pool->used + pool->cached + size <= pool->threshold && !pool->destroyed
                                 ? malloc(sizeof *cached)
                                 : NULL;
        if (cached) {
            *cached = (sim_cached){.address = address, .size = size, .next = pool->free_list};
            pool->free_list = cached;
            pool->cached += size;
            range->freeing = true; /* until it is handed out again, freeing it is an error */
            return;
        }
    }
    heap_drop(range);
    if (pool && pool->destroyed && pool->used == 0)
        free(pool);
}

CUresult sim_heap_free(uintptr_t address)
{
    sim_range *range = sim_heap_at(address);

    if (!range || range->freeing)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t id = range->id;
    CUresult result = sim_device_synchronize(range->device);
    range = sim_heap_at(address); /* the lock was released: another thread may have been faster */
    if (!range || range->id != id || range->freeing)
        return CUDA_ERROR_INVALID_VALUE;
    sim_heap_free_now(address);
    return result;
}

sim_pool *sim_pool_new(int device, size_t maximum)
{
    sim_pool *pool = calloc(1, sizeof *pool);

    if (!pool)
        return NULL;
    *pool = (sim_pool){.device = device, .maximum = maximum ? maximum : SIZE_MAX, .flags = {0, 1, 1, 1}};
    pool->handle = sim_handle_new(SIM_KIND_POOL, pool);
    if (!pool->handle) {
        free(pool);
        return NULL;
    }
    return pool;
}

void sim_pool_trim(sim_pool *pool, size_t keep)
{
    while (pool->free_list && pool->used + pool->cached > keep) {
        sim_cached *cached = pool->free_list;
        pool->free_list = cached->next;
        pool->cached -= cached->size;
        heap_drop(sim_range_at(&sim_ranges, cached->address));
        free(cached);
    }
}

void sim_pool_destroy(sim_pool *pool)
{
    sim_handle_drop(pool->handle);
    pool->destroyed = true;
    sim_pool_trim(pool, 0);
    for (int device = 0; device < sim_device_count; device++)
        if (sim_devices[device].pool == pool)
            sim_devices[device].pool = sim_devices[device].default_pool;
    if (pool->used == 0)
        free(pool); /* else with its last allocation */
}

CUresult sim_pool_get(const sim_pool *pool, CUmemPool_attribute attribute, void *out)
{
    uint64_t *number = out;

    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        *(int *)out = pool->flags[attribute];
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        *number = pool->threshold;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
        *number = pool->used + pool->cached;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        *number = pool->reserved_high;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        *number = pool->used;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        *number = pool->used_high;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult sim_pool_set(sim_pool *pool, CUmemPool_attribute attribute, const void *value)
{
    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        pool->flags[attribute] = *(const int *)value != 0;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        pool->threshold = *(const uint64_t *)value;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: /* the high marks can be set to 0 alone, which means "to now" */
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        if (*(const uint64_t *)value != 0)
            return CUDA_ERROR_INVALID_VALUE;
        if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH)
            pool->used_high = pool->used;
        else
            pool->reserved_high = pool->used + pool->cached;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult sim_pool_alloc(sim_pool *pool, size_t size, sim_stream *stream, uintptr_t *out)
{
    if (stream->capture) {
        stream->capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED; /* memory nodes are not simulated */
    }
    size_t bytes = size <= SIZE_MAX - SIM_FRAME ? padded(size) : size;
    sim_cached **link = &pool->free_list;
    while (*link && (*link)->size != bytes)
        link = &(*link)->next;
    if (*link) {
        sim_cached *cached = *link;
        sim_range *range = sim_range_at(&sim_ranges, cached->address);
        *link = cached->next;
        pool->cached -= bytes;
        range->size = size;
        range->freeing = false;
        *out = cached->address;
        free(cached);
    } else {
        if (bytes > pool->maximum || pool->used > pool->maximum - bytes)
            return CUDA_ERROR_OUT_OF_MEMORY;
        CUresult result = sim_heap_alloc(pool->device, size, pool, out);
        if (result != CUDA_SUCCESS && pool->cached) {
            sim_pool_trim(pool, 0);
            result = sim_heap_alloc(pool->device, size, pool, out);
        }
        if (result != CUDA_SUCCESS)
            return result;
    }
    pool->used += bytes;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
    if (pool->used + pool->cached > pool->reserved_high)
        pool->reserved_high = pool->used + pool->cached;
    return CUDA_SUCCESS;
}

CUresult sim_pool_free(uintptr_t address, sim_stream *stream)
{
    sim_range *range = sim_heap_at(address);

    if (!range || range->freeing)
        return CUDA_ERROR_INVALID_VALUE;
    sim_work *work = sim_work_new(SIM_WORK_FREE, stream->device);
    if (!work)
        return CUDA_ERROR_OUT_OF_MEMORY;
    work->address = address;
    range->freeing = true;
    uint64_t id = range->id;
    CUresult result = sim_stream_submit(stream, work, NULL);
    range = sim_heap_at(address);
    if (result != CUDA_SUCCESS && range && range->id == id)
        range->freeing = false;
    return result;
}
