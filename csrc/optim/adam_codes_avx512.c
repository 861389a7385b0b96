/* Vectors are narrowed to bytes by one instruction each. */
#if defined(__x86_64__)
#include "optim/update_kernels.h"

#include "base/simd_avx512.h"
#include "optim/vector_run.h"
#include "optim/adam_codes_block.h"

enum { GROUP = LANES, TOGETHER = 1 };

WORD void encode_group(const block_values *values, size_t i, const uint32_t *ramp_of_block)
{
    const vec m = load(values->m + i, LANES), v = load(values->v + i, LANES);
    const veci dither = add(alli(values->dither), as_bits(load((const float *)ramp_of_block + i, LANES)));
    __m128i m8 = _mm512_cvtusepi32_epi8(encoded_m(m, all(values->per_m)));
    __m128i v8 = _mm512_cvtusepi32_epi8(sub(encoded_v(v, all(values->per_v), dither), alli(CODE_ABOVE)));

    m8 = _mm_min_epu8(m8, _mm_set1_epi8(127));
    m8 = _mm_mask_add_epi8(m8, _mm512_movepi32_mask(as_bits(m)), m8, _mm_set1_epi8(-128));
    v8 = _mm_mask_max_epu8(v8, _mm512_test_epi32_mask(as_bits(v), as_bits(v)), v8,
                           _mm_set1_epi8(1)); /* v > 0: not code 0 */
    _mm_storeu_si128((__m128i *)(values->m_codes + i), m8);
    _mm_storeu_si128((__m128i *)(values->v_codes + i), v8);
}

#include "optim/adam_codes_vector.h"

void mo_adam_codes_avx512(const mo_adam_termsf *terms, unsigned flags, const mo_run *run)
{
    codes_run(terms, flags, run);
}
#endif
