/* The words of simd_generic.h in AVX-512 (F, BW, DQ, VL): sixteen fp32; and those of the optimizers alone. */
#ifndef MO_SIMD_AVX512_H
#define MO_SIMD_AVX512_H

#include <immintrin.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define VECTOR __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define WORD                                                                                                 \
    static inline __attribute__((always_inline, unused, target("avx512f,avx512bw,avx512dq,avx512vl")))

enum { LANES = 16, WIDE = 8 };
typedef __m512 vec;
typedef __m512i veci;
typedef __m256i vech;
typedef __m512d vecd;
typedef __m512i vecl;

WORD __mmask16 lanes_below(int n)
{
    return (__mmask16)(n > 0 ? (1u << n) - 1 : 0);
}

WORD vec load(const float *x, int n)
{
    return n >= LANES ? _mm512_loadu_ps(x) : _mm512_maskz_loadu_ps(lanes_below(n), x);
}

WORD void store(float *x, vec a, int n)
{
    if (n >= LANES)
        _mm512_storeu_ps(x, a);
    else
        _mm512_mask_storeu_ps(x, lanes_below(n), a);
}

WORD vec all(float a)
{
    return _mm512_set1_ps(a);
}

WORD veci alli(uint32_t a)
{
    return _mm512_set1_epi32((int)a);
}

WORD vec mul(vec a, vec b)
{
    return _mm512_mul_ps(a, b);
}

WORD vec sum(vec a, vec b)
{
    return _mm512_add_ps(a, b);
}

WORD vec mul_add(vec a, vec b, vec c)
{
    return _mm512_fmadd_ps(a, b, c);
}

WORD vec quotient(vec a, vec b)
{
    return _mm512_div_ps(a, b);
}

WORD vec root(vec a)
{
    return _mm512_sqrt_ps(a);
}

/* a where it is a NaN; else the larger; b where b is a NaN. */
WORD vec larger(vec a, vec b)
{
    return _mm512_mask_mov_ps(_mm512_max_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
}

/* The larger of two numbers; b where one is a NaN. */
WORD vec larger_number(vec a, vec b)
{
    return _mm512_max_ps(a, b);
}

/* a where size <= limit; else, where size is a NaN too, 0. */
WORD vec up_to(float limit, vec size, vec a)
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(size, all(limit), _CMP_LE_OQ), a);
}

WORD float largest(vec a)
{
    return _mm512_reduce_max_ps(a);
}

/* ---- bits ------------------------------------------------------------------------------------------------------------ */

WORD vec as_float(veci a)
{
    return _mm512_castsi512_ps(a);
}

WORD veci as_bits(vec a)
{
    return _mm512_castps_si512(a);
}

WORD veci add(veci a, veci b)
{
    return _mm512_add_epi32(a, b);
}

WORD veci sub(veci a, veci b)
{
    return _mm512_sub_epi32(a, b);
}

#define left(a, bits)         _mm512_slli_epi32(a, bits)
#define right(a, bits)        _mm512_srli_epi32(a, bits)
#define right_signed(a, bits) _mm512_srai_epi32(a, bits)

WORD veci both(veci a, veci b)
{
    return _mm512_and_si512(a, b);
}

WORD veci either(veci a, veci b)
{
    return _mm512_or_si512(a, b);
}

WORD vec magnitude(vec a)
{
    return as_float(both(as_bits(a), alli(0x7FFFFFFF)));
}

WORD veci load_bits(const uint32_t *x)
{
    return _mm512_loadu_si512(x);
}

WORD void store_bits(uint32_t *x, veci a)
{
    _mm512_storeu_si512(x, a);
}

WORD veci larger_bits(veci a, veci b)
{
    return _mm512_max_epu32(a, b);
}

