/* The loops over elements of gradients_generic.c, _avx2.c and _avx512.c, in the words of base/simd_*.h, which the file that
 * includes this has included: sixteen lanes of fp32, or eight of fp64, are PARTS vectors.
 *
 * All of it is inlined: `kind`, `stores` and `norms` are constants in every kernel, and so is n where it is all. */
#ifndef MO_GRADIENTS_BODY_H
#define MO_GRADIENTS_BODY_H

enum { PARTS = 16 / LANES };

typedef struct lanes {
    vec part[PARTS];
} lanes;

typedef struct tops {
    veci part[PARTS];
} tops;

typedef struct sums {
    vecd low[PARTS], high[PARTS]; /* halves of each part */
} sums;

typedef struct wide {
    vecd part[PARTS];
} wide;

typedef struct wide_tops {
    vecl part[PARTS];
} wide_tops;

#define EACH_PART for (size_t k = 0; k < PARTS; k++)

/* How many of n elements are left from part k of `size` on. */
WORD int from_part(size_t n, size_t k, int size)
{
    return (int)n - (int)k * size;
}

/* ---- sixteen fp32 ---------------------------------------------------------------------------------------- */

WORD lanes lanes_all(float x)
{
    lanes r;

    EACH_PART
    r.part[k] = all(x);
    return r;
}

WORD lanes lanes_mul(lanes x, lanes y)
{
    EACH_PART
    x.part[k] = mul(x.part[k], y.part[k]);
    return x;
}

WORD lanes lanes_add(lanes x, lanes y)
{
    EACH_PART
    x.part[k] = sum(x.part[k], y.part[k]);
    return x;
}

WORD tops tops_zero(void)
{
    tops r;

    EACH_PART
    r.part[k] = alli(0);
    return r;
}

WORD tops tops_load(const uint32_t *at)
{
    tops r;

    EACH_PART
    r.part[k] = load_bits(at + k * LANES);
    return r;
}

WORD void tops_store(uint32_t *at, tops top)
{
    EACH_PART
    store_bits(at + k * LANES, top.part[k]);
}

WORD tops tops_join(tops x, tops y)
{
    EACH_PART
    x.part[k] = larger_bits(x.part[k], y.part[k]);
    return x;
}

WORD tops tops_max(tops top, lanes x)
{
    EACH_PART
    top.part[k] = larger_bits(top.part[k], as_bits(magnitude(x.part[k])));
    return top;
}

/* Whether |top * scale| of any lane is not 0 and not in [2^-48, 2^60). */
WORD bool tops_suspect(tops top, lanes scale)
{
    bool fits = true;

    EACH_PART
    fits &= all_zero_or_in(magnitude(mul(as_float(top.part[k]), scale.part[k])), 0x1p-48f, 0x1p60f);
    return !fits;
}

WORD sums sums_load(const double *at)
{
    sums r;

    EACH_PART
    {
        r.low[k] = load_d(at + k * LANES, WIDE);
        r.high[k] = load_d(at + k * LANES + WIDE, WIDE);
    }
    return r;
}

WORD sums sums_add(sums s, lanes x)
{
    EACH_PART
    {
        s.low[k] = sum_d(s.low[k], low_wide(x.part[k]));
        s.high[k] = sum_d(s.high[k], high_wide(x.part[k]));
    }
    return s;
}

WORD void sums_store(double *at, sums s)
{
    EACH_PART
    {
        store_d(at + k * LANES, s.low[k], WIDE);
        store_d(at + k * LANES + WIDE, s.high[k], WIDE);
    }
}

/* n of 16: 0 in the lanes from n on. */
WORD lanes load_lanes(mo_float kind, const void *at, size_t n)
{
    lanes r;

    EACH_PART
    {
        const int here = from_part(n, k, LANES);

        if (kind == MO_F32) {
            r.part[k] = load((const float *)at + k * LANES, here);
        } else {
            const vech x = load_h((const uint16_t *)at + k * LANES, here);

            r.part[k] = kind == MO_F16 ? f16_to_float(x) : as_float(left(words(x), 16));
        }
    }
    return r;
}

/* By integers, since vcvtneps2bf16 takes subnormals for zeros. */
WORD veci bf16_bits(vec y)
{
    const veci bits = as_bits(y), odd = both(right(bits, 16), alli(1));

    return if_nan(y, alli(0x7FC0), right(add(bits, add(odd, alli(0x7FFF))), 16));
}

