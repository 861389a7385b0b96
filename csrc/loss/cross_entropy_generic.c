/* cross_entropy.c's loops for any processor. */
#include "loss/cross_entropy_kernels.h"

#include "base/simd_generic.h"
#include "loss/cross_entropy_body.h"

const mo_cross_entropy_kernels mo_cross_entropy_generic = KERNEL_TABLE;
