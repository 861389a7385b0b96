/* One optimizer step over a run of one parameter's elements: a table of functions an instruction set, of
 * which update_cpu.c uses one throughout.
 *
 * update_generic.c and adam_codes_generic.c, loops over kernels/adam.cuh, sgd.cuh, dither.cuh and adam_codes.cuh, are
 * the specification; the others give the same bits for every length, every kind and every misalignment (but
 * for the sign and payload of a NaN). */
#ifndef MO_UPDATE_KERNELS_H
#define MO_UPDATE_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../kernels/adam.cuh"
#include "../kernels/sgd.cuh"
#include "base/isa.h"

/* n elements of a parameter, the first of which is number `index` in it. What the rule and its flags do not
 * name may be NULL. fp32, fp16 and bf16 only: fp64 is update_cpu.c's. */
typedef struct mo_run {
    size_t n;
    void *p, *g;
    float *master; /* or NULL: p itself is read */
    void *m, *v, *vmax;
    float *m_scale, *v_scale; /* of codes, which are m and v then: those of the run's first block */
    unsigned code_bits;       /* of a code: 8 or 4 */
    mo_float kind, grad_kind, state_kind;
    bool factored;   /* v is fp32, of this step already, and nobody's afterwards */
    bool stochastic; /* p of 16 bits without a master is dithered */
    float
        stored; /* not 1: g := g * stored first, where it lies, rounded; the rule goes on with what was not rounded */
    uint32_t index, step; /* step: the number of this step, from 1 */
} mo_run;

typedef void mo_adam_kernel(const mo_adam_termsf *terms, unsigned flags, const mo_run *run);
typedef void mo_sgd_kernel(const mo_sgd_termsf *terms, unsigned flags, const mo_run *run);

/* A block of m of 8 bits: its codes as fp32 and back, dithered; encode returns the new scale, passing over what is no number. */
typedef void mo_decode_kernel(const uint8_t *codes, float scale, float *m);
typedef float mo_encode_kernel(const float *m, uint32_t dither, uint8_t *codes);
/* Before a step of a parameter whose second moment is factored (kernels/factored.cuh): the sums of a row of its matrix. Adds each
 * square to the column_sums, and puts the sum of each 256 of them into row_sums, `apart` numbers apart. */
typedef void mo_factored_kernel(const mo_adam_termsf *terms, unsigned flags, const mo_run *row,
                                float *column_sums, float *row_sums, size_t apart);
/* v[i] = scale * column[i]: the second moments of n elements of a row. */
typedef void mo_product_kernel(float scale, const float *column, size_t n, float *v);

typedef struct mo_update_kernels {
    mo_isa isa;
    mo_adam_kernel *adam;
    mo_adam_kernel
        *adam_codes; /* states are codes; the run begins with a block, and its last block may be short */
    mo_sgd_kernel *sgd;
    mo_decode_kernel *decode;
    mo_encode_kernel *encode;
    mo_factored_kernel *factored;
    mo_product_kernel *product;
} mo_update_kernels;

/* SGD where m is codes; the run begins with a block, and its last block may be short. */
void mo_sgd_codes(const mo_update_kernels *kernels, const mo_sgd_termsf *terms, unsigned flags,
                  const mo_run *run);

extern const mo_update_kernels mo_update_generic;
mo_adam_kernel mo_adam_codes_generic;
mo_decode_kernel mo_decode_generic;
mo_encode_kernel mo_encode_generic;
mo_factored_kernel mo_factored_generic;
mo_product_kernel mo_product_generic;
#if defined(__x86_64__)
extern const mo_update_kernels mo_update_avx2, mo_update_avx512;
mo_adam_kernel mo_adam_codes_avx2, mo_adam_codes_avx512;
mo_decode_kernel mo_decode_avx2, mo_decode_avx512;
mo_encode_kernel mo_encode_avx2, mo_encode_avx512;
mo_factored_kernel mo_factored_avx2, mo_factored_avx512;
mo_product_kernel mo_product_avx2, mo_product_avx512;
#endif

/* The best that this processor has, or what the environment variable MEMOPT_ISA says, looked at once; what
 * mo_isa_choose() says against that. */
mo_status mo_update_kernels_get(const mo_update_kernels **out, mo_detail *detail);

/* Others, for tests (NULL: back to the above). */
void mo_update_kernels_use(const mo_update_kernels *kernels);

#endif
