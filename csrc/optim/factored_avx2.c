#if defined(__x86_64__)
#include "optim/update_kernels.h"

#include "base/simd_avx2.h"
#include "optim/factored_vector.h"

void mo_factored_avx2(const mo_adam_termsf *terms, unsigned flags, const mo_run *row, float *column_sums,
                      float *row_sums, size_t apart)
{
    factored_row(terms, flags, row, column_sums, row_sums, apart);
}

void mo_product_avx2(float scale, const float *column, size_t n, float *v)
{
    factored_product(scale, column, n, v);
}
#endif
