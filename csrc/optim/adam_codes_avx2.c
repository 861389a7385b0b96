/* Codes are made of four vectors at a time, so that the steps after the packing to bytes are shared by 32
 * elements. */
#if defined(__x86_64__)
#include "optim/update_kernels.h"

#include "base/simd_avx2.h"
#include "optim/vector_run.h"
#include "optim/adam_codes_block.h"

enum { GROUP = 4 * LANES, TOGETHER = 4 };

/* Packing goes on within halves of a register; this puts the words of the result in order. */
WORD veci in_order(veci a)
{
    return _mm256_permutevar8x32_epi32(a, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/* Halfwords to bytes: what is more than 255 as 255, what is negative as 0. */
WORD veci packed(veci a, veci b)
{
    return in_order(_mm256_packus_epi16(a, b));
}

/* With signed saturation: of the bits of floats, their signs and whether they are all zero. */
WORD veci packed_signs(const vec a[4])
{
    return in_order(_mm256_packs_epi16(_mm256_packs_epi32(as_bits(a[0]), as_bits(a[1])),
                                       _mm256_packs_epi32(as_bits(a[2]), as_bits(a[3]))));
}

WORD void encode_group(const block_values *values, size_t i, const uint32_t *ramp_of_block)
{
    const vec per_m = all(values->per_m), per_v = all(values->per_v);
    const veci first = alli(values->dither), above16 = _mm256_set1_epi16(CODE_ABOVE);
    vec m[4], v[4];
    veci m_code[4], v_code[4], m8, v8;

    for (size_t k = 0; k < 4; k++) {
        const veci dither = add(first, as_bits(load((const float *)ramp_of_block + i + k * LANES, LANES)));
        m[k] = load(values->m + i + k * LANES, LANES);
        v[k] = load(values->v + i + k * LANES, LANES);
        m_code[k] = encoded_m(m[k], per_m);
        v_code[k] = encoded_v(v[k], per_v, dither);
    }
    m8 = packed(_mm256_packus_epi32(m_code[0], m_code[1]), _mm256_packus_epi32(m_code[2], m_code[3]));
    m8 = _mm256_min_epu8(m8, _mm256_set1_epi8(127));
    m8 = either(m8, both(packed_signs(m), _mm256_set1_epi8(-128)));
    v8 = packed(_mm256_sub_epi16(_mm256_packus_epi32(v_code[0], v_code[1]), above16),
                _mm256_sub_epi16(_mm256_packus_epi32(v_code[2], v_code[3]), above16));
    v8 = _mm256_max_epu8(v8, _mm256_min_epu8(packed_signs(v), _mm256_set1_epi8(1))); /* v > 0: not code 0 */
    _mm256_storeu_si256((__m256i *)(values->m_codes + i), m8);
    _mm256_storeu_si256((__m256i *)(values->v_codes + i), v8);
}

#include "optim/adam_codes_vector.h"

void mo_adam_codes_avx2(const mo_adam_termsf *terms, unsigned flags, const mo_run *run)
{
    codes_run(terms, flags, run);
}
#endif
