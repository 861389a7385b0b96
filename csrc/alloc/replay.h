/* Runs a trace through the allocator itself, on a device of numbers (model_device.h), to learn how little memory it
 * gets by with and what it asks of the driver.
 *
 *     live_peak = the largest sum of requested bytes live at once <= frontier <= peak_reserved with no limit
 *
 * A request is followed by one operation on its stream, a free is preceded by one on the stream that it names: the
 * block's first use and its last. With `lazy` an operation ends one step later than it was queued, as on a device whose
 * host runs one step ahead; else at once.
 *
 * A trace is of one device at a time: events of blocks of the others are left out. No lock, no state: a run is its
 * caller's alone. */
#ifndef MO_REPLAY_H
#define MO_REPLAY_H

#include "alloc/trace_text.h"

typedef struct mo_replay_options {
    size_t
        memory; /* bytes of the device; 0: four times the live peak and 1 GiB, which is as good as no limit */
    size_t slack;       /* of mo_pool_settings */
    size_t small_limit; /* the same */
    bool double_map;    /* the same */
    bool recall;        /* the same */
    bool lazy;          /* the device is one step behind the host */
    bool check;         /* mo_pool_check() at the end of every step, and the device watches who uses what */
    uint32_t device;    /* of the trace: mo_replay_device */
    size_t granularity; /* bytes; 0: a device without virtual memory */
} mo_replay_options;

/* No limit, slack 20, double_map, recall, eager, device 0, 2 MiB. */
mo_replay_options mo_replay_defaults(void);

/* The device that the trace's requests are on. MO_INVALID where it has none, or those of several devices. */
mo_status mo_replay_device(const mo_trace_text *trace, mo_detail *detail, uint32_t *device);

typedef struct mo_replay_step {
    uint64_t driver_calls; /* create, release, map, unmap, grant and those of segments */
    uint64_t granules_moved, granules_switched, stitches;
    uint64_t host_waits; /* times that the host waited until the device had finished queued work */
    size_t held;         /* bytes of the device in use at the end of the step */
} mo_replay_step;

/* Nanoseconds of one request: as many of a hundred took at most that. Beside the allocator's own they hold whatever else the
 * machine did meanwhile, which shows in `max`. */
typedef struct mo_replay_times {
    uint64_t p50, p99, max;
} mo_replay_times;

typedef struct mo_replay_result {
    bool completed; /* false: the device was too small, and the run ended at failed_line */
    uint32_t failed_line;
    char failure[1024]; /* the allocator's own words */
    size_t live_peak;
    size_t peak_reserved; /* of the device: what was created and not given back, mapped or not */
    uint64_t operations;  /* requests, frees and record_streams that were put to the allocator */
    uint64_t nanoseconds; /* that it took for them, the model device's time included */
    mo_replay_times request;
    mo_replay_step total;  /* held: at the end */
    mo_replay_step *steps; /* step_count; one, the whole, for a trace without `s` */
    uint32_t step_count;
} mo_replay_result;

/* MO_OK, too, where the device was too small. MO_INVALID for a trace with nothing on that device, MO_CORRUPT where
 * the allocator has left something on a device that it gave up, or (check) let two blocks use a byte at once. *out is for mo_replay_clear(). */
mo_status mo_replay_run(const mo_trace_text *trace, const mo_replay_options *options, mo_detail *detail,
                        mo_replay_result *out);

void mo_replay_clear(mo_replay_result *result);

/* The smallest device that the trace completes on, by bisection between the live peak and peak_reserved with no limit
 * (options->memory is not looked at), to a thousandth of the live peak. *at_frontier: that run, for mo_replay_clear().
 * MO_NO_DEVICE_MEMORY where it does not even complete with no limit. */
mo_status mo_replay_frontier(const mo_trace_text *trace, const mo_replay_options *options, mo_detail *detail,
                             size_t *frontier, mo_replay_result *at_frontier);

#endif
