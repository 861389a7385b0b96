/* Codes are made of four vectors at a time, so that the steps after the packing to bytes are shared by 32 elements. */
#if defined(__x86_64__)
#include "optim/update_kernels.h"

#include "../kernels/adam8.cuh"
#include "optim/vector_avx2.h"
#include "optim/adam8_vector.h"

enum { GROUP = 4 * LANES };

/* The low bytes of four vectors, in order; what is more than 255 as 255. */
WORD veci packed(veci a, veci b, veci c, veci d)
{
    const veci order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* packing goes on within halves */

    return _mm256_permutevar8x32_epi32(
        _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d)), order);
}

/* The same with signed saturation: of a float's bits, the sign and whether they are all zero. */
WORD veci packed_signed(veci a, veci b, veci c, veci d)
{
    const veci order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);

    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d)),
                                       order);
}

VECTOR static void encode_block(const block_values *values, const block_codes *to)
{
    const vec per_m = all(to->per_m), per_v = all(to->per_v);
    const veci eight_on = alli(LANES * MO_ADAM8_DITHER_INDEX);
    veci d[4];

    d[0] = add(ramp(MO_ADAM8_DITHER_INDEX), alli(to->dither));
    for (size_t k = 1; k < 4; k++)
        d[k] = add(d[k - 1], eight_on);
    for (size_t i = 0; i < MO_ADAM8_ELEMENTS; i += GROUP) {
        vec m[4], v[4];
        veci code_m[4], code_v[4], m8, v8, some;

        for (size_t k = 0; k < 4; k++) {
            m[k] = load(values->m + i + k * LANES, LANES);
            v[k] = load(values->v + i + k * LANES, LANES);
            code_m[k] = encoded_m(m[k], per_m);
            code_v[k] = encoded_v(v[k], per_v, d[k]);
            d[k] = add(d[k], alli(GROUP * MO_ADAM8_DITHER_INDEX));
        }
        for (size_t k = 0; k < 4; k += 2) {
            fetch_ahead(to->next_p + i + k * LANES);
            fetch_ahead(to->next_g + i + k * LANES);
        }
        m8 = _mm256_min_epu8(packed(code_m[0], code_m[1], code_m[2], code_m[3]), _mm256_set1_epi8(127));
        some = packed_signed(as_bits(m[0]), as_bits(m[1]), as_bits(m[2]), as_bits(m[3]));
        m8 = either(m8, both(some, _mm256_set1_epi8(-128)));
        v8 = packed(code_v[0], code_v[1], code_v[2], code_v[3]);
        some = packed_signed(as_bits(v[0]), as_bits(v[1]), as_bits(v[2]), as_bits(v[3]));
        v8 =
            _mm256_max_epu8(v8, _mm256_min_epu8(some, _mm256_set1_epi8(1))); /* v is not 0: nor is its code */
        _mm256_storeu_si256((__m256i *)(to->m + i), m8);
        _mm256_storeu_si256((__m256i *)(to->v + i), v8);
    }
}

VECTOR void mo_adam8_avx2(const mo_adam_termsf *terms, unsigned flags, size_t blocks, float *p,
                          const float *g, mo_adam8_states states, uint32_t index, uint32_t step)
{
    if (flags & MO_ADAM_L2)
        run_blocks(terms, MO_ADAM_L2, blocks, p, g, states, index, step);
    else
        run_blocks(terms, 0, blocks, p, g, states, index, step);
}
#endif
