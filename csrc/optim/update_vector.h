/* update_generic.c in vectors. Included once by each instruction set's file, after the header that defines the words: vec, LANES,
 * load, mul_add …; the last vector of a run is a partial one, so no element takes another way. */
#include "../kernels/dither.cuh"

/* ---- Adam ------------------------------------------------------------------------------------------------------------ */

typedef struct adam_vectors {
    vec factor, weight_decay, decay, beta1, rest1, beta2, rest2, step_size, root, eps;
} adam_vectors;

WORD adam_vectors adam_broadcast(const mo_adam_termsf *c)
{
    return (adam_vectors){
        .factor = all(c->factor),
        .weight_decay = all(c->weight_decay),
        .decay = all(c->decay),
        .beta1 = all(c->beta1),
        .rest1 = all(c->rest1),
        .beta2 = all(c->beta2),
        .rest2 = all(c->rest2),
        .step_size = all(c->step_size),
        .root = all(c->root),
        .eps = all(c->eps),
    };
}

WORD void adam_lanes(const adam_vectors *c, unsigned flags, size_t n, float *p, const float *g, float *m,
                     float *v, float *vmax)
{
    const vec old = load(p, n);
    vec x = mul(load(g, n), c->factor), w, mean;

    if (flags & MO_ADAM_L2)
        x = mul_add(c->weight_decay, old, x);
    mean = mul_add(c->beta1, load(m, n), mul(c->rest1, x));
    store(m, mean, n);
    w = mul_add(c->beta2, load(v, n), mul(c->rest2, mul(x, x)));
    store(v, w, n);
    if (flags & MO_ADAM_AMSGRAD) {
        w = larger(w, load(vmax, n));
        store(vmax, w, n);
    }
    store(p, mul_add(c->step_size, quotient(mean, mul_add(root(w), c->root, c->eps)), mul(old, c->decay)), n);
}

WORD void adam_with(const mo_adam_termsf *terms, unsigned flags, size_t n, float *p, const float *g, float *m,
                    float *v, float *vmax)
{
    const adam_vectors c = adam_broadcast(terms);
    size_t i = 0;

    for (; i + LANES <= n; i += LANES)
        adam_lanes(&c, flags, LANES, p + i, g + i, m + i, v + i, vmax + i);
    if (i < n)
        adam_lanes(&c, flags, n - i, p + i, g + i, m + i, v + i, vmax + i);
}

/* A loop for each set of flags: they do not change within. */
VECTOR static void adam(const mo_adam_termsf *terms, unsigned flags, size_t n, float *p, const float *g,
                        float *m, float *v, float *vmax)
{
    if (!(flags & MO_ADAM_AMSGRAD))
        vmax = v; /* an address to count on from, not used */
    switch (flags) {
    case 0:
        adam_with(terms, 0, n, p, g, m, v, vmax);
        break;
    case MO_ADAM_L2:
        adam_with(terms, MO_ADAM_L2, n, p, g, m, v, vmax);
        break;
    case MO_ADAM_AMSGRAD:
        adam_with(terms, MO_ADAM_AMSGRAD, n, p, g, m, v, vmax);
        break;
    default:
        adam_with(terms, MO_ADAM_L2 | MO_ADAM_AMSGRAD, n, p, g, m, v, vmax);
        break;
    }
}

/* ---- SGD ------------------------------------------------------------------------------------------------------------- */

typedef struct sgd_vectors {
    vec factor, weight_decay, momentum, rest, step_size;
} sgd_vectors;

WORD void sgd_lanes(const sgd_vectors *c, unsigned flags, size_t n, float *p, const float *g, float *m)
{
    const vec old = load(p, n);
    vec x = mul(load(g, n), c->factor), buffer;

    if (flags & MO_SGD_L2)
        x = mul_add(c->weight_decay, old, x);
    if (flags & MO_SGD_MOMENTUM) {
        buffer = flags & MO_SGD_FIRST ? x : mul_add(c->momentum, load(m, n), mul(c->rest, x));
        store(m, buffer, n);
        x = flags & MO_SGD_NESTEROV ? mul_add(c->momentum, buffer, x) : buffer;
    }
    store(p, mul_add(c->step_size, x, old), n);
}

