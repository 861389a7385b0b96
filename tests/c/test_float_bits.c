#include "../kernels/float_bits.cuh"

#include <math.h>

#include "test.h"

/* A 16-bit format as its numbers: value[i] is what the bits i stand for, i up to infinity's; then next to it.
 * The conversions are judged by distances in double, which holds every number here and every difference
 * exactly. */
typedef struct format {
    int exponent_bits, mantissa_bits;
    double value[0x8000];
    unsigned infinity;
} format;

static void make(format *f, int exponent_bits, int mantissa_bits)
{
    const int bias = (1 << (exponent_bits - 1)) - 1;

    f->exponent_bits = exponent_bits;
    f->mantissa_bits = mantissa_bits;
    f->infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
    for (unsigned bits = 0; bits <= f->infinity; bits++) {
        const int exponent = (int)(bits >> mantissa_bits);
        const double mantissa = (double)(bits & ((1u << mantissa_bits) - 1));
        f->value[bits] = exponent ? ldexp(mantissa + ldexp(1, mantissa_bits), exponent - bias - mantissa_bits)
                                  : ldexp(mantissa, 1 - bias - mantissa_bits);
    }
    /* value[infinity] is the number that would come next: rounding treats it as one (IEEE 754, 4.3.1). */
}

/* The bits that a float rounds to: nearest, ties to the even one. */
static unsigned rounded(const format *f, float x)
{
    const double magnitude = fabs((double)x);
    const unsigned sign = signbit(x) ? 0x8000 : 0;
    unsigned low = 0, high = f->infinity;

    if (magnitude >= f->value[f->infinity])
        return sign | f->infinity;
    while (high - low > 1) { /* value[low] <= magnitude < value[high] */
        const unsigned middle = (low + high) / 2;
        if (f->value[middle] <= magnitude)
            low = middle;
        else
            high = middle;
    }
    const double below = magnitude - f->value[low], above = f->value[high] - magnitude;
    return sign | (below < above || (below == above && low % 2 == 0) ? low : high);
}

static void check_format(int exponent_bits, int mantissa_bits, float (*widen)(unsigned),
                         unsigned (*narrow)(float))
{
    static format f;
    uint64_t state = test_seed();

    make(&f, exponent_bits, mantissa_bits);
    for (unsigned bits = 0; bits < 0x10000; bits++) {
        const unsigned magnitude = bits & 0x7FFF;
        const float wide = widen(bits);
        if (magnitude > f.infinity) {
            CHECK(isnan(wide));
            CHECK((narrow(wide) & 0x7FFF) > f.infinity);
            continue;
        }
        CHECK_EQ(signbit(wide) != 0, bits >> 15);
        CHECK(magnitude == f.infinity ? isinf(wide) : fabs((double)wide) == f.value[magnitude]);
        CHECK_EQ(narrow(wide), bits);
    }
    /* Around each number and each midpoint of two: the floats next to it on both sides. */
    for (unsigned bits = 0; bits < f.infinity; bits++) {
        const float points[] = {(float)f.value[bits], (float)((f.value[bits] + f.value[bits + 1]) / 2)};
        for (int p = 0; p < 2; p++)
            for (int side = -1; side <= 1; side++) {
                const float x = side ? nextafterf(points[p], (float)side * INFINITY) : points[p];
                CHECK_EQ(narrow(x), rounded(&f, x));
                CHECK_EQ(narrow(-x), rounded(&f, -x));
            }
    }
    for (int round = 0; round < test_rounds(200000, 20000000); round++) {
        const unsigned bits = (unsigned)test_random(&state);
        const float x = mo_float_from_bits(bits);
        if (isnan(x))
            CHECK((narrow(x) & 0x7FFF) > f.infinity);
        else
            CHECK_EQ(narrow(x), rounded(&f, x));
    }
}

TEST(fp16_converts_exactly_and_rounds_to_nearest_even)
{
    check_format(5, 10, mo_f16_to_float, mo_f16_from_float);
}

TEST(bf16_converts_exactly_and_rounds_to_nearest_even)
{
    check_format(8, 7, mo_bf16_to_float, mo_bf16_from_float);
}

TEST_MAIN
