/* The words of vector_run.h, update_vector.h and adam8_vector.h in AVX2 with FMA and F16C: eight fp32. */
#ifndef MO_VECTOR_AVX2_H
#define MO_VECTOR_AVX2_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define VECTOR __attribute__((target("avx2,fma,f16c")))
#define WORD   static inline __attribute__((always_inline, unused, target("avx2,fma,f16c")))

enum { LANES = 8 };
typedef __m256 vec;
typedef __m256i veci;

/* The first n of LANES elements; the others read as 0. */
WORD veci lanes_below(size_t n)
{
    static const int32_t ones[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
    return _mm256_loadu_si256((const __m256i *)(ones + LANES - n));
}

WORD vec load(const float *x, size_t n)
{
    return n == LANES ? _mm256_loadu_ps(x) : _mm256_maskload_ps(x, lanes_below(n));
}

WORD void store(float *x, vec a, size_t n)
{
    if (n == LANES)
        _mm256_storeu_ps(x, a);
    else
        _mm256_maskstore_ps(x, lanes_below(n), a);
}

WORD vec all(float a)
{
    return _mm256_set1_ps(a);
}

WORD veci alli(uint32_t a)
{
    return _mm256_set1_epi32((int)a);
}

WORD vec mul(vec a, vec b)
{
    return _mm256_mul_ps(a, b);
}

WORD vec mul_add(vec a, vec b, vec c)
{
    return _mm256_fmadd_ps(a, b, c);
}

WORD vec quotient(vec a, vec b)
{
    return _mm256_div_ps(a, b);
}

WORD vec root(vec a)
{
    return _mm256_sqrt_ps(a);
}

/* a where it is a NaN; else the larger; b where b is a NaN. */
WORD vec larger(vec a, vec b)
{
    return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}

/* The larger of two numbers. */
WORD vec larger_number(vec a, vec b)
{
    return _mm256_max_ps(a, b);
}

/* a where size <= limit; else, where size is a NaN too, 0. */
WORD vec up_to(float limit, vec size, vec a)
{
    return _mm256_and_ps(a, _mm256_cmp_ps(size, all(limit), _CMP_LE_OQ));
}

WORD float largest(vec a)
{
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}

/* ---- bits ------------------------------------------------------------------------------------------------------------ */

WORD vec as_float(veci a)
{
    return _mm256_castsi256_ps(a);
}

WORD veci as_bits(vec a)
{
    return _mm256_castps_si256(a);
}

WORD veci add(veci a, veci b)
{
    return _mm256_add_epi32(a, b);
}

WORD veci sub(veci a, veci b)
{
    return _mm256_sub_epi32(a, b);
}

#define left(a, bits)  _mm256_slli_epi32(a, bits)
#define right(a, bits) _mm256_srli_epi32(a, bits)

WORD veci both(veci a, veci b)
{
    return _mm256_and_si256(a, b);
}

WORD veci either(veci a, veci b)
{
    return _mm256_or_si256(a, b);
}

WORD vec magnitude(vec a)
{
    return _mm256_and_ps(a, as_float(alli(0x7FFFFFFF)));
}

/* By bit 31 of another. */
WORD vec by_sign(veci sign, vec negative, vec positive)
{
    return _mm256_blendv_ps(positive, negative, as_float(sign));
}

/* a > limit ? b : c, as signed integers */
WORD veci above(veci a, uint32_t limit, veci b, veci c)
{
    return _mm256_blendv_epi8(c, b, _mm256_cmpgt_epi32(a, alli(limit)));
}

WORD veci truncated(vec a)
{
    return _mm256_cvttps_epi32(a);
}

/* 0, 1, 2 … times a step */
WORD veci ramp(uint32_t step)
{
    return _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), alli(step));
}

/* ---- narrower elements ------------------------------------------------------------------------------------------------ */

WORD vec load_f16(const uint16_t *x)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x));
}

/* The bits of the nearest fp16 of each, in words of 32. */
WORD veci f16_bits(vec a)
{
    return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

WORD veci load_words(const uint16_t *x)
{
    return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x));
}

/* a < 2^16 */
WORD void store_words(uint16_t *x, veci a)
{
    _mm_storeu_si128((__m128i *)x,
                     _mm_packus_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
}

WORD veci load_bytes(const uint8_t *x)
{
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)x));
}

WORD veci load_signed_bytes(const uint8_t *x)
{
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)x));
}

#endif
