#include "optim/update_kernels.h"

#include <stdatomic.h>
#include <stdlib.h>

static _Atomic(const mo_update_kernels *) chosen;

mo_status mo_update_kernels_get(const mo_update_kernels **out, mo_detail *detail)
{
    static const mo_update_kernels *const tables[MO_ISA_COUNT] = {
        [MO_ISA_GENERIC] = &mo_update_generic,
#if defined(__x86_64__)
        [MO_ISA_AVX2] = &mo_update_avx2,
        [MO_ISA_AVX512] = &mo_update_avx512,
#endif
    };
    mo_isa isa;
    mo_status status;

    *out = atomic_load_explicit(&chosen, memory_order_acquire);
    if (*out)
        return MO_OK;
    status = mo_isa_choose(getenv("MEMOPT_ISA"), &isa, detail);
    if (status)
        return status;
    *out = tables[isa];
    atomic_store_explicit(&chosen, *out, memory_order_release);
    return MO_OK;
}

void mo_update_kernels_use(const mo_update_kernels *kernels)
{
    atomic_store_explicit(&chosen, kernels, memory_order_release);
}
