/* Adam's states, and SGD's momentum buffer, as codes of 8 or of 4 bits: a block is 256 elements that follow each other in one tensor
 * (the last block may be shorter), with two fp32 scales, the largest |m| and the largest v of the block. Of two codes of 4 bits in a
 * byte the first lies in the lower half; the half that a last element leaves over is 0.
 *
 * All codes are the leading bits of the float y = c + x * (top - c), with x = |m| / scale or v / scale: a logarithm near 1, a
 * straight line near 0; exactly 0 for 0, and the scale itself (to 2 ulp) for the largest. No table, no search, no root.
 *
 *     8    m    sign and 7 bits: 8 octaves of 16 steps, c = 2^-8; to nearest     |m' - m| <= (|m| + scale / 247) / 32
 *          v    8 bits: 16 octaves of 16 steps, c = 2^-16; dithered              |v' - v| <  (v + scale / 63487) / 16
 *     4    m    sign and 3 bits: 4 octaves of 2 steps, c = 2^-4; dithered        |m' - m| <  (|m| + scale / 11) / 2
 *          v    4 bits: 16 octaves of 1 step, c = 2^-16; dithered                |v' - v| <  v + scale / 32767
 *
 * What is dithered is right in the mean. v is, because a second moment moves by less than half a code a step: rounded to nearest it
 * would stand still; so would the small ones among m of 4 bits. And a v that is not 0 never gets code 0: v' >= scale / 1015792, or
 * scale / 32767 with 4 bits, so a denominator may be too large but never vanishes.
 *
 * An element whose v is not finite, because its gradient is not or because the gradient's square is beyond fp32, leaves the block
 * no moments: the scales pass over it and both its codes are 0. Otherwise 255 neighbours would be lost beside it. Its parameter is
 * updated with the moments as they are: NaN where the gradient was infinite or NaN, not moved where only the square overflowed.
 *
 * SGD's buffer has the codes of m with 8 bits, dithered: with a momentum of 0.95 or 0.99, which are usual there, it moves by less
 * than half a code a step. Of an element that is beyond MO_CODE_HUGE or no number the code is 0. */
#ifndef MO_ADAM_CODES_CUH
#define MO_ADAM_CODES_CUH

#include "arithmetic.cuh"
#include "float_bits.cuh"

#define MO_CODE_ELEMENTS 256 /* a block */

#define MO_CODE_C_V    0x1p-16f
#define MO_CODE_ZERO_V (111u << 23) /* the bits of c: what code 0 stands for */

/* Of codes of so many bits, 8 or 4: a constant, but in the specification. Top is what the last code stands for. */
#define MO_CODE_C_M(bits)     ((bits) == 8 ? 0x1p-8f : 0x1p-4f)
#define MO_CODE_ZERO_M(bits)  (((bits) == 8 ? 119u : 123u) << 23)
#define MO_CODE_SHIFT_M(bits) ((bits) == 8 ? 19 : 22) /* a code is the bits of y above */
#define MO_CODE_SHIFT_V(bits) ((bits) == 8 ? 19 : 23)
#define MO_CODE_SPAN_M(bits)  ((bits) == 8 ? 0x1.eep-1f : 0x1.6p-1f) /* top - c */
#define MO_CODE_SPAN_V(bits)  ((bits) == 8 ? 0x1.effep-1f : 0x1.fffcp-2f)
#define MO_CODE_SIGN(bits)    (1u << ((bits)-1))   /* of m; below it is the last code of |m| */
#define MO_CODE_LAST(bits)    ((1u << (bits)) - 1) /* of v */

#define MO_CODE_TINY 1e-30f     /* a scale below this is as 0: what it could move is lost beside any eps */
#define MO_CODE_HUGE 0x1.fp126f /* the largest scale, so that what a decoder multiplies with is finite */

/* The dither of v: 2^32 / the golden ratio, 2^32 / sqrt(2). */
#define MO_CODE_DITHER_INDEX 0x9E3779B1u
#define MO_CODE_DITHER_STEP  0xB504F333u
#define MO_CODE_NEAREST      0x80000000u /* instead of a dither */

MO_BODY unsigned mo_code_dither(unsigned index, unsigned step)
{
    return index * MO_CODE_DITHER_INDEX + step * MO_CODE_DITHER_STEP;
}

