/* The memory of one device: requests in, addresses out, and as little physical memory behind them as can be.
 *
 * Addresses and memory are apart. Each zone (zone.h) carves blocks out of its own addresses by best fit, byte by byte
 * (MO_ALIGNMENT); physical memory is granules (granules.h), which move to where they are needed:
 *
 *     held = granules * their size         held <= budget
 *     held <= (1 + slack) * live peak, where granules that are free elsewhere can be moved instead of creating more
 *     live blocks lie on granules that their zone owns; a granule has one owner
 *
 * Streams (stream_order.h): a block that is freed may be given to another stream, or its granules elsewhere, only where that
 * stream is ordered behind all that used it; where it is not, it is made to wait on the device, never on the host.
 *
 * Arenas: memory that is kept apart, known by torch's pool number. {0, 0} is the general one; a graph's private pool and
 * a CudaPool are others. An arena opened `pinned` keeps its granules where they are (captured graphs replay their
 * addresses).
 *
 * One lock a pool; any thread may call, with or without the GIL; no function calls Python. None waits for the device
 * but the retries of mo_pool_alloc (bounded; pool_wait.h), trim, pause and close. A call that fails has changed nothing. */
#ifndef MO_POOL_H
#define MO_POOL_H

#include "alloc/stats.h"
#include "driver/driver.h"

/* Bytes: what every address is a multiple of, and what every request is rounded up to. torch's own. */
#define MO_ALIGNMENT 512

#define MO_SMALL_LIMIT ((size_t)64 << 10)
#define MO_HUGE_LIMIT  ((size_t)64 << 20)
#define MO_HUGE_SHARE  128 /* the limit is this part of the live peak, where that is more */

typedef struct mo_pool mo_pool;
typedef struct mo_trace mo_trace; /* trace_ring.h */

/* torch's MempoolId_t (std::pair of two unsigned long long) as it crosses the C ABI. */
typedef struct mo_arena_id {
    unsigned long long first, second;
} mo_arena_id;

typedef struct mo_pool_settings {
    size_t budget;   /* physical bytes held at most; 0: what the device has */
    size_t slack;    /* thousandths of the live peak that are created before granules are moved; default 20 */
    bool double_map; /* a granule may be mapped at its new place while old work still uses the old one */
    bool
        test_aliases; /* instead, double_map is on where the device passes the test (mo_driver.test_aliases) */
    bool recall;      /* a step that repeats is placed as it was last time (step_predictor.h) */
    size_t huge_limit;  /* smallest request, in bytes, of a zone for huge ones, at least; 0: MO_HUGE_LIMIT */
    size_t small_limit; /* largest request, in bytes, that lies in a zone for small ones; 0: MO_SMALL_LIMIT */
    size_t preallocate; /* physical bytes that mo_pool_of_device holds from the start; 0: none */
    bool (*stream_lasts)(int device, mo_stream stream); /* see mo_stream_order.lasts */
} mo_pool_settings;

/* What a pool opened by mo_pool_of_device gets: at first budget 0, slack 20, double_map off and not tested, recall on, streams
 * that last as torch says (torch_streams.h). Set
 * before the first use of a device; pools that are open stay as they are. */
mo_pool_settings mo_pool_defaults(void);
void mo_pool_set_defaults(mo_pool_settings settings);

/* driver must outlive the pool. Makes no driver call but memory_info and, where the settings ask for it, test_aliases, which may
 * run within a capture and WAITS for its own work; that the test fails, or cannot be run, is no failure. */
mo_status mo_pool_open(mo_driver *driver, const mo_pool_settings *settings, mo_detail *detail, mo_pool **out);

/* Gives all back to the driver, live or not; WAITS for the device. What the driver refuses is reported, and the pool is
 * gone nevertheless. */
mo_status mo_pool_close(mo_pool *pool, mo_detail *detail);

/* The process's pool of a device, opened at first use with the defaults and kept for ever. */
mo_status mo_pool_of_device(int device, mo_pool **out, mo_detail *detail);

