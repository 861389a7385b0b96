/* A block's step is Adam's on the decoded states, and what is coded afterwards is right in the mean. */
#define RUN mo_adam8_generic
#define ISA MO_ISA_GENERIC
#include "adam8_kernel_tests.h"

TEST(a_blocks_step_is_adams_on_the_decoded_states_before_they_are_coded)
{
    const mo_adam_terms terms =
        mo_adam_terms_of(1e-3, 0.9, 0.999, 1e-8, 0.1, /* decoupled */ 1, /* maximize */ 0, 9, 1);
    const mo_adam_termsf c = mo_adam_narrow(&terms);
    uint64_t random = test_seed();
    blocks b = blocks_of(), before = blocks_of();

    blocks_fill(&b, &random, /* cases */ false);
    blocks_copy(&before, &b);
    const mo_run run = run_of(&b, ELEMENTS, 0, 10);
    RUN(&c, 0, &run);
    for (size_t k = 0; k < BLOCKS; k++) {
        float largest_m = 0, largest_v = 0;
        for (size_t i = k * MO_ADAM8_ELEMENTS; i < (k + 1) * MO_ADAM8_ELEMENTS; i++) {
            float m = mo_adam8_decode_m(before.m[i], mo_adam8_unit_m(before.m_scale.x[k]));
            float v = mo_adam8_decode_v(before.v[i], mo_adam8_unit_v(before.v_scale.x[k]));
            CHECK(b.p.x[i] == mo_adam_elementf(&c, 0, before.p.x[i], before.g.x[i], &m, &v, NULL));
            largest_m = fmaxf(largest_m, fabsf(m));
            largest_v = fmaxf(largest_v, v);
        }
        CHECK(b.m_scale.x[k] == largest_m && b.v_scale.x[k] == largest_v);
    }
    blocks_free(&b);
    blocks_free(&before);
}

/* v' = E v: over the steps that the dither goes through, the mean of what is decoded is v to a hundredth of a code. */
TEST(the_second_moment_is_coded_without_bias)
{
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(200, 20000); round++) {
        const float scale = float_ordinary(&random),
                    v = fabsf(scale) * exp2f(-(float)(test_random(&random) % 1500) / 100);
        const float per = mo_adam8_per_v(fabsf(scale)), unit = mo_adam8_unit_v(fabsf(scale));
        const uint32_t index = (uint32_t)test_random(&random);
        const double code =
            ((double)v + (double)fabsf(scale) / 63487) / 16; /* the widest a code can be there */
        double sum = 0;
        for (uint32_t step = 0; step < 4096; step++)
            sum += (double)mo_adam8_decode_v(mo_adam8_encode_v(v, per, mo_adam8_dither(index, step)), unit);
        CHECK(fabs(sum / 4096 - (double)v) <= code / 100 + (double)v * 4e-7);
    }
}

TEST(gradients_of_zero_leave_zero_states_and_decay_alone)
{
    const mo_adam_terms terms =
        mo_adam_terms_of(1e-3, 0.9, 0.999, 1e-8, 0.1, /* decoupled */ 1, /* maximize */ 0, 0, 1);
    const mo_adam_termsf c = mo_adam_narrow(&terms);
    blocks b = blocks_of();

    memset(b.m, 0, ELEMENTS);
    memset(b.v, 0, ELEMENTS);
    for (size_t i = 0; i < ELEMENTS; i++) {
        b.p.x[i] = 2;
        b.g.x[i] = 0;
    }
    for (size_t k = 0; k < BLOCKS; k++)
        b.m_scale.x[k] = b.v_scale.x[k] = 0;
    const mo_run run = run_of(&b, ELEMENTS, 0, 1);
    RUN(&c, 0, &run);
    for (size_t i = 0; i < ELEMENTS; i++)
        CHECK(b.p.x[i] == 2 * c.decay && b.m[i] == 0 && b.v[i] == 0);
    CHECK(b.m_scale.x[0] == 0 && b.v_scale.x[BLOCKS - 1] == 0);
    blocks_free(&b);
}

TEST_MAIN
