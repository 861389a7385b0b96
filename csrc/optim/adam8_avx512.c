/* Vectors are narrowed to bytes by one instruction each. */
#if defined(__x86_64__)
#include "optim/update_kernels.h"

#include "../kernels/adam8.cuh"
#include "optim/vector_avx512.h"
#include "optim/adam8_vector.h"

VECTOR static void encode_block(const block_values *values, const block_codes *to)
{
    const vec per_m = all(to->per_m), per_v = all(to->per_v);
    veci d = add(ramp(MO_ADAM8_DITHER_INDEX), alli(to->dither));

    for (size_t i = 0; i < MO_ADAM8_ELEMENTS; i += LANES) {
        const vec m = load(values->m + i, LANES), v = load(values->v + i, LANES);
        __m128i m8 = _mm512_cvtusepi32_epi8(encoded_m(m, per_m));
        __m128i v8 = _mm512_cvtusepi32_epi8(encoded_v(v, per_v, d));

        fetch_ahead(to->next_p + i);
        fetch_ahead(to->next_g + i);
        m8 = _mm_min_epu8(m8, _mm_set1_epi8(127));
        m8 = _mm_mask_add_epi8(m8, _mm512_movepi32_mask(as_bits(m)), m8, _mm_set1_epi8(-128));
        v8 = _mm_mask_max_epu8(v8, _mm512_test_epi32_mask(as_bits(v), as_bits(v)), v8,
                               _mm_set1_epi8(1)); /* v is not 0: nor is its code */
        _mm_storeu_si128((__m128i *)(to->m + i), m8);
        _mm_storeu_si128((__m128i *)(to->v + i), v8);
        d = add(d, alli(LANES * MO_ADAM8_DITHER_INDEX));
    }
}

VECTOR void mo_adam8_avx512(const mo_adam_termsf *terms, unsigned flags, size_t blocks, float *p,
                            const float *g, mo_adam8_states states, uint32_t index, uint32_t step)
{
    if (flags & MO_ADAM_L2)
        run_blocks(terms, MO_ADAM_L2, blocks, p, g, states, index, step);
    else
        run_blocks(terms, 0, blocks, p, g, states, index, step);
}
#endif
