/* Sixteen elements at a time: the words, then the loops that are written in them. */
#if defined(__x86_64__)
#include "optim/update_kernels.h"

#include "base/simd_avx512.h"
#include "optim/update_vector.h"

const mo_update_kernels mo_update_avx512 = {
    .isa = MO_ISA_AVX512,
    .adam = adam,
    .adam_codes = mo_adam_codes_avx512,
    .sgd = sgd,
    .decode = mo_decode_avx512,
    .encode = mo_encode_avx512,
    .factored = mo_factored_avx512,
    .product = mo_product_avx512,
};
#endif
