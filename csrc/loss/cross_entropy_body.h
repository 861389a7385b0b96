/* The loops of cross_entropy_generic.c, _avx2.c and _avx512.c, in the words of base/simd_*.h, which the file that includes this
 * has included. All of it is inlined: `kind` and `capped` are constants in every kernel. */
#ifndef MO_CROSS_ENTROPY_BODY_H
#define MO_CROSS_ENTROPY_BODY_H

#include <math.h>

enum { BLOCK = 1024 }; /* elements that are summed in fp32, in LANES sums */

/* ---- elements ------------------------------------------------------------------------------------------------------ */

WORD vec load_logits(mo_float kind, const void *x, size_t i, int n)
{
    if (kind == MO_F32)
        return load((const float *)x + i, n);
    const vech half = load_h((const uint16_t *)x + i, n);

    return kind == MO_F16 ? f16_to_float(half) : as_float(left(words(half), 16));
}

WORD void store_logits(mo_float kind, void *x, size_t i, int n, vec y)
{
    if (kind == MO_F32) {
        store((float *)x + i, y, n);
    } else if (kind == MO_F16) {
        store_h((uint16_t *)x + i, f16_from_float(y), n);
    } else {
        const veci bits = as_bits(y), odd = both(right(bits, 16), alli(1));
        const veci rounded = right(add(bits, add(odd, alli(0x7FFF))), 16);

        store_h((uint16_t *)x + i, halves(if_nan(y, alli(0x7FC0), rounded)), n);
    }
}

/* ---- functions ----------------------------------------------------------------------------------------------------- */

/* e^x to 2 units in the last place for x <= 88; 0 from -87.7 down; NaN for NaN. Cephes' expf: x = n log 2 + r, the logarithm in
 * two parts, and a polynomial in r. The clamp takes its second operand where that is a NaN. */
WORD vec exponential(vec x)
{
    const vec low = larger_number(all(-88.0f), x);
    const vec shifted = sum(mul(low, all(1.44269504f)), all(0x1.8p23f)); /* n, in the last bits */
    const vec n = sum(shifted, all(-0x1.8p23f));
    const vec r = sum(sum(low, mul(n, all(-0.693359375f))), mul(n, all(2.12194440e-4f)));
    vec p = all(1.9875691500e-4f);

    p = sum(mul(p, r), all(1.3981999507e-3f));
    p = sum(mul(p, r), all(8.3334519073e-3f));
    p = sum(mul(p, r), all(4.1665795894e-2f));
    p = sum(mul(p, r), all(1.6666665459e-1f));
    p = sum(mul(p, r), all(5.0000001201e-1f));
    p = sum(sum(mul(mul(p, r), r), r), all(1.0f));
    return mul(p, as_float(left(add(as_bits(shifted), alli(127)), 23))); /* n of -127: times 0 */
}

/* tanh(x) to 2^-23 of 1, by (1 - e) / (1 + e) with e = exp(-2 x). */
WORD vec hyperbolic_tangent(vec x)
{
    const vec down = larger_number(all(-87.0f), mul(x, all(-2.0f)));
    const vec e = exponential(mul(all(-1.0f), larger_number(all(-87.0f), mul(all(-1.0f), down))));

    return quotient(sum(all(1.0f), mul(all(-1.0f), e)), sum(all(1.0f), e));
}

/* z, and in *slope dz/dx. */
WORD vec capped_logits(bool capped, vec x, float softcap, vec *slope)
{
    if (!capped)
        return x;
    const vec t = hyperbolic_tangent(quotient(x, all(softcap)));

    *slope = sum(all(1.0f), mul(all(-1.0f), mul(t, t)));
    return mul(t, all(softcap));
}

/* ---- rows ---------------------------------------------------------------------------------------------------------- */

WORD int lanes_from(size_t i, size_t end)
{
    return end - i < LANES ? (int)(end - i) : LANES;
}

