/* The oracle is the kernel's own list of what the processor has. */
#include "base/isa.h"

#include "test.h"

static bool kernel_lists(const char *flag)
{
    static char flags[8192];
    char padded[32];
    if (!*flags) {
        FILE *file = fopen("/proc/cpuinfo", "r");
        while (file && fgets(flags, sizeof flags, file) && strncmp(flags, "flags", 5) != 0)
            continue;
        if (file)
            fclose(file);
        if (strncmp(flags, "flags", 5) != 0)
            TEST_FAIL("/proc/cpuinfo has no line of flags");
        flags[strcspn(flags, "\n")] = ' ';
    }
    snprintf(padded, sizeof padded, " %s ", flag);
    return strstr(flags, padded) != NULL;
}

TEST(the_best_is_what_the_processor_has)
{
#if defined(__x86_64__)
    const bool avx2 = kernel_lists("avx2") && kernel_lists("fma") && kernel_lists("f16c");
    const bool avx512 = avx2 && kernel_lists("avx512f") && kernel_lists("avx512bw") &&
                        kernel_lists("avx512vl") && kernel_lists("avx512dq");
    CHECK_EQ(mo_isa_best(), avx512 ? MO_ISA_AVX512 : avx2 ? MO_ISA_AVX2 : MO_ISA_GENERIC);
#else
    (void)kernel_lists;
    CHECK_EQ(mo_isa_best(), MO_ISA_GENERIC);
#endif
}

TEST(nothing_asked_for_is_the_best)
{
    mo_isa isa = MO_ISA_COUNT;
    CHECK_EQ(mo_isa_choose(NULL, &isa, NULL), MO_OK);
    CHECK_EQ(isa, mo_isa_best());
    isa = MO_ISA_COUNT;
    CHECK_EQ(mo_isa_choose("", &isa, NULL), MO_OK);
    CHECK_EQ(isa, mo_isa_best());
}

TEST(what_the_processor_has_can_be_chosen_and_more_is_refused)
{
    for (mo_isa wanted = MO_ISA_GENERIC; wanted < MO_ISA_COUNT; wanted++) {
        mo_isa isa = MO_ISA_COUNT;
        mo_detail detail;
        const mo_status status = mo_isa_choose(mo_isa_name(wanted), &isa, &detail);
        if (wanted <= mo_isa_best()) {
            CHECK_EQ(status, MO_OK);
            CHECK_EQ(isa, wanted);
        } else {
            CHECK_EQ(status, MO_UNSUPPORTED);
            CHECK_EQ(isa, MO_ISA_COUNT);
            CHECK(strstr(detail.text, mo_isa_name(wanted)) &&
                  strstr(detail.text, mo_isa_name(mo_isa_best())));
        }
    }
}

TEST(an_unknown_name_is_refused_and_quoted)
{
    static const char *const names[] = {"AVX2", "avx", "avx512 ", " avx2", "sse", "?", "genericgeneric", "1"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        mo_isa isa = MO_ISA_COUNT;
        mo_detail detail;
        CHECK_EQ(mo_isa_choose(names[i], &isa, &detail), MO_INVALID);
        CHECK_EQ(isa, MO_ISA_COUNT);
        CHECK(strstr(detail.text, names[i]) && strstr(detail.text, "generic, avx2, avx512"));
        CHECK_EQ(mo_isa_choose(names[i], &isa, NULL), MO_INVALID);
    }
}

TEST(a_number_that_is_no_instruction_set_has_no_name)
{
    CHECK_STR(mo_isa_name(MO_ISA_COUNT), "?");
    CHECK_STR(mo_isa_name((mo_isa)-1), "?");
}

TEST_MAIN
