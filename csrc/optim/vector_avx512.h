/* The words of vector_run.h, update_vector.h and adam8_vector.h in AVX-512 (F, BW, DQ, VL): sixteen fp32. */
#ifndef MO_VECTOR_AVX512_H
#define MO_VECTOR_AVX512_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define VECTOR __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define WORD                                                                                                 \
    static inline __attribute__((always_inline, unused, target("avx512f,avx512bw,avx512dq,avx512vl")))

enum { LANES = 16 };
typedef __m512 vec;
typedef __m512i veci;

/* The first n of LANES elements; the others read as 0. */
WORD __mmask16 lanes_below(size_t n)
{
    return (__mmask16)((1u << n) - 1);
}

WORD vec load(const float *x, size_t n)
{
    return n == LANES ? _mm512_loadu_ps(x) : _mm512_maskz_loadu_ps(lanes_below(n), x);
}

WORD void store(float *x, vec a, size_t n)
{
    if (n == LANES)
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

/* The larger of two numbers. */
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

#define left(a, bits)  _mm512_slli_epi32(a, bits)
#define right(a, bits) _mm512_srli_epi32(a, bits)

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

WORD vec load_f16(const uint16_t *x)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x));
}

/* The bits of the nearest fp16 of each, in words of 32. */
WORD veci f16_bits(vec a)
{
    return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

WORD veci load_words(const uint16_t *x)
{
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
}

/* a < 2^16 */
WORD void store_words(uint16_t *x, veci a)
{
    _mm256_storeu_si256((__m256i *)x, _mm512_cvtepi32_epi16(a));
}

WORD veci load_bytes(const uint8_t *x)
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)x));
}

WORD veci load_signed_bytes(const uint8_t *x)
{
    return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x));
}

#endif
