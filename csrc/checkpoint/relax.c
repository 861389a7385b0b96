#include "checkpoint/relax.h"

#include <stdlib.h>

mo_status mo_relax_get(const mo_relax_kernels **out, mo_detail *detail)
{
    static const mo_relax_kernels table[MO_ISA_COUNT] = {
        [MO_ISA_GENERIC] = {mo_relax_generic, mo_reach_generic},
#if defined(__x86_64__)
        [MO_ISA_AVX2] = {mo_relax_avx2, mo_reach_avx2},
        [MO_ISA_AVX512] = {mo_relax_avx512, mo_reach_avx512},
#endif
    };
    mo_isa isa;
    mo_status status = mo_isa_choose(getenv("MEMOPT_ISA"), &isa, detail);

    if (!status)
        *out = &table[isa];
    return status;
}
