/* The inside of a pool, for the files that it is made of:
 *
 *     pool         requests and frees            pool_wait     the host waits; what is tried before a request fails
 *     placement    where a request goes          trim          memory goes back to the device
 *     remap        granules move there           arena, pool_arenas, arena_pause
 *     supply       which granules can be had     pool_views, pool_stats, fragmentation, pool_check: what is known of it
 *
 * Everything here is under pool->lock, except where a function says so. One that UNLOCKS gives the lock away while the host
 * waits.
 *
 *     peak = max of requested bytes live at once          held = granules + segments, in bytes
 *     each arena: held = the slots and segments its zones own */
#ifndef MO_POOL_PARTS_H
#define MO_POOL_PARTS_H

#include "alloc/address_map.h"
#include "alloc/stream_order.h"
#include "alloc/pool.h"
#include "alloc/step_predictor.h"
#include "alloc/trace_ring.h"
#include "alloc/zone.h"
#include "base/lock.h"

/* Requests of like size lie together, so that small ones do not break up what large ones will need again. */
typedef enum mo_zone_kind { MO_ZONE_SMALL, MO_ZONE_LARGE, MO_ZONE_HUGE, MO_ZONES } mo_zone_kind;

#define MO_EACH_ZONE(zone, arena)                                                                            \
    for (mo_zone *zone = (arena)->zones; zone < (arena)->zones + MO_ZONES; zone++)

struct mo_arena {
    mo_arena_id id;
    mo_arena *next;
    mo_zone zones[MO_ZONES];
    bool pinned, paused;
    bool pausing; /* the device is waited for, and requests are refused already */
    uint64_t
        unsettled; /* tick at which it was pinned no more: replays on streams unknown may still use it; 0: none */
    size_t references;
    size_t budget;   /* physical bytes, 0: none */
    size_t reserved; /* physical bytes that stay here (preallocated) */
    size_t live_blocks, live_bytes, requested_bytes, peak_bytes;
    mo_stat held[MO_STAT_COLUMN_COUNT]; /* bytes, as of the last time statistics were asked for */
    uint64_t number;                    /* for signatures: of all arenas so far */
};

typedef struct mo_route_entry {
    struct mo_route_entry *next;
    mo_arena *arena;
    mo_route route;
} mo_route_entry;

struct mo_pool {
    mo_lock lock;
    mo_driver *driver;
    mo_pool_settings settings;
    mo_detail aliases; /* of their test; written at opening */
    mo_block_store blocks;
    mo_address_map live;
    mo_granules granules;
    mo_stream_order order;
    mo_step_predictor predictor;
    mo_arena general; /* the first arena; never closed */
    mo_arena *arenas;
    mo_arena *retired; /* closed, their addresses kept for the next */
    uint64_t arena_count;
    mo_route_entry *routes; /* newest first */
    size_t segment_bytes;   /* where there are no granules */
    size_t peak;
    size_t held_peak;
    size_t device_bytes; /* of the whole device, 0: not asked yet */
    uint64_t serial;
    mo_stats stats;
    /* freed, and still used, when the accumulated counts began */
    int64_t active_before[MO_STAT_COLUMN_COUNT], active_bytes_before[MO_STAT_COLUMN_COUNT];
    mo_trace *trace;
};

static inline size_t mo_pool_held(const mo_pool *pool)
{
    return pool->granules.count * pool->granules.size + pool->segment_bytes;
}

static inline size_t mo_arena_held(const mo_arena *arena)
{
    size_t bytes = 0;

    for (const mo_zone *zone = arena->zones; zone < arena->zones + MO_ZONES; zone++)
        bytes += zone->owned * zone->granules->size + zone->segment_bytes;
    return bytes;
}

/* The live block that holds address, or NULL (pool.c). */
mo_block *mo_pool_live_at(mo_pool *pool, mo_address address);

/* Tells the trace that memory came to an address (MO_TRACE_MAP, with the stream that wanted it) or left it
 * (MO_TRACE_UNMAP): granules that are owned there, whatever is mapped, or a segment. */
static inline void mo_pool_tell(const mo_pool *pool, mo_trace_op op, const mo_span *span, mo_address address,
                                size_t size, mo_stream stream)
{
    if (pool->trace)
        mo_trace_put(pool->trace, pool->driver->device, op, 0, address, size, stream, span->zone->arena->id);
}

static inline void mo_pool_tell_slots(const mo_pool *pool, mo_trace_op op, const mo_span *span, size_t slot,
                                      size_t count, mo_stream stream)
{
    mo_pool_tell(pool, op, span, mo_slot_address(span, slot), count * pool->granules.size, stream);
}

#endif
