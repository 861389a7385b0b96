#include "scaler/unscale_cuda.h"

#include <string.h>

#include "base/hostmem.h"
#include "base/lock.h"
#include "driver/context.h"
#include "driver/forked.h"
#include "driver/kernel_module.h"
#include "driver/staging.h"

/* ---- geometry ------------------------------------------------------------------------------------------ */

/* Threads a block. With 32 registers a thread (ptxas on sm_75 … sm_120) eight blocks fill a multiprocessor's
 * 2048 threads; smaller blocks than 512 leave less of it idle when a grid runs out. unscale.cu bounds it by
 * 256. */
#define THREADS 256

/* Blocks a multiprocessor that a large job should have: 8 resident times 4, so that the last, partly filled
 * wave wastes at most a quarter of the time of the others. */
#define BLOCKS_WANTED 32

/* One round of a block: 256 threads with four 16-byte loads each. Less per block would leave threads without
 * work. */
#define CHUNK_MIN ((size_t)16 << 10)

/* More gains nothing in bandwidth; it is bounded because a table of 16 bytes a chunk is then 1/16384 of the
 * data. */
#define CHUNK_MAX ((size_t)256 << 10)

size_t mo_unscale_chunk_bytes(size_t bytes, int multiprocessors)
{
    const size_t blocks = (size_t)(multiprocessors > 0 ? multiprocessors : 1) * BLOCKS_WANTED;
    size_t chunk = CHUNK_MIN;
    while (chunk < CHUNK_MAX && bytes / chunk > blocks)
        chunk *= 2;
    return chunk;
}

/* ---- a device's state ---------------------------------------------------------------------------------- */

typedef struct device_state {
    mo_lock lock; /* of all below; held while a launch is queued, never while the device is waited for, but
                     staging */
    mo_staging staging;
    mo_chunk *scratch; /* the table is built here, then compared with and copied to a staging slot */
    size_t scratch_chunks;
    int multiprocessors;
    uint64_t launches;
} device_state;

static device_state states[MO_MAX_DEVICES] = {[0 ... MO_MAX_DEVICES - 1] = {.lock = MO_LOCK_INIT}};

static mo_status build_table_locked(device_state *state, const mo_tensor_list *list, size_t *out_chunks,
                                    mo_detail *detail)
{
    size_t bytes, chunks = 0, chunk_bytes;
    mo_status status;

    if (!mo_tensors_bytes(list, &bytes))
        return mo_fail(detail, MO_OVERFLOW, 0, "the bytes of all %zu tensors do not fit", list->tensors);
    chunk_bytes = mo_unscale_chunk_bytes(bytes, state->multiprocessors);
    status = mo_chunks_count(list, chunk_bytes, &chunks, detail);
    if (status)
        return status;
    if (chunks > state->scratch_chunks) {
        mo_chunk *larger = mo_host_alloc(chunks * sizeof *larger); /* chunks < 2^31: no overflow */
        if (!larger)
            return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "out of host memory for a table of %zu chunks",
                           chunks);
        mo_host_free(state->scratch);
        state->scratch = larger;
        state->scratch_chunks = chunks;
    }
    mo_chunks_fill(list, chunk_bytes, state->scratch);
    *out_chunks = chunks;
    return MO_OK;
}

static mo_status launch_locked(device_state *state, const mo_driver_cuda *device,
                               const mo_kernel_module *kernels, const mo_unscale_job *job, size_t chunks,
                               mo_detail *detail)
{
    static const mo_kernel kernel_of[MO_FLOAT_COUNT] = {
        [MO_F32] = MO_KERNEL_UNSCALE_F32,
        [MO_F16] = MO_KERNEL_UNSCALE_F16,
        [MO_BF16] = MO_KERNEL_UNSCALE_BF16,
        [MO_F64] = MO_KERNEL_UNSCALE_F64,
    };
    const mo_cuda_api *api = device->api;
    CUdeviceptr table = 0, inv_scale = job->inv_scale, found_inf = job->found_inf;
    void *arguments[] = {&table, &inv_scale, &found_inf};
    mo_staging_slot *slot = NULL;
    mo_status status = mo_staging_put(&state->staging, api, job->stream, state->scratch,
                                      chunks * sizeof *state->scratch, &slot, &table, detail);
    mo_status after;

    if (status)
        return status;
    status = mo_cuda_check(api,
                           api->launch(kernels->functions[kernel_of[job->kind]], (unsigned)chunks, 1, 1,
                                       THREADS, 1, 1,
                                       /* shared_bytes */ 0, job->stream, arguments, NULL),
                           "cuLaunchKernel(memopt_unscale)", detail);
    after = mo_staging_used(api, slot, status ? NULL : detail);
    if (!status)
        state->launches++;
    return status ? status : after;
}

mo_status mo_unscale_cuda(const mo_unscale_job *job, mo_detail *detail)
{
    const mo_kernel_module *kernels = NULL;
    mo_tensor_list list = job->tensors;
    mo_driver *driver = NULL;
    mo_context_scope scope;
    device_state *state;
    size_t chunks = 0;
    mo_status status;

    if ((unsigned)job->kind >= MO_FLOAT_COUNT)
        return mo_fail(detail, MO_INVALID, 0,
                       "element type %d: expected 0 (fp32), 1 (fp16), 2 (bf16) or 3 (fp64)", (int)job->kind);
    if (!job->inv_scale || job->inv_scale % 4 || !job->found_inf || job->found_inf % 4)
        return mo_fail(detail, MO_INVALID, 0,
                       "inv_scale at %#llx, found_inf at %#llx: expected addresses of fp32", job->inv_scale,
                       job->found_inf);
    if (mo_forked()) /* before any lock: the fork may have taken its holder away */
        return mo_forked_refuse("unscaling gradients", detail);
    list.size = mo_float_size(job->kind);
    status = mo_kernels_get(job->device, &kernels, detail); /* refuses a device number that states[] lacks */
    if (!status)
        status = mo_driver_cuda_get(job->device, &driver, detail);
    if (status)
        return status;
    state = &states[job->device];

    mo_lock_take(&state->lock);
    const mo_driver_cuda *device = (const mo_driver_cuda *)driver;
    if (!state->multiprocessors)
        status = mo_cuda_check(device->api,
                               device->api->device_attribute(&state->multiprocessors,
                                                             CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                                                             device->handle),
                               "cuDeviceGetAttribute(MULTIPROCESSOR_COUNT)", detail);
    if (!status)
        status = build_table_locked(state, &list, &chunks, detail);
    if (!status && chunks > 0) {
        status = mo_cuda_check(device->api, mo_context_enter(device, &scope), "cuCtxPushCurrent", detail);
        if (!status) {
            status = launch_locked(state, device, kernels, job, chunks, detail);
            mo_context_leave(&scope);
        }
    }
    mo_lock_give(&state->lock);
    return status;
}

void mo_unscale_read(int device, mo_unscale_counts *out)
{
    memset(out, 0, sizeof *out);
    if (device < 0 || device >= MO_MAX_DEVICES || mo_forked())
        return;
    device_state *state = &states[device];
    mo_lock_take(&state->lock);
    *out = (mo_unscale_counts){
        .launches = state->launches,
        .uploads = state->staging.counts.uploads,
        .repeats = state->staging.counts.repeats,
        .waits = state->staging.counts.waits,
        .captured = state->staging.counts.captured,
        .captured_bytes = state->staging.counts.captured_bytes,
    };
    mo_lock_give(&state->lock);
}