/* Returns what was stored: rounded. */
WORD lanes store_lanes(mo_float kind, void *at, size_t n, lanes y)
{
    EACH_PART
    {
        const int here = from_part(n, k, LANES);

        if (kind == MO_F32) {
            store((float *)at + k * LANES, y.part[k], here);
        } else if (kind == MO_F16) {
            const vech rounded = f16_from_float(y.part[k]);

            store_h((uint16_t *)at + k * LANES, rounded, here);
            y.part[k] = f16_to_float(rounded);
        } else {
            const veci rounded = bf16_bits(y.part[k]);

            store_h((uint16_t *)at + k * LANES, halves(rounded), here);
            y.part[k] = as_float(left(rounded, 16));
        }
    }
    return y;
}

/* Sixteen elements, or n of them where n is less. */
WORD void step(mo_float kind, int stores, int norms, char *at, size_t n, lanes scale, tops *top, lanes *sum)
{
    const lanes x = load_lanes(kind, at, n);
    lanes y = x;

    *top = tops_max(*top, x);
    if (stores) {
        y = lanes_mul(x, scale);
        y = store_lanes(kind, at, n, y);
    }
    if (norms)
        *sum = lanes_add(*sum, lanes_mul(y, y));
}

WORD void run(mo_float kind, int stores, int norms, mo_gradients_lanes *state, void *memory, size_t count,
              float inv_scale)
{
    const lanes scale = lanes_all(stores ? inv_scale : 1.0f);
    const size_t size = mo_float_size(kind);
    tops all = tops_load(state->tops);
    sums total = sums_load(state->sums);
    char *x = memory;

    while (count > 0) {
        const size_t n = count < MO_GRADIENTS_BLOCK ? count : MO_GRADIENTS_BLOCK;
        lanes sum0 = lanes_all(0), sum1 = lanes_all(0), sum2 = lanes_all(0), sum3 = lanes_all(0);
        tops top = tops_zero();
        char *at = x;
        size_t left = n;

        for (; left >= 64; left -= 64, at += 64 * size) {
            step(kind, stores, norms, at, 16, scale, &top, &sum0);
            step(kind, stores, norms, at + 16 * size, 16, scale, &top, &sum1);
            step(kind, stores, norms, at + 32 * size, 16, scale, &top, &sum2);
            step(kind, stores, norms, at + 48 * size, 16, scale, &top, &sum3);
        }
        if (left > 0) {
            if (left >= 16) {
                step(kind, stores, norms, at, 16, scale, &top, &sum0);
                at += 16 * size, left -= 16;
                if (left >= 16) {
                    step(kind, stores, norms, at, 16, scale, &top, &sum1);
                    at += 16 * size, left -= 16;
                    if (left >= 16) {
                        step(kind, stores, norms, at, 16, scale, &top, &sum2);
                        at += 16 * size, left -= 16;
                    }
                }
            }
            if (left > 0) /* the last ones always to the last lanes */
                step(kind, stores, norms, at, left, scale, &top, &sum3);
        }
        all = tops_join(all, top);
        if (norms) {
            if (__builtin_expect(tops_suspect(top, scale), 0))
                state->careful += mo_gradients_careful(kind, x, n);
            else
                total = sums_add(total, lanes_add(lanes_add(sum0, sum1), lanes_add(sum2, sum3)));
        }
        x += n * size;
        count -= n;
    }
    tops_store(state->tops, all);
    if (norms)
        sums_store(state->sums, total);
}

/* ---- eight fp64 ------------------------------------------------------------------------------------------- */

WORD wide wide_all(double x)
{
    wide r;

    EACH_PART
    r.part[k] = all_d(x);
    return r;
}

WORD wide wide_mul(wide x, wide y)
{
    EACH_PART
    x.part[k] = mul_d(x.part[k], y.part[k]);
    return x;
}

WORD wide wide_add(wide x, wide y)
{
    EACH_PART
    x.part[k] = sum_d(x.part[k], y.part[k]);
    return x;
}

WORD wide load_wide(const double *at, size_t n)
{
    wide r;

    EACH_PART
    r.part[k] = load_d(at + k * WIDE, from_part(n, k, WIDE));
    return r;
}