/* Two multiplications an element leave room for the flags, which never change and so are always foretold. */
VECTOR static void sgd(const mo_sgd_termsf *terms, unsigned flags, size_t n, float *p, const float *g,
                       float *m)
{
    const sgd_vectors c = {
        .factor = all(terms->factor),
        .weight_decay = all(terms->weight_decay),
        .momentum = all(terms->momentum),
        .rest = all(terms->rest),
        .step_size = all(terms->step_size),
    };
    size_t i = 0;

    if (!(flags & MO_SGD_MOMENTUM))
        m = p; /* an address to count on from, not used */
    for (; i + LANES <= n; i += LANES)
        sgd_lanes(&c, flags, LANES, p + i, g + i, m + i);
    if (i < n)
        sgd_lanes(&c, flags, n - i, p + i, g + i, m + i);
}

VECTOR static void scale(float factor, size_t n, float *x)
{
    size_t i = 0;

    for (; i + LANES <= n; i += LANES)
        store(x + i, mul(load(x + i, LANES), all(factor)), LANES);
    if (i < n)
        store(x + i, mul(load(x + i, n - i), all(factor)), n - i);
}

/* ---- 16 bits: the few elements behind the last whole vector go by the specification -------------------------------------- */

VECTOR static void widen(mo_float kind, size_t n, const uint16_t *x, float *out)
{
    size_t i = 0;

    if (kind == MO_F16)
        for (; i + LANES <= n; i += LANES)
            store(out + i, load_f16(x + i), LANES);
    else
        for (; i + LANES <= n; i += LANES)
            store(out + i, as_float(left(load_words(x + i), 16)), LANES);
    mo_update_generic.widen(kind, n - i, x + i, out + i);
}

WORD veci bf16_bits(veci bits, veci addend)
{
    const veci nan = either(right(bits, 16), alli(0x0040));

    return above(both(bits, alli(0x7FFFFFFF)), 0x7F800000, nan, right(add(bits, addend), 16));
}

VECTOR static void narrow(mo_float kind, size_t n, const float *x, uint16_t *out)
{
    size_t i = 0;

    if (kind == MO_F16)
        for (; i + LANES <= n; i += LANES)
            store_f16(out + i, load(x + i, LANES));
    else
        for (; i + LANES <= n; i += LANES) {
            const veci bits = as_bits(load(x + i, LANES));
            store_words(out + i, bf16_bits(bits, add(alli(0x7FFF), both(right(bits, 16), alli(1)))));
        }
    mo_update_generic.narrow(kind, n - i, x + i, out + i);
}

WORD veci f16_bits(veci bits, veci d)
{
    const veci size = both(bits, alli(0x7FFFFFFF));
    const veci normal = right(add(sub(size, alli((127 - 15) << 23)), right(d, 19)), 13);
    const veci small = right(add(truncated(mul(as_float(size), all(0x1p40f))), right(d, 16)), 16);
    veci result = above(size, 0x38800000 - 1, normal, small);

    result = above(size, 0x47800000 - 1, alli(0x7C00), result);
    result = above(size, 0x7F800000, alli(0x7E00), result);
    return either(result, both(right(bits, 16), alli(0x8000)));
}

VECTOR static void dither(mo_float kind, size_t n, const float *x, uint32_t index, uint32_t step,
                          uint16_t *out)
{
    veci d = add(ramp(MO_DITHER_INDEX), alli(mo_dither(index, step)));
    size_t i = 0;

    for (; i + LANES <= n; i += LANES, d = add(d, alli(LANES * MO_DITHER_INDEX))) {
        const veci bits = as_bits(load(x + i, LANES));
        store_words(out + i, kind == MO_F16 ? f16_bits(bits, d) : bf16_bits(bits, right(d, 16)));
    }
    mo_update_generic.dither(kind, n - i, x + i, index + (uint32_t)i, step, out + i);
}
