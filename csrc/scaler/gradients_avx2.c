/* gradients_generic.c's arithmetic with AVX2 and F16C: lanes are two registers. FMA, which every such processor has too,
 * would give other bits than the specification. */
#include "scaler/gradients_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

typedef struct lanes {
    __m256 low, high;
} lanes;

typedef struct tops {
    __m256i low, high;
} tops;

typedef struct sums {
    __m256d a, b, c, d;
} sums;

/* All ones in the first n of eight 32-bit lanes, or of four 64-bit lanes; none for a negative n, all for a large one. */
INLINE __m256i first(int n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

INLINE __m256i first_wide(int n)
{
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3));
}

INLINE lanes lanes_zero(void)
{
    return (lanes){_mm256_setzero_ps(), _mm256_setzero_ps()};
}

INLINE lanes lanes_all(float x)
{
    return (lanes){_mm256_set1_ps(x), _mm256_set1_ps(x)};
}

INLINE lanes lanes_mul(lanes a, lanes b)
{
    return (lanes){_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}

INLINE lanes lanes_add(lanes a, lanes b)
{
    return (lanes){_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}

INLINE tops tops_zero(void)
{
    return (tops){_mm256_setzero_si256(), _mm256_setzero_si256()};
}

INLINE tops tops_load(const uint32_t *at)
{
    return (tops){_mm256_load_si256((const __m256i *)at), _mm256_load_si256((const __m256i *)(at + 8))};
}

INLINE void tops_store(uint32_t *at, tops top)
{
    _mm256_store_si256((__m256i *)at, top.low);
    _mm256_store_si256((__m256i *)(at + 8), top.high);
}

INLINE tops tops_join(tops a, tops b)
{
    return (tops){_mm256_max_epu32(a.low, b.low), _mm256_max_epu32(a.high, b.high)};
}

INLINE __m256i magnitude(__m256 x)
{
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7FFFFFFF));
}

INLINE tops tops_max(tops top, lanes x)
{
    return tops_join(top, (tops){magnitude(x.low), magnitude(x.high)});
}

INLINE int suspect(__m256i top, __m256 scale)
{
    const __m256 y = _mm256_castsi256_ps(magnitude(_mm256_mul_ps(_mm256_castsi256_ps(top), scale)));
    const __m256 fits = _mm256_and_ps(_mm256_cmp_ps(y, _mm256_set1_ps(0x1p-48f), _CMP_GE_OQ),
                                      _mm256_cmp_ps(y, _mm256_set1_ps(0x1p60f), _CMP_LT_OQ));
    const __m256 zero = _mm256_cmp_ps(y, _mm256_setzero_ps(), _CMP_EQ_OQ);
    return _mm256_movemask_ps(_mm256_or_ps(fits, zero)) != 0xFF;
}

INLINE int tops_suspect(tops top, lanes scale)
{
    return suspect(top.low, scale.low) | suspect(top.high, scale.high);
}

INLINE sums sums_load(const double *at)
{
    return (sums){_mm256_load_pd(at), _mm256_load_pd(at + 4), _mm256_load_pd(at + 8),
                  _mm256_load_pd(at + 12)};
}

INLINE sums sums_add(sums s, lanes x)
{
    s.a = _mm256_add_pd(s.a, _mm256_cvtps_pd(_mm256_castps256_ps128(x.low)));
    s.b = _mm256_add_pd(s.b, _mm256_cvtps_pd(_mm256_extractf128_ps(x.low, 1)));
    s.c = _mm256_add_pd(s.c, _mm256_cvtps_pd(_mm256_castps256_ps128(x.high)));
    s.d = _mm256_add_pd(s.d, _mm256_cvtps_pd(_mm256_extractf128_ps(x.high, 1)));
    return s;
}

INLINE void sums_store(double *at, sums s)
{
    _mm256_store_pd(at, s.a);
    _mm256_store_pd(at + 4, s.b);
    _mm256_store_pd(at + 8, s.c);
    _mm256_store_pd(at + 12, s.d);
}

