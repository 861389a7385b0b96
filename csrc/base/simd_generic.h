/* The vocabulary of the loops that are written for vectors, an instruction set a file: here for any processor, by the vectors
 * of gcc and clang, which are operations on each lane. simd_avx2.h and simd_avx512.h have the same words with the same bits;
 * what only the optimizers' vectors use stands there alone, since their generic form is no vector. One of the three is
 * included by a file, before what is written in its words.
 *
 *     LANES, WIDE     fp32, and fp64, of a vector
 *     vec, veci       LANES fp32; LANES words of 32 bits             vech     LANES words of 16 bits
 *     vecd, vecl      WIDE fp64; WIDE words of 64 bits
 *     WORD, VECTOR    what a word, and a function that uses them, begins with
 *
 * Loads and stores of n elements, none for n <= 0 and all from LANES (WIDE) on: the others read as 0, and no memory beyond n
 * is touched. "bits" are taken to
 * have no sign bit. fp16: to nearest, ties to even; a NaN keeps its sign and what fits of its payload, and becomes quiet. */
#ifndef MO_SIMD_GENERIC_H
#define MO_SIMD_GENERIC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define VECTOR
#define WORD static inline __attribute__((always_inline, unused))

enum { LANES = 4, WIDE = 2 };
typedef float vec __attribute__((vector_size(16)));
typedef int32_t veci __attribute__((vector_size(16))); /* a comparison gives all ones or none */
typedef uint32_t vecu __attribute__((vector_size(16)));
typedef uint16_t vech __attribute__((vector_size(8)));
typedef double vecd __attribute__((vector_size(16)));
typedef int64_t vecl __attribute__((vector_size(16)));

WORD veci pick(veci condition, veci yes, veci no)
{
    return (condition & yes) | (~condition & no);
}

WORD vec load(const float *x, int n)
{
    vec a = {0};

    if (n >= LANES)
        memcpy(&a, x, sizeof a);
    else
        for (int i = 0; i < n; i++)
            a[i] = x[i];
    return a;
}

WORD void store(float *x, vec a, int n)
{
    if (n >= LANES)
        memcpy(x, &a, sizeof a);
    else
        for (int i = 0; i < n; i++)
            x[i] = a[i];
}

WORD vec all(float a)
{
    return (vec){a, a, a, a};
}

WORD veci alli(uint32_t a)
{
    return (veci)(vecu){a, a, a, a};
}

WORD vec mul(vec a, vec b)
{
    return a * b;
}

WORD vec sum(vec a, vec b)
{
    return a + b;
}

WORD vec quotient(vec a, vec b)
{
    return a / b;
}

/* The larger of two numbers; b where one is a NaN. */
WORD vec larger_number(vec a, vec b)
{
    return (vec)pick(a > b, (veci)a, (veci)b);
}

WORD float largest(vec a)
{
    const float low = a[0] > a[1] ? a[0] : a[1], high = a[2] > a[3] ? a[2] : a[3];

    return low > high ? low : high;
}

/* ---- bits -------------------------------------------------------------------------------------------------------- */

WORD vec as_float(veci a)
{
    return (vec)a;
}

WORD veci as_bits(vec a)
{
    return (veci)a;
}

WORD veci add(veci a, veci b)
{
    return (veci)((vecu)a + (vecu)b);
}

#define left(a, bits)  ((veci)((vecu)(a) << (bits)))
#define right(a, bits) ((veci)((vecu)(a) >> (bits)))

WORD veci both(veci a, veci b)
{
    return a & b;
}

WORD vec magnitude(vec a)
{
    return (vec)((veci)a & INT32_MAX);
}

WORD veci load_bits(const uint32_t *x)
{
    veci a;

    memcpy(&a, x, sizeof a);
    return a;
}

WORD void store_bits(uint32_t *x, veci a)
{
    memcpy(x, &a, sizeof a);
}

WORD veci larger_bits(veci a, veci b)
{
    return pick(a > b, a, b);
}

/* Whether each is 0, or low <= a < high. */
WORD bool all_zero_or_in(vec a, float low, float high)
{
    const veci in = ((a >= low) & (a < high)) | (a == 0);

    return in[0] & in[1] & in[2] & in[3];
}

