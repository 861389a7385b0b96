/* Which instruction set the CPU kernels use: the best that this processor has, unless told less. */
#ifndef MO_ISA_H
#define MO_ISA_H

#include "base/status.h"

typedef enum mo_isa { MO_ISA_GENERIC, MO_ISA_AVX2, MO_ISA_AVX512, MO_ISA_COUNT } mo_isa;

/* "generic", "avx2", "avx512". */
const char *mo_isa_name(mo_isa isa);

/* What the processor and the operating system support: avx2 asks for AVX2, FMA and F16C; avx512 for F, BW, VL
 * and DQ beside them. */
mo_isa mo_isa_best(void);

/* MEMOPT_ISA's value: NULL or "" for the best; MO_INVALID for an unknown name; MO_UNSUPPORTED for more than the
 * processor has. */
mo_status mo_isa_choose(const char *name, mo_isa *out, mo_detail *detail);

#endif