/* ---- fp32 ---------------------------------------------------------------------------------------------- */

INLINE lanes load_f32(const void *at)
{
    const float *x = at;
    return (lanes){_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)};
}

INLINE lanes load_some_f32(const void *at, size_t n)
{
    const float *x = at;
    return (lanes){_mm256_maskload_ps(x, first((int)n)), _mm256_maskload_ps(x + 8, first((int)n - 8))};
}

INLINE lanes store_f32(void *at, lanes y)
{
    float *x = at;
    _mm256_storeu_ps(x, y.low);
    _mm256_storeu_ps(x + 8, y.high);
    return y;
}

INLINE lanes store_some_f32(void *at, size_t n, lanes y)
{
    float *x = at;
    _mm256_maskstore_ps(x, first((int)n), y.low);
    if (n > 8)
        _mm256_maskstore_ps(x + 8, first((int)n - 8), y.high);
    return y;
}

/* ---- 16 bits: a half register holds eight; there is no mask, so fewer are moved in powers of two ------------ */

typedef struct halves {
    __m128i low, high;
} halves;

/* The n first of 16-bit elements, n < 16. */
INLINE void copy_some(void *to, const void *from, size_t n)
{
    char *t = to;
    const char *f = from;

    if (n & 8)
        memcpy(t, f, 16), t += 16, f += 16;
    if (n & 4)
        memcpy(t, f, 8), t += 8, f += 8;
    if (n & 2)
        memcpy(t, f, 4), t += 4, f += 4;
    if (n & 1)
        memcpy(t, f, 2);
}

INLINE halves load_halves(const void *at)
{
    const uint16_t *x = at;
    return (halves){_mm_loadu_si128((const __m128i *)x), _mm_loadu_si128((const __m128i *)(x + 8))};
}

INLINE halves load_some_halves(const void *at, size_t n)
{
    halves x = {_mm_setzero_si128(), _mm_setzero_si128()};
    copy_some(&x, at, n);
    return x;
}

INLINE void store_halves(void *at, halves x)
{
    uint16_t *to = at;
    _mm_storeu_si128((__m128i *)to, x.low);
    _mm_storeu_si128((__m128i *)(to + 8), x.high);
}

INLINE lanes widen_f16(halves x)
{
    return (lanes){_mm256_cvtph_ps(x.low), _mm256_cvtph_ps(x.high)};
}

INLINE halves round_f16(lanes y)
{
    return (halves){_mm256_cvtps_ph(y.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                    _mm256_cvtps_ph(y.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

INLINE lanes load_f16(const void *at)
{
    return widen_f16(load_halves(at));
}

INLINE lanes load_some_f16(const void *at, size_t n)
{
    return widen_f16(load_some_halves(at, n));
}

INLINE lanes store_f16(void *at, lanes y)
{
    const halves rounded = round_f16(y);
    store_halves(at, rounded);
    return widen_f16(rounded);
}

INLINE lanes store_some_f16(void *at, size_t n, lanes y)
{
    const halves rounded = round_f16(y);
    copy_some(at, &rounded, n);
    return widen_f16(rounded);
}

INLINE __m256 widen_half_bf16(__m128i x)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}

INLINE lanes widen_bf16(halves x)
{
    return (lanes){widen_half_bf16(x.low), widen_half_bf16(x.high)};
}

/* A bf16 in every 32-bit lane. */
INLINE __m256i round_half_bf16(__m256 y)
{
    const __m256i bits = _mm256_castps_si256(y);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(y, y, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), _mm256_set1_epi32(0x7FC0), nan);
}

/* The pack takes from both registers by turns; 0, 2, 1, 3 puts the parts back in order. */
INLINE __m256i pack_bf16(__m256i low, __m256i high)
{
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);
}

INLINE lanes load_bf16(const void *at)
{
    return widen_bf16(load_halves(at));
}

INLINE lanes load_some_bf16(const void *at, size_t n)
{
    return widen_bf16(load_some_halves(at, n));
}

INLINE lanes store_bf16(void *at, lanes y)
{
    const __m256i low = round_half_bf16(y.low), high = round_half_bf16(y.high);
    _mm256_storeu_si256(at, pack_bf16(low, high));
    return (lanes){_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)),
                   _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}

