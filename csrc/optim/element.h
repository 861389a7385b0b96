/* One element of a run, read as fp32 and written back: what the specification does around each formula. */
#ifndef MO_ELEMENT_H
#define MO_ELEMENT_H

#include "../kernels/adam_codes.cuh"
#include "../kernels/dither.cuh"
#include "optim/update_kernels.h"

static inline float mo_element_read(mo_float kind, const void *x, size_t i)
{
    if (kind == MO_F32)
        return ((const float *)x)[i];
    return kind == MO_F16 ? mo_f16_to_float(((const uint16_t *)x)[i])
                          : mo_bf16_to_float(((const uint16_t *)x)[i]);
}

static inline void mo_element_write(mo_float kind, void *x, size_t i, float value)
{
    if (kind == MO_F32)
        ((float *)x)[i] = value;
    else
        ((uint16_t *)x)[i] =
            (uint16_t)(kind == MO_F16 ? mo_f16_from_float(value) : mo_bf16_from_float(value));
}

static inline float mo_element_read_p(const mo_run *run, size_t i)
{
    return run->master ? run->master[i] : mo_element_read(run->kind, run->p, i);
}

static inline void mo_element_write_p(const mo_run *run, size_t i, float value)
{
    if (run->master)
        run->master[i] = value;
    if (run->stochastic && !run->master && run->kind != MO_F32) {
        const uint32_t dither = mo_dither(run->index + (uint32_t)i, run->step);
        ((uint16_t *)run->p)[i] = (uint16_t)(run->kind == MO_F16 ? mo_f16_dithered(value, dither)
                                                                 : mo_bf16_dithered(value, dither));
    } else {
        mo_element_write(run->kind, run->p, i, value);
    }
}

static inline float mo_element_read_g(const mo_run *run, size_t i)
{
    float g = mo_element_read(run->grad_kind, run->g, i);

    if (run->stored != 1) {
        g = mo_mulf(g, run->stored);
        mo_element_write(run->grad_kind, run->g, i, g);
    }
    return g;
}

/* Code number i of an array of codes of so many bits, 8 or 4. */
static inline unsigned mo_element_code(unsigned bits, const uint8_t *codes, size_t i)
{
    return bits == 8 ? codes[i] : codes[i / 2] >> i % 2 * 4 & 15;
}

/* From the first to the last of a block: a byte is begun by the first of its codes. */
static inline void mo_element_put_code(unsigned bits, uint8_t *codes, size_t i, unsigned code)
{
    if (bits == 8)
        codes[i] = (uint8_t)code;
    else
        codes[i / 2] = (uint8_t)(i % 2 ? codes[i / 2] | code << 4 : code);
}

#endif
