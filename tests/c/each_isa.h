/* TEST_EACH_ISA(name): a function of `mo_isa isa` as a test for each instruction set, name_generic, name_avx2 and name_avx512. On a
 * processor that lacks the instructions the test is skipped, and said to be. */
#ifndef MEMOPT_EACH_ISA_H
#define MEMOPT_EACH_ISA_H

#include "base/isa.h"
#include "test.h"

static void run_with_isa(void (*test)(mo_isa), mo_isa isa)
{
    mo_isa chosen;
    mo_detail detail;

    if (isa > mo_isa_best()) {
        CHECK_EQ(mo_isa_choose(mo_isa_name(isa), &chosen, &detail), MO_UNSUPPORTED);
        TEST_SKIP("%s", detail.text);
    }
    test(isa);
}

#define TEST_EACH_ISA(name_)                                                                                 \
    static void each_##name_(mo_isa isa);                                                                    \
    TEST(name_##_generic)                                                                                    \
    {                                                                                                        \
        run_with_isa(each_##name_, MO_ISA_GENERIC);                                                          \
    }                                                                                                        \
    TEST(name_##_avx2)                                                                                       \
    {                                                                                                        \
        run_with_isa(each_##name_, MO_ISA_AVX2);                                                             \
    }                                                                                                        \
    TEST(name_##_avx512)                                                                                     \
    {                                                                                                        \
        run_with_isa(each_##name_, MO_ISA_AVX512);                                                           \
    }                                                                                                        \
    static void each_##name_(mo_isa isa)

#endif
