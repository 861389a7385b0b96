/* Arithmetic that gives the same bits everywhere: one IEEE rounding an operation, to nearest, nothing flushed to zero. nvcc would
 * make one fma of a product and a sum, and so round once where the CPU rounds twice; the intrinsics below are never merged.
 * (gcc and clang are told by -ffp-contract=off.) A NaN is a NaN; its sign and payload are the processor's own.
 *
 * Names end in f for fp32, as in <math.h>. */
#ifndef MO_ARITHMETIC_CUH
#define MO_ARITHMETIC_CUH

#include "chunk.cuh"

#ifdef __CUDACC__
#define MO_OPERATION(device, host) return device
#else
#include <math.h>
#define MO_OPERATION(device, host) return host
#endif

MO_BODY float mo_subf(float a, float b)
{
    MO_OPERATION(__fsub_rn(a, b), a - b);
}

MO_BODY float mo_mulf(float a, float b)
{
    MO_OPERATION(__fmul_rn(a, b), a * b);
}

MO_BODY float mo_fmaf(float a, float b, float c)
{
    MO_OPERATION(__fmaf_rn(a, b, c), fmaf(a, b, c));
}

MO_BODY float mo_divf(float a, float b)
{
    MO_OPERATION(__fdiv_rn(a, b), a / b);
}

MO_BODY float mo_sqrtf(float a)
{
    MO_OPERATION(__fsqrt_rn(a), sqrtf(a));
}

/* A divisor of many numbers, y: three operations for each of them instead of the nine of a division, with the same bits.
 *
 *     r = RN(1 / y)      q = RN(x r)      e = RN(x - q y)      RN(q + e r) = RN(x / y)
 *
 * q is within 1.5 ulp of x / y, as r's error of half an ulp becomes one at the most. Where |x / y - q| <= 1 ulp, e is exact and
 * the last line is Markstein's theorem (IBM Journal of Research and Development 34, 1990). Beyond that the rounding of e moves the
 * sum by 2^-22 ulp, and no number halfway between two floats is as near: the next one lies 1.5 ulp from q, which only
 * significands of x and y within 2^-19 of 2 could approach, and those are all tried (tests/c/test_arithmetic.c).
 *
 * As long as nothing overflows or is subnormal, and x is not -0 (of which a positive divisor makes +0). x may be +0. Of an
 * infinite x it makes a NaN. */
typedef struct mo_divisor {
    float reciprocal, negated;
} mo_divisor;

MO_BODY mo_divisor mo_divisor_of(float y)
{
    const mo_divisor divisor = {mo_divf(1, y), -y};

    return divisor;
}

MO_BODY float mo_divided(float x, mo_divisor by)
{
    const float q = mo_mulf(x, by.reciprocal);

    return mo_fmaf(mo_fmaf(q, by.negated, x), by.reciprocal, q);
}

MO_BODY double mo_mul(double a, double b)
{
    MO_OPERATION(__dmul_rn(a, b), a * b);
}

MO_BODY double mo_fma(double a, double b, double c)
{
    MO_OPERATION(__fma_rn(a, b, c), fma(a, b, c));
}

MO_BODY double mo_div(double a, double b)
{
    MO_OPERATION(__ddiv_rn(a, b), a / b);
}

MO_BODY double mo_sqrt(double a)
{
    MO_OPERATION(__dsqrt_rn(a), sqrt(a));
}

/* base^n for 0 <= base <= 1 by squaring: pow() differs between libraries. Relative error below n * 2^-53, so 1 - base^n is right
 * to 2^-53 / (1 - base): 4e-14 of itself or better at base = 0.999. */
MO_BODY double mo_power(double base, unsigned long long n)
{
    double power = 1;

    for (; n; n >>= 1) {
        if (n & 1)
            power = mo_mul(power, base);
        base = mo_mul(base, base);
    }
    return power;
}

/* Which step this is, from 1, when `steps` were counted before: a count that is no count (negative, NaN) is as 0. */
MO_BODY unsigned long long mo_step_number(float steps)
{
    if (!(steps >= 0))
        return 1;
    return steps < 9e18f ? (unsigned long long)steps + 1 : 9000000000000000000ull;
}

#endif