/* Grants what is mapped once more, for devices that have come since (mo_driver.grant). mo_pool_of_device does so with all
 * pools when it opens one: each device's memory is then within the other's reach. */
mo_status mo_pool_grant_again(mo_pool *pool, mo_detail *detail);

/* The same where it is open already, else NULL. */
mo_pool *mo_pool_if_open(int device);

/* Called with each pool that mo_pool_of_device opens from now on, once however often it is given here (MO_ON_OPEN different
 * ones at most). It must not open another. */
#define MO_ON_OPEN 4
void mo_pool_on_open(void (*call)(int device, mo_pool *pool));

/* Whether double_map is on, and by the test; why has its error, or MO_OK. It stays as it was at opening. */
typedef struct mo_pool_double_map {
    bool on, tested;
    mo_detail why;
} mo_pool_double_map;
void mo_pool_read_double_map(mo_pool *pool, mo_pool_double_map *out);

/* ---- memory -------------------------------------------------------------------------------------------- */

/* size bytes for work on `stream`, in the arena that the routes choose (mo_pool_route), else in the general one.
 * A size of 0 gives address 0. MO_NO_DEVICE_MEMORY where it cannot be had, with a text that begins "CUDA out of
 * memory. Tried to allocate" and says what would help. */
mo_status mo_pool_alloc(mo_pool *pool, size_t size, mo_stream stream, mo_detail *detail, mo_address *out);

/* The same in a given arena, whatever the routes say. MO_INVALID where there is no such arena. */
mo_status mo_pool_alloc_in(mo_pool *pool, mo_arena_id arena, size_t size, mo_stream stream, mo_detail *detail,
                           mo_address *out);

/* Address 0 is fine. MO_INVALID for an address that is not live (counted: double or foreign). Never waits. */
mo_status mo_pool_free(mo_pool *pool, mo_address address, mo_detail *detail);

/* Work on `stream` uses the block, beside the stream it was allocated for. address may lie inside a block. */
mo_status mo_pool_record_stream(mo_pool *pool, mo_address address, mo_stream stream, mo_detail *detail);

/* The start and size (as rounded) of the live block that holds address. MO_INVALID where none does. */
mo_status mo_pool_base(mo_pool *pool, mo_address address, mo_detail *detail, mo_address *base, size_t *size);

/* ---- limits --------------------------------------------------------------------------------------------- */

/* Gives free granules back to the device until `keep` bytes are held or none is free; stale mappings go too. Waits
 * for events of streams that used them. */
mo_status mo_pool_trim(mo_pool *pool, size_t keep, mo_detail *detail, size_t *freed);

/* budget: physical bytes, 0 for none. What is held already stays held (then the next trim brings it down). */
void mo_pool_limit(mo_pool *pool, size_t budget);

/* Holds at least `bytes` of physical memory for arena from now on, created at once. */
mo_status mo_pool_preallocate(mo_pool *pool, mo_arena_id arena, size_t bytes, mo_detail *detail);

/* ---- arenas --------------------------------------------------------------------------------------------- */

/* Opens an arena, or adds a reference to one that is open. budget: most physical bytes in it, 0 for none. */
mo_status mo_pool_arena_retain(mo_pool *pool, mo_arena_id id, bool pinned, size_t budget, mo_detail *detail);

/* One reference fewer. At none its free memory is anyone's again, at once; its live blocks stay until they are
 * freed, and the arena with them. */
mo_status mo_pool_arena_release(mo_pool *pool, mo_arena_id id, mo_detail *detail);

/* From now on requests go to arena `id` where accepts(user, stream) says so; asked newest route first, under the
 * pool's lock: it must not call back. accepts NULL: all. drop(user), if not NULL, at the end of the route. The route
 * holds a reference of the arena. */
typedef struct mo_route {
    bool (*accepts)(void *user, mo_stream stream);
    void (*drop)(void *user);
    void *user;
} mo_route;
mo_status mo_pool_route(mo_pool *pool, mo_arena_id id, mo_route route, mo_detail *detail);
/* Ends the newest route to `id`. MO_INVALID where there is none. */
mo_status mo_pool_unroute(mo_pool *pool, mo_arena_id id, mo_detail *detail);

