/* The specification of what gradients_avx2.c and gradients_avx512.c compute, bit for bit, in C and the vectors of gcc and clang,
 * which are operations on each lane, for any processor: sixteen lanes are four vectors of 16 bytes. */
#include "scaler/gradients_kernels.h"

#include <string.h>

typedef float float4 __attribute__((vector_size(16)));
typedef int32_t int4 __attribute__((vector_size(16))); /* bits; a comparison gives all ones or none */
typedef uint32_t uint4 __attribute__((vector_size(16)));
typedef double double2 __attribute__((vector_size(16)));
typedef int64_t long2 __attribute__((vector_size(16)));
typedef uint16_t short4 __attribute__((vector_size(8)));

typedef struct lanes {
    float4 a, b, c, d;
} lanes;

typedef struct tops {
    int4 a, b, c, d;
} tops;

typedef struct sums {
    double v[16];
} sums;

INLINE int4 pick(int4 condition, int4 yes, int4 no)
{
    return (condition & yes) | (~condition & no);
}

INLINE lanes lanes_all(float x)
{
    const float4 v = {x, x, x, x};
    return (lanes){v, v, v, v};
}

INLINE lanes lanes_zero(void)
{
    return lanes_all(0);
}

INLINE lanes lanes_mul(lanes x, lanes y)
{
    return (lanes){x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d};
}

INLINE lanes lanes_add(lanes x, lanes y)
{
    return (lanes){x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d};
}

