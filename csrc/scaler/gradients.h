/* What is done to a list of gradients in one pass over them, on the CPU (gradients_cpu.c) or on a CUDA device
 * (gradients_cuda.c): the job that both take.
 *
 *     x       an element as it lies in memory          wide(x): fp32, and fp64 for fp64
 *     y       inv_scale == 1 ? x : round(wide(x) * inv_scale)
 *
 *     MO_GRADIENTS_CHECK      *found_inf = 1 where any x is infinite or NaN; else it is left
 *     MO_GRADIENTS_STORE      x := y                              (nothing is written where inv_scale is 1)
 *     MO_GRADIENTS_NORM       *norm = the norm of all y, of kind 2 or of the maximum; 0 for no elements
 *
 * With NORM but not STORE, y is not rounded: the norm is inv_scale * norm(x), to the bound below. CHECK looks at x, before the
 * multiply, as torch does; it does not depend on the norm, whose squares may overflow.
 *
 *     *norm       within 1e-6 of the norm in double, whatever the number of threads or blocks, and always the same
 *     *norm64     the same in fp64, not yet rounded to fp32: norms of parts are combined by the norm of these
 *     *clip       min(1, max_norm / (*norm + 1e-6)); NaN where the norm is
 *     *factor     inv_scale * *clip: what the optimizer's kernel multiplies gradients with that were only read
 *
 * Each of the four is written where its address is given, with MO_GRADIENTS_NORM only. Squares are summed in fp32 within a
 * chunk at most (fp64 elements: in fp64), scaled so that they neither overflow nor vanish where wide(x) does not, and in fp64 across
 * chunks, in the order of the list: no atomics.
 *
 * A second job kind multiplies in place by a value that lies in memory, mo_gradients_clip: x := round(wide(x) * *clip), without
 * touching memory where *clip is 1. NaN is a value like others. */
#ifndef MO_GRADIENTS_H
#define MO_GRADIENTS_H

#include <stddef.h>
#include <stdint.h>

#include "../kernels/gradients.cuh" /* MO_GRADIENTS_… */
#include "base/status.h"
#include "scaler/chunk_table.h"

typedef mo_tensor mo_gradient; /* in the memory of the job's device */

/* Addresses of single fp32 values (norm64: one fp64), in the memory of the job's device: 0 where there is none. */
typedef struct mo_gradients_job {
    const mo_gradient *gradients;
    size_t count;
    unsigned passes;     /* of the above, or'ed */
    uintptr_t inv_scale; /* 0: 1 */
    uintptr_t found_inf; /* with CHECK */
    uintptr_t norm, norm64, clip, factor;
    double max_norm; /* for clip and factor */
} mo_gradients_job;

/* ---- on the CPU: done when it returns. MO_NO_HOST_MEMORY; MO_INVALID for a kind or an address that is none. ---- */
mo_status mo_gradients_cpu(const mo_gradients_job *job, mo_detail *detail);
mo_status mo_gradients_clip_cpu(const mo_gradient *gradients, size_t count, uintptr_t clip,
                                mo_detail *detail);

/* ---- on a CUDA device: queued on a stream when it returns; one launch, which may be captured. A fault on the device shows
 * up in a later call. Nothing is queued for no elements, but with NORM. Call without the GIL (driver/launch.h). ---- */
mo_status mo_gradients_cuda(int device, void *stream, const mo_gradients_job *job, mo_detail *detail);
mo_status mo_gradients_clip_cuda(int device, void *stream, const mo_gradient *gradients, size_t count,
                                 uintptr_t clip, mo_detail *detail);

/* The bytes of a kernel's chunk for a total of `bytes` on so many multiprocessors; a power of two. Here for the tests. */
size_t mo_gradients_chunk_bytes(size_t bytes, int multiprocessors);

#endif
