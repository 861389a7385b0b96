#include "optim/update_kernels.h"

#include "test.h"

TEST(the_environment_chooses_the_table)
{
    for (mo_isa isa = MO_ISA_GENERIC; isa <= mo_isa_best(); isa++) {
        const mo_update_kernels *kernels;
        setenv("MEMOPT_ISA", mo_isa_name(isa), 1);
        mo_update_kernels_use(NULL);
        CHECK_EQ(mo_update_kernels_get(&kernels, NULL), MO_OK);
        CHECK_EQ(kernels->isa, isa);
        setenv("MEMOPT_ISA", "generic", 1); /* too late: it is looked at once */
        CHECK_EQ(mo_update_kernels_get(&kernels, NULL), MO_OK);
        CHECK_EQ(kernels->isa, isa);
    }
    unsetenv("MEMOPT_ISA");
    mo_update_kernels_use(NULL);
}

TEST(without_it_the_best_is_taken)
{
    const mo_update_kernels *kernels;
    CHECK_EQ(mo_update_kernels_get(&kernels, NULL), MO_OK);
    CHECK_EQ(kernels->isa, mo_isa_best());
    mo_update_kernels_use(NULL);
}

TEST(a_wrong_name_is_refused_until_it_is_put_right)
{
    const mo_update_kernels *kernels;
    mo_detail detail = {.text = ""};

    setenv("MEMOPT_ISA", "sse9", 1);
    CHECK_EQ(mo_update_kernels_get(&kernels, &detail), MO_INVALID);
    CHECK(strstr(detail.text, "sse9"));
    unsetenv("MEMOPT_ISA");
    CHECK_EQ(mo_update_kernels_get(&kernels, NULL), MO_OK);
    mo_update_kernels_use(NULL);
}

TEST(each_table_is_whole)
{
    static const mo_update_kernels *const tables[] = {
        &mo_update_generic,
#if defined(__x86_64__)
        &mo_update_avx2,
        &mo_update_avx512,
#endif
    };
    for (size_t k = 0; k < sizeof tables / sizeof *tables; k++) {
        const mo_update_kernels *t = tables[k];
        CHECK_EQ(t->isa, k);
        CHECK(t->adam && t->adam8 && t->sgd);
    }
}

TEST_MAIN
