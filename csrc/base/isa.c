#include "base/isa.h"

#include <string.h>

const char *mo_isa_name(mo_isa isa)
{
    static const char *const names[MO_ISA_COUNT] = {"generic", "avx2", "avx512"};
    return (unsigned)isa < MO_ISA_COUNT ? names[isa] : "?";
}

mo_isa mo_isa_best(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
        return MO_ISA_GENERIC;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return MO_ISA_AVX512;
    return MO_ISA_AVX2;
#else
    return MO_ISA_GENERIC;
#endif
}

mo_status mo_isa_choose(const char *name, mo_isa *out, mo_detail *detail)
{
    mo_isa best = mo_isa_best();

    if (!name || !*name) {
        *out = best;
        return MO_OK;
    }
    for (mo_isa isa = MO_ISA_GENERIC; isa < MO_ISA_COUNT; isa++) {
        if (strcmp(name, mo_isa_name(isa)) != 0)
            continue;
        if (isa > best)
            return mo_fail(detail, MO_UNSUPPORTED, 0, "MEMOPT_ISA=%s, but this processor has no more than %s", name,
                           mo_isa_name(best));
        *out = isa;
        return MO_OK;
    }
    return mo_fail(detail, MO_INVALID, 0, "MEMOPT_ISA=%.40s is not one of generic, avx2, avx512", name);
}
