#include "base/isa.h"

#include <stdbool.h>
#include <string.h>

const char *mo_isa_name(mo_isa isa)
{
    static const char *const names[MO_ISA_COUNT] = {"generic", "avx2", "avx512"};
    return (unsigned)isa < MO_ISA_COUNT ? names[isa] : "?";
}

#if defined(__x86_64__)
#include <cpuid.h>

/* clang 14 does not know the name "f16c". Whether the system keeps the registers, AVX2's own answer says. */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

mo_isa mo_isa_best(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c())
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
            return mo_fail(detail, MO_UNSUPPORTED, 0, "MEMOPT_ISA=%s, but this processor has no more than %s",
                           name, mo_isa_name(best));
        *out = isa;
        return MO_OK;
    }
    return mo_fail(detail, MO_INVALID, 0, "MEMOPT_ISA=%.40s is not one of generic, avx2, avx512", name);
}
