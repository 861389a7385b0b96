/* SGD, one element of one step, in fp32 and in fp64: the specification that every instruction set and the CUDA kernels follow bit
 * for bit.
 *
 *     x = g * factor            negated where the objective is maximized
 *     x = fma(weight_decay, p, x)                            MO_SGD_L2
 *     m = fma(momentum, m, rest * x), or x                   MO_SGD_MOMENTUM; x with MO_SGD_FIRST
 *     x = m, or fma(momentum, m, rest * x)                   MO_SGD_MOMENTUM; the second with MO_SGD_NESTEROV
 *     p = fma(step_size, x, p)
 *
 * torch's SGD has no Nesterov momentum with dampening, so that its rest is 1 there. Muon's momentum is this one, with a dampening
 * that is the momentum: its direction is what p := 0 with step_size = 1 becomes (memopt/optim/_muon.py). */
#ifndef MO_SGD_CUH
#define MO_SGD_CUH

#include "arithmetic.cuh"

enum { MO_SGD_L2 = 1, MO_SGD_MOMENTUM = 2, MO_SGD_FIRST = 4, MO_SGD_NESTEROV = 8 };

/* What the elements of one parameter have in common in one step. */
typedef struct mo_sgd_terms {
    double factor;       /* 1 / grad_scale * clip coefficient; negative where maximize */
    double weight_decay; /* with MO_SGD_L2 */
    double momentum;
    double rest;      /* 1 - dampening */
    double step_size; /* -lr */
} mo_sgd_terms;

typedef struct mo_sgd_termsf {
    float factor, weight_decay, momentum, rest, step_size;
} mo_sgd_termsf;

MO_BODY mo_sgd_terms mo_sgd_terms_of(double lr, double weight_decay, double momentum, double dampening,
                                     int maximize, float factor)
{
    mo_sgd_terms c;

    c.factor = maximize ? -factor : factor;
    c.weight_decay = weight_decay;
    c.momentum = momentum;
    c.rest = 1 - dampening;
    c.step_size = -lr;
    return c;
}

MO_BODY mo_sgd_termsf mo_sgd_narrow(const mo_sgd_terms *c)
{
    mo_sgd_termsf f;

    f.factor = (float)c->factor;
    f.weight_decay = (float)c->weight_decay;
    f.momentum = (float)c->momentum;
    f.rest = (float)c->rest;
    f.step_size = (float)c->step_size;
    return f;
}

/* p after the step; *m, which only MO_SGD_MOMENTUM touches, is the state before and after. */
MO_BODY float mo_sgd_elementf(const mo_sgd_termsf *c, unsigned flags, float p, float g, float *m)
{
    float x = mo_mulf(g, c->factor);

    if (flags & MO_SGD_L2)
        x = mo_fmaf(c->weight_decay, p, x);
    if (flags & MO_SGD_MOMENTUM) {
        *m = flags & MO_SGD_FIRST ? x : mo_fmaf(c->momentum, *m, mo_mulf(c->rest, x));
        x = flags & MO_SGD_NESTEROV ? mo_fmaf(c->momentum, *m, mo_mulf(c->rest, x)) : *m;
    }
    return mo_fmaf(c->step_size, x, p);
}

MO_BODY double mo_sgd_element(const mo_sgd_terms *c, unsigned flags, double p, double g, double *m)
{
    double x = mo_mul(g, c->factor);

    if (flags & MO_SGD_L2)
        x = mo_fma(c->weight_decay, p, x);
    if (flags & MO_SGD_MOMENTUM) {
        *m = flags & MO_SGD_FIRST ? x : mo_fma(c->momentum, *m, mo_mul(c->rest, x));
        x = flags & MO_SGD_NESTEROV ? mo_fma(c->momentum, *m, mo_mul(c->rest, x)) : *m;
    }
    return mo_fma(c->step_size, x, p);
}

#endif
