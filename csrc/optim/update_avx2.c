/* Eight elements at a time: the words, then the loops that are written in them. */
#if defined(__x86_64__)
#include "optim/update_kernels.h"

#include "base/simd_avx2.h"
#include "optim/update_vector.h"

const mo_update_kernels mo_update_avx2 = {
    .isa = MO_ISA_AVX2,
    .adam = adam,
    .adam_codes = mo_adam_codes_avx2,
    .sgd = sgd,
    .decode = mo_decode_avx2,
    .encode = mo_encode_avx2,
    .factored = mo_factored_avx2,
    .product = mo_product_avx2,
};
#endif
