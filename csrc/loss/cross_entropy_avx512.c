/* cross_entropy.c's loops with AVX-512. */
#if defined(__x86_64__)
#include "loss/cross_entropy_kernels.h"

#include "base/simd_avx512.h"
#include "loss/cross_entropy_body.h"

const mo_cross_entropy_kernels mo_cross_entropy_avx512 = KERNEL_TABLE;
#endif
