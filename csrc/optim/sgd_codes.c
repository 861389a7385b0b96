/* SGD with a momentum buffer of codes, for every instruction set: a block is decoded to where only the processor's cache sees it, its
 * step is SGD's with an fp32 buffer, and what that leaves is coded. */
#include "optim/update_kernels.h"

#include <string.h>

#include "../kernels/adam_codes.cuh"

static void *behind(void *x, size_t first, mo_float kind)
{
    return (char *)x + first * mo_float_size(kind);
}

void mo_sgd_codes(const mo_update_kernels *kernels, const mo_sgd_termsf *terms, unsigned flags,
                  const mo_run *run)
{
    for (size_t first = 0; first < run->n; first += MO_CODE_ELEMENTS) {
        const size_t left = run->n - first, n = left < MO_CODE_ELEMENTS ? left : MO_CODE_ELEMENTS;
        float m[MO_CODE_ELEMENTS], *const scale = run->m_scale + first / MO_CODE_ELEMENTS;
        uint8_t codes[MO_CODE_ELEMENTS] = {0}, *const at = (uint8_t *)run->m + first;
        mo_run block = *run;

        block.n = n;
        block.p = behind(run->p, first, run->kind);
        block.g = behind(run->g, first, run->grad_kind);
        block.master = run->master ? run->master + first : NULL;
        block.m = m;
        block.state_kind = MO_F32;
        block.index += (uint32_t)first;
        memcpy(codes, at, n);
        kernels->decode(codes, *scale, m); /* zeros behind the last: they leave the scale alone */
        kernels->sgd(terms, flags, &block);
        *scale = kernels->encode(m, mo_code_dither_hashed(block.index, run->step), codes);
        memcpy(at, codes, n);
    }
}
