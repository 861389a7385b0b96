/* The specification: a loop over each formula. */
#include "optim/update_kernels.h"

#include "optim/element.h"

static void adam(const mo_adam_termsf *terms, unsigned flags, const mo_run *run)
{
    const mo_float kind = run->state_kind;

    for (size_t i = 0; i < run->n; i++) {
        float m = mo_element_read(kind, run->m, i), vmax = 0, p,
              v = mo_element_read(run->factored ? MO_F32 : kind, run->v, i);

        if (flags & MO_ADAM_AMSGRAD)
            vmax = mo_element_read(kind, run->vmax, i);
        p = mo_adam_elementf(terms, flags, mo_element_read_p(run, i), mo_element_read_g(run, i), &m, &v,
                             &vmax);
        mo_element_write_p(run, i, p);
        if (!run->factored)
            mo_element_write(kind, run->v, i, v);
        else if (!mo_code_is_kept(v))
            m = 0;
        mo_element_write(kind, run->m, i, m);
        if (flags & MO_ADAM_AMSGRAD)
            mo_element_write(kind, run->vmax, i, vmax);
    }
}

static void sgd(const mo_sgd_termsf *terms, unsigned flags, const mo_run *run)
{
    for (size_t i = 0; i < run->n; i++) {
        float m = flags & MO_SGD_MOMENTUM ? mo_element_read(run->state_kind, run->m, i) : 0;
        const float p =
            mo_sgd_elementf(terms, flags, mo_element_read_p(run, i), mo_element_read_g(run, i), &m);

        mo_element_write_p(run, i, p);
        if (flags & MO_SGD_MOMENTUM)
            mo_element_write(run->state_kind, run->m, i, m);
    }
}

const mo_update_kernels mo_update_generic = {
    .isa = MO_ISA_GENERIC,
    .adam = adam,
    .adam_codes = mo_adam_codes_generic,
    .sgd = sgd,
    .decode = mo_decode_generic,
    .encode = mo_encode_generic,
    .factored = mo_factored_generic,
    .product = mo_product_generic,
};
