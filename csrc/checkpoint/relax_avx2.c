#if defined(__x86_64__)
#include "checkpoint/relax.h"

#include <immintrin.h>

#define LANES 8
#define AVX2  __attribute__((target("avx2")))

AVX2 void mo_relax_avx2(float *best, const float *left, const float *right, float seconds, size_t count)
{
    const __m256 more = _mm256_set1_ps(seconds);
    const size_t whole = count / LANES * LANES;

    for (size_t k = 0; k < whole; k += LANES) {
        __m256 value = _mm256_loadu_ps(left + k);
        if (right)
            value = _mm256_add_ps(value, _mm256_loadu_ps(right + k));
        value = _mm256_min_ps(_mm256_add_ps(more, value), _mm256_loadu_ps(best + k));
        _mm256_storeu_ps(best + k, value);
    }
    if (whole < count)
        mo_relax_generic(best + whole, left + whole, right ? right + whole : NULL, seconds, count - whole);
}

AVX2 uint32_t mo_reach_avx2(const float *best, const float *left, const float *right, float seconds)
{
    const __m256 more = _mm256_set1_ps(seconds);
    uint32_t mask = 0;

    for (unsigned k = 0; k < MO_RELAX_BLOCKS; k += LANES) {
        const __m256 value =
            _mm256_add_ps(more, _mm256_add_ps(_mm256_loadu_ps(left + k), _mm256_loadu_ps(right + k)));
        const __m256 less = _mm256_cmp_ps(value, _mm256_loadu_ps(best + k), _CMP_LT_OQ);
        mask |= (uint32_t)_mm256_movemask_ps(less) << k;
    }
    return mask;
}
#endif
