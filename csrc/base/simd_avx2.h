/* The words of simd_generic.h in AVX2 with FMA and F16C: eight fp32; and those of the optimizers alone. */
#ifndef MO_SIMD_AVX2_H
#define MO_SIMD_AVX2_H

#include <immintrin.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define VECTOR __attribute__((target("avx2,fma,f16c")))
#define WORD   static inline __attribute__((always_inline, unused, target("avx2,fma,f16c")))

enum { LANES = 8, WIDE = 4 };
typedef __m256 vec;
typedef __m256i veci;
typedef __m128i vech;
typedef __m256d vecd;
typedef __m256i vecl;

WORD veci lanes_below(int n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

WORD vec load(const float *x, int n)
{
    return n >= LANES ? _mm256_loadu_ps(x) : _mm256_maskload_ps(x, lanes_below(n));
}

WORD void store(float *x, vec a, int n)
{
    if (n >= LANES)
        _mm256_storeu_ps(x, a);
    else if (n > 0)
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

WORD vec sum(vec a, vec b)
{
    return _mm256_add_ps(a, b);
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

/* The larger of two numbers; b where one is a NaN. */
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

#define left(a, bits)         _mm256_slli_epi32(a, bits)
#define right(a, bits)        _mm256_srli_epi32(a, bits)
#define right_signed(a, bits) _mm256_srai_epi32(a, bits)

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

WORD veci load_bits(const uint32_t *x)
{
    return _mm256_loadu_si256((const __m256i *)x);
}

WORD void store_bits(uint32_t *x, veci a)
{
    _mm256_storeu_si256((__m256i *)x, a);
}

WORD veci larger_bits(veci a, veci b)
{
    return _mm256_max_epu32(a, b);
}

WORD bool all_zero_or_in(vec a, float low, float high)
{
    const vec in =
        _mm256_and_ps(_mm256_cmp_ps(a, all(low), _CMP_GE_OQ), _mm256_cmp_ps(a, all(high), _CMP_LT_OQ));

    return _mm256_movemask_ps(_mm256_or_ps(in, _mm256_cmp_ps(a, all(0), _CMP_EQ_OQ))) == 0xFF;
}

WORD veci if_nan(vec a, veci b, veci c)
{
    return _mm256_blendv_epi8(c, b, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
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

/* There is no mask for 16 bits: fewer than LANES are moved in powers of two. */
WORD void copy_some(void *to, const void *from, int n)
{
    char *t = to;
    const char *f = from;

    if (n & 4)
        memcpy(t, f, 8), t += 8, f += 8;
    if (n & 2)
        memcpy(t, f, 4), t += 4, f += 4;
    if (n & 1)
        memcpy(t, f, 2);
}

WORD vech load_h(const uint16_t *x, int n)
{
    vech part = _mm_setzero_si128();

    if (n >= LANES)
        return _mm_loadu_si128((const __m128i *)x);
    if (n > 0)
        copy_some(&part, x, n);
    return part;
}

WORD void store_h(uint16_t *x, vech a, int n)
{
    if (n >= LANES)
        _mm_storeu_si128((__m128i *)x, a);
    else if (n > 0)
        copy_some(x, &a, n);
}

WORD veci words(vech a)
{
    return _mm256_cvtepu16_epi32(a);
}

WORD vech halves(veci a)
{
    return _mm_packus_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
}

WORD vec f16_to_float(vech a)
{
    return _mm256_cvtph_ps(a);
}

WORD vech f16_from_float(vec a)
{
    return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

WORD veci load_bytes(const uint8_t *x)
{
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)x));
}

WORD veci load_signed_bytes(const uint8_t *x)
{
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)x));
}

/* Eight of 4 bits, each at the top of its lane; what lies below is of no meaning. */
WORD veci load_nibbles(const uint8_t *x)
{
    uint32_t word;

    memcpy(&word, x, sizeof word);
    return _mm256_sllv_epi32(alli(word), _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0));
}

/* ---- fp64 -------------------------------------------------------------------------------------------------------- */

WORD vecl wide_below(int n)
{
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3));
}

WORD vecd load_d(const double *x, int n)
{
    return n >= WIDE ? _mm256_loadu_pd(x) : _mm256_maskload_pd(x, wide_below(n));
}

WORD void store_d(double *x, vecd a, int n)
{
    if (n >= WIDE)
        _mm256_storeu_pd(x, a);
    else if (n > 0)
        _mm256_maskstore_pd(x, wide_below(n), a);
}

WORD vecd all_d(double a)
{
    return _mm256_set1_pd(a);
}

WORD vecd mul_d(vecd a, vecd b)
{
    return _mm256_mul_pd(a, b);
}

WORD vecd sum_d(vecd a, vecd b)
{
    return _mm256_add_pd(a, b);
}

WORD vecd low_wide(vec a)
{
    return _mm256_cvtps_pd(_mm256_castps256_ps128(a));
}

WORD vecd high_wide(vec a)
{
    return _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1));
}

WORD vecl load_bits_d(const uint64_t *x)
{
    return _mm256_loadu_si256((const __m256i *)x);
}

WORD void store_bits_d(uint64_t *x, vecl a)
{
    _mm256_storeu_si256((__m256i *)x, a);
}

WORD vecl magnitude_bits_d(vecd a)
{
    return _mm256_and_si256(_mm256_castpd_si256(a), _mm256_set1_epi64x(INT64_MAX));
}

WORD vecl larger_bits_d(vecl a, vecl b)
{
    return _mm256_blendv_epi8(a, b, _mm256_cmpgt_epi64(b, a));
}

#endif
