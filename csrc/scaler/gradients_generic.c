/* The specification of what gradients_avx2.c and gradients_avx512.c compute, bit for bit, in C alone: sixteen lanes are an
 * array. */
#include "scaler/gradients_kernels.h"

#include <math.h>
#include <string.h>

#include "../kernels/float_bits.cuh"

#define EACH for (int i = 0; i < 16; i++)

typedef struct lanes {
    float v[16];
} lanes;

typedef struct tops {
    uint32_t v[16];
} tops;

typedef struct sums {
    double v[16];
} sums;

INLINE lanes lanes_all(float x)
{
    lanes r;
    EACH r.v[i] = x;
    return r;
}

INLINE lanes lanes_zero(void)
{
    return lanes_all(0);
}

INLINE lanes lanes_mul(lanes a, lanes b)
{
    EACH a.v[i] *= b.v[i];
    return a;
}

INLINE lanes lanes_add(lanes a, lanes b)
{
    EACH a.v[i] += b.v[i];
    return a;
}

INLINE tops tops_zero(void)
{
    tops r;
    EACH r.v[i] = 0;
    return r;
}

INLINE tops tops_load(const uint32_t *at)
{
    tops r;
    memcpy(&r, at, sizeof r);
    return r;
}

INLINE void tops_store(uint32_t *at, tops top)
{
    memcpy(at, &top, sizeof top);
}

INLINE tops tops_join(tops a, tops b)
{
    /* Neither has a sign bit, and SSE2 compares signed integers only. */
    EACH a.v[i] = (int32_t)a.v[i] > (int32_t)b.v[i] ? a.v[i] : b.v[i];
    return a;
}

INLINE tops tops_max(tops top, lanes x)
{
    tops r;
    memcpy(&r, &x, sizeof r);
    EACH r.v[i] &= 0x7FFFFFFF;
    return tops_join(top, r);
}

INLINE int tops_suspect(tops top, lanes scale)
{
    int suspects = 0;
    EACH
    {
        const float y = fabsf(mo_float_from_bits(top.v[i]) * scale.v[i]);
        suspects |= !(y >= 0x1p-48f && y < 0x1p60f) && y != 0;
    }
    return suspects;
}

INLINE sums sums_load(const double *at)
{
    sums r;
    memcpy(&r, at, sizeof r);
    return r;
}

INLINE sums sums_add(sums s, lanes x)
{
    EACH s.v[i] += (double)x.v[i];
    return s;
}

INLINE void sums_store(double *at, sums s)
{
    memcpy(at, &s, sizeof s);
}

/* ---- fp32 ---------------------------------------------------------------------------------------------- */

INLINE lanes load_some_f32(const void *at, size_t n)
{
    lanes r = lanes_zero();
    memcpy(&r, at, n * 4);
    return r;
}

INLINE lanes load_f32(const void *at)
{
    return load_some_f32(at, 16);
}

INLINE lanes store_some_f32(void *at, size_t n, lanes y)
{
    memcpy(at, &y, n * 4);
    return y;
}

INLINE lanes store_f32(void *at, lanes y)
{
    return store_some_f32(at, 16, y);
}

/* ---- fp16 ---------------------------------------------------------------------------------------------- */

/* As the processors' own instructions: a NaN keeps its sign and what fits of its payload, and becomes quiet. */
INLINE float widen_f16(unsigned x)
{
    const float wide = mo_f16_to_float(x);
    return (x & 0x7FFF) > 0x7C00 ? mo_float_from_bits(mo_float_bits(wide) | 0x00400000) : wide;
}

INLINE unsigned round_f16(float y)
{
    const unsigned bits = mo_float_bits(y);
    return (bits & 0x7FFFFFFF) > 0x7F800000 ? (bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x3FF)
                                            : mo_f16_from_float(y);
}

INLINE lanes load_some_f16(const void *at, size_t n)
{
    uint16_t x[16] = {0};
    lanes r;
    memcpy(x, at, n * 2);
    EACH r.v[i] = widen_f16(x[i]);
    return r;
}

INLINE lanes load_f16(const void *at)
{
    return load_some_f16(at, 16);
}

