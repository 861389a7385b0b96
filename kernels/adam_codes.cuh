/* Adam's states in 8 bits: a block is 256 elements that follow each other in one tensor (the last block may be shorter), with two
 * fp32 scales, the largest |m| and the largest v of the block.
 *
 * Both codes are the leading bits of the float y = c + x * (top - c), with x = |m| / scale or v / scale: a logarithm near 1, a
 * straight line near 0; exactly 0 for 0, and the scale itself (to 2 ulp) for the largest. No table, no search, no root.
 *
 *     m    sign and 7 bits: 8 octaves of 16 steps, c = 2^-8; to nearest         |m' - m| <= (|m| + scale / 247) / 32
 *     v    8 bits: 16 octaves of 16 steps, c = 2^-16; dithered, so unbiased     |v' - v| <  (v + scale / 63487) / 16
 *
 * v is dithered because a second moment moves by less than half a code a step: rounded to nearest it would stand still. And a v that
 * is not 0 never gets code 0: v' >= scale / 1015792, so a denominator may be too large but never vanishes.
 *
 * An element whose v is not finite, because its gradient is not or because the gradient's square is beyond fp32, leaves the block
 * no moments: the scales pass over it and both its codes are 0. Otherwise 255 neighbours would be lost beside it. Its parameter is
 * updated with the moments as they are: NaN where the gradient was infinite or NaN, not moved where only the square overflowed. */
#ifndef MO_ADAM_CODES_CUH
#define MO_ADAM_CODES_CUH

#include "arithmetic.cuh"
#include "float_bits.cuh"

#define MO_CODE_ELEMENTS 256 /* a block */

#define MO_CODE_C_M    0x1p-8f
#define MO_CODE_C_V    0x1p-16f
#define MO_CODE_ZERO_M (119u << 23) /* the bits of C_M, and of C_V: what code 0 stands for */
#define MO_CODE_ZERO_V (111u << 23)
#define MO_CODE_SHIFT  19           /* a code is the bits above; the last code is top = 31/32 */
#define MO_CODE_SPAN_M 0x1.eep-1f   /* top - c */
#define MO_CODE_SPAN_V 0x1.effep-1f /* top - c */
#define MO_CODE_TINY   1e-30f     /* a scale below this is as 0: what it could move is lost beside any eps */
#define MO_CODE_HUGE   0x1.ep127f /* the largest scale, so that what a decoder multiplies with is finite */

/* The dither of v: 2^32 / the golden ratio, 2^32 / sqrt(2). */
#define MO_CODE_DITHER_INDEX 0x9E3779B1u
#define MO_CODE_DITHER_STEP  0xB504F333u
#define MO_CODE_NEAREST      0x80000000u /* instead of a dither */

MO_BODY unsigned mo_code_dither(unsigned index, unsigned step)
{
    return index * MO_CODE_DITHER_INDEX + step * MO_CODE_DITHER_STEP;
}

/* ---- of a block ------------------------------------------------------------------------------------------------------ */

/* What a decoder multiplies with; scale is 0 or between MO_CODE_TINY and MO_CODE_HUGE. */
MO_BODY float mo_code_unit_m(float scale)
{
    return mo_mulf(scale, 1 / MO_CODE_SPAN_M);
}

MO_BODY float mo_code_unit_v(float scale)
{
    return mo_mulf(scale, 1 / MO_CODE_SPAN_V);
}

/* The new scale from the largest value, and what an encoder multiplies with. */
MO_BODY float mo_code_scale(float largest)
{
    return largest < MO_CODE_TINY ? 0 : largest > MO_CODE_HUGE ? MO_CODE_HUGE : largest;
}

/* span: MO_CODE_SPAN_M or _V. */
MO_BODY float mo_code_per(float span, float scale)
{
    return scale > 0 ? mo_divf(span, scale) : 0;
}

MO_BODY float mo_code_per_m(float scale)
{
    return mo_code_per(MO_CODE_SPAN_M, scale);
}

MO_BODY float mo_code_per_v(float scale)
{
    return mo_code_per(MO_CODE_SPAN_V, scale);
}

/* ---- of an element --------------------------------------------------------------------------------------------------- */

/* Whether an element leaves the block its moments. With v its m is finite too. */
MO_BODY int mo_code_is_kept(float v)
{
    return v <= MO_CODE_HUGE;
}

MO_BODY float mo_code_decode_m(unsigned code, float unit)
{
    const float magnitude = mo_fmaf(mo_float_from_bits(((code & 127) << MO_CODE_SHIFT) + MO_CODE_ZERO_M),
                                    unit, mo_mulf(-MO_CODE_C_M, unit));

    return code & 128 ? 0 - magnitude : magnitude; /* 128 is 0, as 0 is: not a negative zero */
}

