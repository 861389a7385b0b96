#include "alloc/pool.h"

#include <string.h>

#include "alloc/arena.h"
#include "alloc/fragmentation.h"
#include "alloc/placement.h"
#include "alloc/pool_check.h"
#include "alloc/pool_wait.h"
#include "alloc/remap.h"
#include "alloc/segments.h"
#include "alloc/torch_streams.h"
#include "alloc/trace_ring.h"
#include "base/assert.h"
#include "base/hostmem.h"
#include "base/size.h"
#include "driver/driver_cuda.h"
#include "driver/forked.h"

#define REPEATING      256  /* requests predicted right in a row, until a step is taken to repeat */
#define GRANULES_LEAST 4096 /* of a full device */
#define RECALLED       ((size_t)1 << 20) /* requests larger than this are put where they were the last time */

/* ---- the process's pools --------------------------------------------------------------------------------- */

static mo_lock opening = MO_LOCK_INIT;
static mo_pool_settings defaults = {.slack = 20,
                                    .recall = true,
                                    .small_limit = MO_SMALL_LIMIT,
                                    .huge_limit = MO_HUGE_LIMIT,
                                    .stream_lasts = mo_torch_stream_lasts};
static _Atomic(mo_pool *) of_device[MO_MAX_DEVICES];
static void (*on_open[MO_ON_OPEN])(int device, mo_pool *pool); /* under `opening` */

mo_pool_settings mo_pool_defaults(void)
{
    mo_pool_settings settings;

    mo_lock_take(&opening);
    settings = defaults;
    mo_lock_give(&opening);
    return settings;
}

void mo_pool_set_defaults(mo_pool_settings settings)
{
    mo_lock_take(&opening);
    defaults = settings;
    mo_lock_give(&opening);
}

mo_pool *mo_pool_if_open(int device)
{
    return device < 0 || device >= MO_MAX_DEVICES
               ? NULL
               : atomic_load_explicit(&of_device[device], memory_order_acquire);
}

void mo_pool_on_open(void (*call)(int device, mo_pool *pool))
{
    size_t i = 0;

    mo_lock_take(&opening);
    while (i < MO_ON_OPEN && on_open[i] && on_open[i] != call)
        i++;
    MO_ASSERT(i < MO_ON_OPEN);
    on_open[i] = call;
    mo_lock_give(&opening);
}

mo_status mo_pool_of_device(int device, mo_pool **out, mo_detail *detail)
{
    mo_driver *driver = NULL;
    mo_pool *pool = mo_pool_if_open(device);
    mo_status status = MO_OK;

    if (!pool) {
        status = mo_driver_cuda_get(device, &driver,
                                    detail); /* refuses a number that of_device[] lacks, and a child */
        if (status)
            return status;
        mo_lock_take(&opening);
        pool = atomic_load_explicit(&of_device[device], memory_order_relaxed);
        if (!pool) {
            status = mo_pool_open(driver, &defaults, detail, &pool);
            for (int other = 0; other < MO_MAX_DEVICES && !status; other++)
                if (mo_pool_if_open(other))
                    status = mo_pool_grant_again(mo_pool_if_open(other), detail);
            if (!status && defaults.preallocate)
                status = mo_pool_preallocate(pool, (mo_arena_id){0, 0}, defaults.preallocate, detail);
            if (status && pool) {
                mo_pool_close(pool, NULL);
                pool = NULL;
            }
            if (!status)
                atomic_store_explicit(&of_device[device], pool, memory_order_release);
            for (size_t i = 0; i < MO_ON_OPEN && !status && on_open[i]; i++)
                on_open[i](device, pool);
        }
        mo_lock_give(&opening);
    }
    if (!status)
        *out = pool;
    return status;
}

void mo_pool_read_double_map(mo_pool *pool, mo_pool_double_map *out)
{
    *out = (mo_pool_double_map){
        .on = pool->settings.double_map, .tested = pool->settings.test_aliases, .why = pool->aliases};
}