INLINE lanes store_some_f16(void *at, size_t n, lanes y)
{
    uint16_t x[16];
    EACH
    {
        x[i] = (uint16_t)round_f16(y.v[i]);
        y.v[i] = widen_f16(x[i]);
    }
    memcpy(at, x, n * 2);
    return y;
}

INLINE lanes store_f16(void *at, lanes y)
{
    return store_some_f16(at, 16, y);
}

/* ---- bf16 ---------------------------------------------------------------------------------------------- */

/* Every NaN becomes the one that torch's scalar conversion makes (its vectors make 0xFFFF). */
INLINE unsigned round_bf16(float y)
{
    return (mo_float_bits(y) & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : mo_bf16_from_float(y);
}

INLINE lanes load_some_bf16(const void *at, size_t n)
{
    uint16_t x[16] = {0};
    lanes r;
    memcpy(x, at, n * 2);
    EACH r.v[i] = mo_bf16_to_float(x[i]);
    return r;
}

INLINE lanes load_bf16(const void *at)
{
    return load_some_bf16(at, 16);
}

INLINE lanes store_some_bf16(void *at, size_t n, lanes y)
{
    uint16_t x[16];
    EACH
    {
        x[i] = (uint16_t)round_bf16(y.v[i]);
        y.v[i] = mo_bf16_to_float(x[i]);
    }
    memcpy(at, x, n * 2);
    return y;
}

INLINE lanes store_bf16(void *at, lanes y)
{
    return store_some_bf16(at, 16, y);
}

/* ---- fp64 ---------------------------------------------------------------------------------------------- */

#define EACH_WIDE for (int i = 0; i < 8; i++)

typedef struct wide {
    double v[8];
} wide;

typedef struct wide_tops {
    uint64_t v[8];
} wide_tops;

INLINE wide wide_all(double x)
{
    wide r;
    EACH_WIDE r.v[i] = x;
    return r;
}

INLINE wide wide_zero(void)
{
    return wide_all(0);
}

INLINE wide wide_mul(wide a, wide b)
{
    EACH_WIDE a.v[i] *= b.v[i];
    return a;
}

INLINE wide wide_add(wide a, wide b)
{
    EACH_WIDE a.v[i] += b.v[i];
    return a;
}

INLINE wide load_some_f64(const void *at, size_t n)
{
    wide r = wide_zero();
    memcpy(&r, at, n * 8);
    return r;
}

INLINE wide load_f64(const void *at)
{
    return load_some_f64(at, 8);
}

INLINE wide wide_load(const double *at)
{
    return load_some_f64(at, 8);
}

INLINE void store_some_f64(void *at, size_t n, wide y)
{
    memcpy(at, &y, n * 8);
}

INLINE void store_f64(void *at, wide y)
{
    store_some_f64(at, 8, y);
}

INLINE void wide_store(double *at, wide y)
{
    store_some_f64(at, 8, y);
}

INLINE wide_tops wide_tops_zero(void)
{
    wide_tops r;
    EACH_WIDE r.v[i] = 0;
    return r;
}

INLINE wide_tops wide_tops_load(const uint64_t *at)
{
    wide_tops r;
    memcpy(&r, at, sizeof r);
    return r;
}

INLINE void wide_tops_store(uint64_t *at, wide_tops top)
{
    memcpy(at, &top, sizeof top);
}

INLINE wide_tops wide_tops_join(wide_tops a, wide_tops b)
{
    EACH_WIDE a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return a;
}

INLINE wide_tops wide_tops_max(wide_tops top, wide x)
{
    wide_tops r;
    memcpy(&r, &x, sizeof r);
    EACH_WIDE r.v[i] &= INT64_MAX;
    return wide_tops_join(top, r);
}

#include "scaler/gradients_body.h"

const mo_gradients_kernels mo_gradients_generic = KERNEL_TABLE;

/* ---- where fp32 would not do --------------------------------------------------------------------------- */

double mo_gradients_careful(mo_float kind, const void *x, size_t count)
{
    const char *at = x;
    double total[16] = {0}, sum = 0;

    for (; count > 0; at += 16 * mo_float_size(kind)) {
        const size_t n = count < 16 ? count : 16;
        const lanes part = load_some(kind, at, n);
        EACH total[i] += (double)part.v[i] * (double)part.v[i];
        count -= n;
    }
    EACH sum += total[i];
    return sum;
}
