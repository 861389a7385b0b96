/* The specification: a block in two loops, the second of which knows the scales. */
#include "optim/update_kernels.h"

#include "../kernels/adam8.cuh"

static void run_block(const mo_adam_termsf *terms, unsigned flags, float *p, const float *g,
                      mo_adam8_states states, uint32_t index, uint32_t step)
{
    const float unit_m = mo_adam8_unit_m(*states.m_scale), unit_v = mo_adam8_unit_v(*states.v_scale);
    float m[MO_ADAM8_ELEMENTS], v[MO_ADAM8_ELEMENTS], largest_m = 0, largest_v = 0, per_m, per_v;

    for (unsigned i = 0; i < MO_ADAM8_ELEMENTS; i++) {
        m[i] = mo_adam8_decode_m(states.m[i], unit_m);
        v[i] = mo_adam8_decode_v(states.v[i], unit_v);
        p[i] = mo_adam_elementf(terms, flags, p[i], g[i], m + i, v + i, NULL);
        if (fabsf(m[i]) > largest_m)
            largest_m = fabsf(m[i]);
        if (v[i] > largest_v)
            largest_v = v[i];
    }
    *states.m_scale = mo_adam8_scale(largest_m);
    *states.v_scale = mo_adam8_scale(largest_v);
    per_m = mo_adam8_per_m(*states.m_scale);
    per_v = mo_adam8_per_v(*states.v_scale);
    for (unsigned i = 0; i < MO_ADAM8_ELEMENTS; i++) {
        states.m[i] = (uint8_t)mo_adam8_encode_m(m[i], per_m);
        states.v[i] = (uint8_t)mo_adam8_encode_v(v[i], per_v, mo_adam8_dither(index + i, step));
    }
}

void mo_adam8_generic(const mo_adam_termsf *terms, unsigned flags, size_t blocks, float *p, const float *g,
                      mo_adam8_states states, uint32_t index, uint32_t step)
{
    for (size_t b = 0; b < blocks; b++) {
        const size_t at = b * MO_ADAM8_ELEMENTS;
        const mo_adam8_states block = {states.m + at, states.v + at, states.m_scale + b, states.v_scale + b};
        run_block(terms, flags, p + at, g + at, block, index + (uint32_t)at, step);
    }
}
