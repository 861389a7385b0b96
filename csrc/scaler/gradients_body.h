/* The loops over elements of gradients_generic.c, _avx2.c and _avx512.c, written once in terms of sixteen lanes of fp32 or
 * eight of fp64. The file that includes this has defined, for its instruction set:
 *
 *     lanes, tops, sums       16 fp32, 16 uint32_t, 16 double             wide, wide_tops     8 double, 8 uint64_t
 *     lanes_zero, lanes_all(float), lanes_mul, lanes_add                  wide_zero, …        the same
 *     tops_load, tops_store, tops_max(tops, lanes), tops_join             wide_tops_load, …   the same
 *     tops_suspect(tops, lanes scale)     any lane with |top * scale| not 0 and not in [2^-48, 2^60)
 *     sums_load, sums_add(sums, lanes), sums_store
 *     load_K(at), load_some_K(at, n), store_K(at, lanes), store_some_K(at, n, lanes)    K of f32, f16, bf16; and f64
 *
 * load_some: 0 in the lanes from n on, 0 < n < all, and nothing beyond n is read or written. A store returns what was
 * stored, as lanes: rounded. All of it is inlined: `kind`, `stores` and `norms` are constants in every kernel. */
#ifndef MO_GRADIENTS_BODY_H
#define MO_GRADIENTS_BODY_H

INLINE lanes load(mo_float kind, const void *at)
{
    return kind == MO_F32 ? load_f32(at) : kind == MO_F16 ? load_f16(at) : load_bf16(at);
}

INLINE lanes load_some(mo_float kind, const void *at, size_t n)
{
    return kind == MO_F32   ? load_some_f32(at, n)
           : kind == MO_F16 ? load_some_f16(at, n)
                            : load_some_bf16(at, n);
}

INLINE lanes store(mo_float kind, void *at, lanes y)
{
    return kind == MO_F32 ? store_f32(at, y) : kind == MO_F16 ? store_f16(at, y) : store_bf16(at, y);
}

INLINE lanes store_some(mo_float kind, void *at, size_t n, lanes y)
{
    return kind == MO_F32   ? store_some_f32(at, n, y)
           : kind == MO_F16 ? store_some_f16(at, n, y)
                            : store_some_bf16(at, n, y);
}

/* Sixteen elements, or n of them where n is less. */
INLINE void step(mo_float kind, int stores, int norms, char *at, size_t n, lanes scale, tops *top, lanes *sum)
{
    const lanes x = n < 16 ? load_some(kind, at, n) : load(kind, at);
    lanes y = x;

    *top = tops_max(*top, x);
    if (stores) {
        y = lanes_mul(x, scale);
        y = n < 16 ? store_some(kind, at, n, y) : store(kind, at, y);
    }
    if (norms)
        *sum = lanes_add(*sum, lanes_mul(y, y));
}

INLINE void run(mo_float kind, int stores, int norms, mo_gradients_lanes *state, void *memory, size_t count,
                float inv_scale)
{
    const lanes scale = lanes_all(stores ? inv_scale : 1.0f);
    const size_t size = mo_float_size(kind);
    tops all = tops_load(state->tops);
    sums total = sums_load(state->sums);
    char *x = memory;

    while (count > 0) {
        const size_t n = count < MO_GRADIENTS_BLOCK ? count : MO_GRADIENTS_BLOCK;
        lanes sum0 = lanes_zero(), sum1 = lanes_zero(), sum2 = lanes_zero(), sum3 = lanes_zero();
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

/* The same of fp64. */
INLINE void wide_step(int stores, int norms, double *at, size_t n, wide scale, wide_tops *top, wide *sum)
{
    const wide x = n < 8 ? load_some_f64(at, n) : load_f64(at);
    wide y = x;

    *top = wide_tops_max(*top, x);
    if (stores) {
        y = wide_mul(x, scale);
        if (n < 8) {
            store_some_f64(at, n, y);
            y = load_some_f64(at, n); /* 0 where there is nothing, even under an infinite scale */
        } else {
            store_f64(at, y);
        }
    }
    if (norms)
        *sum = wide_add(*sum, wide_mul(y, y));
}

INLINE void run_wide(int stores, int norms, mo_gradients_lanes *state, void *memory, size_t count,
                     float inv_scale)
{
    const wide scale = wide_all((double)inv_scale);
    wide sum0 = wide_load(state->sums), sum1 = wide_zero();
    wide_tops top0 = wide_tops_load(state->wide_tops), top1 = wide_tops_zero();
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
        wide_store(state->sums, wide_add(sum0, sum1));
}

#define KERNEL(name, call)                                                                                   \
    static void name(mo_gradients_lanes *state, void *x, size_t count, float inv_scale)                      \
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
