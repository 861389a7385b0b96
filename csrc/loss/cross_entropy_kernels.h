/* The loops over one row of cross_entropy.c, an instruction set a table. They agree to a few units in fp32's last place. */
#ifndef MO_CROSS_ENTROPY_KERNELS_H
#define MO_CROSS_ENTROPY_KERNELS_H

#include <stddef.h>

#include "../kernels/chunk.cuh"
#include "base/isa.h"

typedef struct mo_row_sums {
    double lse, sum; /* log of the sum of exp(z); sum of z */
} mo_row_sums;

/* softcap: 0 for none, a constant of the loop in the tables below. */
typedef mo_row_sums mo_row_find(const void *x, size_t count, float softcap);

/* x := scale * (exp(z - lse) - flat) * dz/dx */
typedef void mo_row_subtract(void *x, size_t count, float softcap, float lse, float flat, float scale);

typedef struct mo_cross_entropy_kernels {
    mo_row_find *find[MO_F64][2]; /* by kind, and whether there is a softcap */
    mo_row_subtract *subtract[MO_F64][2];
} mo_cross_entropy_kernels;

extern const mo_cross_entropy_kernels mo_cross_entropy_generic;
#if defined(__x86_64__)
extern const mo_cross_entropy_kernels mo_cross_entropy_avx2, mo_cross_entropy_avx512;
#endif

/* For tests: this instruction set, or with MO_ISA_COUNT the one that MEMOPT_ISA or the processor says, which is asked anew. */
void mo_cross_entropy_use(mo_isa isa);

#endif