INLINE tops tops_zero(void)
{
    return (tops){{0}, {0}, {0}, {0}};
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

INLINE int4 larger(int4 a, int4 b)
{
    return pick(a > b, a, b);
}

INLINE tops tops_join(tops x, tops y)
{
    return (tops){larger(x.a, y.a), larger(x.b, y.b), larger(x.c, y.c), larger(x.d, y.d)};
}

INLINE tops tops_max(tops top, lanes x)
{
    return tops_join(top, (tops){(int4)x.a & INT32_MAX, (int4)x.b & INT32_MAX, (int4)x.c & INT32_MAX,
                                 (int4)x.d & INT32_MAX});
}

INLINE int4 fits(int4 top, float4 scale)
{
    const float4 y = (float4)((int4)((float4)top * scale) & INT32_MAX);
    return ((y >= 0x1p-48f) & (y < 0x1p60f)) | (y == 0);
}

INLINE int tops_suspect(tops top, lanes scale)
{
    const int4 all =
        fits(top.a, scale.a) & fits(top.b, scale.b) & fits(top.c, scale.c) & fits(top.d, scale.d);
    return !(all[0] & all[1] & all[2] & all[3]);
}

INLINE sums sums_load(const double *at)
{
    sums r;
    memcpy(&r, at, sizeof r);
    return r;
}

INLINE sums sums_add(sums s, lanes x)
{
    float each[16];
    memcpy(each, &x, sizeof each);
    for (int i = 0; i < 16; i++)
        s.v[i] += (double)each[i];
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

/* ---- 16 bits, in 32-bit lanes ---------------------------------------------------------------------------- */

typedef struct halves {
    short4 a, b, c, d;
} halves;

INLINE halves load_halves(const void *at, size_t n)
{
    halves x = {{0}, {0}, {0}, {0}};
    memcpy(&x, at, n * 2);
    return x;
}

INLINE int4 to_lanes(short4 x)
{
    return __builtin_convertvector(x, int4);
}

INLINE short4 to_halves(int4 x)
{
    return __builtin_convertvector(x, short4);
}

/* ---- fp16 ---------------------------------------------------------------------------------------------- */

/* As the processors' own instructions: a NaN keeps its sign and what fits of its payload, and becomes quiet. */
INLINE float4 widen_f16(short4 half)
{
    const int4 x = to_lanes(half), magnitude = x & 0x7FFF, sign = (int4)((uint4)(x & 0x8000) << 16);
    const int4 normal = (magnitude << 13) + ((127 - 15) << 23);
    const int4 subnormal = (int4)(__builtin_convertvector(magnitude, float4) * 0x1p-24f);
    const int4 infinite = magnitude << 13 | 0x7F800000 | ((magnitude > 0x7C00) & 0x00400000);
    return (float4)(sign | pick(magnitude < 0x7C00, pick(magnitude < 0x0400, subnormal, normal), infinite));
}

INLINE short4 round_f16(float4 y)
{
    const int4 bits = (int4)y, magnitude = bits & INT32_MAX;
    /* 13 bits go; a carry into the exponent is the right result, as far as infinity from 65520 on */
    const int4 normal = (magnitude - ((127 - 15) << 23) + 0x0FFF + (magnitude >> 13 & 1)) >> 13;
    /* below 2^-14 the unit in the last place of 0.5f is fp16's smallest step */
    const int4 subnormal = (int4)((float4)magnitude + 0.5f) - 0x3F000000;
    const int4 infinite =
        pick(magnitude > 0x7F800000, 0x7E00 | (magnitude >> 13 & 0x3FF), 0x7C00 + (int4){0});
    return to_halves((bits >> 16 & 0x8000) |
                     pick(magnitude < 0x477FF000, pick(magnitude < 0x38800000, subnormal, normal), infinite));
}

INLINE lanes widen_all_f16(halves x)
{
    return (lanes){widen_f16(x.a), widen_f16(x.b), widen_f16(x.c), widen_f16(x.d)};
}

INLINE lanes load_some_f16(const void *at, size_t n)
{
    return widen_all_f16(load_halves(at, n));
}

INLINE lanes load_f16(const void *at)
{
    return load_some_f16(at, 16);
}

INLINE lanes store_some_f16(void *at, size_t n, lanes y)
{
    const halves rounded = {round_f16(y.a), round_f16(y.b), round_f16(y.c), round_f16(y.d)};
    memcpy(at, &rounded, n * 2);
    return widen_all_f16(rounded);
}

INLINE lanes store_f16(void *at, lanes y)
{
    return store_some_f16(at, 16, y);
}

/* ---- bf16 ---------------------------------------------------------------------------------------------- */

INLINE float4 widen_bf16(short4 x)
{
    return (float4)((uint4)to_lanes(x) << 16);
}

INLINE short4 round_bf16(float4 y)
{
    const uint4 bits = (uint4)y, number = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return to_halves(pick((int4)(bits & INT32_MAX) > 0x7F800000, 0x7FC0 + (int4){0}, (int4)number));
}

INLINE lanes widen_all_bf16(halves x)
{
    return (lanes){widen_bf16(x.a), widen_bf16(x.b), widen_bf16(x.c), widen_bf16(x.d)};
}

INLINE lanes load_some_bf16(const void *at, size_t n)
{
    return widen_all_bf16(load_halves(at, n));
}

INLINE lanes load_bf16(const void *at)
{
    return load_some_bf16(at, 16);
}

INLINE lanes store_some_bf16(void *at, size_t n, lanes y)
{
    const halves rounded = {round_bf16(y.a), round_bf16(y.b), round_bf16(y.c), round_bf16(y.d)};
    memcpy(at, &rounded, n * 2);
    return widen_all_bf16(rounded);
}

INLINE lanes store_bf16(void *at, lanes y)
{
    return store_some_bf16(at, 16, y);
}

/* ---- fp64 ---------------------------------------------------------------------------------------------- */

typedef struct wide {
    double2 a, b, c, d;
} wide;

typedef struct wide_tops {
    long2 a, b, c, d;
} wide_tops;

INLINE wide wide_all(double x)
{
    const double2 v = {x, x};
    return (wide){v, v, v, v};
}

INLINE wide wide_zero(void)
{
    return wide_all(0);
}

INLINE wide wide_mul(wide x, wide y)
{
    return (wide){x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d};
}

INLINE wide wide_add(wide x, wide y)
{
    return (wide){x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d};
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
    return (wide_tops){{0}, {0}, {0}, {0}};
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

INLINE long2 larger_wide(long2 a, long2 b)
{
    const long2 a_is = a > b;
    return (a_is & a) | (~a_is & b);
}

INLINE wide_tops wide_tops_join(wide_tops x, wide_tops y)
{
    return (wide_tops){larger_wide(x.a, y.a), larger_wide(x.b, y.b), larger_wide(x.c, y.c),
                       larger_wide(x.d, y.d)};
}

INLINE wide_tops wide_tops_max(wide_tops top, wide x)
{
    return wide_tops_join(top, (wide_tops){(long2)x.a & INT64_MAX, (long2)x.b & INT64_MAX,
                                           (long2)x.c & INT64_MAX, (long2)x.d & INT64_MAX});
}

#include "scaler/gradients_body.h"

const mo_gradients_kernels mo_gradients_generic = KERNEL_TABLE;

/* ---- where fp32 would not do --------------------------------------------------------------------------- */

double mo_gradients_careful(mo_float kind, const void *x, size_t count)
{
    const size_t size = mo_float_size(kind);
    const char *at = x;
    double total[16] = {0}, sum = 0;
    float each[16];

    for (; count > 0; at += 16 * size) {
        const size_t n = count < 16 ? count : 16;
        const lanes part = load_some(kind, at, n);
        memcpy(each, &part, sizeof each);
        for (int i = 0; i < 16; i++)
            total[i] += (double)each[i] * (double)each[i];
        count -= n;
    }
    for (int i = 0; i < 16; i++)
        sum += total[i];
    return sum;
}
