#include "checkpoint/relax.h"

#include "test.h"

TEST(the_kernels_are_those_that_the_environment_names)
{
    const mo_relax_kernels *kernels;

    CHECK_EQ(setenv("MEMOPT_ISA", "generic", 1), 0);
    CHECK_EQ(mo_relax_get(&kernels, NULL), MO_OK);
    CHECK(kernels->relax == mo_relax_generic && kernels->reach == mo_reach_generic);
    CHECK_EQ(unsetenv("MEMOPT_ISA"), 0);
    CHECK_EQ(mo_relax_get(&kernels, NULL), MO_OK);
    CHECK((mo_isa_best() == MO_ISA_GENERIC) == (kernels->relax == mo_relax_generic));
}

TEST(an_unknown_name_is_refused)
{
    const mo_relax_kernels *kernels = NULL;
    mo_detail detail;

    CHECK_EQ(setenv("MEMOPT_ISA", "mmx", 1), 0);
    CHECK_EQ(mo_relax_get(&kernels, &detail), MO_INVALID);
    CHECK_EQ(unsetenv("MEMOPT_ISA"), 0);
    CHECK(!kernels && strstr(detail.text, "mmx"));
}

TEST_MAIN