/* Takes the physical memory away from a whole arena, live blocks too, and keeps its addresses: any use of them is a
 * fault until resume. WAITS for the device. The content is the caller's to save: mo_pool_blocks() lists it. */
mo_status mo_pool_pause(mo_pool *pool, mo_arena_id id, mo_detail *detail);
/* Puts memory (of undefined content) behind the same addresses again. */
mo_status mo_pool_resume(mo_pool *pool, mo_arena_id id, mo_detail *detail);

typedef struct mo_arena_info {
    mo_arena_id id;
    bool pinned, paused;
    size_t references;
    size_t budget, held_bytes;                                   /* physical */
    size_t live_blocks, live_bytes, requested_bytes, peak_bytes; /* peak of live_bytes */
    size_t free_bytes; /* on memory of this arena, in no live block */
} mo_arena_info;
/* MO_INVALID where there is no such arena. */
mo_status mo_pool_arena_info(mo_pool *pool, mo_arena_id id, mo_detail *detail, mo_arena_info *out);

/* What each arena but the general one holds, in an array for mo_host_free(). */
typedef struct mo_arena_held_bytes {
    mo_arena_id id;
    mo_stat bytes[MO_STAT_COLUMN_COUNT];
} mo_arena_held_bytes;
mo_status mo_pool_arenas(mo_pool *pool, mo_detail *detail, mo_arena_held_bytes **out, size_t *count);

/* ---- what is known -------------------------------------------------------------------------------------- */

void mo_pool_read_stats(mo_pool *pool, mo_stats *out);
void mo_pool_reset_peaks(mo_pool *pool);
void mo_pool_reset_accumulated(mo_pool *pool);

typedef enum mo_block_state {
    MO_BLOCK_HOLE,    /* addresses only, nothing owned behind them (never in a mo_block_view) */
    MO_BLOCK_FREE,    /* memory that a request may get */
    MO_BLOCK_PENDING, /* free, and a stream other than its own may still be using it */
    MO_BLOCK_LIVE,
} mo_block_state;

typedef struct mo_block_view {
    mo_address address;
    size_t size, requested; /* requested 0 where not live */
    mo_block_state state;
    mo_stream stream; /* that it was allocated for, or last */
    uint64_t serial;  /* live: the number of its allocation, counted from 1 */
    mo_arena_id arena;
    bool small;
    bool starts_segment; /* nothing owned lies directly before it */
} mo_block_view;

/* All blocks with memory behind them, by zone and ascending address, in an array for mo_host_free(). */
mo_status mo_pool_blocks(mo_pool *pool, mo_detail *detail, mo_block_view **out, size_t *count);

/* Definitions: allocator research, and memopt.cuda.fragmentation(). */
typedef struct mo_fragmentation {
    size_t held_bytes, live_bytes, requested_bytes, free_bytes; /* held = live + free */
    size_t largest_free;                                        /* the largest free run as it lies */
    size_t largest_allocatable; /* with free granules moved together, and what the budget still allows */
    size_t pending_bytes;       /* free, but some stream may still use it */
    size_t stale_bytes;         /* addresses that still map a granule which lives elsewhere now */
    double external; /* 1 - largest_allocatable / (free + what the budget still allows), 0 where that is 0 */
    double internal; /* 1 - requested / live, 0 where nothing is live */
    double unused_at_peak; /* 1 - peak of requested / peak of held */
} mo_fragmentation;
void mo_pool_fragmentation(mo_pool *pool, mo_fragmentation *out);

/* Events go there from now on; NULL: nowhere. The ring must outlive its use (its owner keeps it for ever). */
void mo_pool_trace(mo_pool *pool, mo_trace *ring);

/* Notes the end of a step, which the program alone knows of, where the pool is traced. */
void mo_pool_step(mo_pool *pool);

/* Walks everything and compares it with the equations above and those of the parts. MO_CORRUPT names the first that
 * does not hold. */
mo_status mo_pool_check(mo_pool *pool, mo_detail *detail);

#endif
