/* Adam and AdamW, one element of one step, in fp32 and in fp64: the specification that every instruction set and the CUDA kernels
 * follow bit for bit.
 *
 *     x = g * factor            negated where the objective is maximized
 *     x = fma(weight_decay, p, x)                            MO_ADAM_L2
 *     m = fma(beta1, m, rest1 * x)
 *     v = fma(beta2, v, rest2 * (x * x))
 *     w = v, or vmax = max(vmax, v), w = vmax                MO_ADAM_AMSGRAD; a NaN wins, as in torch.maximum
 *     p = fma(step_size, m / fma(sqrt(w), root, eps), p * decay)
 *
 * The terms are computed in double from the param group, then rounded once; t is the number of this step, from 1. */
#ifndef MO_ADAM_CUH
#define MO_ADAM_CUH

#include "arithmetic.cuh"

enum { MO_ADAM_L2 = 1, MO_ADAM_AMSGRAD = 2 };

/* What the elements of one parameter have in common in one step. */
typedef struct mo_adam_terms {
    double factor;       /* 1 / grad_scale * clip coefficient; negative where maximize */
    double weight_decay; /* with MO_ADAM_L2 */
    double decay;        /* AdamW: 1 - lr * weight_decay; else 1 */
    double beta1, rest1; /* rest: 1 - beta */
    double beta2, rest2;
    double step_size; /* -lr / (1 - beta1^t) */
    double root;      /* 1 / sqrt(1 - beta2^t) */
    double eps;
} mo_adam_terms;

typedef struct mo_adam_termsf {
    float factor, weight_decay, decay, beta1, rest1, beta2, rest2, step_size, root, eps;
} mo_adam_termsf;

/* decoupled: AdamW. steps: those taken before this one. */
MO_BODY mo_adam_terms mo_adam_terms_of(double lr, double beta1, double beta2, double eps, double weight_decay,
                                       int decoupled, int maximize, float steps, float factor)
{
    const unsigned long long t = mo_step_number(steps);
    mo_adam_terms c;

    c.factor = maximize ? -factor : factor;
    c.weight_decay = weight_decay;
    c.decay = decoupled ? 1 - mo_mul(lr, weight_decay) : 1;
    c.beta1 = beta1;
    c.rest1 = 1 - beta1;
    c.beta2 = beta2;
    c.rest2 = 1 - beta2;
    c.step_size = -mo_div(lr, 1 - mo_power(beta1, t));
    c.root = mo_div(1, mo_sqrt(1 - mo_power(beta2, t)));
    c.eps = eps;
    return c;
}

MO_BODY mo_adam_termsf mo_adam_narrow(const mo_adam_terms *c)
{
    mo_adam_termsf f;

    f.factor = (float)c->factor;
    f.weight_decay = (float)c->weight_decay;
    f.decay = (float)c->decay;
    f.beta1 = (float)c->beta1;
    f.rest1 = (float)c->rest1;
    f.beta2 = (float)c->beta2;
    f.rest2 = (float)c->rest2;
    f.step_size = (float)c->step_size;
    f.root = (float)c->root;
    f.eps = (float)c->eps;
    return f;
}

/* p after the step; *m, *v and, with MO_ADAM_AMSGRAD, *vmax are the states before and after. */
MO_BODY float mo_adam_elementf(const mo_adam_termsf *c, unsigned flags, float p, float g, float *m, float *v,
                               float *vmax)
{
    float x = mo_mulf(g, c->factor), w;

    if (flags & MO_ADAM_L2)
        x = mo_fmaf(c->weight_decay, p, x);
    *m = mo_fmaf(c->beta1, *m, mo_mulf(c->rest1, x));
    *v = w = mo_fmaf(c->beta2, *v, mo_mulf(c->rest2, mo_mulf(x, x)));
    if (flags & MO_ADAM_AMSGRAD)
        *vmax = w = w > *vmax || w != w ? w : *vmax;
    return mo_fmaf(c->step_size, mo_divf(*m, mo_fmaf(mo_sqrtf(w), c->root, c->eps)), mo_mulf(p, c->decay));
}

MO_BODY double mo_adam_element(const mo_adam_terms *c, unsigned flags, double p, double g, double *m,
                               double *v, double *vmax)
{
    double x = mo_mul(g, c->factor), w;

    if (flags & MO_ADAM_L2)
        x = mo_fma(c->weight_decay, p, x);
    *m = mo_fma(c->beta1, *m, mo_mul(c->rest1, x));
    *v = w = mo_fma(c->beta2, *v, mo_mul(c->rest2, mo_mul(x, x)));
    if (flags & MO_ADAM_AMSGRAD)
        *vmax = w = w > *vmax || w != w ? w : *vmax;
    return mo_fma(c->step_size, mo_div(*m, mo_fma(mo_sqrt(w), c->root, c->eps)), mo_mul(p, c->decay));
}

#endif