/* ---- opening and closing ------------------------------------------------------------------------------------ */

/* The driver's granularity, doubled as long as GRANULES_LEAST of them fit the budget and the device: 16 MiB on a card of
 * 80 GiB. Each costs a create and a map when the card is filled; where memory is short, some ten are lost at the edges of
 * blocks, whatever their size (replay --frontier). */
static size_t granule_size(mo_driver *driver, size_t budget)
{
    size_t size = driver->granularity, free_bytes = 0, limit = 0;

    if (!size || driver->memory_info(driver, NULL, &free_bytes, &limit))
        return size;
    if (budget && budget < limit)
        limit = budget;
    while (limit / 2 / size >= GRANULES_LEAST)
        size *= 2;
    return size;
}

mo_status mo_pool_open(mo_driver *driver, const mo_pool_settings *settings, mo_detail *detail, mo_pool **out)
{
    mo_pool *pool = mo_host_calloc(1, sizeof *pool);

    if (!pool)
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory for a pool");
    pool->lock = (mo_lock)MO_LOCK_INIT;
    pool->driver = pool->granules.driver = pool->order.driver = driver;
    pool->settings = *settings;
    pool->order.lasts = settings->stream_lasts;
    if (!pool->settings.small_limit)
        pool->settings.small_limit = MO_SMALL_LIMIT;
    if (!pool->settings.huge_limit)
        pool->settings.huge_limit = MO_HUGE_LIMIT;
    pool->granules.size = granule_size(driver, pool->settings.budget);
    if (settings->test_aliases) {
        pool->settings.test_aliases = driver->granularity != 0; /* without, there is nothing to map twice */
        pool->settings.double_map =
            pool->settings.test_aliases && driver->test_aliases(driver, &pool->aliases) == MO_OK;
    }
    if (settings->recall && mo_step_predictor_open(&pool->predictor, NULL))
        pool->settings.recall = false; /* slower steps, nothing else */
    mo_arena_start(pool, &pool->general, (mo_arena_id){0, 0});
    pool->general.references = 1;
    pool->arenas = &pool->general;
    *out = pool;
    return MO_OK;
}

static void note_failure(mo_status *first, mo_status status)
{
    if (!*first)
        *first = status;
}

mo_status mo_pool_close(mo_pool *pool, mo_detail *detail)
{
    mo_status status = pool->driver->synchronize(pool->driver, detail);

    note_failure(&status, mo_arenas_close(pool, detail));
    mo_stream_order_close(&pool->order);
    mo_granules_close(&pool->granules);
    mo_step_predictor_close(&pool->predictor);
    mo_address_map_close(&pool->live);
    mo_blocks_close(&pool->blocks);
    mo_host_free(pool);
    return status;
}

/* ---- requests ------------------------------------------------------------------------------------------------ */

/* A free block that holds the request, its memory there, in the order of what that costs. */
static mo_status search(mo_pool *pool, const mo_request *request, mo_address hint, mo_detail *detail,
                        mo_block **out, mo_address *at)
{
    mo_block *waiting, *block = hint ? mo_remap_at(pool, request, hint) : NULL;
    mo_status status;

    /* Memory that had to move in the step before need not move back: the step is placed where it went. A step that is only
     * like the one before would take new ways each time; and with double_map the old mapping is there still. */
    if (hint && !block && request->predicted && !pool->settings.double_map) {
        hint = mo_remap_follow(request->zone, hint);
        block = hint ? mo_remap_at(pool, request, hint) : NULL;
    }
    if (block) {
        pool->stats.recalled++;
        *at = hint;
        *out = block;
        return MO_OK;
    }
    block = mo_fit(pool, request, &waiting);
    if (!block && waiting) {
        mo_stream_order_poll(&pool->order);
        block = mo_fit(pool, request, &waiting);
    }
    if (block || !pool->granules.size) {
        status = MO_OK;
        if (!block && waiting && !request->captured && !request->apart)
            block = waiting;
        if (!block)
            status = mo_segment_add(pool, request->zone, request->size, detail, &block);
        if (!status) {
            *out = block;
            *at = block->address;
        }
        return status;
    }
    if (!pool->settings.double_map || request->captured || pool->granules.stale_count)
        mo_stream_order_probe(&pool->order, request->stream); /* on the slow path only */
    for (mo_effort effort = MO_EFFORT_SWITCH;; effort++) {
        status = mo_place(pool, request, effort, detail, out, at);
        if ((status != MO_NO_DEVICE_MEMORY && status != MO_NOT_READY) || effort == MO_EFFORT_CREATE)
            return status;
        if (effort == MO_EFFORT_SWITCH && !request->captured && !request->apart) {
            block = mo_fit(pool, request, &waiting);
            block = block ? block : waiting;
            if (block) {
                *out = block;
                *at = block->address;
                return MO_OK;
            }
        }
    }
}

