/* What a block leaves to be coded, and the codes of one vector. Included before encode_group(), which makes
 * bytes of them. */
#ifndef MO_ADAM_CODES_BLOCK_H
#define MO_ADAM_CODES_BLOCK_H

#include "../kernels/adam_codes.cuh"

typedef struct block_values {
    float m[MO_CODE_ELEMENTS], v[MO_CODE_ELEMENTS];
    float per_m, per_v;
    uint32_t dither_m, dither_v; /* of the block's first element */
    uint8_t *m_codes, *v_codes;
} __attribute__((aligned(64))) block_values;

/* What is added to the bits of y before a code of m is cut from them. `bits` is a constant, here and below. */
WORD veci dithered_m(unsigned bits, veci dither)
{
    return add(right(dither, 32 - MO_CODE_SHIFT_M(bits)), alli(0 - MO_CODE_ZERO_M(bits)));
}

WORD veci nearest_m(unsigned bits)
{
    return alli((MO_CODE_NEAREST >> (32 - MO_CODE_SHIFT_M(bits))) - MO_CODE_ZERO_M(bits));
}

/* Of Adam's m. */
WORD veci addend_m(unsigned bits, veci dither)
{
    return bits == 8 ? nearest_m(bits) : dithered_m(bits, dither);
}

/* The code of m without its sign, as an integer of up to 13 bits that counts as the last code where it is more. */
WORD veci encoded_m(unsigned bits, vec m, vec per, veci addend)
{
    const veci y = as_bits(mul_add(magnitude(m), per, all(MO_CODE_C_M(bits))));

    return right(add(y, addend), MO_CODE_SHIFT_M(bits));
}

/* The code of v and what code 0 lies above 0, as an integer of 13 bits: see CODE_ABOVE. */
WORD veci encoded_v(unsigned bits, vec v, vec per, veci dither)
{
    const veci y = as_bits(mul_add(v, per, all(MO_CODE_C_V)));
    return right(add(y, right(dither, 32 - MO_CODE_SHIFT_V(bits))), MO_CODE_SHIFT_V(bits));
}

#define CODE_ABOVE(bits) (MO_CODE_ZERO_V >> MO_CODE_SHIFT_V(bits))

/* The codes of one vector where they lie in floats: m's sign in bit 31. */
WORD veci m_codes_in_place(unsigned bits, const uint8_t *codes, size_t i)
{
    const unsigned shift = MO_CODE_SHIFT_M(bits);
    const veci code = bits == 8 ? left(load_signed_bytes(codes + i), shift)
                                : right_signed(load_nibbles(codes + i / 2), 28 - shift);

    return both(code, alli(0x80000000 | (MO_CODE_SIGN(bits) - 1) << shift));
}

WORD veci v_codes_in_place(unsigned bits, const uint8_t *codes, size_t i)
{
    const unsigned shift = MO_CODE_SHIFT_V(bits);

    if (bits == 8)
        return left(load_bytes(codes + i), shift);
    return both(right(load_nibbles(codes + i / 2), 28 - shift), alli(MO_CODE_LAST(bits) << shift));
}

#endif
