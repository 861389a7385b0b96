/* One optimizer step over a list of parameters, on the CPU (update_cpu.c) or on a CUDA device (update_cuda.c): the job that both
 * take. One pass: every parameter, gradient and state is read once and written once.
 *
 * The formulas, element by element, in fp32 (fp64 for fp64 parameters), fma where written (kernels/adam.cuh and sgd.cuh are the
 * specification; every instruction set gives the same bits):
 *
 *     x = g * factor                 factor: 1 / grad_scale * clip coefficient, 1 where no address is given
 *     x = -x                                                 where maximize
 *
 *     ADAM    x = fma(weight_decay, p, x)                    where weight_decay is not 0
 *     ADAMW   p = p * (1 - lr * weight_decay)                the factor rounded from double
 *             m = fma(beta1, m, (1 - beta1) * x)             complements rounded from double
 *             v = fma(beta2, v, (1 - beta2) * (x * x))
 *             w = v, or with amsgrad: vmax = max(vmax, v), w = vmax
 *             p = fma(-lr / (1 - beta1^t), m / fma(sqrt(w), 1 / sqrt(1 - beta2^t), eps), p)
 *
 *             Against the formula in double p is at most some 3 ulp of its largest term off, which is seen only where a step is as
 *             large as p. (In double it would be right to half an ulp of p: for 3.2 times the arithmetic with AVX2, which memory
 *             hides only in part, and at a 64th of the rate on a GPU that is not made for fp64.)
 *
 *     SGD     x = fma(weight_decay, p, x)                    where weight_decay is not 0
 *             m = first ? x : fma(momentum, m, (1 - dampening) * x)        where momentum is not 0
 *             x = nesterov ? fma(momentum, m, (1 - dampening) * x) : m     where momentum is not 0
 *             p = fma(-lr, x, p)
 *
 * t = *step + 1 is the parameter's own count of steps. Where *found_inf is not 0 nothing at all is changed. Else *step is
 * advanced by 1, once each parameter, after its elements.
 *
 * States of 8 or 4 bits (`m`, `v` are codes, with `m_scale`, `v_scale` one fp32 a block of 256 elements; only ADAM and ADAMW
 * without amsgrad, and SGD's m of 8 bits) have their arithmetic in kernels/adam_codes.cuh.
 *
 * A factored second moment (two vectors of fp32, `row` and `column`; only ADAM and ADAMW without amsgrad) has its arithmetic in
 * kernels/factored.cuh. Gradients are read once more for it, before the pass.
 *
 * Parameters of 16 bits: p is read from, and written to, `master` (fp32) where there is one, and p := round(master); else with
 * `stochastic` p is rounded up or down at random, so that the mean is right, by a dither that is a function of the element's
 * index and t alone; else it is rounded to nearest. m, v, vmax are of state_kind: fp32, or the parameter's own kind. */
#ifndef MO_UPDATE_H
#define MO_UPDATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../kernels/chunk.cuh"
#include "base/status.h"

typedef enum mo_rule { MO_ADAM, MO_ADAMW, MO_SGD, MO_RULE_COUNT } mo_rule;

/* A param group. */
typedef struct mo_hyper {
    mo_rule rule;
    double lr, beta1, beta2, eps, weight_decay;
    double momentum, dampening; /* SGD */
    uintptr_t
        lr_address; /* not 0: lr is one value there, in the job's device memory, of lr_kind (fp32 or fp64) */
    mo_float lr_kind;
    bool amsgrad, nesterov, maximize;
    bool stochastic; /* how p of 16 bits without a master is rounded */
} mo_hyper;

/* A parameter: addresses of dense memory of the job's device, all with count elements in the same order. */
typedef struct mo_parameter {
    uintptr_t p, g;             /* of kind, of grad_kind */
    uintptr_t master;           /* fp32, or 0 */
    uintptr_t m, v, vmax;       /* what the rule has of them; SGD: m is the momentum buffer; else 0 */
    uintptr_t m_scale, v_scale; /* fp32 each block of codes; else 0 */
    uintptr_t row, column; /* fp32, not 0 where the second moment is factored: it has no v and v_scale then */
    size_t columns;        /* of that matrix, below 2^31; and so many rows that it has count elements */
    uintptr_t
        step; /* one fp32; SGD: 0, or one where p or codes are rounded at random, whose dither needs it */
    size_t count;
    mo_float kind, grad_kind, state_kind;
    unsigned code_bits; /* m and v, if there is one, are codes of 8 or of 4 bits; 0: of state_kind */
    uint32_t group;     /* whose hyper-parameters */
    bool first;         /* SGD: the momentum buffer has no value yet */
} mo_parameter;

typedef struct mo_update_job {
    const mo_parameter *parameters;
    size_t count;
    const mo_hyper *groups;
    size_t group_count;
    uintptr_t factor;    /* one fp32 in the job's device memory; 0: 1 */
    uintptr_t found_inf; /* one fp32; 0: never */
    uint32_t
        first_index; /* of each parameter's first element, to dithers: not 0 for a piece of a parameter */
    uintptr_t
        scratch; /* mo_update_scratch() bytes of the job's device memory, uninitialised; 0 where that is 0 */
    bool
        store_gradients; /* g := round(x before maximize) too, so that p.grad is unscaled and clipped afterwards */
} mo_update_job;

/* Bytes that a job needs beside all else while it runs: for factored second moments, 1/32 of a byte an element of the largest
 * such parameter, or 16 MiB on all. */
size_t mo_update_scratch(const mo_update_job *job);

/* The end of a round that begins with a parameter: those whose factored second moments are averaged together. Their sums of tiles
 * fit into the scratch memory, behind an fp32 of each parameter of the job. */
size_t mo_update_round(const mo_update_job *job, size_t first);

/* Checks what both need: kinds, groups, addresses present and aligned, that the step and the states a rule needs are there.
 * MO_INVALID names the parameter. Done by the two below, before anything is changed. */
mo_status mo_update_check(const mo_update_job *job, mo_detail *detail);

/* How its rule applies to a parameter: MO_ADAM_… or MO_SGD_… (kernels/adam.cuh, sgd.cuh). */
unsigned mo_update_flags(const mo_parameter *a, const mo_hyper *group);

/* On the CPU: done when it returns. MO_NO_HOST_MEMORY, and then nothing has changed. Call without the GIL. */
mo_status mo_update_cpu(const mo_update_job *job, mo_detail *detail);

/* On a CUDA device: queued on the stream when it returns; one launch, and one or more before it where second moments are factored,
 * which may be captured. A fault on the device shows up in a
 * later call. Call without the GIL (driver/launch.h). */
mo_status mo_update_cuda(int device, void *stream, const mo_update_job *job, mo_detail *detail);

/* Blocks of states of 8 or 4 bits: elements a block, and the conversions that state_dict needs, on the CPU. */
#define MO_CODE_BLOCK 256
/* codes[ceil(count * bits / 8)], scales[ceil(count / 256)] <-> fp32 values; `second`: of the second moment, else of the first.
 * Nearest. */
void mo_code_decode(unsigned bits, bool second, const uint8_t *codes, const float *scales, size_t count,
                    float *out);
void mo_code_encode(unsigned bits, bool second, const float *values, size_t count, uint8_t *codes,
                    float *scales);

#endif