/* From a free block to a live one. */
static mo_status grant_request(mo_pool *pool, const mo_request *request, mo_block *block, mo_address at,
                               mo_detail *detail, mo_block **out)
{
    mo_arena *arena = request->arena;
    mo_status status = MO_OK;

    if (!mo_stream_order_own(request->stream, block->last_use))
        status = mo_stream_order_join(&pool->order, request->stream, false, block->last_use, detail);
    if (!status)
        status = mo_blocks_reserve(&pool->blocks, 2, detail);
    if (!status)
        status = mo_address_map_reserve(&pool->live, detail);
    if (status)
        return status;
    block = mo_zone_take(request->zone, block, at, request->size);
    block->last_use = (mo_last_use){0};
    block->requested = request->requested;
    block->stream = (uint8_t)request->stream;
    block->serial = ++pool->serial;
    mo_address_map_put(&pool->live, block);
    pool->order.streams[request->stream].users++;
    mo_stat_add(&pool->stats, MO_ALLOCATION, request->zone->column, 1);
    mo_stat_add(&pool->stats, MO_ALLOCATED_BYTES, request->zone->column, (int64_t)block->size);
    mo_stat_add(&pool->stats, MO_REQUESTED_BYTES, request->zone->column, (int64_t)block->requested);
    if (pool->peak < (size_t)pool->stats.of[MO_REQUESTED_BYTES][MO_STAT_ALL].current)
        pool->peak = (size_t)pool->stats.of[MO_REQUESTED_BYTES][MO_STAT_ALL].current;
    arena->live_blocks++;
    arena->live_bytes += block->size;
    arena->requested_bytes += block->requested;
    if (arena->peak_bytes < arena->live_bytes)
        arena->peak_bytes = arena->live_bytes;
    *out = block;
    return MO_OK;
}

/* One search for a request, with what it finds taken; again: not the first one. */
static mo_status fulfil(mo_pool *pool, mo_request *request, bool again, mo_detail *detail, mo_block **out)
{
    uint32_t signature = 0;
    mo_address hint = 0, at = 0;
    mo_block *block = NULL;
    mo_status status;

    if (pool->settings.recall) {
        signature = mo_step_predictor_signature(request->size, request->stream, request->arena->number);
        hint = mo_step_predictor_predict(&pool->predictor, signature);
        request->predicted = hint && pool->predictor.run >= REPEATING;
        /* Smaller ones tell what comes next as well as others do, and fall into place by best fit alone; to look for their
         * old place would take longer, among the thousands of blocks that may begin in one granule. */
        if (request->size <= RECALLED || again)
            hint = 0;
    }
    for (;;) {
        status = search(pool, request, hint, detail, &block, &at);
        if (!status)
            status = grant_request(pool, request, block, at, detail, out);
        if (status != MO_NOT_READY || request->apart)
            break;
        request->apart = true; /* the memory's stream is being captured, and cannot be waited for */
        hint = 0;
    }
    if (status)
        return status == MO_NOT_READY ? MO_NO_DEVICE_MEMORY : status;
    if (again)
        pool->stats.num_alloc_retries++;
    if (pool->settings.recall)
        mo_step_predictor_learn(&pool->predictor, signature, at);
    return MO_OK;
}

