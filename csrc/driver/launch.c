#include "driver/launch.h"

#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/hostmem.h"
#include "base/lock.h"
#include "driver/context.h"
#include "driver/forked.h"
#include "driver/staging.h"

typedef struct mo_launch_state {
    mo_lock lock; /* of all below; held while a launch is queued, never while the device is waited for, but
                     staging */
    mo_staging staging;
    void *table; /* built here, then compared with and copied to a staging slot */
    size_t table_size;
    int multiprocessors;
    uint64_t launches, bytes;
} mo_launch_state;

static mo_launch_state states[MO_MAX_DEVICES] = {[0 ... MO_MAX_DEVICES - 1] = {.lock = MO_LOCK_INIT}};

mo_status mo_launch_begin(int device, const char *what, mo_launch *out, mo_detail *detail)
{
    const mo_kernel_module *kernels = NULL;
    const mo_driver_cuda *cuda;
    mo_driver *driver = NULL;
    mo_launch_state *state;
    mo_status status;

    if (mo_forked()) /* before any lock: the fork may have taken its holder away */
        return mo_forked_refuse(what, detail);
    status = mo_kernels_get(device, &kernels, detail); /* refuses a device number that states[] lacks */
    if (!status)
        status = mo_driver_cuda_get(device, &driver, detail);
    if (status)
        return status;
    cuda = (const mo_driver_cuda *)driver;
    state = &states[device];

    mo_lock_take(&state->lock);
    if (!state->multiprocessors)
        status =
            mo_cuda_check(cuda->api,
                          cuda->api->device_attribute(&state->multiprocessors,
                                                      CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, cuda->handle),
                          "cuDeviceGetAttribute(MULTIPROCESSOR_COUNT)", detail);
    if (status) {
        mo_lock_give(&state->lock);
        return status;
    }
    *out = (mo_launch){
        .device = cuda, .kernels = kernels, .state = state, .multiprocessors = state->multiprocessors};
    return MO_OK;
}

mo_status mo_launch_table(mo_launch *launch, size_t size, void **out, mo_detail *detail)
{
    mo_launch_state *state = launch->state;

    MO_ASSERT(mo_lock_held(&state->lock));
    if (size > state->table_size) {
        void *larger = mo_host_alloc(size);
        if (!larger)
            return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "out of host memory for a table of %zu bytes", size);
        mo_host_free(state->table);
        state->table = larger;
        state->table_size = size;
    }
    *out = state->table;
    return MO_OK;
}

static mo_status run_in_context(mo_launch *launch, CUstream stream, mo_launch_shape shape, void *argument,
                                mo_detail *detail)
{
    mo_launch_state *state = launch->state;
    const mo_cuda_api *api = launch->device->api;
    void *arguments[] = {argument};
    mo_staging_slot *slot = NULL;
    CUdeviceptr table = 0;
    mo_status status, after;
    char call[80];

    status = mo_staging_put(&state->staging, api, stream, state->table, shape.size, shape.room, &slot, &table,
                            detail);
    if (status)
        return status;
    memcpy(argument, &table, sizeof table);
    snprintf(call, sizeof call, "cuLaunchKernel(%s)", mo_kernel_name(shape.kernel));
    status = mo_cuda_check(api,
                           api->launch(launch->kernels->functions[shape.kernel], shape.blocks, 1, 1,
                                       shape.threads, 1, 1, /* shared_bytes */ 0, stream, arguments, NULL),
                           call, detail);
    after = mo_staging_used(api, slot, status ? NULL : detail);
    if (!status) {
        state->launches++;
        state->bytes += shape.bytes;
    }
    return status ? status : after;
}

mo_status mo_launch_run(mo_launch *launch, CUstream stream, mo_launch_shape shape, void *argument,
                        mo_detail *detail)
{
    mo_context_scope scope;
    mo_status status;

    MO_ASSERT(mo_lock_held(&launch->state->lock) && shape.size <= launch->state->table_size);
    status = mo_cuda_check(launch->device->api, mo_context_enter(launch->device, &scope), "cuCtxPushCurrent",
                           detail);
    if (status)
        return status;
    status = run_in_context(launch, stream, shape, argument, detail);
    mo_context_leave(&scope);
    return status;
}

void mo_launch_end(mo_launch *launch)
{
    mo_lock_give(&launch->state->lock);
}

void mo_launch_read(int device, mo_launch_counts *out)
{
    memset(out, 0, sizeof *out);
    if (device < 0 || device >= MO_MAX_DEVICES || mo_forked())
        return;
    mo_launch_state *state = &states[device];
    mo_lock_take(&state->lock);
    *out = (mo_launch_counts){
        .launches = state->launches,
        .bytes = state->bytes,
        .uploads = state->staging.counts.uploads,
        .repeats = state->staging.counts.repeats,
        .waits = state->staging.counts.waits,
        .captured = state->staging.counts.captured,
        .captured_bytes = state->staging.counts.captured_bytes,
    };
    mo_lock_give(&state->lock);
}
