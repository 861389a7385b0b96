/* What an optimizer step does to dense runs of fp32, and how the 16-bit formats get there and back: one table of functions an
 * instruction set, of which update_cpu.c uses one throughout.
 *
 * update_generic.c and adam8_generic.c, loops over kernels/adam.cuh, sgd.cuh, dither.cuh and adam8.cuh, are the specification; the
 * others give the same bits for every length and every misalignment (but for the sign and payload of a NaN). */
#ifndef MO_UPDATE_KERNELS_H
#define MO_UPDATE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "../kernels/adam.cuh"
#include "../kernels/sgd.cuh"
#include "base/isa.h"

/* fp32 arrays of n elements that do not overlap. flags: MO_ADAM_…, MO_SGD_…; what they do not name may be NULL. */
typedef void mo_adam_run(const mo_adam_termsf *terms, unsigned flags, size_t n, float *p, const float *g,
                         float *m, float *v, float *vmax);
typedef void mo_sgd_run(const mo_sgd_termsf *terms, unsigned flags, size_t n, float *p, const float *g,
                        float *m);

/* x := x * factor */
typedef void mo_scale_run(float factor, size_t n, float *x);

/* MO_F16 or MO_BF16, to and from fp32. Narrow: to nearest. Dither: up or down (kernels/dither.cuh); index: of the first. */
typedef void mo_widen_run(mo_float kind, size_t n, const uint16_t *x, float *out);
typedef void mo_narrow_run(mo_float kind, size_t n, const float *x, uint16_t *out);
typedef void mo_dither_run(mo_float kind, size_t n, const float *x, uint32_t index, uint32_t step,
                           uint16_t *out);

/* Whole blocks of MO_ADAM8_ELEMENTS; index: of the first element in its tensor; step: the number of this step. */
typedef struct mo_adam8_states {
    uint8_t *m, *v;           /* codes */
    float *m_scale, *v_scale; /* one a block */
} mo_adam8_states;

typedef void mo_adam8_run(const mo_adam_termsf *terms, unsigned flags, size_t blocks, float *p,
                          const float *g, mo_adam8_states states, uint32_t index, uint32_t step);

typedef struct mo_update_kernels {
    mo_isa isa;
    mo_adam_run *adam;
    mo_sgd_run *sgd;
    mo_scale_run *scale;
    mo_widen_run *widen;
    mo_narrow_run *narrow;
    mo_dither_run *dither;
    mo_adam8_run *adam8;
} mo_update_kernels;

extern const mo_update_kernels mo_update_generic;
mo_adam8_run mo_adam8_generic;
#if defined(__x86_64__)
extern const mo_update_kernels mo_update_avx2, mo_update_avx512;
mo_adam8_run mo_adam8_avx2, mo_adam8_avx512;
#endif

/* The best that this processor has, or what the environment variable MEMOPT_ISA says, looked at once; what mo_isa_choose() says
 * against that. */
mo_status mo_update_kernels_get(const mo_update_kernels **out, mo_detail *detail);

/* Others, for tests (NULL: back to the above). */
void mo_update_kernels_use(const mo_update_kernels *kernels);

#endif
