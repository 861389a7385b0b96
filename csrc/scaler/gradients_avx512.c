/* gradients_generic.c's arithmetic with AVX-512 F, BW, VL and DQ: lanes are one register, what is short is masked. */
#include "scaler/gradients_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c"))),        \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c")
#endif

typedef __m512 lanes;
typedef __m512i tops;
typedef struct sums {
    __m512d low, high;
} sums;

INLINE __mmask16 first(size_t n)
{
    return (__mmask16)((1u << n) - 1);
}

INLINE lanes lanes_zero(void)
{
    return _mm512_setzero_ps();
}

INLINE lanes lanes_all(float x)
{
    return _mm512_set1_ps(x);
}

INLINE lanes lanes_mul(lanes a, lanes b)
{
    return _mm512_mul_ps(a, b);
}

INLINE lanes lanes_add(lanes a, lanes b)
{
    return _mm512_add_ps(a, b);
}

INLINE tops tops_zero(void)
{
    return _mm512_setzero_si512();
}

INLINE tops tops_load(const uint32_t *at)
{
    return _mm512_load_si512(at);
}

INLINE void tops_store(uint32_t *at, tops top)
{
    _mm512_store_si512(at, top);
}

INLINE tops tops_join(tops a, tops b)
{
    return _mm512_max_epu32(a, b);
}

INLINE tops tops_max(tops top, lanes x)
{
    return _mm512_max_epu32(top, _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF)));
}

INLINE int tops_suspect(tops top, lanes scale)
{
    const __m512 y = _mm512_abs_ps(_mm512_mul_ps(_mm512_castsi512_ps(top), scale));
    const __mmask16 fits = _mm512_cmp_ps_mask(y, _mm512_set1_ps(0x1p-48f), _CMP_GE_OQ) &
                           _mm512_cmp_ps_mask(y, _mm512_set1_ps(0x1p60f), _CMP_LT_OQ);
    return (__mmask16)(fits | _mm512_cmp_ps_mask(y, _mm512_setzero_ps(), _CMP_EQ_OQ)) != 0xFFFF;
}

INLINE sums sums_load(const double *at)
{
    return (sums){_mm512_load_pd(at), _mm512_load_pd(at + 8)};
}

INLINE sums sums_add(sums s, lanes x)
{
    s.low = _mm512_add_pd(s.low, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    s.high = _mm512_add_pd(s.high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
    return s;
}

INLINE void sums_store(double *at, sums s)
{
    _mm512_store_pd(at, s.low);
    _mm512_store_pd(at + 8, s.high);
}

/* ---- fp32 ---------------------------------------------------------------------------------------------- */

INLINE lanes load_f32(const void *at)
{
    return _mm512_loadu_ps(at);
}

INLINE lanes load_some_f32(const void *at, size_t n)
{
    return _mm512_maskz_loadu_ps(first(n), at);
}

INLINE lanes store_f32(void *at, lanes y)
{
    _mm512_storeu_ps(at, y);
    return y;
}

INLINE lanes store_some_f32(void *at, size_t n, lanes y)
{
    _mm512_mask_storeu_ps(at, first(n), y);
    return y;
}

/* ---- fp16 ---------------------------------------------------------------------------------------------- */

INLINE lanes load_f16(const void *at)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256(at));
}

INLINE lanes load_some_f16(const void *at, size_t n)
{
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), at));
}

INLINE lanes store_f16(void *at, lanes y)
{
    const __m256i rounded = _mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(at, rounded);
    return _mm512_cvtph_ps(rounded);
}

INLINE lanes store_some_f16(void *at, size_t n, lanes y)
{
    const __m256i rounded = _mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_mask_storeu_epi16(at, first(n), rounded);
    return _mm512_cvtph_ps(rounded);
}

/* ---- bf16: by integers, since vcvtneps2bf16 takes subnormals for zeros ----------------------------------- */

INLINE lanes widen_bf16(__m256i x)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

INLINE __m256i round_bf16(lanes y)
{
    const __m512i bits = _mm512_castps_si512(y);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 nan = _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(
        _mm512_mask_mov_epi32(_mm512_srli_epi32(up, 16), nan, _mm512_set1_epi32(0x7FC0)));
}

INLINE lanes load_bf16(const void *at)
{
    return widen_bf16(_mm256_loadu_si256(at));
}

INLINE lanes load_some_bf16(const void *at, size_t n)
{
    return widen_bf16(_mm256_maskz_loadu_epi16(first(n), at));
}

INLINE lanes store_bf16(void *at, lanes y)
{
    const __m256i rounded = round_bf16(y);
    _mm256_storeu_si256(at, rounded);
    return widen_bf16(rounded);
}

INLINE lanes store_some_bf16(void *at, size_t n, lanes y)
{
    const __m256i rounded = round_bf16(y);
    _mm256_mask_storeu_epi16(at, first(n), rounded);
    return widen_bf16(rounded);
}

/* ---- fp64 ---------------------------------------------------------------------------------------------- */

typedef __m512d wide;
typedef __m512i wide_tops;

INLINE wide wide_zero(void)
{
    return _mm512_setzero_pd();
}

INLINE wide wide_all(double x)
{
    return _mm512_set1_pd(x);
}

INLINE wide wide_mul(wide a, wide b)
{
    return _mm512_mul_pd(a, b);
}

INLINE wide wide_add(wide a, wide b)
{
    return _mm512_add_pd(a, b);
}

INLINE wide wide_load(const double *at)
{
    return _mm512_load_pd(at);
}

INLINE void wide_store(double *at, wide x)
{
    _mm512_store_pd(at, x);
}

INLINE wide_tops wide_tops_zero(void)
{
    return _mm512_setzero_si512();
}

INLINE wide_tops wide_tops_load(const uint64_t *at)
{
    return _mm512_load_si512(at);
}

INLINE void wide_tops_store(uint64_t *at, wide_tops top)
{
    _mm512_store_si512(at, top);
}

INLINE wide_tops wide_tops_join(wide_tops a, wide_tops b)
{
    return _mm512_max_epu64(a, b);
}

INLINE wide_tops wide_tops_max(wide_tops top, wide x)
{
    return _mm512_max_epu64(top, _mm512_and_si512(_mm512_castpd_si512(x), _mm512_set1_epi64(INT64_MAX)));
}

INLINE wide load_f64(const void *at)
{
    return _mm512_loadu_pd(at);
}

INLINE wide load_some_f64(const void *at, size_t n)
{
    return _mm512_maskz_loadu_pd((__mmask8)first(n), at);
}

INLINE void store_f64(void *at, wide y)
{
    _mm512_storeu_pd(at, y);
}

INLINE void store_some_f64(void *at, size_t n, wide y)
{
    _mm512_mask_storeu_pd(at, (__mmask8)first(n), y);
}

#include "scaler/gradients_body.h"

const mo_gradients_kernels mo_gradients_avx512 = KERNEL_TABLE;

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
