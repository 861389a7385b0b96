/* Handles that are looked up, never followed.
 *
 * What a caller holds as a CUstream, CUevent, CUmodule … is a number in a range no address of x86-64 lies in
 * (bits 47 to 63 not all equal), multiple of 16: table slot and generation. A destroyed, foreign, mistyped or
 * made-up handle is found out by comparing, so that misuse is the documented error and never a crash; a
 * slot's generation changes at each use, so that a stale handle does not name the slot's next object (until
 * 2^19 uses). With the setting dead_handles a destroyed stream's or event's handle that a call is given ends the process:
 * CUDA follows such a handle, to whatever is there. */
#ifndef SIM_HANDLES_H
#define SIM_HANDLES_H

#include <stdint.h>

typedef enum sim_kind {
    SIM_FREE_SLOT,
    SIM_KIND_CONTEXT,
    SIM_KIND_STREAM,
    SIM_KIND_EVENT,
    SIM_KIND_GRAPH,
    SIM_KIND_NODE,
    SIM_KIND_EXEC,
    SIM_KIND_MODULE, /* a library is a module under another name */
    SIM_KIND_FUNCTION,
    SIM_KIND_FRAMES,
    SIM_KIND_POOL
} sim_kind;

/* 0 when the host is out of memory. */
uint64_t sim_handle_new(sim_kind kind, void *object);
/* NULL when the handle is not a live one of this kind. */
void *sim_handle_get(uint64_t handle, sim_kind kind);
void sim_handle_drop(uint64_t handle);

#define SIM_HANDLE(pointer) ((uint64_t)(uintptr_t)(pointer))

#endif
