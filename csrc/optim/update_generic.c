/* The specification: a loop over each formula. */
#include "optim/update_kernels.h"

#include "../kernels/dither.cuh"

static void adam(const mo_adam_termsf *terms, unsigned flags, size_t n, float *p, const float *g, float *m,
                 float *v, float *vmax)
{
    for (size_t i = 0; i < n; i++)
        p[i] = mo_adam_elementf(terms, flags, p[i], g[i], m + i, v + i,
                                flags & MO_ADAM_AMSGRAD ? vmax + i : NULL);
}

static void sgd(const mo_sgd_termsf *terms, unsigned flags, size_t n, float *p, const float *g, float *m)
{
    for (size_t i = 0; i < n; i++)
        p[i] = mo_sgd_elementf(terms, flags, p[i], g[i], flags & MO_SGD_MOMENTUM ? m + i : NULL);
}

static void scale(float factor, size_t n, float *x)
{
    for (size_t i = 0; i < n; i++)
        x[i] = mo_mulf(x[i], factor);
}

static void widen(mo_float kind, size_t n, const uint16_t *x, float *out)
{
    for (size_t i = 0; i < n; i++)
        out[i] = kind == MO_F16 ? mo_f16_to_float(x[i]) : mo_bf16_to_float(x[i]);
}

static void narrow(mo_float kind, size_t n, const float *x, uint16_t *out)
{
    for (size_t i = 0; i < n; i++)
        out[i] = (uint16_t)(kind == MO_F16 ? mo_f16_from_float(x[i]) : mo_bf16_from_float(x[i]));
}

static void dither(mo_float kind, size_t n, const float *x, uint32_t index, uint32_t step, uint16_t *out)
{
    for (size_t i = 0; i < n; i++) {
        const uint32_t d = mo_dither(index + (uint32_t)i, step);
        out[i] = (uint16_t)(kind == MO_F16 ? mo_f16_dithered(x[i], d) : mo_bf16_dithered(x[i], d));
    }
}

const mo_update_kernels mo_update_generic = {
    .isa = MO_ISA_GENERIC,
    .adam = adam,
    .sgd = sgd,
    .scale = scale,
    .widen = widen,
    .narrow = narrow,
    .dither = dither,
    .adam8 = mo_adam8_generic,
};