/* The program's own scale says what is huge: a model ten times as large has activations ten times as large. Where the limit
 * fell among them, some of a layer's would go to one zone and some to the other, and granules with them, back and forth.
 * Without double_map nothing is: memory that was used lately cannot change zones, so each zone would need its own. */
static size_t huge_limit(const mo_pool *pool)
{
    const size_t share = pool->peak / MO_HUGE_SHARE;

    if (!pool->settings.double_map)
        return SIZE_MAX;
    return share > pool->settings.huge_limit ? share : pool->settings.huge_limit;
}

static mo_status make_request(mo_pool *pool, mo_arena *arena, size_t size, mo_stream stream, unsigned number,
                              mo_detail *detail, mo_request *out)
{
    uint64_t capture = 0;
    mo_status status = MO_OK;

    *out = (mo_request){.arena = arena, .requested = size, .stream = number};
    if (arena->paused || arena->pausing)
        return mo_fail(detail, MO_INVALID, 0, "the pool is paused: resume it before requesting memory");
    if (!mo_align_up_ok(size, MO_ALIGNMENT, &out->size) || out->size >> 48)
        return mo_fail(detail, MO_NO_DEVICE_MEMORY, 0, "%zu bytes are more than any device has", size);
    out->zone = &arena->zones[size <= pool->settings.small_limit ? MO_ZONE_SMALL
                              : size < huge_limit(pool)          ? MO_ZONE_LARGE
                                                                 : MO_ZONE_HUGE];
    if (arena->pinned || pool->routes)
        status = pool->driver->capture_id(pool->driver, stream, detail, &capture);
    out->captured = capture != 0;
    return status;
}

/* One attempt. UNLOCKS where it fails; MO_NOT_READY then asks for another. *arena: whose it is, NULL: nobody's. */
static mo_status alloc_locked(mo_pool *pool, bool named, mo_arena_id id, size_t size, mo_stream stream,
                              mo_oom_retry *retry, mo_detail *detail, mo_arena **arena, mo_address *out)
{
    mo_request request;
    mo_block *block = NULL;
    unsigned number = 0;
    mo_status status = mo_pool_number_stream(pool, stream, detail, &number);

    if (status)
        return status;
    *arena = named          ? mo_arena_named(pool, id, detail)
             : pool->routes ? mo_arena_routed(pool, stream)
                            : &pool->general;
    status = *arena ? make_request(pool, *arena, size, stream, number, detail, &request) : MO_INVALID;
    if (status)
        return status;
    status = fulfil(pool, &request, retry->step > 0, detail, &block);
    if (status == MO_NO_DEVICE_MEMORY) {
        status = mo_oom_retry_next(pool, &request, retry, detail);
        return status ? status : MO_NOT_READY;
    }
    if (status)
        return status;
    if (pool->trace)
        mo_trace_put(pool->trace, pool->driver->device, MO_TRACE_ALLOC, block->serial, block->address, size,
                     stream, (*arena)->id);
    *out = block->address;
    return MO_OK;
}

static void trace_oom(mo_pool *pool, size_t size, mo_stream stream, const mo_arena *arena)
{
    size_t free_bytes = 0, total;

    pool->driver->memory_info(pool->driver, NULL, &free_bytes, &total);
    mo_trace_put(pool->trace, pool->driver->device, MO_TRACE_OOM, 0, free_bytes, size, stream, arena->id);
}

