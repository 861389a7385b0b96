/* The inside of a pool, for the files that make it up: pool.c (the lock, requests and frees), placement.c (where memory is
 * brought to), ladder.c (what is tried when there is none), arena.c, pool_report.c. Everything here is under pool->lock,
 * except where a function says so. One that UNLOCKS gives the lock away while the host waits: blocks, arenas and numbers of
 * streams that its caller knew of may be gone after it, and are looked up again.
 *
 *     peak = max of requested bytes live at once          held = granules + segments, in bytes
 *     each arena: held = the slots and segments its zones own */
#ifndef MO_POOL_PARTS_H
#define MO_POOL_PARTS_H

#include "alloc/address_map.h"
#include "alloc/order.h"
#include "alloc/pool.h"
#include "alloc/recall.h"
#include "alloc/trace_ring.h"
#include "alloc/zone.h"
#include "base/lock.h"

#define MO_SEGMENT_STEP                                                                                      \
    ((size_t)2 << 20) /* bytes: what segments are multiples of, where there are no granules */

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
    mo_block_store blocks;
    mo_address_map live;
    mo_granules granules;
    mo_order order;
    mo_recall recall;
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
    mo_pressure pressure;
    void *pressure_user;
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

/* ---- placement.c ------------------------------------------------------------------------------------------ */

/* A request on its way through the pool. */
typedef struct mo_request {
    mo_arena *arena;
    mo_zone *zone;
    size_t size, requested; /* bytes, rounded and as asked */
    unsigned stream;        /* its number */
    bool captured;
    bool apart;    /* beside free memory that cannot be waited for (a capture uses it): joins none of it */
    bool foretold; /* the step repeats: what is mapped now will be wanted again */
} mo_request;

/* How far a placement may go; each includes what stands before it. */
typedef enum mo_effort {
    MO_EFFORT_SWITCH, /* granules that are mapped there already, spare ones, new ones within the slack */
    MO_EFFORT_MOVE,   /* granules that are free elsewhere */
    MO_EFFORT_JOIN,   /* … and the stream is made to wait for others */
    MO_EFFORT_CREATE, /* new ones as far as the budget goes */
} mo_effort;

/* The free block that a request fits best, for which its stream waits for nobody, or NULL; then *waiting is the best of
 * those for which it would, or NULL. */
mo_block *mo_fit(mo_pool *pool, const mo_request *request, mo_block **waiting);

/* Brings memory to where a request can have it: then *out is a free block of the zone that holds it, and *at the address
 * to take. MO_NO_DEVICE_MEMORY where this effort is not enough. */
mo_status mo_place(mo_pool *pool, const mo_request *request, mo_effort effort, mo_detail *detail,
                   mo_block **out, mo_address *at);

/* The free block that holds [address, address + size) of the zone, where that takes no call of the driver and no wait:
 * free as it is, or after switching granules. NULL otherwise. */
mo_block *mo_place_at(mo_pool *pool, const mo_request *request, mo_address address);

/* At least `bytes` of physical memory for the arena, as far as its and the pool's budget go. */
mo_status mo_arena_fill(mo_pool *pool, mo_arena *arena, size_t bytes, mo_detail *detail);

/* A new granule within the budgets, spare. */
mo_status mo_pool_create_granule(mo_pool *pool, mo_detail *detail);

/* ---- segments.c ------------------------------------------------------------------------------------------- */

/* A segment that holds `size` bytes, as one free block of the zone; MO_NO_DEVICE_MEMORY. */
mo_status mo_segment_add(mo_pool *pool, mo_zone *zone, size_t size, mo_detail *detail, mo_block **out);
/* Gives segments that are free as a whole back, until no more than `keep` bytes are held. WAITS. */
mo_status mo_segments_free(mo_pool *pool, mo_zone *zone, size_t keep, mo_detail *detail);

/* ---- ladder.c --------------------------------------------------------------------------------------------- */

/* UNLOCKS. Until all that was freed so far is over, however long that takes; but for what is being captured, which has no
 * end. Arenas are settled, too. */
mo_status mo_pool_wait(mo_pool *pool, mo_detail *detail);

/* UNLOCKS. Until the whole device is done: not while a graph is captured, which CUDA may end for that. */
mo_status mo_pool_synchronize(mo_pool *pool, mo_detail *detail);

/* UNLOCKS, where all numbers are taken and one may become free. The stream's number. */
mo_status mo_pool_number_stream(mo_pool *pool, mo_stream stream, mo_detail *detail, unsigned *out);

/* UNLOCKS. The next thing to try for a request that cannot be had. MO_OK: make it once more, from the start.
 * MO_NO_DEVICE_MEMORY: nothing is left to try; else the error that ended a wait. */
#define MO_LADDER_WAITS                                                                                      \
    64 /* at most: threads that go on freeing and queueing could keep one waiting for ever */
typedef struct mo_ladder {
    int rung, waits;
} mo_ladder;
mo_status mo_ladder_climb(mo_pool *pool, const mo_request *request, mo_ladder *ladder, mo_detail *detail);

/* Releases spare granules, and free ones of whole arenas, until held <= keep. What is not known to be over stays. */
mo_status mo_pool_shrink(mo_pool *pool, size_t keep, mo_detail *detail);

/* ---- arena.c ---------------------------------------------------------------------------------------------- */

void mo_arena_start(mo_pool *pool, mo_arena *arena, mo_arena_id id);
mo_arena *mo_arena_find(mo_pool *pool, mo_arena_id id);
/* The arena for a request that names none. */
mo_arena *mo_arena_routed(mo_pool *pool, mo_stream stream);
/* After a free: an arena without references and live blocks is retired. */
void mo_arena_check_retired(mo_pool *pool, mo_arena *arena);
/* Whether an arena was pinned, and is released, and waits for the whole device. */
bool mo_arenas_unsettled(const mo_pool *pool);
/* The device is done with all that was queued at `tick`. Arenas that waited for that go, and those that could not go yet. */
void mo_arenas_settle(mo_pool *pool, uint64_t tick);
/* Gives all memory and addresses of all arenas back to the driver; the first failure is reported. */
mo_status mo_arenas_close(mo_pool *pool, mo_detail *detail);

/* ---- pool_report.c ---------------------------------------------------------------------------------------- */

/* Bytes that a request could have, were all work over (mo_fragmentation.largest_allocatable). */
size_t mo_pool_allocatable(mo_pool *pool);
/* Fills detail with what a user is told: out_of_memory.h. */
void mo_pool_describe_oom(mo_pool *pool, const mo_arena *arena, size_t size, mo_detail *detail);
mo_status mo_pool_check_locked(mo_pool *pool, mo_detail *detail);

/* ---- pool.c ----------------------------------------------------------------------------------------------- */

/* The live block that holds address, or NULL. */
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
