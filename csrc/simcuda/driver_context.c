/* Contexts by the driver API. */
#include "context.h"

#include "device.h"
#include "driver_api.h"
#include "handles.h"
#include "streams.h"

#include <stdlib.h>

sim_context *sim_context_current(void)
{
    sim_thread *self = sim_self();
    return self->depth ? self->contexts[self->depth - 1] : NULL;
}

int sim_current_device(void)
{
    sim_context *context = sim_context_current();
    return context ? context->device : sim_self()->device;
}

static sim_context *make(int device, unsigned flags, bool primary)
{
    sim_context *context = malloc(sizeof *context);

    if (!context)
        return NULL;
    *context = (sim_context){.device = device, .flags = flags, .primary = primary};
    context->handle = sim_handle_new(SIM_KIND_CONTEXT, context);
    if (!context->handle) {
        free(context);
        return NULL;
    }
    return context;
}

sim_context *sim_context_primary(int device)
{
    if (!sim_devices[device].primary)
        sim_devices[device].primary = make(device, sim_devices[device].primary_flags, true);
    return sim_devices[device].primary;
}

CUresult sim_context_bind_primary(void)
{
    sim_thread *self = sim_self();

    if (!self->depth) {
        sim_context *context = sim_context_primary(self->device);
        if (!context)
            return CUDA_ERROR_OUT_OF_MEMORY;
        self->contexts[self->depth++] = context;
    }
    sim_devices[sim_current_device()].primary_bound = true;
    return CUDA_SUCCESS;
}

static sim_context *lookup(CUcontext handle)
{
    return sim_handle_get(SIM_HANDLE(handle), SIM_KIND_CONTEXT);
}

static CUcontext exported(const sim_context *context)
{
    return context ? (CUcontext)(uintptr_t)context->handle : NULL;
}

SIM_DRIVER(SIM_INITIALISED, cuDevicePrimaryCtxRetain, (CUcontext * out, CUdevice device), (out, device))
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_exists(device))
        return CUDA_ERROR_INVALID_DEVICE;
    sim_context *context = sim_context_primary(device);
    if (!context)
        return CUDA_ERROR_OUT_OF_MEMORY;
    sim_devices[device].primary_retained++;
    *out = exported(context);
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuDevicePrimaryCtxRelease_v2, (CUdevice device), (device))
{
    if (!sim_device_exists(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!sim_devices[device].primary_retained)
        return CUDA_ERROR_INVALID_CONTEXT;
    sim_devices[device].primary_retained--;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuDevicePrimaryCtxGetState, (CUdevice device, unsigned *flags, int *active),
           (device, flags, active))
{
    if (!flags || !active)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_exists(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *flags = sim_devices[device].primary_flags;
    *active = sim_devices[device].primary_retained > 0 || sim_devices[device].primary_bound;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuDevicePrimaryCtxSetFlags_v2, (CUdevice device, unsigned flags), (device, flags))
{
    if (!sim_device_exists(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (flags & ~(unsigned)CU_CTX_FLAGS_MASK)
        return CUDA_ERROR_INVALID_VALUE;
    sim_devices[device].primary_flags = flags;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuCtxCreate_v2, (CUcontext * out, unsigned flags, CUdevice device),
           (out, flags, device))
{
    sim_thread *self = sim_self();

    if (!out || flags & ~(unsigned)CU_CTX_FLAGS_MASK)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_exists(device))
        return CUDA_ERROR_INVALID_DEVICE;
    sim_context *context = self->depth < SIM_CONTEXT_DEPTH ? make(device, flags, false) : NULL;
    if (!context)
        return CUDA_ERROR_OUT_OF_MEMORY;
    self->contexts[self->depth++] = context;
    *out = exported(context);
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuCtxDestroy_v2, (CUcontext handle), (handle))
{
    sim_thread *self = sim_self();
    sim_context *context = lookup(handle);

    if (!context || context->primary)
        return CUDA_ERROR_INVALID_CONTEXT;
    sim_handle_drop(context->handle);
    if (self->depth && self->contexts[self->depth - 1] == context)
        self->depth--;
    /* Not freed: other threads may have it on their stacks, where CUDA too leaves a context that is no longer
     * valid. Programs make a handful in their lives. */
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuCtxGetCurrent, (CUcontext * out), (out))
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = exported(sim_context_current());
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuCtxSetCurrent, (CUcontext handle), (handle))
{
    sim_thread *self = sim_self();
    sim_context *context = lookup(handle);

    if (handle && !context)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (self->depth)
        self->depth--;
    if (context)
        self->contexts[self->depth++] = context;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuCtxPushCurrent_v2, (CUcontext handle), (handle))
{
    sim_thread *self = sim_self();
    sim_context *context = lookup(handle);

    if (!context || self->depth == SIM_CONTEXT_DEPTH)
        return CUDA_ERROR_INVALID_CONTEXT;
    self->contexts[self->depth++] = context;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuCtxPopCurrent_v2, (CUcontext * out), (out))
{
    sim_thread *self = sim_self();

    if (!self->depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    self->depth--;
    if (out)
        *out = exported(self->contexts[self->depth]);
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_CONTEXT, cuCtxGetDevice, (CUdevice * out), (out))
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = sim_current_device();
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_CONTEXT, cuCtxGetFlags, (unsigned *out), (out))
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = sim_context_current()->flags;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_CONTEXT, cuCtxGetApiVersion, (CUcontext handle, unsigned *out), (handle, out))
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (handle && !lookup(handle))
        return CUDA_ERROR_INVALID_CONTEXT;
    *out = 3020;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuCtxSynchronize, (void), ())
{
    return sim_device_synchronize(sim_current_device());
}

SIM_DRIVER(SIM_CONTEXT, cuCtxGetStreamPriorityRange, (int *least, int *greatest), (least, greatest))
{
    if (least)
        *least = SIM_PRIORITY_LEAST;
    if (greatest)
        *greatest = SIM_PRIORITY_GREATEST;
    return CUDA_SUCCESS;
}

/* Stack, printf buffer and heap: kept and read back, as there is no device code to need them. */
static size_t limits[CU_LIMIT_PERSISTING_L2_CACHE_SIZE + 1] = {1024, 7 << 20, 8 << 20, 2, 2048, 64, 0};

SIM_DRIVER(SIM_CONTEXT, cuCtxGetLimit, (size_t * out, CUlimit limit), (out, limit))
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if ((unsigned)limit > CU_LIMIT_PERSISTING_L2_CACHE_SIZE)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    *out = limits[limit];
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_CONTEXT, cuCtxSetLimit, (CUlimit limit, size_t value), (limit, value))
{
    if ((unsigned)limit > CU_LIMIT_PERSISTING_L2_CACHE_SIZE)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    limits[limit] = value;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_CONTEXT, cuCtxEnablePeerAccess, (CUcontext peer, unsigned flags), (peer, flags))
{
    sim_context *context = lookup(peer);

    if (!context || context->device == sim_current_device())
        return CUDA_ERROR_INVALID_CONTEXT;
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    bool *enabled = &sim_devices[sim_current_device()].peers[context->device];
    if (*enabled)
        return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    *enabled = true;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_CONTEXT, cuCtxDisablePeerAccess, (CUcontext peer), (peer))
{
    sim_context *context = lookup(peer);

    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    bool *enabled = &sim_devices[sim_current_device()].peers[context->device];
    if (!*enabled)
        return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    *enabled = false;
    return CUDA_SUCCESS;
}
