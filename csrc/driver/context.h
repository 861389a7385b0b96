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

static inline CUresult mo_context_enter(const mo_driver_cuda *device, mo_context_scope *out)
{
    mo_context_scope scope = {.api = device->api, .mode = CU_STREAM_CAPTURE_MODE_RELAXED};
    CUcontext current = NULL;
    CUresult code = scope.api->context_current(&current);

    if (code)
        return code;
    if (current != device->context) {
        code = scope.api->context_push(device->context);
        if (code)
            return code;
        scope.pushed = true;
    }
    code = scope.api->capture_mode(&scope.mode);
    if (code) {
        if (scope.pushed)
            scope.api->context_pop(&current);
        return code;
    }
    *out = scope;
    return CUDA_SUCCESS;
}

/* Fails only where the driver is being shut down, and then there is nothing left to put back. */
static inline void mo_context_leave(mo_context_scope *scope)
{
    CUcontext popped;
    scope->api->capture_mode(&scope->mode);
    if (scope->pushed)
        scope->api->context_pop(&popped);
}

#endif
