/* What every instruction set's inner loops must do: the specification's bits. The file that includes this defines
 * RELAX, REACH and ISA. */
#include "checkpoint/relax.h"

#include <math.h>

#include "needs_isa.h"

enum { ROOM = 80 };

static void fill(uint64_t *random, float *array, size_t count)
{
    for (size_t k = 0; k < count; k++) {
        const uint64_t draw = test_random(random);
        array[k] = draw % 16 == 0 ? INFINITY : (float)(draw >> 40) * 0x1p-20f;
    }
}

TEST(the_least_is_taken_of_each_slot_and_nothing_else_is_touched)
{
    uint64_t random = test_seed();

    needs_isa(ISA);
    for (int round = 0; round < test_rounds(2000, 100000); round++) {
        const size_t count = test_random(&random) % 67, shift = test_random(&random) % 5;
        const bool two = test_random(&random) % 2;
        const float seconds = (float)(test_random(&random) >> 40) * 0x1p-22f;
        float best[ROOM], old[ROOM], left[ROOM], right[ROOM];

        fill(&random, best, ROOM);
        fill(&random, left, ROOM);
        fill(&random, right, ROOM);
        memcpy(old, best, sizeof old);
        RELAX(best + shift, left + 2, two ? right + 1 : NULL, seconds, count);
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

TEST(blocks_in_which_something_is_to_be_won_are_named)
{
    uint64_t random = test_seed();

    needs_isa(ISA);
    for (int round = 0; round < test_rounds(2000, 100000); round++) {
        float best[MO_RELAX_BLOCKS + 3], left[MO_RELAX_BLOCKS + 3], right[MO_RELAX_BLOCKS + 3];
        uint32_t mask;

        fill(&random, best, MO_RELAX_BLOCKS + 3);
        fill(&random, left, MO_RELAX_BLOCKS + 3);
        fill(&random, right, MO_RELAX_BLOCKS + 3);
        best[3] = -INFINITY;
        mask = REACH(best + 3, left + 1, right + 2, 1.5f);
        for (unsigned k = 0; k < 32; k++)
            CHECK_EQ(mask >> k & 1, k < MO_RELAX_BLOCKS && 1.5f + (left[k + 1] + right[k + 2]) < best[k + 3]);
    }
}