MO_BODY float mo_code_decode_v(unsigned code, float unit)
{
    return mo_fmaf(mo_float_from_bits((code << MO_CODE_SHIFT) + MO_CODE_ZERO_V), unit,
                   mo_mulf(-MO_CODE_C_V, unit));
}

MO_BODY unsigned mo_code_encode_m(float m, float per)
{
    const unsigned bits = mo_float_bits(m);
    const float y = mo_fmaf(mo_float_from_bits(bits & 0x7FFFFFFF), per, MO_CODE_C_M);
    const unsigned code = (mo_float_bits(y) + (1u << (MO_CODE_SHIFT - 1)) - MO_CODE_ZERO_M) >> MO_CODE_SHIFT;

    return (code < 127 ? code : 127) | (bits >> 24 & 128);
}

MO_BODY unsigned mo_code_encode_v(float v, float per, unsigned dither)
{
    const float y = mo_fmaf(v, per, MO_CODE_C_V);
    unsigned code = (mo_float_bits(y) + (dither >> (32 - MO_CODE_SHIFT)) - MO_CODE_ZERO_V) >> MO_CODE_SHIFT;

    if (code > 255)
        code = 255;
    return code ? code : v > 0;
}

/* ---- of four elements in a word, the first in its lowest byte: the same with fewer operations ------------------------------ */

/* Byte k of a word where a code lies in a float, the sign's bit of m not taken off. */
MO_BODY unsigned mo_code_in_place(unsigned word, unsigned k)
{
    return k < 3 ? word << (MO_CODE_SHIFT - 8 * k) : word >> (8 * k - MO_CODE_SHIFT);
}

MO_BODY void mo_code_decode_four_m(unsigned word, float unit, float *m)
{
    const float zero = mo_mulf(-MO_CODE_C_M, unit);
    unsigned k;

    MO_UNROLL
    for (k = 0; k < 4; k++) {
        const unsigned bits = (mo_code_in_place(word, k) & 127u << MO_CODE_SHIFT) + MO_CODE_ZERO_M;
        const float magnitude = mo_fmaf(mo_float_from_bits(bits), unit, zero);
        m[k] = word & 128u << 8 * k ? 0 - magnitude : magnitude;
    }
}

MO_BODY void mo_code_decode_four_v(unsigned word, float unit, float *v)
{
    const float zero = mo_mulf(-MO_CODE_C_V, unit);
    unsigned k;

    MO_UNROLL
    for (k = 0; k < 4; k++) {
        const unsigned bits = (mo_code_in_place(word, k) & 255u << MO_CODE_SHIFT) + MO_CODE_ZERO_V;
        v[k] = mo_fmaf(mo_float_from_bits(bits), unit, zero);
    }
}

/* The bytes of that number, 0 to 3, of four words. */
MO_BODY unsigned mo_code_gathered(const unsigned *word, unsigned number)
{
    const unsigned pair = number << 4 | number | 0x40;

    return mo_bytes(mo_bytes(word[0], word[1], pair), mo_bytes(word[2], word[3], pair), 0x5410);
}

MO_BODY unsigned mo_code_signs(const float *m)
{
    const unsigned word[4] = {mo_float_bits(m[0]), mo_float_bits(m[1]), mo_float_bits(m[2]),
                              mo_float_bits(m[3])};

    return mo_code_gathered(word, 3) & 0x80808080u;
}

/* Of |m|, with mo_code_signs of m. */
MO_BODY unsigned mo_code_encode_four_m(const float *magnitude, unsigned signs, float per)
{
    unsigned code[4], k;

    MO_UNROLL
    for (k = 0; k < 4; k++) {
        const float y = mo_fmaf(magnitude[k], per, MO_CODE_C_M);
        const unsigned rounded =
            (mo_float_bits(y) + (1u << (MO_CODE_SHIFT - 1)) - MO_CODE_ZERO_M) >> MO_CODE_SHIFT;
        code[k] = rounded < 127 ? rounded : 127;
    }
    return mo_code_gathered(code, 0) | signs;
}

/* dither: the first element's. */
MO_BODY unsigned mo_code_encode_four_v(const float *v, float per, unsigned dither)
{
    unsigned code[4], k;

    MO_UNROLL
    for (k = 0; k < 4; k++) {
        const float y = mo_fmaf(v[k], per, MO_CODE_C_V);
        const unsigned up = (dither + k * MO_CODE_DITHER_INDEX) >> (32 - MO_CODE_SHIFT);
        const unsigned rounded = (mo_float_bits(y) + up - MO_CODE_ZERO_V) >> MO_CODE_SHIFT;
        const unsigned least = v[k] > 0, most = rounded < 255 ? rounded : 255;
        code[k] = most > least ? most : least;
    }
    return mo_code_gathered(code, 0);
}

#endif