WORD double lane_sum(vec a, int n)
{
    float each[LANES];
    double total = 0;

    store(each, a, LANES);
    for (int k = 0; k < n; k++)
        total += (double)each[k];
    return total;
}

VECTOR static inline __attribute__((always_inline)) mo_row_sums
find(mo_float kind, bool capped, const void *x, size_t count, float softcap)
{
    const size_t whole = count - count % LANES;
    mo_row_sums r = {0, 0};
    vec tops = all(-INFINITY), slope;
    float top, each[LANES];
    double total = 0;

    for (size_t i = 0; i < whole; i += LANES)
        tops = larger_number(tops, capped_logits(capped, load_logits(kind, x, i, LANES), softcap, &slope));
    top = largest(tops);
    store(each, capped_logits(capped, load_logits(kind, x, whole, (int)(count - whole)), softcap, &slope),
          LANES);
    for (size_t k = 0; k < count - whole; k++)
        top = each[k] > top ? each[k] : top;

    for (size_t begin = 0; begin < count; begin += BLOCK) {
        const size_t end = count - begin < BLOCK ? count : begin + BLOCK, full = end - end % LANES;
        vec powers = all(0), values = all(0);

        for (size_t i = begin; i < full; i += LANES) {
            const vec z = capped_logits(capped, load_logits(kind, x, i, LANES), softcap, &slope);

            powers = sum(powers, exponential(sum(z, all(-top))));
            values = sum(values, z);
        }
        total += lane_sum(powers, LANES);
        r.sum += lane_sum(values, LANES);
        if (full < end) {
            const int n = (int)(end - full);
            const vec z = capped_logits(capped, load_logits(kind, x, full, n), softcap, &slope);

            total += lane_sum(exponential(sum(z, all(-top))), n);
            r.sum += lane_sum(z, n);
        }
    }
    r.lse = (double)top + log(total);
    return r;
}

VECTOR static inline __attribute__((always_inline)) void
subtract(mo_float kind, bool capped, void *x, size_t count, float softcap, float lse, float flat, float scale)
{
    for (size_t i = 0; i < count; i += LANES) {
        const int n = lanes_from(i, count);
        vec slope = all(1.0f);
        const vec z = capped_logits(capped, load_logits(kind, x, i, n), softcap, &slope);
        vec d = mul(all(scale), sum(exponential(sum(z, all(-lse))), all(-flat)));

        if (capped)
            d = mul(d, slope);
        store_logits(kind, x, i, n, d);
    }
}

#define ROW(name, kind, capped)                                                                              \
    VECTOR static mo_row_sums find_##name(const void *x, size_t count, float softcap)                        \
    {                                                                                                        \
        return find(kind, capped, x, count, softcap);                                                        \
    }                                                                                                        \
    VECTOR static void subtract_##name(void *x, size_t count, float softcap, float lse, float flat,          \
                                       float scale)                                                          \
    {                                                                                                        \
        subtract(kind, capped, x, count, softcap, lse, flat, scale);                                         \
    }

ROW(f32, MO_F32, false)
ROW(f16, MO_F16, false)
ROW(bf16, MO_BF16, false)
ROW(f32_capped, MO_F32, true)
ROW(f16_capped, MO_F16, true)
ROW(bf16_capped, MO_BF16, true)

#define KERNEL_TABLE                                                                                         \
    {                                                                                                        \
        .find = {[MO_F32] = {find_f32, find_f32_capped},                                                     \
                 [MO_F16] = {find_f16, find_f16_capped},                                                     \
                 [MO_BF16] = {find_bf16, find_bf16_capped}},                                                 \
        .subtract = {[MO_F32] = {subtract_f32, subtract_f32_capped},                                         \
                     [MO_F16] = {subtract_f16, subtract_f16_capped},                                         \
                     [MO_BF16] = {subtract_bf16, subtract_bf16_capped}},                                     \
    }

#endif
