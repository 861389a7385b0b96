/* optim/element.h in vectors: LANES elements of a run, from number i on, or the n < LANES that are left, as fp32 and back. Included
 * after the header that defines the words.
 *
 * The kinds are the same for a whole run, so that each branch on them is foretold; beside a division and a root they cost nothing. */
#ifndef MO_VECTOR_RUN_H
#define MO_VECTOR_RUN_H

#include <string.h>

#include "../kernels/dither.cuh"
#include "optim/update_kernels.h"

/* fp32 alone, nothing beside the rule: what has a loop without branches. Codes have kinds of their own. */
static inline bool is_plain(const mo_run *run)
{
    return run->kind == MO_F32 && run->grad_kind == MO_F32 && run->stored == 1;
}

WORD vec load_as(mo_float kind, const void *x, size_t i, size_t n)
{
    const uint16_t *at = (const uint16_t *)x + i;

    if (kind == MO_F32)
        return load((const float *)x + i, n);
    return kind == MO_F16 ? f16_to_float(load_h(at, n)) : as_float(left(words(load_h(at, n)), 16));
}

WORD veci bf16_bits(veci bits, veci addend)
{
    const veci nan = either(right(bits, 16), alli(0x0040));

    return above(both(bits, alli(0x7FFFFFFF)), 0x7F800000, nan, right(add(bits, addend), 16));
}

WORD veci f16_dithered(veci bits, veci dither)
{
    const veci size = both(bits, alli(0x7FFFFFFF));
    const veci normal = right(add(sub(size, alli((127 - 15) << 23)), right(dither, 19)), 13);
    const veci small = right(add(truncated(mul(as_float(size), all(0x1p40f))), right(dither, 16)), 16);
    veci result = above(size, 0x38800000 - 1, normal, small);

    result = above(size, 0x47800000 - 1, alli(0x7C00), result);
    result = above(size, 0x7F800000, alli(0x7E00), result);
    return either(result, both(right(bits, 16), alli(0x8000)));
}

WORD void store_as(mo_float kind, void *x, size_t i, vec value, size_t n)
{
    const veci bits = as_bits(value);

    if (kind == MO_F32)
        store((float *)x + i, value, n);
    else if (kind == MO_F16)
        store_h((uint16_t *)x + i, f16_from_float(value), n);
    else
        store_h((uint16_t *)x + i, halves(bf16_bits(bits, add(alli(0x7FFF), both(right(bits, 16), alli(1))))),
                n);
}

WORD vec load_p(const mo_run *run, size_t i, size_t n)
{
    return run->master ? load(run->master + i, n) : load_as(run->kind, run->p, i, n);
}

WORD void store_p(const mo_run *run, size_t i, vec value, size_t n)
{
    if (run->master)
        store(run->master + i, value, n);
    if (run->stochastic && !run->master && run->kind != MO_F32) {
        const veci dither = add(ramp(MO_DITHER_INDEX), alli(mo_dither(run->index + (uint32_t)i, run->step)));
        const veci bits = as_bits(value);
        const veci stored =
            run->kind == MO_F16 ? f16_dithered(bits, dither) : bf16_bits(bits, right(dither, 16));

        store_h((uint16_t *)run->p + i, halves(stored), n);
    } else {
        store_as(run->kind, run->p, i, value, n);
    }
}

WORD vec load_g(const mo_run *run, size_t i, size_t n)
{
    vec g = load_as(run->grad_kind, run->g, i, n);

    if (run->stored != 1) {
        g = mul(g, all(run->stored));
        store_as(run->grad_kind, run->g, i, g, n);
    }
    return g;
}

#endif
