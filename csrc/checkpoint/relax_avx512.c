#if defined(__x86_64__)
#include "checkpoint/relax.h"

#include <immintrin.h>

#define LANES  16
#define AVX512 __attribute__((target("avx512f")))

AVX512 void mo_relax_avx512(float *best, const float *left, const float *right, float seconds, size_t count)
{
    const __m512 more = _mm512_set1_ps(seconds);

    for (size_t k = 0; k < count; k += LANES) {
        const __mmask16 there = count - k < LANES ? (__mmask16)((1u << (count - k)) - 1) : (__mmask16)0xFFFF;
        __m512 value = _mm512_maskz_loadu_ps(there, left + k);
        if (right)
            value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(there, right + k));
        value = _mm512_min_ps(_mm512_add_ps(more, value), _mm512_maskz_loadu_ps(there, best + k));
        _mm512_mask_storeu_ps(best + k, there, value);
    }
}

AVX512 uint32_t mo_reach_avx512(const float *best, const float *left, const float *right, float seconds)
{
    const __m512 value =
        _mm512_add_ps(_mm512_set1_ps(seconds), _mm512_add_ps(_mm512_loadu_ps(left), _mm512_loadu_ps(right)));

    _Static_assert(MO_RELAX_BLOCKS == LANES, "one vector");
    return _mm512_cmp_ps_mask(value, _mm512_loadu_ps(best), _CMP_LT_OQ);
}
#endif
