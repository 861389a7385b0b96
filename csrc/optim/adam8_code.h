/* What a block leaves to be coded, and the codes of one vector. Included before encode_group(), which makes
 * bytes of them. */
#ifndef MO_ADAM8_CODE_H
#define MO_ADAM8_CODE_H

#include "../kernels/adam8.cuh"

typedef struct block_values {
    float m[MO_ADAM8_ELEMENTS], v[MO_ADAM8_ELEMENTS];
    float per_m, per_v;
    uint32_t dither; /* of the block's first element */
    uint8_t *m_codes, *v_codes;
} __attribute__((aligned(64))) block_values;

/* The code of m without its sign, as an integer of up to 13 bits that counts as 127 where it is more. */
WORD veci encoded_m(vec m, vec per)
{
    const veci y = as_bits(mul_add(magnitude(m), per, all(MO_ADAM8_C_M)));
    return right(add(y, alli((1u << (MO_ADAM8_SHIFT - 1)) - MO_ADAM8_ZERO_M)), MO_ADAM8_SHIFT);
}

/* The code of v and what code 0 lies above 0, as an integer of 13 bits: see CODE_ABOVE. */
WORD veci encoded_v(vec v, vec per, veci dither)
{
    const veci y = as_bits(mul_add(v, per, all(MO_ADAM8_C_V)));
    return right(add(y, right(dither, 32 - MO_ADAM8_SHIFT)), MO_ADAM8_SHIFT);
}

enum { CODE_ABOVE = MO_ADAM8_ZERO_V >> MO_ADAM8_SHIFT };

#endif
