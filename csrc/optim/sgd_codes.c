/* SGD with a momentum buffer of codes, for every instruction set: a block is decoded to where only the processor's cache sees it, its
 * step is SGD's with an fp32 buffer, and what that leaves is coded. */
#include "optim/update_kernels.h"

#include <string.h>

#include "../kernels/adam_codes.cuh"

static void *behind(void *x, size_t first, mo_float kind)
{
    return (char *)x + first * mo_float_size(kind);
}

/* The lines of a block two further on: while a block is decoded and coded no others would come. An address behind the array's end
 * does no harm. */
static void fetch_ahead(const void *x, mo_float kind)
{
    const size_t bytes = (size_t)MO_CODE_ELEMENTS * mo_float_size(kind);

    for (size_t at = 2 * bytes; at < 3 * bytes; at += 64)
        __builtin_prefetch((const char *)x + at);
}

void mo_sgd_codes(const mo_update_kernels *kernels, const mo_sgd_termsf *terms, unsigned flags,
                  const mo_run *run)
{
    for (size_t first = 0; first < run->n; first += MO_CODE_ELEMENTS) {
        const size_t left = run->n - first, n = left < MO_CODE_ELEMENTS ? left : MO_CODE_ELEMENTS;
        float *const scale = run->m_scale + first / MO_CODE_ELEMENTS;
        float m[MO_CODE_ELEMENTS] __attribute__((aligned(64)));
        uint8_t *const at = (uint8_t *)run->m + first, some[MO_CODE_ELEMENTS];
        uint8_t *const codes = n == MO_CODE_ELEMENTS ? at : some;
        mo_run block = *run;

        block.n = n;
        block.p = behind(run->p, first, run->kind);
        block.g = behind(run->g, first, run->grad_kind);
        block.master = run->master ? run->master + first : NULL;
        block.m = m;
        block.state_kind = MO_F32;
        block.index += (uint32_t)first;
        fetch_ahead(block.p, run->kind);
        fetch_ahead(block.g, run->grad_kind);
        if (codes == some) { /* zeros behind the last leave the scale alone */
            memset(some, 0, sizeof some);
            memcpy(some, at, n);
        }
        kernels->decode(codes, *scale, m);
        kernels->sgd(terms, flags, &block);
        *scale = kernels->encode(m, mo_code_dither_hashed(block.index, run->step), codes);
        if (codes == some)
            memcpy(at, some, n);
    }
}