/* named: `id` counts, else the routes do. */
static mo_status alloc(mo_pool *pool, bool named, mo_arena_id id, size_t size, mo_stream stream,
                       mo_detail *detail, mo_address *out)
{
    mo_detail own;
    mo_oom_retry retry = {0};
    mo_arena *arena = NULL;
    mo_status status;

    detail = detail ? detail : &own;
    if (!size) {
        *out = 0;
        return MO_OK;
    }
    if (mo_forked())
        return mo_forked_refuse("allocating device memory", detail);
    if (stream == MO_STREAM_PER_THREAD)
        return mo_fail(
            detail, MO_UNSUPPORTED, 0,
            "CU_STREAM_PER_THREAD is a different stream in each thread, and memopt's allocator cannot "
            "distinguish them: use a created stream");
    mo_lock_take(&pool->lock);
    do
        status = alloc_locked(pool, named, id, size, stream, &retry, detail, &arena, out);
    while (status == MO_NOT_READY);
    if (arena && status == MO_NO_DEVICE_MEMORY) {
        pool->stats.num_ooms++;
        mo_pool_describe_oom(pool, arena, size, detail);
        if (pool->trace)
            trace_oom(pool, size, stream, arena);
    }
    MO_CHECK_ALL(mo_pool_check_locked(pool, NULL) == MO_OK);
    mo_lock_give(&pool->lock);
    return status;
}

mo_status mo_pool_alloc(mo_pool *pool, size_t size, mo_stream stream, mo_detail *detail, mo_address *out)
{
    return alloc(pool, false, (mo_arena_id){0, 0}, size, stream, detail, out);
}

mo_status mo_pool_alloc_in(mo_pool *pool, mo_arena_id arena, size_t size, mo_stream stream, mo_detail *detail,
                           mo_address *out)
{
    return alloc(pool, true, arena, size, stream, detail, out);
}

/* ---- frees ------------------------------------------------------------------------------------------------- */

static mo_span *span_of(mo_pool *pool, mo_address address)
{
    for (mo_arena *arena = pool->arenas; arena; arena = arena->next)
        MO_EACH_ZONE (zone, arena)
            for (mo_span *span = zone->spans; span; span = span->next)
                if (address - span->base < span->size)
                    return span;
    return NULL;
}

mo_block *mo_pool_live_at(mo_pool *pool, mo_address address)
{
    mo_block *block = mo_address_map_find(&pool->live, address);
    mo_span *span;

    if (block)
        return block;
    span = span_of(pool, address);
    if (!span)
        return NULL;
    block = span->slot_count ? mo_span_block_at(span, address) : span->lowest;
    while (address - block->address >= block->size)
        block = block->next;
    return block->state == MO_BLOCK_LIVE ? block : NULL;
}

static mo_status refuse_free(mo_pool *pool, mo_address address, mo_detail *detail)
{
    if (span_of(pool, address)) {
        pool->stats.double_frees++;
        return mo_fail(detail, MO_INVALID, 0,
                       "%#llx is not allocated: it was already freed, or is not the start of a block",
                       (unsigned long long)address);
    }
    pool->stats.foreign_frees++;
    return mo_fail(detail, MO_INVALID, 0, "%#llx is not memory of this allocator",
                   (unsigned long long)address);
}

static void free_block(mo_pool *pool, mo_block *block)
{
    mo_zone *zone = block->span->zone;
    mo_arena *arena = zone->arena;
    uint64_t own = 1ull << block->stream;
    bool shared = (block->last_use.streams & ~own) != 0;
    uint64_t alive;

    block->last_use.streams |= own;
    block->last_use.tick = ++pool->order.tick;
    for (uint64_t rest = block->last_use.streams; rest; rest &= rest - 1) {
        mo_stream_state *state = &pool->order.streams[__builtin_ctzll(rest)];

        state->users--;
        state->last = block->last_use.tick;
    }
    /* Marked now, it is known the sooner to be over; where that fails, whoever wants the memory marks again. Recorded streams
     * are alive, as for torch's own allocator, which marks them here too; the block's own, if borrowed, may be gone. */
    alive = block->last_use.streams & ~(own & pool->order.borrowed);
    if (shared)
        mo_stream_order_mark(&pool->order, alive, block->last_use.tick, NULL);
    mo_stat_add(&pool->stats, MO_ALLOCATION, zone->column, -1);
    mo_stat_add(&pool->stats, MO_ALLOCATED_BYTES, zone->column, -(int64_t)block->size);
    mo_stat_add(&pool->stats, MO_REQUESTED_BYTES, zone->column, -(int64_t)block->requested);
    arena->live_blocks--;
    arena->live_bytes -= block->size;
    arena->requested_bytes -= block->requested;
    block->requested = 0;
    mo_zone_put(zone, block);
    if (arena != &pool->general)
        mo_arena_check_retired(pool, arena);
}

