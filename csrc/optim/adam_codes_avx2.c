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

WORD void store_codes(unsigned bits, uint8_t *codes, size_t i, veci a)
{
    if (bits == 8) {
        _mm256_storeu_si256((__m256i *)(codes + i), a);
    } else { /* each even byte with 16 times the odd one behind it */
        a = _mm256_maddubs_epi16(a, _mm256_set1_epi16(0x1001));
        a = _mm256_permute4x64_epi64(_mm256_packus_epi16(a, a), 0x08);
        _mm_storeu_si128((__m128i *)(codes + i / 2), _mm256_castsi256_si128(a));
    }
}

/* A byte each of what encoded_m() made of these m, with their signs. */
WORD veci packed_m(unsigned bits, const veci code[4], const vec m[4])
{
    const veci signs = both(packed_signs(m), _mm256_set1_epi8(-128));
    veci m8 = packed(_mm256_packus_epi32(code[0], code[1]), _mm256_packus_epi32(code[2], code[3]));

    m8 = _mm256_min_epu8(m8, _mm256_set1_epi8((char)(MO_CODE_SIGN(bits) - 1)));
    return either(m8, bits == 8 ? signs : right(signs, 4));
}

WORD void encode_group_m(const vec *m, vec per, const veci *addend, uint8_t *codes)
{
    veci code[4];

    for (size_t k = 0; k < 4; k++)
        code[k] = encoded_m(8, m[k], per, addend[k]);
    store_codes(8, codes, 0, packed_m(8, code, m));
}

/* `factored`, a constant too: there is no v. */
WORD void encode_group(unsigned bits, bool factored, const block_values *values, size_t i,
                       const uint32_t *ramp_of_block)
{
    const vec per_m = all(values->per_m), per_v = all(values->per_v);
    const veci first_m = alli(values->dither_m), first_v = alli(values->dither_v),
               above16 = _mm256_set1_epi16(CODE_ABOVE(bits));
    vec m[4], v[4];
    veci m_code[4], v_code[4], v8;

    for (size_t k = 0; k < 4; k++) {
        const veci ramp_here = load_bits(ramp_of_block + i + k * LANES);
        m[k] = load(values->m + i + k * LANES, LANES);
        m_code[k] = encoded_m(bits, m[k], per_m, addend_m(bits, add(first_m, ramp_here)));
        if (factored)
            continue;
        v[k] = load(values->v + i + k * LANES, LANES);
        v_code[k] = encoded_v(bits, v[k], per_v, add(first_v, ramp_here));
    }
    store_codes(bits, values->m_codes, i, packed_m(bits, m_code, m));
    if (factored)
        return;
    v8 = packed(_mm256_sub_epi16(_mm256_packus_epi32(v_code[0], v_code[1]), above16),
                _mm256_sub_epi16(_mm256_packus_epi32(v_code[2], v_code[3]), above16));
    v8 = _mm256_min_epu8(v8, _mm256_set1_epi8((char)MO_CODE_LAST(bits)));
    v8 = _mm256_max_epu8(v8, _mm256_min_epu8(packed_signs(v), _mm256_set1_epi8(1))); /* v > 0: not code 0 */
    store_codes(bits, values->v_codes, i, v8);
}

#include "optim/adam_codes_vector.h"

void mo_adam_codes_avx2(const mo_adam_termsf *terms, unsigned flags, const mo_run *run)
{
    codes_run(terms, flags, run);
}

void mo_decode_avx2(const uint8_t *codes, float scale, float *m)
{
    decode_m(codes, scale, m);
}

float mo_encode_avx2(const float *m, uint32_t dither, uint8_t *codes)
{
    return encode_m(m, dither, codes);
}
#endif