WORD bool all_zero_or_in(vec a, float low, float high)
{
    const __mmask16 in =
        _mm512_cmp_ps_mask(a, all(low), _CMP_GE_OQ) & _mm512_cmp_ps_mask(a, all(high), _CMP_LT_OQ);

    return (__mmask16)(in | _mm512_cmp_ps_mask(a, all(0), _CMP_EQ_OQ)) == 0xFFFF;
}

WORD veci if_nan(vec a, veci b, veci c)
{
    return _mm512_mask_mov_epi32(c, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), b);
}

/* By bit 31 of another. */
WORD vec by_sign(veci sign, vec negative, vec positive)
{
    return _mm512_mask_mov_ps(positive, _mm512_movepi32_mask(sign), negative);
}

/* a > limit ? b : c, as signed integers */
WORD veci above(veci a, uint32_t limit, veci b, veci c)
{
    return _mm512_mask_mov_epi32(c, _mm512_cmpgt_epi32_mask(a, alli(limit)), b);
}

WORD veci truncated(vec a)
{
    return _mm512_cvttps_epi32(a);
}

/* 0, 1, 2 … times a step */
WORD veci ramp(uint32_t step)
{
    return _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                              alli(step));
}

/* ---- narrower elements ------------------------------------------------------------------------------------------------ */

WORD vech load_h(const uint16_t *x, int n)
{
    return n >= LANES ? _mm256_loadu_si256((const __m256i *)x) : _mm256_maskz_loadu_epi16(lanes_below(n), x);
}

WORD void store_h(uint16_t *x, vech a, int n)
{
    if (n >= LANES)
        _mm256_storeu_si256((__m256i *)x, a);
    else
        _mm256_mask_storeu_epi16(x, lanes_below(n), a);
}

WORD veci words(vech a)
{
    return _mm512_cvtepu16_epi32(a);
}

WORD vech halves(veci a)
{
    return _mm512_cvtepi32_epi16(a);
}

WORD vec f16_to_float(vech a)
{
    return _mm512_cvtph_ps(a);
}

WORD vech f16_from_float(vec a)
{
    return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

WORD veci load_bytes(const uint8_t *x)
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)x));
}

WORD veci load_signed_bytes(const uint8_t *x)
{
    return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x));
}

/* Sixteen of 4 bits, each at the top of its lane; what lies below is of no meaning. */
WORD veci load_nibbles(const uint8_t *x)
{
    const veci pair = _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)x));
    const veci words =
        _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), pair);

    return _mm512_sllv_epi32(words,
                             _mm512_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0));
}

/* ---- fp64 -------------------------------------------------------------------------------------------------------- */

WORD vecd load_d(const double *x, int n)
{
    return n >= WIDE ? _mm512_loadu_pd(x) : _mm512_maskz_loadu_pd((__mmask8)lanes_below(n), x);
}

WORD void store_d(double *x, vecd a, int n)
{
    if (n >= WIDE)
        _mm512_storeu_pd(x, a);
    else
        _mm512_mask_storeu_pd(x, (__mmask8)lanes_below(n), a);
}

WORD vecd all_d(double a)
{
    return _mm512_set1_pd(a);
}

WORD vecd mul_d(vecd a, vecd b)
{
    return _mm512_mul_pd(a, b);
}

WORD vecd sum_d(vecd a, vecd b)
{
    return _mm512_add_pd(a, b);
}

WORD vecd low_wide(vec a)
{
    return _mm512_cvtps_pd(_mm512_castps512_ps256(a));
}

WORD vecd high_wide(vec a)
{
    return _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1));
}

WORD vecl load_bits_d(const uint64_t *x)
{
    return _mm512_loadu_si512(x);
}

WORD void store_bits_d(uint64_t *x, vecl a)
{
    _mm512_storeu_si512(x, a);
}

WORD vecl magnitude_bits_d(vecd a)
{
    return _mm512_and_si512(_mm512_castpd_si512(a), _mm512_set1_epi64(INT64_MAX));
}

WORD vecl larger_bits_d(vecl a, vecl b)
{
    return _mm512_max_epu64(a, b);
}

#endif
