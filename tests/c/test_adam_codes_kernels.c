/* Every instruction set's block kernel: the specification's parameters, codes and scales, bit for bit; that a block's step is Adam's on the
 * decoded states, and what is coded afterwards right in the mean. */
#include "optim/update_kernels.h"

#include "../kernels/adam_codes.cuh"
#include "each_isa.h"
#include "float_cases.h"
#include "optim/element.h"

static mo_adam_kernel *const kernels[] = {
    mo_adam_codes_generic,
#if defined(__x86_64__)
    mo_adam_codes_avx2,
    mo_adam_codes_avx512,
#endif
};

enum { BLOCKS = 5, ELEMENTS = BLOCKS * MO_CODE_ELEMENTS };

static const unsigned formats[] = {8, 4};

typedef struct blocks {
    unsigned bits; /* of a code */
    shifted p, g, m_scale, v_scale;
    uint8_t *m, *v; /* one past a boundary */
} blocks;

static blocks blocks_of(unsigned bits)
{
    return (blocks){bits,
                    shifted_of(ELEMENTS, 3),
                    shifted_of(ELEMENTS, 5),
                    shifted_of(BLOCKS, 1),
                    shifted_of(BLOCKS, 0),
                    (uint8_t *)malloc(ELEMENTS + 1) + 1,
                    (uint8_t *)malloc(ELEMENTS + 1) + 1};
}

static void blocks_free(blocks *b)
{
    free(b->p.block);
    free(b->g.block);
    free(b->m_scale.block);
    free(b->v_scale.block);
    free(b->m - 1);
    free(b->v - 1);
}

/* cases: with what goes wrong, in the gradients and the scales; else ordinary. */
static void blocks_fill(blocks *b, uint64_t *random, bool cases)
{
    for (size_t i = 0; i < ELEMENTS; i++) {
        b->p.x[i] = float_ordinary(random);
        b->g.x[i] = cases ? float_case(random) : float_ordinary(random);
        b->m[i] = (uint8_t)test_random(random);
        b->v[i] = (uint8_t)test_random(random);
    }
    for (size_t k = 0; k < BLOCKS; k++) { /* a scale is 0, or between MO_CODE_TINY and MO_CODE_HUGE */
        b->m_scale.x[k] = mo_code_scale(cases ? fmaxf(0, fabsf(float_case(random))) : 1);
        b->v_scale.x[k] = mo_code_scale(cases ? fmaxf(0, fabsf(float_case(random))) : 1);
    }
}

static void blocks_copy(blocks *to, const blocks *from)
{
    memcpy(to->p.x, from->p.x, ELEMENTS * sizeof(float));
    memcpy(to->g.x, from->g.x, ELEMENTS * sizeof(float));
    memcpy(to->m_scale.x, from->m_scale.x, BLOCKS * sizeof(float));
    memcpy(to->v_scale.x, from->v_scale.x, BLOCKS * sizeof(float));
    memcpy(to->m, from->m, ELEMENTS);
    memcpy(to->v, from->v, ELEMENTS);
}

static mo_run run_of(const blocks *b, size_t n, uint32_t index, uint32_t step)
{
    return (mo_run){.n = n,
                    .p = b->p.x,
                    .g = b->g.x,
                    .m = b->m,
                    .v = b->v,
                    .m_scale = b->m_scale.x,
                    .v_scale = b->v_scale.x,
                    .code_bits = b->bits,
                    .stored = 1,
                    .index = index,
                    .step = step};
}

static unsigned m_of(const blocks *b, size_t i)
{
    return mo_element_code(b->bits, b->m, i);
}

static unsigned v_of(const blocks *b, size_t i)
{
    return mo_element_code(b->bits, b->v, i);
}

static void check_same(const blocks *a, const blocks *b)
{
    for (size_t i = 0; i < ELEMENTS; i++) {
        test_checks++;
        if (!same_float(a->p.x[i], b->p.x[i]) || m_of(a, i) != m_of(b, i) || v_of(a, i) != v_of(b, i))
            TEST_FAIL("element %zu: p %a, codes %u %u; expected %a, %u %u", i, (double)a->p.x[i], m_of(a, i),
                      v_of(a, i), (double)b->p.x[i], m_of(b, i), v_of(b, i));
    }
    for (size_t k = 0; k < BLOCKS; k++) {
        CHECK(same_float(a->m_scale.x[k], b->m_scale.x[k]));
        CHECK(same_float(a->v_scale.x[k], b->v_scale.x[k]));
    }
}

