/* A stretch of driver calls on one device: its primary context is current and calls that CUDA counts as
 * unsafe during a stream capture are allowed (relaxed mode). What the thread had before is put back.
 *
 *     mo_context_scope scope;
 *     CUresult code = mo_context_enter(device, &scope);
 *     if (code == CUDA_SUCCESS) { …; mo_context_leave(&scope); } */
#ifndef MO_CONTEXT_H
#define MO_CONTEXT_H

#include <stdbool.h>

#include "driver/driver_cuda.h"

typedef struct mo_context_scope {
    const mo_cuda_api *api;
    CUstreamCaptureMode mode; /* to be put back */
    bool pushed;
} mo_context_scope;

/* The driver's code where the context cannot be entered; then mo_context_leave() must not be called.
 * CUDA_ERROR_NOT_INITIALIZED, without a call of the driver, in a child of a process that had opened a device:
 * CUDA does not work there, and the fork may have torn the state of any lock. */
CUresult mo_context_enter(const mo_driver_cuda *device, mo_context_scope *out);

/* Fails only where the driver is being shut down, and then there is nothing left to put back. */
void mo_context_leave(mo_context_scope *scope);

#endif
