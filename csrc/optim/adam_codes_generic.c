/* The specification: a block in two loops, the second of which knows the scales. */
#include "optim/update_kernels.h"

#include "optim/element.h"

/* Elements [first, end) of the run: a block, or what there is of the last. */
static void run_block(const mo_adam_termsf *terms, unsigned flags, const mo_run *run, size_t first,
                      size_t end)
{
    const unsigned bits = run->code_bits;
    uint8_t *const m_codes = run->m, *const v_codes = run->v;
    float none_scale = 0, *const m_scale = run->m_scale + first / MO_CODE_ELEMENTS,
          *const v_scale = run->factored ? &none_scale : run->v_scale + first / MO_CODE_ELEMENTS;
    const float unit_m = mo_code_unit_m(bits, *m_scale), unit_v = mo_code_unit_v(bits, *v_scale);
    float m[MO_CODE_ELEMENTS], v[MO_CODE_ELEMENTS], largest_m = 0, largest_v = 0;
    float none = 0; /* there is no vmax beside codes */

    for (size_t i = first; i < end; i++) {
        float *mean = &m[i - first], *square = &v[i - first];
        *mean = mo_code_decode_m(bits, mo_element_code(bits, m_codes, i), unit_m);
        *square = run->factored ? ((const float *)run->v)[i]
                                : mo_code_decode_v(bits, mo_element_code(bits, v_codes, i), unit_v);
        mo_element_write_p(run, i,
                           mo_adam_elementf(terms, flags, mo_element_read_p(run, i),
                                            mo_element_read_g(run, i), mean, square, &none));
        if (!mo_code_is_kept(*square))
            *mean = *square = 0;
        if (fabsf(*mean) > largest_m)
            largest_m = fabsf(*mean);
        if (*square > largest_v)
            largest_v = *square;
    }
    *m_scale = mo_code_scale(largest_m);
    *v_scale = mo_code_scale(largest_v);
    for (size_t i = first; i < end; i++) {
        const uint32_t index = run->index + (uint32_t)i;
        mo_element_put_code(bits, m_codes, i,
                            mo_code_encode_m(bits, m[i - first], mo_code_per_m(bits, *m_scale),
                                             mo_code_dither_m(bits, index, run->step)));
        if (!run->factored)
            mo_element_put_code(bits, v_codes, i,
                                mo_code_encode_v(bits, v[i - first], mo_code_per_v(bits, *v_scale),
                                                 mo_code_dither(index, run->step)));
    }
}

void mo_adam_codes_generic(const mo_adam_termsf *terms, unsigned flags, const mo_run *run)
{
    for (size_t first = 0; first < run->n; first += MO_CODE_ELEMENTS)
        run_block(terms, flags, run, first,
                  run->n - first < MO_CODE_ELEMENTS ? run->n : first + MO_CODE_ELEMENTS);
}

void mo_decode_generic(const uint8_t *codes, float scale, float *m)
{
    for (size_t i = 0; i < MO_CODE_ELEMENTS; i++)
        m[i] = mo_code_decode_m(8, codes[i], mo_code_unit_m(8, scale));
}

float mo_encode_generic(const float *m, uint32_t dither, uint8_t *codes)
{
    float kept[MO_CODE_ELEMENTS], scale = 0;

    for (size_t i = 0; i < MO_CODE_ELEMENTS; i++) {
        kept[i] = mo_code_is_kept(fabsf(m[i])) ? m[i] : 0;
        scale = fabsf(kept[i]) > scale ? fabsf(kept[i]) : scale;
    }
    scale = mo_code_scale(scale);
    for (size_t i = 0; i < MO_CODE_ELEMENTS; i++)
        codes[i] = (uint8_t)mo_code_encode_m(8, kept[i], mo_code_per_m(8, scale),
                                             dither + (uint32_t)i * MO_CODE_DITHER_INDEX);
    return scale;
}