/* The dither of m. It moves by as much as a code in a few steps: a dither that goes on regularly with them would be in step with
 * it, and the mean wrong by up to twice. So it is a hash of the step. */
MO_BODY unsigned mo_code_dither_hashed(unsigned index, unsigned step)
{
    unsigned hash = step;

    hash = (hash ^ hash >> 16) * 0x7FEB352Du;
    hash = (hash ^ hash >> 15) * 0x846CA68Bu;
    return index * MO_CODE_DITHER_INDEX + (hash ^ hash >> 16);
}

/* Of Adam's m: from one element to the next, and that of an element. */
#define MO_CODE_DITHER_M(bits) ((bits) == 8 ? 0 : MO_CODE_DITHER_INDEX)

MO_BODY unsigned mo_code_dither_m(unsigned bits, unsigned index, unsigned step)
{
    return bits == 8 ? MO_CODE_NEAREST : mo_code_dither_hashed(index, step);
}

/* ---- of a block ------------------------------------------------------------------------------------------------------ */

/* What a decoder multiplies with; scale is 0 or between MO_CODE_TINY and MO_CODE_HUGE. */
MO_BODY float mo_code_unit_m(unsigned bits, float scale)
{
    return mo_mulf(scale, 1 / MO_CODE_SPAN_M(bits));
}

