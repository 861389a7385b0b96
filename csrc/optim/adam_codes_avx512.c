/* Vectors are narrowed to bytes by one instruction each. */
#if defined(__x86_64__)
#include "optim/update_kernels.h"

#include "base/simd_avx512.h"
#include "optim/vector_run.h"
#include "optim/adam_codes_block.h"

enum { GROUP = LANES, TOGETHER = 1 };

WORD void store_codes(unsigned bits, uint8_t *codes, size_t i, __m128i a)
{
    if (bits == 8) {
        _mm_storeu_si128((__m128i *)(codes + i), a);
    } else { /* each even byte with 16 times the odd one behind it */
        a = _mm_maddubs_epi16(a, _mm_set1_epi16(0x1001));
        _mm_storel_epi64((__m128i *)(codes + i / 2), _mm_packus_epi16(a, a));
    }
}

/* A byte each of what encoded_m() made of these m, with their signs. */
WORD __m128i packed_m(unsigned bits, veci code, vec m)
{
    const __m128i m8 =
        _mm_min_epu8(_mm512_cvtusepi32_epi8(code), _mm_set1_epi8((char)(MO_CODE_SIGN(bits) - 1)));

    return _mm_mask_add_epi8(m8, _mm512_movepi32_mask(as_bits(m)), m8,
                             _mm_set1_epi8((char)MO_CODE_SIGN(bits)));
}

WORD void encode_group_m(const vec *m, vec per, const veci *addend, uint8_t *codes)
{
    store_codes(8, codes, 0, packed_m(8, encoded_m(8, *m, per, *addend), *m));
}

/* `factored`, a constant too: there is no v. */
WORD void encode_group(unsigned bits, bool factored, const block_values *values, size_t i,
                       const uint32_t *ramp_of_block)
{
    const vec m = load(values->m + i, LANES);
    const veci ramp_here = load_bits(ramp_of_block + i), dither_m = add(alli(values->dither_m), ramp_here),
               dither_v = add(alli(values->dither_v), ramp_here);
    __m128i v8;
    vec v;

    store_codes(bits, values->m_codes, i,
                packed_m(bits, encoded_m(bits, m, all(values->per_m), addend_m(bits, dither_m)), m));
    if (factored)
        return;
    v = load(values->v + i, LANES);
    v8 =
        _mm512_cvtusepi32_epi8(sub(encoded_v(bits, v, all(values->per_v), dither_v), alli(CODE_ABOVE(bits))));
    v8 = _mm_min_epu8(v8, _mm_set1_epi8((char)MO_CODE_LAST(bits)));
    v8 = _mm_mask_max_epu8(v8, _mm512_test_epi32_mask(as_bits(v), as_bits(v)), v8,
                           _mm_set1_epi8(1)); /* v > 0: not code 0 */
    store_codes(bits, values->v_codes, i, v8);
}

#include "optim/adam_codes_vector.h"

void mo_adam_codes_avx512(const mo_adam_termsf *terms, unsigned flags, const mo_run *run)
{
    codes_run(terms, flags, run);
}

void mo_decode_avx512(const uint8_t *codes, float scale, float *m)
{
    decode_m(codes, scale, m);
}

float mo_encode_avx512(const float *m, uint32_t dither, uint8_t *codes)
{
    return encode_m(m, dither, codes);
}
#endif