INLINE lanes store_some_bf16(void *at, size_t n, lanes y)
{
    const __m256i low = round_half_bf16(y.low), high = round_half_bf16(y.high);
    const __m256i packed = pack_bf16(low, high);
    copy_some(at, &packed, n);
    return (lanes){_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)),
                   _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}

/* ---- fp64 ---------------------------------------------------------------------------------------------- */

typedef struct wide {
    __m256d low, high;
} wide;

typedef tops wide_tops;

INLINE wide wide_zero(void)
{
    return (wide){_mm256_setzero_pd(), _mm256_setzero_pd()};
}

INLINE wide wide_all(double x)
{
    return (wide){_mm256_set1_pd(x), _mm256_set1_pd(x)};
}

INLINE wide wide_mul(wide a, wide b)
{
    return (wide){_mm256_mul_pd(a.low, b.low), _mm256_mul_pd(a.high, b.high)};
}

INLINE wide wide_add(wide a, wide b)
{
    return (wide){_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)};
}

INLINE wide wide_load(const double *at)
{
    return (wide){_mm256_load_pd(at), _mm256_load_pd(at + 4)};
}

INLINE void wide_store(double *at, wide x)
{
    _mm256_store_pd(at, x.low);
    _mm256_store_pd(at + 4, x.high);
}

INLINE wide_tops wide_tops_zero(void)
{
    return tops_zero();
}

INLINE wide_tops wide_tops_load(const uint64_t *at)
{
    return (wide_tops){_mm256_load_si256((const __m256i *)at), _mm256_load_si256((const __m256i *)(at + 4))};
}

INLINE void wide_tops_store(uint64_t *at, wide_tops top)
{
    _mm256_store_si256((__m256i *)at, top.low);
    _mm256_store_si256((__m256i *)(at + 4), top.high);
}

INLINE __m256i larger(__m256i a, __m256i b)
{
    return _mm256_blendv_epi8(a, b, _mm256_cmpgt_epi64(b, a)); /* both without a sign bit */
}

INLINE wide_tops wide_tops_join(wide_tops a, wide_tops b)
{
    return (wide_tops){larger(a.low, b.low), larger(a.high, b.high)};
}

INLINE wide_tops wide_tops_max(wide_tops top, wide x)
{
    const __m256i unsigned_bits = _mm256_set1_epi64x(INT64_MAX);
    return wide_tops_join(top, (wide_tops){_mm256_and_si256(_mm256_castpd_si256(x.low), unsigned_bits),
                                           _mm256_and_si256(_mm256_castpd_si256(x.high), unsigned_bits)});
}

INLINE wide load_f64(const void *at)
{
    const double *x = at;
    return (wide){_mm256_loadu_pd(x), _mm256_loadu_pd(x + 4)};
}

INLINE wide load_some_f64(const void *at, size_t n)
{
    const double *x = at;
    return (wide){_mm256_maskload_pd(x, first_wide((int)n)),
                  _mm256_maskload_pd(x + 4, first_wide((int)n - 4))};
}

INLINE void store_f64(void *at, wide y)
{
    double *x = at;
    _mm256_storeu_pd(x, y.low);
    _mm256_storeu_pd(x + 4, y.high);
}

INLINE void store_some_f64(void *at, size_t n, wide y)
{
    double *x = at;
    _mm256_maskstore_pd(x, first_wide((int)n), y.low);
    if (n > 4)
        _mm256_maskstore_pd(x + 4, first_wide((int)n - 4), y.high);
}

#include "scaler/gradients_body.h"

const mo_gradients_kernels mo_gradients_avx2 = KERNEL_TABLE;

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