mo_status mo_pool_free(mo_pool *pool, mo_address address, mo_detail *detail)
{
    mo_block *block;
    mo_status status = MO_OK;

    if (!address || mo_forked()) /* the child's memory is the parent's still */
        return MO_OK;
    mo_lock_take(&pool->lock);
    block = mo_address_map_take(&pool->live, address);
    if (!block) {
        status = refuse_free(pool, address, detail);
    } else {
        if (pool->trace)
            mo_trace_put(pool->trace, pool->driver->device, MO_TRACE_FREE, block->serial, address,
                         block->requested, pool->order.streams[block->stream].handle,
                         block->span->zone->arena->id);
        free_block(pool, block);
    }
    MO_CHECK_ALL(mo_pool_check_locked(pool, NULL) == MO_OK);
    mo_lock_give(&pool->lock);
    return status;
}

static mo_status not_live(mo_address address, mo_detail *detail)
{
    return mo_fail(detail, MO_INVALID, 0, "%#llx is not in a live block of this allocator",
                   (unsigned long long)address);
}

mo_status mo_pool_record_stream(mo_pool *pool, mo_address address, mo_stream stream, mo_detail *detail)
{
    unsigned number = 0;
    mo_block *block;
    mo_status status = MO_OK;

    if (mo_forked())
        return MO_OK;
    mo_lock_take(&pool->lock);
    status = mo_pool_number_stream(pool, stream, detail, &number);
    block = mo_pool_live_at(pool, address);
    if (!block) {
        pool->stats.foreign_streams++;
        status = not_live(address, detail);
    }
    if (!status && number != block->stream && !(block->last_use.streams >> number & 1)) {
        block->last_use.streams |= 1ull << number;
        pool->order.streams[number].users++;
    }
    if (!status && pool->trace)
        mo_trace_put(pool->trace, pool->driver->device, MO_TRACE_RECORD_STREAM, block->serial, block->address,
                     block->requested, stream, block->span->zone->arena->id);
    mo_lock_give(&pool->lock);
    return status;
}

mo_status mo_pool_base(mo_pool *pool, mo_address address, mo_detail *detail, mo_address *base, size_t *size)
{
    mo_block *block;
    mo_status status = MO_OK;

    if (mo_forked())
        return mo_forked_refuse("looking for a block of device memory", detail);
    mo_lock_take(&pool->lock);
    block = mo_pool_live_at(pool, address);
    if (block) {
        *base = block->address;
        *size = block->size;
    } else {
        status = not_live(address, detail);
    }
    mo_lock_give(&pool->lock);
    return status;
}

/* ---- limits -------------------------------------------------------------------------------------------------- */

void mo_pool_limit(mo_pool *pool, size_t budget)
{
    if (mo_forked())
        return;
    mo_lock_take(&pool->lock);
    pool->settings.budget = budget;
    mo_lock_give(&pool->lock);
}

void mo_pool_trace(mo_pool *pool, mo_trace *ring)
{
    if (mo_forked())
        return;
    mo_lock_take(&pool->lock);
    pool->trace = ring;
    mo_lock_give(&pool->lock);
}

void mo_pool_step(mo_pool *pool)
{
    if (mo_forked())
        return;
    mo_lock_take(&pool->lock);
    if (pool->trace)
        mo_trace_put(pool->trace, pool->driver->device, MO_TRACE_STEP, 0, 0, 0, NULL, (mo_arena_id){0, 0});
    mo_lock_give(&pool->lock);
}
