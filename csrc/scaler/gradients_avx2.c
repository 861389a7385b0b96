/* gradients_generic.c's arithmetic with AVX2 and F16C. FMA would give other bits than the specification. */
#if defined(__x86_64__)
#include "scaler/gradients_kernels.h"

#include "base/simd_avx2.h"
#include "scaler/gradients_body.h"

const mo_gradients_kernels mo_gradients_avx2 = KERNEL_TABLE;
#endif