/* b where a is a NaN, else c. */
WORD veci if_nan(vec a, veci b, veci c)
{
    return pick(a != a, b, c);
}

/* ---- narrower elements ------------------------------------------------------------------------------------------- */

WORD vech load_h(const uint16_t *x, int n)
{
    vech a = {0};

    if (n >= LANES)
        memcpy(&a, x, sizeof a);
    else
        for (int i = 0; i < n; i++)
            a[i] = x[i];
    return a;
}

WORD void store_h(uint16_t *x, vech a, int n)
{
    if (n >= LANES)
        memcpy(x, &a, sizeof a);
    else
        for (int i = 0; i < n; i++)
            x[i] = a[i];
}

WORD veci words(vech a)
{
    return __builtin_convertvector(a, veci);
}

/* a < 2^16 */
WORD vech halves(veci a)
{
    return __builtin_convertvector(a, vech);
}

WORD vec f16_to_float(vech half)
{
    const veci x = words(half), magnitude = x & 0x7FFF, sign = (veci)((vecu)(x & 0x8000) << 16);
    const veci normal = (magnitude << 13) + ((127 - 15) << 23);
    const veci subnormal = (veci)(__builtin_convertvector(magnitude, vec) * 0x1p-24f);
    const veci infinite = magnitude << 13 | 0x7F800000 | ((magnitude > 0x7C00) & 0x00400000);
    return (vec)(sign | pick(magnitude < 0x7C00, pick(magnitude < 0x0400, subnormal, normal), infinite));
}

WORD vech f16_from_float(vec y)
{
    const veci bits = (veci)y, magnitude = bits & INT32_MAX;
    /* 13 bits go; a carry into the exponent is the right result, as far as infinity from 65520 on */
    const veci normal = (magnitude - ((127 - 15) << 23) + 0x0FFF + (magnitude >> 13 & 1)) >> 13;
    /* below 2^-14 the unit in the last place of 0.5f is fp16's smallest step */
    const veci subnormal = (veci)((vec)magnitude + 0.5f) - 0x3F000000;
    const veci infinite =
        pick(magnitude > 0x7F800000, 0x7E00 | (magnitude >> 13 & 0x3FF), 0x7C00 + (veci){0});
    return halves((bits >> 16 & 0x8000) |
                  pick(magnitude < 0x477FF000, pick(magnitude < 0x38800000, subnormal, normal), infinite));
}

/* ---- fp64 -------------------------------------------------------------------------------------------------------- */

WORD vecd load_d(const double *x, int n)
{
    vecd a = {0};

    if (n >= WIDE)
        memcpy(&a, x, sizeof a);
    else
        for (int i = 0; i < n; i++)
            a[i] = x[i];
    return a;
}

WORD void store_d(double *x, vecd a, int n)
{
    if (n >= WIDE)
        memcpy(x, &a, sizeof a);
    else
        for (int i = 0; i < n; i++)
            x[i] = a[i];
}

WORD vecd all_d(double a)
{
    return (vecd){a, a};
}

WORD vecd mul_d(vecd a, vecd b)
{
    return a * b;
}

WORD vecd sum_d(vecd a, vecd b)
{
    return a + b;
}

/* The first and the second half of a vector. */
WORD vecd low_wide(vec a)
{
    return (vecd){(double)a[0], (double)a[1]};
}

WORD vecd high_wide(vec a)
{
    return (vecd){(double)a[2], (double)a[3]};
}

WORD vecl load_bits_d(const uint64_t *x)
{
    vecl a;

    memcpy(&a, x, sizeof a);
    return a;
}

WORD void store_bits_d(uint64_t *x, vecl a)
{
    memcpy(x, &a, sizeof a);
}

WORD vecl magnitude_bits_d(vecd a)
{
    return (vecl)a & INT64_MAX;
}

WORD vecl larger_bits_d(vecl a, vecl b)
{
    const vecl a_is = a > b;

    return (a_is & a) | (~a_is & b);
}

#endif
