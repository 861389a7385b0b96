/* Gradients unscaled on the device, with torch._amp_foreach_non_finite_check_and_unscale_'s semantics
 * (kernels/unscale.cu): one table, at most one upload, one launch, for any number of tensors of one type.
 *
 * The host never waits for the device (but see staging.h on being eight launches ahead), so it may be
 * captured into a CUDA graph. The first call on a device loads the kernels and may compile them: call without
 * the GIL. */
#ifndef MO_UNSCALE_CUDA_H
#define MO_UNSCALE_CUDA_H

#include "driver/cuda_api.h"
#include "scaler/chunk_table.h"

typedef struct mo_unscale_job {
    int device;
    CUstream stream;
    mo_float kind;
    mo_tensor_list tensors; /* .size is taken from kind; each dense in the device's memory */
    CUdeviceptr inv_scale;  /* one fp32 on the device */
    CUdeviceptr found_inf;  /* one fp32 on the device; set to 1 or left */
} mo_unscale_job;

/* Queues the work. MO_OK says that it is queued; a fault on the device shows up in a later call, as with any
 * launch. A list without elements queues nothing. */
mo_status mo_unscale_cuda(const mo_unscale_job *job, mo_detail *detail);

/* The chunk size for a total of `bytes` on `multiprocessors`; a power of two. Here for the tests. */
size_t mo_unscale_chunk_bytes(size_t bytes, int multiprocessors);

/* What the tables of a device have cost so far; zeros where it was never used. */
typedef struct mo_unscale_counts {
    uint64_t launches, uploads, repeats, waits, captured, captured_bytes;
} mo_unscale_counts;

void mo_unscale_read(int device, mo_unscale_counts *out);

#endif