WORD void store_wide(double *at, size_t n, wide y)
{
    EACH_PART
    store_d(at + k * WIDE, y.part[k], from_part(n, k, WIDE));
}

WORD wide_tops wide_tops_load(const uint64_t *at)
{
    wide_tops r;

    EACH_PART
    r.part[k] = load_bits_d(at + k * WIDE);
    return r;
}

WORD void wide_tops_store(uint64_t *at, wide_tops top)
{
    EACH_PART
    store_bits_d(at + k * WIDE, top.part[k]);
}

WORD wide_tops wide_tops_join(wide_tops x, wide_tops y)
{
    EACH_PART
    x.part[k] = larger_bits_d(x.part[k], y.part[k]);
    return x;
}

WORD wide_tops wide_tops_max(wide_tops top, wide x)
{
    EACH_PART
    top.part[k] = larger_bits_d(top.part[k], magnitude_bits_d(x.part[k]));
    return top;
}

/* The same of fp64. */
WORD void wide_step(int stores, int norms, double *at, size_t n, wide scale, wide_tops *top, wide *sum)
{
    const wide x = load_wide(at, n);
    wide y = x;

    *top = wide_tops_max(*top, x);
    if (stores) {
        y = wide_mul(x, scale);
        store_wide(at, n, y);
        if (n < 8)
            y = load_wide(at, n); /* 0 where there is nothing, even under an infinite scale */
    }
    if (norms)
        *sum = wide_add(*sum, wide_mul(y, y));
}

WORD void run_wide(int stores, int norms, mo_gradients_lanes *state, void *memory, size_t count,
                   float inv_scale)
{
    const wide scale = wide_all((double)inv_scale);
    wide sum0 = load_wide(state->sums, 8), sum1 = wide_all(0);
    wide_tops top0 = wide_tops_load(state->wide_tops), top1 = top0;
    double *x = memory;

    for (; count >= 16; count -= 16, x += 16) {
        wide_step(stores, norms, x, 8, scale, &top0, &sum0);
        wide_step(stores, norms, x + 8, 8, scale, &top1, &sum1);
    }
    if (count >= 8) {
        wide_step(stores, norms, x, 8, scale, &top0, &sum0);
        count -= 8, x += 8;
    }
    if (count > 0)
        wide_step(stores, norms, x, count, scale, &top1, &sum1);
    wide_tops_store(state->wide_tops, wide_tops_join(top0, top1));
    if (norms)
        store_wide(state->sums, 8, wide_add(sum0, sum1));
}

#define KERNEL(name, call)                                                                                   \
    VECTOR static void name(mo_gradients_lanes *state, void *x, size_t count, float inv_scale)               \
    {                                                                                                        \
        call;                                                                                                \
    }
#define KERNELS(suffix, kind)                                                                                \
    KERNEL(check_##suffix, run(kind, 0, 0, state, x, count, inv_scale))                                      \
    KERNEL(store_##suffix##_checked, run(kind, 1, 0, state, x, count, inv_scale))                            \
    KERNEL(norm_##suffix, run(kind, 0, 1, state, x, count, inv_scale))                                       \
    KERNEL(store_norm_##suffix, run(kind, 1, 1, state, x, count, inv_scale))

KERNELS(f32, MO_F32)
KERNELS(f16, MO_F16)
KERNELS(bf16, MO_BF16)
KERNEL(check_f64, run_wide(0, 0, state, x, count, inv_scale))
KERNEL(store_f64_checked, run_wide(1, 0, state, x, count, inv_scale))
KERNEL(norm_f64, run_wide(0, 1, state, x, count, inv_scale))
KERNEL(store_norm_f64, run_wide(1, 1, state, x, count, inv_scale))

#define KERNEL_ROW(suffix)                                                                                   \
    {                                                                                                        \
        check_##suffix, store_##suffix##_checked, norm_##suffix, store_norm_##suffix                         \
    }
#define KERNEL_TABLE                                                                                         \
    {                                                                                                        \
        .run = {                                                                                             \
            [MO_F32] = KERNEL_ROW(f32),                                                                      \
            [MO_F16] = KERNEL_ROW(f16),                                                                      \
            [MO_BF16] = KERNEL_ROW(bf16),                                                                    \
            [MO_F64] = KERNEL_ROW(f64)                                                                       \
        }                                                                                                    \
    }

#endif
