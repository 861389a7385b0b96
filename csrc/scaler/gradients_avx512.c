/* gradients_generic.c's arithmetic with AVX-512 F, BW, VL and DQ. */
#if defined(__x86_64__)
#include "scaler/gradients_kernels.h"

#include "base/simd_avx512.h"
#include "scaler/gradients_body.h"

const mo_gradients_kernels mo_gradients_avx512 = KERNEL_TABLE;
#endif
