/* Numbers that go wrong, and arrays that are exactly as long as they should be. */
#ifndef MEMOPT_FLOAT_CASES_H
#define MEMOPT_FLOAT_CASES_H

#include <float.h>
#include <math.h>

#include "../kernels/float_bits.cuh"
#include "test.h"

/* One in eight is special: zeros, infinities, NaN, subnormals, the ends of the range; else of any size near 1. */
__attribute__((unused)) static float float_case(uint64_t *random)
{
    static const float special[] = {
        0,     -0.0f, INFINITY, -INFINITY, NAN, 0x1p-149f, -0x1.8p-140f, FLT_MIN,   FLT_MAX, 1e30f,  -1e-30f,
        65504, 65520, 0x1p-24f, 0x1p-14f,  1,   -1,        3e19f,        0x1p-126f, 6e-8f,   1e-20f, -1e-20f};
    const uint64_t bits = test_random(random);
    const float magnitude = ldexpf(1 + (float)(bits >> 40) * 0x1p-24f, (int)(bits >> 8 & 15) - 12);

    if ((bits & 7) == 0)
        return special[(bits >> 32) % (sizeof special / sizeof *special)];
    return bits & 8 ? -magnitude : magnitude;
}

/* Ordinary numbers, log-uniform in size over some 12 octaves. */
__attribute__((unused)) static float float_ordinary(uint64_t *random)
{
    const uint64_t bits = test_random(random);
    const float magnitude = exp2f((float)(bits >> 40) * 0x1p-24f * 12 - 10);
    return bits & 1 ? -magnitude : magnitude;
}

/* The same number: equal bits, or both NaN. */
__attribute__((unused)) static bool same_float(float a, float b)
{
    return mo_float_bits(a) == mo_float_bits(b) || (a != a && b != b);
}

__attribute__((unused)) static bool same_half(mo_float kind, uint16_t a, uint16_t b)
{
    const float x = kind == MO_F16 ? mo_f16_to_float(a) : mo_bf16_to_float(a);
    const float y = kind == MO_F16 ? mo_f16_to_float(b) : mo_bf16_to_float(b);
    return a == b || (x != x && y != y);
}

/* n elements, `shift` of them past a 64-byte boundary, with nothing behind them. */
typedef struct shifted {
    void *block;
    float *x;
} shifted;

__attribute__((unused)) static shifted shifted_of(size_t n, size_t shift)
{
    shifted s = {NULL, NULL};
    if (posix_memalign(&s.block, 64, (shift + n) * sizeof(float) + !(shift + n)) != 0)
        TEST_FAIL("out of memory");
    s.x = (float *)s.block + shift;
    return s;
}

#endif
