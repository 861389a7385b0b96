/* The solver's two inner loops, once an instruction set. relax_generic.c is the specification, and the others give
 * its bits. No NaN goes in; infinities may. Addresses are aligned to a float only. */
#ifndef MO_RELAX_H
#define MO_RELAX_H

#include <stddef.h>
#include <stdint.h>

#include "base/isa.h"

/* best[k] = min(best[k], seconds + (left[k] + right[k])), 0 <= k < count. right NULL: seconds + left[k]. */
typedef void mo_relax(float *best, const float *left, const float *right, float seconds, size_t count);

#define MO_RELAX_BLOCKS 16

/* Bit k: seconds + (left[k] + right[k]) < best[k], 0 <= k < MO_RELAX_BLOCKS. */
typedef uint32_t mo_reach(const float *best, const float *left, const float *right, float seconds);

typedef struct mo_relax_kernels {
    mo_relax *relax;
    mo_reach *reach;
} mo_relax_kernels;

mo_relax mo_relax_generic;
mo_reach mo_reach_generic;
#if defined(__x86_64__)
mo_relax mo_relax_avx2, mo_relax_avx512;
mo_reach mo_reach_avx2, mo_reach_avx512;
#endif

/* The best that this processor has, or what the environment variable MEMOPT_ISA says; what mo_isa_choose() says
 * against that. */
mo_status mo_relax_get(const mo_relax_kernels **out, mo_detail *detail);

#endif
