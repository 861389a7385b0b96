/* kernels/arithmetic.cuh: a division by three operations has the bits of a division. */
#include "../kernels/arithmetic.cuh"
#include "../kernels/float_bits.cuh"

#include "test.h"

/* 1 <= x < 2, of that significand. */
static float with_significand(uint32_t bits)
{
    return mo_float_from_bits(0x3F800000u | (bits & 0x7FFFFF));
}

static void check(float x, float y, mo_divisor by)
{
    if (mo_float_bits(mo_divided(x, by)) != mo_float_bits(x / y))
        TEST_FAIL("%a / %a is not %a", (double)x, (double)y, (double)mo_divided(x, by));
}

TEST(quotients_of_the_largest_significands_are_those_of_a_division)
{
    for (uint32_t i = 0; i < 512; i++) {
        const float y = with_significand(0x7FFFFF - i);
        const mo_divisor by = mo_divisor_of(y);
        for (uint32_t k = 0; k < 512; k++)
            check(with_significand(0x7FFFFF - k), y, by);
    }
}

TEST(bytes_are_divided_as_by_a_division)
{
    uint64_t random = 1;

    for (int i = 0; i < 4000; i++) {
        const float y = i ? with_significand((uint32_t)test_random(&random)) : 255;
        const mo_divisor by = mo_divisor_of(y);
        for (int x = 0; x < 256; x++)
            check((float)x, y, by);
    }
}

/* By exponents, significands and signs; quotients and remainders stay normal. */
TEST(random_numbers_of_both_signs_are_divided_as_by_a_division)
{
    uint64_t random = 2;

    for (int i = 0; i < 400000; i++) {
        const uint64_t bits = test_random(&random);
        const float y = ldexpf(with_significand((uint32_t)bits), (int)(bits >> 23 & 63) - 31);
        const float x = ldexpf(with_significand((uint32_t)(bits >> 32)), (int)(bits >> 57 & 63) - 31);
        check(x, y, mo_divisor_of(y));
        check(-x, y, mo_divisor_of(y));
        check(x, -y, mo_divisor_of(-y));
        check(0, -y, mo_divisor_of(-y)); /* -0 */
    }
}

TEST(an_infinite_number_and_a_nan_become_a_nan)
{
    CHECK(isnan(mo_divided(INFINITY, mo_divisor_of(3))));
    CHECK(isnan(mo_divided(NAN, mo_divisor_of(3))));
}

TEST_MAIN
