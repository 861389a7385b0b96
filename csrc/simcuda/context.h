/* Contexts: which device a thread works on.
 *
 * A thread has a stack of current contexts, as in CUDA. The runtime's current device is the device of the
 * context on top, or what cudaSetDevice chose while there is none. Memory, streams and modules belong to the
 * device here, not to one context: destroying a context ends the handle and nothing else. */
#ifndef SIM_CONTEXT_H
#define SIM_CONTEXT_H

#include "calls.h"

typedef struct sim_context {
    uint64_t handle;
    int device;
    bool primary;
    unsigned flags;
} sim_context;

sim_context *sim_context_current(void); /* NULL when this thread has none */
int sim_current_device(void);

/* Makes the primary context of the thread's device current where none is; what the runtime does at its first
 * use. */
CUresult sim_context_bind_primary(void);
/* The device's primary context, made at first need; NULL when the host is out of memory. */
sim_context *sim_context_primary(int device);

#endif
