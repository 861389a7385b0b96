/* Conversions between a number and its bits, and between fp32 and the two 16-bit formats, for compilers that
 * may lack cuda_fp16.h: NVRTC finds no header of the CUDA toolkit on a user's machine.
 *
 * Rounding is to nearest, ties to even, as in torch; nothing is flushed to zero. A NaN stays a NaN; its
 * payload after a conversion is not specified (the hardware's own conversions do not keep it either). */
#ifndef MO_FLOAT_BITS_CUH
#define MO_FLOAT_BITS_CUH

#include "chunk.cuh"

#ifndef __CUDACC__
#include <string.h>
#endif

MO_BODY float mo_float_from_bits(unsigned bits)
{
#ifdef __CUDACC__
    return __uint_as_float(bits);
#else
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

MO_BODY unsigned mo_float_bits(float x)
{
#ifdef __CUDACC__
    return __float_as_uint(x);
#else
    unsigned bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
#endif
}

MO_BODY float mo_magnitudef(float x)
{
    return mo_float_from_bits(mo_float_bits(x) & 0x7FFFFFFF);
}

/* Of a NaN and a number it is the number. */
MO_BODY float mo_largerf(float a, float b)
{
#ifdef __CUDACC__
    return fmaxf(a, b);
#else
    return b > a || a != a ? b : a;
#endif
}

MO_BODY double mo_double_from_bits(unsigned long long bits)
{
#ifdef __CUDACC__
    return __longlong_as_double((long long)bits);
#else
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

MO_BODY unsigned long long mo_double_bits(double x)
{
#ifdef __CUDACC__
    return (unsigned long long)__double_as_longlong(x);
#else
    unsigned long long bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
#endif
}

/* fp16: 1 sign, 5 exponent (bias 15), 10 mantissa bits. On the device one instruction each way (PTX, sm_53
 * and later): by integer arithmetic a 16-bit kernel would need more operations than an H100 has time for at
 * full bandwidth (0.84e12 elements/s over 132 SMs: about 17 integer operations an element). */
MO_BODY float mo_f16_to_float(unsigned x)
{
#ifdef __CUDACC__
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"((unsigned short)x));
    return wide;
#else
    const unsigned sign = (x & 0x8000) << 16, magnitude = x & 0x7FFF;
    float wide;

    if (magnitude < 0x0400) /* zero or subnormal: a count of 2^-24 */
        wide = (float)magnitude * 0x1p-24f;
    else if (magnitude < 0x7C00)
        wide = mo_float_from_bits((magnitude << 13) + ((127 - 15) << 23));
    else
        wide = mo_float_from_bits((magnitude << 13) | 0x7F800000);
    return mo_float_from_bits(mo_float_bits(wide) | sign);
#endif
}

MO_BODY unsigned mo_f16_from_float(float wide)
{
#ifdef __CUDACC__
    unsigned short x;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x) : "f"(wide));
    return x;
#else
    const unsigned bits = mo_float_bits(wide), sign = (bits >> 16) & 0x8000;
    unsigned magnitude = bits & 0x7FFFFFFF;

    if (magnitude > 0x7F800000) /* NaN: keep it one, even where the payload's high bits are all zero */
        return sign | 0x7E00;
    if (magnitude >= 0x477FF000) /* 65520, halfway from the largest fp16 to 2^16, and everything above */
        return sign | 0x7C00;
    if (magnitude < 0x38800000) /* below 2^-14: the unit in the last place of 0.5f is fp16's smallest step */
        return sign | (mo_float_bits(mo_float_from_bits(magnitude) + 0.5f) - 0x3F000000);
    magnitude +=
        0x0FFF + ((magnitude >> 13) & 1); /* 13 bits go; a carry into the exponent is the right result */
    return sign | ((magnitude - ((127 - 15) << 23)) >> 13);
#endif
}

/* bf16: the upper half of an fp32. */
MO_BODY float mo_bf16_to_float(unsigned x)
{
    return mo_float_from_bits(x << 16);
}

/* By integers before sm_80, which has the instruction. */
MO_BODY unsigned mo_bf16_from_float(float wide)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned short x;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(x) : "f"(wide));
    return x;
#else
    const unsigned bits = mo_float_bits(wide), nan = (bits & 0x7FFFFFFF) > 0x7F800000;

    /* Rounding up could carry a NaN into a number. */
    return nan ? (bits >> 16) | 0x0040 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
#endif
}

/* Two neighbours in one word, the first in its low half: one instruction from sm_80 on, where four elements of bf16 by
 * integers, put together in 64 bits, took more than their arithmetic. */
MO_BODY unsigned mo_f16_pair(float low, float high)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
#else
    return mo_f16_from_float(high) << 16 | mo_f16_from_float(low);
#endif
}

MO_BODY unsigned mo_bf16_pair(float low, float high)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
#else
    return mo_bf16_from_float(high) << 16 | mo_bf16_from_float(low);
#endif
}

/* And back. */
MO_BODY void mo_f16_pair_to_float(unsigned pair, float *low, float *high)
{
#ifdef __CUDACC__
    unsigned short first, second;
    asm("mov.b32 {%0, %1}, %2;"
        : "=h"(first), "=h"(second)
        : "r"(pair)); /* no instruction: a register has halves */
    *low = mo_f16_to_float(first);
    *high = mo_f16_to_float(second);
#else
    *low = mo_f16_to_float(pair & 0xFFFF);
    *high = mo_f16_to_float(pair >> 16);
#endif
}

MO_BODY void mo_bf16_pair_to_float(unsigned pair, float *low, float *high)
{
    *low = mo_float_from_bits(pair << 16);
    *high = mo_float_from_bits(pair & 0xFFFF0000u);
}

#endif
