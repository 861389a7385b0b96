/* What a block leaves to be coded, and the codes of one vector. Included before encode_group(), which makes
 * bytes of them. */
#ifndef MO_ADAM_CODES_BLOCK_H
#define MO_ADAM_CODES_BLOCK_H

#include "../kernels/adam_codes.cuh"

typedef struct block_values {
    float m[MO_CODE_ELEMENTS], v[MO_CODE_ELEMENTS];
    float per_m, per_v;
    uint32_t dither; /* of the block's first element */
    uint8_t *m_codes, *v_codes;
} __attribute__((aligned(64))) block_values;

/* The code of m without its sign, as an integer of up to 13 bits that counts as 127 where it is more. */
WORD veci encoded_m(vec m, vec per)
{
    const veci y = as_bits(mul_add(magnitude(m), per, all(MO_CODE_C_M)));
    return right(add(y, alli((1u << (MO_CODE_SHIFT - 1)) - MO_CODE_ZERO_M)), MO_CODE_SHIFT);
}

/* The code of v and what code 0 lies above 0, as an integer of 13 bits: see CODE_ABOVE. */
WORD veci encoded_v(vec v, vec per, veci dither)
{
    const veci y = as_bits(mul_add(v, per, all(MO_CODE_C_V)));
    return right(add(y, right(dither, 32 - MO_CODE_SHIFT)), MO_CODE_SHIFT);
}

enum { CODE_ABOVE = MO_CODE_ZERO_V >> MO_CODE_SHIFT };

#endif
