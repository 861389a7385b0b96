/* The solver's two inner loops: the specification's bits with every instruction set, and the choice among them. */
#include "checkpoint/relax.h"

#include <math.h>

#include "each_isa.h"

static const mo_relax_kernels *kernels_of(mo_isa isa)
{
    const mo_relax_kernels *kernels;

    CHECK_EQ(setenv("MEMOPT_ISA", mo_isa_name(isa), 1), 0);
    CHECK_EQ(mo_relax_get(&kernels, NULL), MO_OK);
    CHECK_EQ(unsetenv("MEMOPT_ISA"), 0);
    return kernels;
}

enum { ROOM = 80 };

static void fill(uint64_t *random, float *array, size_t count)
{
    for (size_t k = 0; k < count; k++) {
        const uint64_t draw = test_random(random);
        array[k] = draw % 16 == 0 ? INFINITY : (float)(draw >> 40) * 0x1p-20f;
    }
}

TEST_EACH_ISA(the_least_is_taken_of_each_slot_and_nothing_else_is_touched)
{
    const mo_relax_kernels *kernels = kernels_of(isa);
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(2000, 100000); round++) {
        const size_t count = test_random(&random) % 67, shift = test_random(&random) % 5;
        const bool two = test_random(&random) % 2;
        const float seconds = (float)(test_random(&random) >> 40) * 0x1p-22f;
        float best[ROOM], old[ROOM], left[ROOM], right[ROOM];

        fill(&random, best, ROOM);
        fill(&random, left, ROOM);
        fill(&random, right, ROOM);
        memcpy(old, best, sizeof old);
        kernels->relax(best + shift, left + 2, two ? right + 1 : NULL, seconds, count);
        for (size_t k = 0; k < ROOM; k++) {
            float wanted = old[k];
            if (k >= shift && k < shift + count) {
                const float sum = two ? left[k - shift + 2] + right[k - shift + 1] : left[k - shift + 2];
                wanted = fminf(old[k], seconds + sum);
            }
            CHECK(best[k] == wanted);
        }
    }
}

TEST_EACH_ISA(blocks_in_which_something_is_to_be_won_are_named)
{
    const mo_relax_kernels *kernels = kernels_of(isa);
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(2000, 100000); round++) {
        float best[MO_RELAX_BLOCKS + 3], left[MO_RELAX_BLOCKS + 3], right[MO_RELAX_BLOCKS + 3];
        uint32_t mask;

        fill(&random, best, MO_RELAX_BLOCKS + 3);
        fill(&random, left, MO_RELAX_BLOCKS + 3);
        fill(&random, right, MO_RELAX_BLOCKS + 3);
        best[3] = -INFINITY;
        mask = kernels->reach(best + 3, left + 1, right + 2, 1.5f);
        for (unsigned k = 0; k < 32; k++)
            CHECK_EQ(mask >> k & 1, k < MO_RELAX_BLOCKS && 1.5f + (left[k + 1] + right[k + 2]) < best[k + 3]);
    }
}

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
