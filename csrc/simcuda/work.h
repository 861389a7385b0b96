/* Work: one thing for a device to do, as queued in a stream or kept as a node of a graph.
 *
 * Unchangeable once made and counted by reference, so that a graph's node and its replays share one.
 * Arguments of kernels are copied at launch, as CUDA does. */
#ifndef SIM_WORK_H
#define SIM_WORK_H

#include "ranges.h"

#include <stdbool.h>

typedef enum sim_work_kind {
    SIM_WORK_EMPTY,
    SIM_WORK_KERNEL,
    SIM_WORK_COPY,
    SIM_WORK_SET,
    SIM_WORK_HOST,     /* cudaLaunchHostFunc */
    SIM_WORK_CALLBACK, /* cudaStreamAddCallback */
    SIM_WORK_FREE,     /* cudaFreeAsync */
    SIM_WORK_RECORD,
    SIM_WORK_WAIT
} sim_work_kind;

typedef void (*sim_body)(void **arguments, const unsigned grid[3], const unsigned block[3]);

typedef struct sim_work {
    unsigned references;
    sim_work_kind kind;
    int device; /* of the stream it was made for */
    union {
        struct {
            sim_body body; /* NULL: a kernel without a host body does nothing */
            unsigned grid[3], block[3];
            int count;
            size_t *sizes;
            void **arguments; /* into the same block as sizes */
        } kernel;
        struct { /* rows of `width` bytes; a plain copy has one */
            char *to;
            const char *from;
            size_t width, rows, to_pitch, from_pitch;
            int to_device, from_device;    /* whose rights count, -1: the stream's device */
            sim_access to_kind, from_kind; /* what they were at the call: freed since, device memory must not
                                              pass for the host's */
        } copy;
        struct {
            char *to;
            size_t width, rows, pitch; /* width in elements */
            unsigned element;          /* 1, 2, 4 or 8 bytes */
            uint64_t value;
        } set;
        struct {
            CUhostFn function;
            CUstreamCallback callback;
            CUstream stream;
            void *data;
        } host;
        uintptr_t address;       /* FREE */
        struct sim_event *event; /* RECORD and WAIT as nodes of a graph (external events); else NULL */
    };
} sim_work;

sim_work *sim_work_new(sim_work_kind kind, int device); /* NULL when out of memory */
void sim_work_release(sim_work *work);

/* Addresses are checked twice: when the call is made, where a bad one is CUDA_ERROR_INVALID_VALUE, and when
 * the work runs, where it is the sticky CUDA_ERROR_ILLEGAL_ADDRESS. */
bool sim_work_addresses_valid(sim_work *work);

/* Whether it will read or write in [at, at + size): rows of copies and memsets; for a kernel, whether an argument points
 * there, so that an array which only reaches into it is not seen, nor anything of a kernel without a host body. */
bool sim_work_touches(const sim_work *work, uintptr_t at, size_t size);

/* Does it. Called with the lock held; released around user code. */
void sim_work_run(const sim_work *work);

#endif
