/* What a pool counts: torch's own statistics, under torch's names and meanings (torch.cuda.memory_stats), and those
 * that only this pool has. One mo_stat for each kind and each of torch's three columns.
 *
 *     of[kind][MO_STAT_ALL] = of[kind][MO_STAT_SMALL] + of[kind][MO_STAT_LARGE]
 *     current = allocated - freed          peak = max of current since the last reset
 *     requested <= allocated <= active <= reserved          (bytes, current)
 *
 * Small is what lies in a pool's zone for small requests (zone.h). Changed under the pool's lock only. */
#ifndef MO_STATS_H
#define MO_STATS_H

#include <stdint.h>

/*    constant               torch's key              counts                                                    */
/* clang-format off */
#define MO_STAT_LIST(X)                                                                                      \
    X(MO_ALLOCATION,           "allocation",           "live blocks")                                            \
    X(MO_SEGMENT,              "segment",              "pieces of physical memory from the driver")              \
    X(MO_ACTIVE,               "active",               "live blocks, and freed ones that a stream still uses")   \
    X(MO_INACTIVE_SPLIT,       "inactive_split",       "free blocks beside live ones")                           \
    X(MO_ALLOCATED_BYTES,      "allocated_bytes",      "of live blocks, rounded up")                             \
    X(MO_RESERVED_BYTES,       "reserved_bytes",       "of physical memory held")                                \
    X(MO_ACTIVE_BYTES,         "active_bytes",         "of active blocks")                                       \
    X(MO_INACTIVE_SPLIT_BYTES, "inactive_split_bytes", "of free blocks beside live ones")                        \
    X(MO_REQUESTED_BYTES,      "requested_bytes",      "asked for by live blocks")
/* clang-format on */

typedef enum mo_stat_kind {
#define STAT_KIND(name, key, text) name,
    MO_STAT_LIST(STAT_KIND)
#undef STAT_KIND
        MO_STAT_KIND_COUNT
} mo_stat_kind;

typedef enum mo_stat_column {
    MO_STAT_ALL,
    MO_STAT_SMALL,
    MO_STAT_LARGE,
    MO_STAT_COLUMN_COUNT
} mo_stat_column;

typedef struct mo_stat {
    int64_t current, peak, allocated, freed;
} mo_stat;

typedef struct mo_stats {
    mo_stat of[MO_STAT_KIND_COUNT][MO_STAT_COLUMN_COUNT];
    /* torch's single numbers */
    uint64_t num_alloc_retries;    /* requests that succeeded only when they were retried */
    uint64_t num_ooms;             /* requests that failed for want of memory */
    uint64_t num_sync_all_streams; /* times the host waited for the device */
    uint64_t num_device_alloc;     /* create and segment_alloc calls */
    uint64_t num_device_free;      /* release and segment_free calls */
    /* memopt's own */
    uint64_t granules_moved;    /* granules that were mapped at a second place by a call of the driver */
    uint64_t granules_switched; /* granules that went back to a place where they were still mapped: no call */
    uint64_t stitches;          /* requests for which granules were moved */
    uint64_t recalled;          /* requests placed where the same step put them last time */
    uint64_t events_recorded, stream_waits;
    uint64_t double_frees, foreign_frees, foreign_streams; /* misuse: refused, and counted here */
    uint64_t failed_releases;                              /* the driver refused to take something back */
    uint64_t driver_calls; /* all calls of the mo_driver table that reach memory: create … grant, segments */
} mo_stats;

/* Adds to current, and to allocated or freed by its sign; column is MO_STAT_SMALL or MO_STAT_LARGE. */
static inline void mo_stat_add(mo_stats *stats, mo_stat_kind kind, mo_stat_column column, int64_t amount)
{
    for (int i = 0; i < 2; i++) {
        mo_stat *stat = &stats->of[kind][i ? column : MO_STAT_ALL];

        stat->current += amount;
        if (amount > 0) {
            stat->allocated += amount;
            if (stat->current > stat->peak)
                stat->peak = stat->current;
        } else {
            stat->freed -= amount;
        }
    }
}

/* Each peak becomes its current value. */
void mo_stats_reset_peaks(mo_stats *stats);

/* Each allocated and freed becomes 0, and so do the single numbers. */
void mo_stats_reset_accumulated(mo_stats *stats);

/* torch's key of a kind: "allocation" … */
const char *mo_stat_key(mo_stat_kind kind);

#endif