MO_BODY float mo_code_unit_v(unsigned bits, float scale)
{
    return mo_mulf(scale, 1 / MO_CODE_SPAN_V(bits));
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

MO_BODY float mo_code_per_m(unsigned bits, float scale)
{
    return mo_code_per(MO_CODE_SPAN_M(bits), scale);
}

MO_BODY float mo_code_per_v(unsigned bits, float scale)
{
    return mo_code_per(MO_CODE_SPAN_V(bits), scale);
}

/* ---- of an element --------------------------------------------------------------------------------------------------- */

/* Whether an element leaves the block its moments. With v its m is finite too. */
MO_BODY int mo_code_is_kept(float v)
{
    return v <= MO_CODE_HUGE;
}

MO_BODY float mo_code_decode_m(unsigned bits, unsigned code, float unit)
{
    const unsigned sign = MO_CODE_SIGN(bits);
    const float magnitude =
        mo_fmaf(mo_float_from_bits(((code & (sign - 1)) << MO_CODE_SHIFT_M(bits)) + MO_CODE_ZERO_M(bits)),
                unit, mo_mulf(-MO_CODE_C_M(bits), unit));

    return code & sign ? 0 - magnitude : magnitude; /* a sign alone is 0, as 0 is: not a negative zero */
}

MO_BODY float mo_code_decode_v(unsigned bits, unsigned code, float unit)
{
    return mo_fmaf(mo_float_from_bits((code << MO_CODE_SHIFT_V(bits)) + MO_CODE_ZERO_V), unit,
                   mo_mulf(-MO_CODE_C_V, unit));
}

/* The bits of y above, up to a last code; zero: the bits of y of code 0. */
MO_BODY unsigned mo_code_of(float y, unsigned shift, unsigned dither, unsigned zero, unsigned last)
{
    const unsigned code = (mo_float_bits(y) + (dither >> (32 - shift)) - zero) >> shift;

    return code < last ? code : last;
}

MO_BODY unsigned mo_code_encode_m(unsigned bits, float m, float per, unsigned dither)
{
    const unsigned raw = mo_float_bits(m), last = MO_CODE_SIGN(bits) - 1;
    const float y = mo_fmaf(mo_float_from_bits(raw & 0x7FFFFFFF), per, MO_CODE_C_M(bits));
    const unsigned code = mo_code_of(y, MO_CODE_SHIFT_M(bits), dither, MO_CODE_ZERO_M(bits), last);

    return code | (raw >> 31) << (bits - 1);
}

MO_BODY unsigned mo_code_encode_v(unsigned bits, float v, float per, unsigned dither)
{
    const float y = mo_fmaf(v, per, MO_CODE_C_V);
    const unsigned least = v > 0;
    const unsigned code = mo_code_of(y, MO_CODE_SHIFT_V(bits), dither, MO_CODE_ZERO_V, MO_CODE_LAST(bits));

    return code > least ? code : least;
}

/* ---- of the elements in a word, 4 or 8, the first in its lowest bits: the same with fewer operations ------------------------ */

#define MO_CODE_IN_WORD(bits) (32 / (bits))

/* Code k of a word where it lies in a float, the codes beside it not taken off. */
MO_BODY unsigned mo_code_in_place(unsigned bits, unsigned shift, unsigned word, unsigned k)
{
    return bits * k <= shift ? word << (shift - bits * k) : word >> (bits * k - shift);
}

MO_BODY void mo_code_decode_word_m(unsigned bits, unsigned word, float unit, float *m)
{
    const float zero = mo_mulf(-MO_CODE_C_M(bits), unit);
    const unsigned sign = MO_CODE_SIGN(bits), shift = MO_CODE_SHIFT_M(bits);
    unsigned k;

    MO_UNROLL
    for (k = 0; k < MO_CODE_IN_WORD(bits); k++) {
        const unsigned y =
            (mo_code_in_place(bits, shift, word, k) & (sign - 1) << shift) + MO_CODE_ZERO_M(bits);
        const float magnitude = mo_fmaf(mo_float_from_bits(y), unit, zero);
        m[k] = word & sign << bits * k ? 0 - magnitude : magnitude;
    }
}

MO_BODY void mo_code_decode_word_v(unsigned bits, unsigned word, float unit, float *v)
{
    const float zero = mo_mulf(-MO_CODE_C_V, unit);
    const unsigned shift = MO_CODE_SHIFT_V(bits);
    unsigned k;

    MO_UNROLL
    for (k = 0; k < MO_CODE_IN_WORD(bits); k++) {
        const unsigned y =
            (mo_code_in_place(bits, shift, word, k) & MO_CODE_LAST(bits) << shift) + MO_CODE_ZERO_V;
        v[k] = mo_fmaf(mo_float_from_bits(y), unit, zero);
    }
}

/* The bytes of that number, 0 to 3, of four words, each `apart` words behind the one before. */
MO_BODY unsigned mo_code_gathered(const unsigned *word, unsigned apart, unsigned number)
{
    const unsigned pair = number << 4 | number | 0x40;

    return mo_bytes(mo_bytes(word[0], word[apart], pair), mo_bytes(word[2 * apart], word[3 * apart], pair),
                    0x5410);
}

/* As codes have them. */
MO_BODY unsigned mo_code_signs(unsigned bits, const float *m)
{
    unsigned raw[8], k;

    MO_UNROLL
    for (k = 0; k < MO_CODE_IN_WORD(bits); k++)
        raw[k] = mo_float_bits(m[k]);
    if (bits == 8)
        return mo_code_gathered(raw, 1, 3) & 0x80808080u;
    return (mo_code_gathered(raw, 2, 3) & 0x80808080u) >> 4 | (mo_code_gathered(raw + 1, 2, 3) & 0x80808080u);
}

MO_BODY unsigned mo_code_joined(unsigned bits, const unsigned *code)
{
    if (bits == 8)
        return mo_code_gathered(code, 1, 0);
    return mo_code_gathered(code, 2, 0) | mo_code_gathered(code + 1, 2, 0) << 4;
}

/* Of |m|, with mo_code_signs of m; dither: of the first element's m, and from one to the next. */
MO_BODY unsigned mo_code_encode_word_m(unsigned bits, const float *magnitude, unsigned signs, float per,
                                       unsigned dither, unsigned apart)
{
    unsigned code[8], k;

    MO_UNROLL
    for (k = 0; k < MO_CODE_IN_WORD(bits); k++)
        code[k] = mo_code_of(mo_fmaf(magnitude[k], per, MO_CODE_C_M(bits)), MO_CODE_SHIFT_M(bits),
                             dither + k * apart, MO_CODE_ZERO_M(bits), MO_CODE_SIGN(bits) - 1);
    return mo_code_joined(bits, code) | signs;
}

/* dither: the first element's. */
MO_BODY unsigned mo_code_encode_word_v(unsigned bits, const float *v, float per, unsigned dither)
{
    unsigned code[8], k;

    MO_UNROLL
    for (k = 0; k < MO_CODE_IN_WORD(bits); k++)
        code[k] = mo_code_encode_v(bits, v[k], per, dither + k * MO_CODE_DITHER_INDEX);
    return mo_code_joined(bits, code);
}

#endif