TEST_EACH_ISA(blocks_are_the_specifications_bit_for_bit_over_many_steps)
{
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(40, 4000); round++) {
        const unsigned bits = formats[round / 4 % 2];
        blocks one = blocks_of(bits), two = blocks_of(bits);
        const uint32_t index = (uint32_t)test_random(&random) & ~255u;
        const unsigned flags = round & 1 ? MO_ADAM_L2 : 0;
        const size_t n =
            round % 3 ? 1 + test_random(&random) % ELEMENTS : ELEMENTS; /* the last block may be short */
        blocks_fill(&one, &random, /* cases */ round & 2);
        blocks_copy(&two, &one);
        for (uint32_t step = 1; step < 20; step++) {
            const mo_adam_terms terms =
                mo_adam_terms_of(1e-3, 0.9, 0.999, 1e-8, 0.1, !flags, round & 4, (float)step - 1, 0.5f);
            const mo_adam_termsf c = mo_adam_narrow(&terms);
            const mo_run first = run_of(&one, n, index, step), second = run_of(&two, n, index, step);
            kernels[isa](&c, flags, &first);
            mo_adam_codes_generic(&c, flags, &second);
            check_same(&one, &two);
            for (size_t i = 0; i < ELEMENTS; i++)
                one.g.x[i] = two.g.x[i] =
                    round & 2 && step % 5 == 0 ? float_case(&random) : float_ordinary(&random);
        }
        blocks_free(&one);
        blocks_free(&two);
    }
}

/* Beside the same block without that gradient. */
TEST_EACH_ISA(a_gradient_that_is_huge_or_no_number_changes_its_own_element_alone)
{
    static const float bad[] = {1e20f, -1e20f, 1e30f, FLT_MAX, -FLT_MAX, INFINITY, -INFINITY, NAN};
    uint64_t random = test_seed();

    for (size_t k = 0; k < 2 * sizeof bad / sizeof *bad; k++) {
        const float value = bad[k / 2];
        const unsigned bits = formats[k % 2];
        blocks one = blocks_of(bits), two = blocks_of(bits);
        const size_t at = test_random(&random) % ELEMENTS;
        blocks_fill(&one, &random, /* cases */ false);
        one.m[at * bits / 8] = one.v[at * bits / 8] = 0;
        blocks_copy(&two, &one);
        for (uint32_t step = 1; step < 12; step++) {
            const mo_adam_terms terms =
                mo_adam_terms_of(1e-3, 0.9, 0.999, 1e-8, 0.1, /* decoupled */ 1, 0, (float)step - 1, 1);
            const mo_adam_termsf c = mo_adam_narrow(&terms);
            const mo_run first = run_of(&one, ELEMENTS, 0, step), second = run_of(&two, ELEMENTS, 0, step);
            one.g.x[at] = step == 2 ? value : 0;
            two.g.x[at] = 0;
            kernels[isa](&c, 0, &first);
            kernels[isa](&c, 0, &second);
            CHECK(isnan(one.p.x[at]) == (step >= 2 && !isfinite(value)));
            if (isnan(one.p.x[at])) /* the one difference that there may be */
                two.p.x[at] = one.p.x[at];
            check_same(&one, &two);
        }
        blocks_free(&one);
        blocks_free(&two);
    }
}

/* Up to the sizes at which squares, sums and scales end. */
TEST_EACH_ISA(finite_gradients_leave_finite_parameters_and_scales)
{
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(20, 2000); round++) {
        blocks b = blocks_of(formats[round / 4 % 2]);
        const float beta1 = (float[]){0, 0.9f, 0.999f}[round % 3];
        blocks_fill(&b, &random, /* cases */ false);
        for (uint32_t step = 1; step < 12; step++) {
            const double beta2 = round & 1 ? 0.999 : 1 - 1e-7;
            const mo_adam_terms terms =
                mo_adam_terms_of(1e-3, (double)beta1, beta2, 1e-8, 0.1, round & 2, 0, (float)step - 1, 1);
            const mo_adam_termsf c = mo_adam_narrow(&terms);
            const mo_run run = run_of(&b, ELEMENTS, 0, step);
            for (size_t i = 0; i < ELEMENTS; i++)
                b.g.x[i] = test_random(&random) % 64
                               ? float_ordinary(&random)
                               : ldexpf(float_ordinary(&random), (int)(test_random(&random) % 127));
            kernels[isa](&c, round & 2 ? 0 : MO_ADAM_L2, &run);
            for (size_t i = 0; i < ELEMENTS; i++)
                CHECK(isfinite(b.p.x[i]));
            for (size_t k = 0; k < BLOCKS; k++)
                CHECK(isfinite(b.m_scale.x[k]) && isfinite(b.v_scale.x[k]));
        }
        blocks_free(&b);
    }
}

TEST_EACH_ISA(no_elements_touch_nothing)
{
    const mo_adam_termsf c = {.factor = 1};
    const mo_run none = {.stored = 1};

    kernels[isa](&c, 0, &none);
}

