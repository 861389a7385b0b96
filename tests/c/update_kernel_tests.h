/* What every instruction set's table of csrc/optim/update_kernels.h must do: the same as the specification, bit for bit, at every
 * length and misalignment, and nothing beyond the last element. The file that includes this defines KERNELS, and its ISA. */
#include "optim/update_kernels.h"

#include "../kernels/dither.cuh"
#include "float_cases.h"
#include "test.h"

#define MOST 1100

static bool runs_here(void)
{
    if (mo_isa_best() >= KERNELS.isa)
        return true;
    printf("# this processor has no %s: not run\n", mo_isa_name(KERNELS.isa));
    return false;
}

/* Lengths 0 … 70, and some beyond. */
static size_t next_length(size_t n)
{
    return n < 70 ? n + 1 : n + 331;
}

static mo_adam_termsf some_adam(uint64_t *random, float factor)
{
    const mo_adam_terms c =
        mo_adam_terms_of(1e-3, 0.9, 0.999, 1e-8, 0.1, (int)(test_random(random) & 1),
                         (int)(test_random(random) & 1), (float)(test_random(random) % 1000), factor);
    return mo_adam_narrow(&c);
}

static mo_sgd_termsf some_sgd(uint64_t *random, float factor)
{
    const mo_sgd_terms c = mo_sgd_terms_of(0.1, 0.01, 0.9, 0.25, (int)(test_random(random) & 1), factor);
    return mo_sgd_narrow(&c);
}

enum { P, G, M, V, VMAX, ARRAYS };

/* Five arrays twice, so that two tables can be given the same. */
typedef struct pair {
    shifted one[ARRAYS], two[ARRAYS];
    size_t n;
} pair;

static pair pair_of(uint64_t *random, size_t n, bool ordinary)
{
    pair x = {.n = n};
    for (int k = 0; k < ARRAYS; k++) {
        const size_t shift = test_random(random) % 16;
        x.one[k] = shifted_of(n, shift);
        x.two[k] = shifted_of(n, shift);
        for (size_t i = 0; i < n; i++) {
            float value = ordinary ? float_ordinary(random) : float_case(random);
            if (k == V || k == VMAX)
                value = fabsf(value);
            x.one[k].x[i] = x.two[k].x[i] = value;
        }
    }
    return x;
}

static void check_same_and_free(pair *x)
{
    for (int k = 0; k < ARRAYS; k++)
        for (size_t i = 0; i < x->n; i++)
            if (!same_float(x->one[k].x[i], x->two[k].x[i]))
                TEST_FAIL("array %d, element %zu of %zu: %a, expected %a", k, i, x->n, (double)x->one[k].x[i],
                          (double)x->two[k].x[i]);
    for (int k = 0; k < ARRAYS; k++) {
        free(x->one[k].block);
        free(x->two[k].block);
    }
    test_checks++;
}

TEST(adam_is_the_specifications_at_every_length)
{
    uint64_t random = test_seed();

    if (!runs_here())
        return;
    for (int round = 0; round < test_rounds(2, 100); round++)
        for (size_t n = 0; n < MOST; n = next_length(n))
            for (unsigned flags = 0; flags < 4; flags++) {
                pair x = pair_of(&random, n, /* ordinary */ round % 2);
                const mo_adam_termsf c = some_adam(&random, 0.7f);
                const bool amsgrad = flags & MO_ADAM_AMSGRAD;
                KERNELS.adam(&c, flags, n, x.one[P].x, x.one[G].x, x.one[M].x, x.one[V].x,
                             amsgrad ? x.one[VMAX].x : NULL);
                for (size_t i = 0; i < n; i++)
                    x.two[P].x[i] = mo_adam_elementf(&c, flags, x.two[P].x[i], x.two[G].x[i], &x.two[M].x[i],
                                                     &x.two[V].x[i], &x.two[VMAX].x[i]);
                check_same_and_free(&x);
            }
}

