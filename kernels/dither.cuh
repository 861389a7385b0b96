/* Rounding up or down "at random", so that the mean is right, without a generator: the dither is a function of the element's place
 * in its tensor and of the number of the step alone. It is a rotation by irrational numbers, so that over steps, and over
 * neighbours, it fills [0, 2^32) more evenly than random numbers would: a state that moves by a hundredth of a step of its format
 * is moved by one whole step every hundredth time.
 *
 *     rounded up with probability    (x - the number of the format below x) / (their distance)        to 2^-13 or better */
#ifndef MO_DITHER_CUH
#define MO_DITHER_CUH

#include "float_bits.cuh"

/* Of a parameter: 2^32 / r and 2^32 / r^2 with r^3 = r + 1, whose multiples fill the plane evenly. */
#define MO_DITHER_INDEX 0xC13FA9A9u
#define MO_DITHER_STEP  0x91E10DA5u

MO_BODY unsigned mo_dither(unsigned index, unsigned step)
{
    return index * MO_DITHER_INDEX + step * MO_DITHER_STEP;
}

/* A NaN stays one and an infinity stays; what lies beyond the largest number of the format may become infinite. Each case is
 * computed and one chosen: with branches, an unrolled loop of these took a CUDA compiler minutes. */
MO_BODY unsigned mo_bf16_dithered(float wide, unsigned dither)
{
    const unsigned bits = mo_float_bits(wide), nan = (bits & 0x7FFFFFFF) > 0x7F800000;

    return nan ? (bits >> 16) | 0x0040 : (bits + (dither >> 16)) >> 16;
}

MO_BODY unsigned mo_f16_dithered(float wide, unsigned dither)
{
    const unsigned bits = mo_float_bits(wide), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7FFFFFFF;
    const unsigned least = 0x38800000; /* 2^-14 */
    /* Below it the format is a count of 2^-24: in units of 2^-40, what is below is cut. */
    const float small = mo_float_from_bits(magnitude < least ? magnitude : least) * 0x1p40f;
    unsigned x = magnitude < least ? ((unsigned)small + (dither >> 16)) >> 16
                                   : (magnitude - ((127 - 15) << 23) + (dither >> 19)) >> 13;

    x = magnitude >= 0x47800000 ? 0x7C00 : x; /* 2^16 */
    x = magnitude > 0x7F800000 ? 0x7E00 : x;
    return sign | x;
}

#endif
