#include "driver/context.h"

#include <pthread.h>
#include <stdatomic.h>

static atomic_bool forked;

static void note_fork(void)
{
    atomic_store(&forked, true);
}

static void watch(void)
{
    pthread_atfork(NULL, NULL, note_fork);
}

void mo_context_watch_forks(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch);
}

bool mo_context_forked(void)
{
    return atomic_load_explicit(&forked, memory_order_relaxed);
}

CUresult mo_context_enter(const mo_driver_cuda *device, mo_context_scope *out)
{
    mo_context_scope scope = {.api = device->api, .mode = CU_STREAM_CAPTURE_MODE_RELAXED};
    CUcontext current = NULL;
    CUresult code;

    if (mo_context_forked())
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
