/* update_generic.c in vectors. Included once by each instruction set's file, after the header that defines the words: vec, LANES,
 * load, mul_add …; the last vector of a run is a partial one, so no element takes another way. */
#include "../kernels/adam_codes.cuh"
#include "optim/vector_run.h"

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

/* plain: all of fp32, known where this is compiled. */
WORD void adam_lanes(const adam_vectors *c, unsigned flags, bool plain, const mo_run *run, size_t i, size_t n)
{
    const mo_float kind = plain ? MO_F32 : run->state_kind;
    const bool factored = !plain && run->factored;
    const vec old = plain ? load((float *)run->p + i, n) : load_p(run, i, n);
    vec x = mul(plain ? load((float *)run->g + i, n) : load_g(run, i, n), c->factor), w, mean;

    if (flags & MO_ADAM_L2)
        x = mul_add(c->weight_decay, old, x);
    mean = mul_add(c->beta1, load_as(kind, run->m, i, n), mul(c->rest1, x));
    w = mul_add(c->beta2, load_as(factored ? MO_F32 : kind, run->v, i, n), mul(c->rest2, mul(x, x)));
    store_as(kind, run->m, i, factored ? up_to(MO_CODE_HUGE, w, mean) : mean, n);
    if (!factored)
        store_as(kind, run->v, i, w, n);
    if (flags & MO_ADAM_AMSGRAD) {
        w = larger(w, load_as(kind, run->vmax, i, n));
        store_as(kind, run->vmax, i, w, n);
    }
    x = mul_add(c->step_size, quotient(mean, mul_add(root(w), c->root, c->eps)), mul(old, c->decay));
    if (plain)
        store((float *)run->p + i, x, n);
    else
        store_p(run, i, x, n);
}

WORD void adam_with(const mo_adam_termsf *terms, unsigned flags, bool plain, const mo_run *run)
{
    const adam_vectors c = adam_broadcast(terms);
    const mo_run r = *run; /* a copy of its own, which no store can change */
    size_t i = 0;

    for (; i + LANES <= r.n; i += LANES)
        adam_lanes(&c, flags, plain, &r, i, LANES);
    if (i < r.n)
        adam_lanes(&c, flags, plain, &r, i, r.n - i);
}

VECTOR static void adam(const mo_adam_termsf *terms, unsigned flags, const mo_run *run)
{
    if (!is_plain(run) || run->state_kind != MO_F32 || run->factored)
        adam_with(terms, flags, false, run);
    else if (flags == 0)
        adam_with(terms, 0, true, run);
    else if (flags == MO_ADAM_L2)
        adam_with(terms, MO_ADAM_L2, true, run);
    else if (flags == MO_ADAM_AMSGRAD)
        adam_with(terms, MO_ADAM_AMSGRAD, true, run);
    else
        adam_with(terms, MO_ADAM_L2 | MO_ADAM_AMSGRAD, true, run);
}

/* ---- SGD ------------------------------------------------------------------------------------------------------------- */

typedef struct sgd_vectors {
    vec factor, weight_decay, momentum, rest, step_size;
} sgd_vectors;

WORD void sgd_lanes(const sgd_vectors *c, unsigned flags, bool plain, const mo_run *run, size_t i, size_t n)
{
    const mo_float kind = plain ? MO_F32 : run->state_kind;
    const vec old = plain ? load((float *)run->p + i, n) : load_p(run, i, n);
    vec x = mul(plain ? load((float *)run->g + i, n) : load_g(run, i, n), c->factor), buffer;

    if (flags & MO_SGD_L2)
        x = mul_add(c->weight_decay, old, x);
    if (flags & MO_SGD_MOMENTUM) {
        buffer =
            flags & MO_SGD_FIRST ? x : mul_add(c->momentum, load_as(kind, run->m, i, n), mul(c->rest, x));
        store_as(kind, run->m, i, buffer, n);
        x = flags & MO_SGD_NESTEROV ? mul_add(c->momentum, buffer, mul(c->rest, x)) : buffer;
    }
    x = mul_add(c->step_size, x, old);
    if (plain)
        store((float *)run->p + i, x, n);
    else
        store_p(run, i, x, n);
}

WORD void sgd_with(const mo_sgd_termsf *terms, unsigned flags, bool plain, const mo_run *run)
{
    const sgd_vectors c = {
        .factor = all(terms->factor),
        .weight_decay = all(terms->weight_decay),
        .momentum = all(terms->momentum),
        .rest = all(terms->rest),
        .step_size = all(terms->step_size),
    };
    const mo_run r = *run; /* a copy of its own, which no store can change */
    size_t i = 0;

    for (; i + LANES <= r.n; i += LANES)
        sgd_lanes(&c, flags, plain, &r, i, LANES);
    if (i < r.n)
        sgd_lanes(&c, flags, plain, &r, i, r.n - i);
}

/* Two multiplications an element leave room for branches on the flags. */
VECTOR static void sgd(const mo_sgd_termsf *terms, unsigned flags, const mo_run *run)
{
    if (is_plain(run) && run->state_kind == MO_F32)
        sgd_with(terms, flags, true, run);
    else
        sgd_with(terms, flags, false, run);
}