TEST_EACH_ISA(a_blocks_step_is_adams_on_the_decoded_states_before_they_are_coded)
{
    const mo_adam_terms terms =
        mo_adam_terms_of(1e-3, 0.9, 0.999, 1e-8, 0.1, /* decoupled */ 1, /* maximize */ 0, 9, 1);
    const mo_adam_termsf c = mo_adam_narrow(&terms);
    uint64_t random = test_seed();

    for (int f = 0; f < 2; f++) {
        const unsigned bits = formats[f];
        blocks b = blocks_of(bits), before = blocks_of(bits);

        blocks_fill(&b, &random, /* cases */ false);
        blocks_copy(&before, &b);
        const mo_run run = run_of(&b, ELEMENTS, 0, 10);
        kernels[isa](&c, 0, &run);
        for (size_t k = 0; k < BLOCKS; k++) {
            float largest_m = 0, largest_v = 0;
            for (size_t i = k * MO_CODE_ELEMENTS; i < (k + 1) * MO_CODE_ELEMENTS; i++) {
                float m = mo_code_decode_m(bits, m_of(&before, i), mo_code_unit_m(bits, before.m_scale.x[k]));
                float v = mo_code_decode_v(bits, v_of(&before, i), mo_code_unit_v(bits, before.v_scale.x[k]));
                CHECK(b.p.x[i] == mo_adam_elementf(&c, 0, before.p.x[i], before.g.x[i], &m, &v, NULL));
                largest_m = fmaxf(largest_m, fabsf(m));
                largest_v = fmaxf(largest_v, v);
                CHECK((v_of(&b, i) == 0) == (v == 0));
            }
            CHECK(b.m_scale.x[k] == largest_m && b.v_scale.x[k] == largest_v);
        }
        blocks_free(&b);
        blocks_free(&before);
    }
}

/* Over the steps that the dither goes through, the mean of what is decoded is the number to a hundredth of a code: of v; and of m with
 * 4 bits, whose dither is as good as random, to a twentieth. */
TEST(what_is_dithered_is_coded_without_bias)
{
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(300, 30000); round++) {
        const bool second = round % 3;
        const unsigned bits = round % 3 == 1 ? 8 : 4;
        const float scale = fabsf(float_ordinary(&random)),
                    x = scale * exp2f(-(float)(test_random(&random) % (second ? 1500 : 700)) / 100);
        const float per = second ? mo_code_per_v(bits, scale) : mo_code_per_m(bits, scale);
        const float unit = second ? mo_code_unit_v(bits, scale) : mo_code_unit_m(bits, scale);
        const uint32_t index = (uint32_t)test_random(&random);
        const double zero = !second ? 11 : bits == 8 ? 63487 : 32767;
        const double widest = ((double)x + (double)scale / zero) / (bits == 8 ? 16
                                                                    : second  ? 1
                                                                              : 2); /* of a code there */
        double sum = 0;
        for (uint32_t step = 0; step < 4096; step++) {
            const unsigned code = second
                                      ? mo_code_encode_v(bits, x, per, mo_code_dither(index, step))
                                      : mo_code_encode_m(bits, x, per, mo_code_dither_m(bits, index, step));
            sum += (double)(second ? mo_code_decode_v(bits, code, unit) : mo_code_decode_m(bits, code, unit));
        }
        if (!second || x >= scale / 32767) /* what lies below the least v is lifted */
            CHECK(fabs(sum / 4096 - (double)x) <= widest / (second ? 100 : 20) + (double)x * 4e-7);
    }
}

TEST_EACH_ISA(gradients_of_zero_leave_zero_states_and_decay_alone)
{
    const mo_adam_terms terms =
        mo_adam_terms_of(1e-3, 0.9, 0.999, 1e-8, 0.1, /* decoupled */ 1, /* maximize */ 0, 0, 1);
    const mo_adam_termsf c = mo_adam_narrow(&terms);

    for (int f = 0; f < 2; f++) {
        blocks b = blocks_of(formats[f]);

        memset(b.m, 0, ELEMENTS);
        memset(b.v, 0, ELEMENTS);
        for (size_t i = 0; i < ELEMENTS; i++) {
            b.p.x[i] = 2;
            b.g.x[i] = 0;
        }
        for (size_t k = 0; k < BLOCKS; k++)
            b.m_scale.x[k] = b.v_scale.x[k] = 0;
        const mo_run run = run_of(&b, ELEMENTS, 0, 1);
        kernels[isa](&c, 0, &run);
        for (size_t i = 0; i < ELEMENTS; i++)
            CHECK(b.p.x[i] == 2 * c.decay && b.m[i] == 0 && b.v[i] == 0);
        CHECK(b.m_scale.x[0] == 0 && b.v_scale.x[BLOCKS - 1] == 0);
        blocks_free(&b);
    }
}

TEST_MAIN
