/* Cross entropy over rows of logits, which become their own gradient in place:
 *
 *     z        x, or softcap * tanh(x / softcap) where softcap > 0
 *     lse      log of the sum of exp(z) over all classes
 *     loss     lse - (1 - smoothing) * z[target] - smoothing * mean(z)
 *     x        := scale * (exp(z - lse) - (1 - smoothing) * [class is target] - smoothing / classes) * dz/dx
 *
 *     MO_LOSS_FIND       reads rows of all classes, and writes *lse and, where it has an address, *loss
 *     MO_LOSS_SUBTRACT   reads *lse and *scale, and writes x; the columns may be a block of the classes
 *
 * as torch.nn.functional.cross_entropy and its derivative have it. Logits are fp32, fp16 or bf16, the rest is fp32; on the CPU sums
 * over more than 1024 classes are fp64. NaN and infinities give what torch gives; a logit of -inf is a class that cannot be. */
#ifndef MO_CROSS_ENTROPY_H
#define MO_CROSS_ENTROPY_H

#include <stddef.h>
#include <stdint.h>

#include "../kernels/cross_entropy.cuh"
#include "base/status.h"

typedef struct mo_cross_entropy_job {
    unsigned passes;  /* of kernels/cross_entropy.cuh */
    uintptr_t logits; /* rows * columns elements, a multiple of an element's size */
    mo_float kind;    /* not MO_F64 */
    size_t rows, columns;
    size_t classes, first; /* the columns are of the classes [first, first + columns) */
    const int64_t *target; /* a class a row; no class of these columns: the row has no target among them */
    float *lse, *loss;     /* a number a row; loss may be NULL */
    const float *scale;    /* a number a row; with MO_LOSS_SUBTRACT alone */
    float smoothing;       /* in [0, 1] */
    float softcap;         /* 0: none */
} mo_cross_entropy_job;

/* MO_INVALID: kinds, addresses, columns or options that do not fit. */
mo_status mo_cross_entropy_check(const mo_cross_entropy_job *job, mo_detail *detail);

/* Host memory, on torch's threads. MO_INVALID, and then nothing is written. Call without the GIL. */
mo_status mo_cross_entropy_cpu(const mo_cross_entropy_job *job, mo_detail *detail);

/* Queued on a stream of the device, where all addresses are. One launch. The host does not wait. MO_INVALID, or MO_OVERFLOW for
 * more than 2^31 - 1 rows or 2^32 - 1 columns. */
mo_status mo_cross_entropy_cuda(int device, void *stream, const mo_cross_entropy_job *job, mo_detail *detail);

#endif