TEST(sgd_is_the_specifications_at_every_length)
{
    uint64_t random = test_seed();

    if (!runs_here())
        return;
    for (int round = 0; round < test_rounds(2, 50); round++)
        for (size_t n = 0; n < MOST; n = next_length(n))
            for (unsigned flags = 0; flags < 16; flags++) {
                pair x = pair_of(&random, n, /* ordinary */ round % 2);
                const mo_sgd_termsf c = some_sgd(&random, 0.7f);
                KERNELS.sgd(&c, flags, n, x.one[P].x, x.one[G].x,
                            flags & MO_SGD_MOMENTUM ? x.one[M].x : NULL);
                for (size_t i = 0; i < n; i++)
                    x.two[P].x[i] = mo_sgd_elementf(&c, flags, x.two[P].x[i], x.two[G].x[i], &x.two[M].x[i]);
                check_same_and_free(&x);
            }
}

TEST(scaling_is_one_multiplication_an_element)
{
    uint64_t random = test_seed();

    if (!runs_here())
        return;
    for (size_t n = 0; n < MOST; n = next_length(n)) {
        pair x = pair_of(&random, n, /* ordinary */ false);
        KERNELS.scale(-0.3f, n, x.one[G].x);
        for (size_t i = 0; i < n; i++)
            x.two[G].x[i] *= -0.3f;
        check_same_and_free(&x);
    }
}

TEST(each_16_bit_number_is_widened_as_specified)
{
    if (!runs_here())
        return;
    for (mo_float kind = MO_F16; kind <= MO_BF16; kind++)
        for (unsigned first = 0; first < 3; first++) { /* misaligned, and never whole vectors only */
            const size_t n = 65536 - first;
            uint16_t *x = malloc(n * sizeof *x);
            float *out = malloc(n * sizeof *out);
            for (size_t i = 0; i < n; i++)
                x[i] = (uint16_t)(first + i);
            KERNELS.widen(kind, n, x, out);
            for (size_t i = 0; i < n; i++)
                CHECK(same_float(out[i], kind == MO_F16 ? mo_f16_to_float(x[i]) : mo_bf16_to_float(x[i])));
            free(x);
            free(out);
        }
}

TEST(rounding_to_16_bits_is_the_specifications_nearest_or_dithered)
{
    uint64_t random = test_seed();

    if (!runs_here())
        return;
    for (mo_float kind = MO_F16; kind <= MO_BF16; kind++)
        for (int round = 0; round < test_rounds(10, 1000); round++)
            for (size_t n = 0; n < MOST; n = next_length(n)) {
                float *x = malloc(n * sizeof *x + 1);
                uint16_t *near = malloc(n * sizeof *near + 1), *dithered = malloc(n * sizeof *dithered + 1);
                const uint32_t index = (uint32_t)test_random(&random), step = (uint32_t)test_random(&random);
                for (size_t i = 0; i < n; i++) /* any bits at all, or the special ones */
                    x[i] = i % 2 ? mo_float_from_bits((unsigned)test_random(&random)) : float_case(&random);
                KERNELS.narrow(kind, n, x, near);
                KERNELS.dither(kind, n, x, index, step, dithered);
                for (size_t i = 0; i < n; i++) {
                    const uint32_t d = mo_dither(index + (uint32_t)i, step);
                    const unsigned nearest =
                        kind == MO_F16 ? mo_f16_from_float(x[i]) : mo_bf16_from_float(x[i]);
                    const unsigned expected =
                        kind == MO_F16 ? mo_f16_dithered(x[i], d) : mo_bf16_dithered(x[i], d);
                    CHECK(same_half(kind, near[i], (uint16_t)nearest));
                    if (!same_half(kind, dithered[i], (uint16_t)expected))
                        TEST_FAIL("%a with dither %#x: %#x, expected %#x", (double)x[i], d, dithered[i],
                                  expected);
                }
                free(x);
                free(near);
                free(dithered);
            }
}
