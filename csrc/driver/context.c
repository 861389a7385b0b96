#include "driver/context.h"

#include "driver/forked.h"

CUresult mo_context_enter(const mo_driver_cuda *device, mo_context_scope *out)
{
    mo_context_scope scope = {.api = device->api, .mode = CU_STREAM_CAPTURE_MODE_RELAXED};
    CUcontext current = NULL;
    CUresult code;

    if (mo_forked())
        return CUDA_ERROR_NOT_INITIALIZED;
    code = scope.api->context_current(&current);
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

void mo_context_leave(mo_context_scope *scope)
{
    CUcontext popped;
    scope->api->capture_mode(&scope->mode);
    if (scope->pushed)
        scope->api->context_pop(&popped);
}
