/* The formulas themselves, against the same written in double; and that dithered rounding has the right mean. */
#include "../kernels/adam.cuh"
#include "../kernels/dither.cuh"
#include "../kernels/sgd.cuh"
#include "float_cases.h"
#include "optim/update_kernels.h"

static double ulp(double x)
{
    const float f = fabsf((float)x);
    return (double)(nextafterf(f, INFINITY) - f);
}

static double larger_of(double a, double b)
{
    return fabs(a) > fabs(b) ? fabs(a) : fabs(b);
}

/* p is kept + moved, each with a relative error of its own: two roundings in what is kept, up to twelve (of half an ulp) in what it is
 * moved by, whose largest term may be larger than itself. As a step is small beside p, that is 1 ulp of p and 2 of what is kept. */
static void check_close(float got, double kept, double moved, double largest_term)
{
    const double bound = ulp(kept + moved) + 2 * ulp(kept) + 6 * ulp(larger_of(moved, largest_term));
    test_checks++;
    if (!(fabs((double)got - (kept + moved)) <= bound))
        TEST_FAIL("p is %a, expected %a: off by %g of the bound", (double)got, kept + moved,
                  fabs((double)got - kept - moved) / bound);
}

TEST(one_step_of_adam_is_the_formula_in_double_to_a_few_ulp)
{
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(200000, 20000000); round++) {
        const unsigned kind = (unsigned)test_random(&random);
        const bool decoupled = kind & 1, maximize = kind & 2, amsgrad = kind & 4;
        const double lr = 1e-3, beta1 = kind & 8 ? 0.9 : 0.5, beta2 = kind & 16 ? 0.999 : 0.95, eps = 1e-8,
                     decay = kind & 32 ? 0.1 : 0;
        const float steps = (float)(test_random(&random) % 10000), factor = 1.0f / 65536;
        const unsigned flags =
            (!decoupled && decay != 0 ? MO_ADAM_L2 : 0u) | (amsgrad ? MO_ADAM_AMSGRAD : 0u);
        const mo_adam_terms terms =
            mo_adam_terms_of(lr, beta1, beta2, eps, decay, decoupled, maximize, steps, factor);
        const mo_adam_termsf narrow = mo_adam_narrow(&terms);
        const float p = float_ordinary(&random), g = float_ordinary(&random) * 65536,
                    m0 = float_ordinary(&random);
        const float v0 = float_ordinary(&random) * float_ordinary(&random), vmax0 = fabsf(v0) * 1.5f;
        float m = m0, v = fabsf(v0), vmax = vmax0;
        const float got = mo_adam_elementf(&narrow, flags, p, g, &m, &v, &vmax);

        double x = (double)g * (double)factor * (maximize ? -1 : 1);
        x += decoupled ? 0 : decay * (double)p;
        const double mean = beta1 * (double)m0 + (1 - beta1) * x,
                     square = beta2 * fabs((double)v0) + (1 - beta2) * x * x;
        const double root =
            sqrt(amsgrad ? fmax(square, (double)vmax0) : square) / sqrt(1 - pow(beta2, (double)steps + 1)) +
            eps;
        const double size = lr / (1 - pow(beta1, (double)steps + 1)) / root;
        const double kept = (double)p * (decoupled ? 1 - lr * decay : 1);
        check_close(got, kept, -size * mean,
                    size * larger_of(beta1 * (double)m0, (1 - beta1) * larger_of(x, decay * (double)p)));
    }
}

TEST(one_step_of_sgd_is_the_formula_in_double_to_a_few_ulp)
{
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(200000, 20000000); round++) {
        const unsigned flags = (unsigned)test_random(&random) & 15;
        const double lr = 0.1, decay = flags & MO_SGD_L2 ? 0.01 : 0, momentum = 0.9, dampening = 0.3;
        const bool maximize = test_random(&random) & 1;
        const mo_sgd_terms terms = mo_sgd_terms_of(lr, decay, momentum, dampening, maximize, 1.0f / 3);
        const mo_sgd_termsf narrow = mo_sgd_narrow(&terms);
        const float p = float_ordinary(&random), g = float_ordinary(&random), m0 = float_ordinary(&random);
        float m = m0;
        const float got = mo_sgd_elementf(&narrow, flags, p, g, &m);

        double x = (double)g * (double)(1.0f / 3) * (maximize ? -1 : 1) + decay * (double)p,
               largest = larger_of(x, decay * (double)p);
        if (flags & MO_SGD_MOMENTUM) {
            const double buffer = flags & MO_SGD_FIRST ? x : momentum * (double)m0 + (1 - dampening) * x;
            largest = larger_of(largest, larger_of(momentum * (double)m0, buffer));
            x = flags & MO_SGD_NESTEROV ? (1 - dampening) * x + momentum * buffer : buffer;
        }
        check_close(got, (double)p, -lr * x, lr * largest);
    }
}

TEST(fp64_is_the_formula_to_its_last_bits)
{
    uint64_t random = test_seed();

    for (int round = 0; round < 10000; round++) {
        const mo_adam_terms c =
            mo_adam_terms_of(1e-3, 0.9, 0.999, 1e-8, 0.1, /* decoupled */ 1, /* maximize */ 0, 9, 1);
        const double p = (double)float_ordinary(&random), g = (double)float_ordinary(&random), m0 = 0.1,
                     v0 = 0.3;
        double m = m0, v = v0, vmax = 0;
        const double got = mo_adam_element(&c, 0, p, g, &m, &v, &vmax);
        const double mean = 0.9 * m0 + (1 - 0.9) * g, square = 0.999 * v0 + (1 - 0.999) * g * g;
        const double expected = p * (1 - 1e-3 * 0.1) - 1e-3 / (1 - pow(0.9, 10)) * mean /
                                                           (sqrt(square) / sqrt(1 - pow(0.999, 10)) + 1e-8);
        CHECK(fabs(got - expected) <= 8 * 0x1p-53 * (fabs(p) + fabs(expected)));
    }
}

TEST(powers_are_pow_s_but_for_the_last_bits)
{
    for (unsigned long long n = 0; n < 3000000; n = n * 5 / 4 + 1)
        for (int k = 0; k < 4; k++) {
            const double base = (double[]){0, 0.5, 0.999, 0.9999999}[k], expected = pow(base, (double)n);
            CHECK(fabs(mo_power(base, n) - expected) <= ((double)n + 1) * 0x1p-52 * expected);
        }
}

TEST(a_count_of_steps_that_is_none_is_as_0)
{
    CHECK_EQ(mo_step_number(0), 1);
    CHECK_EQ(mo_step_number(41), 42);
    CHECK_EQ(mo_step_number(-5), 1);
    CHECK_EQ(mo_step_number(NAN), 1);
    CHECK_EQ(mo_step_number(0x1p24f), 16777217);
    CHECK(mo_step_number(INFINITY) > 1ull << 60);
}

/* Over n steps the sum of what a number was rounded to is off by a few units, not by n times a fraction of one. */
TEST(dithered_rounding_has_the_right_mean_over_steps_and_over_neighbours)
{
    uint64_t random = test_seed();

    for (mo_float kind = MO_F16; kind <= MO_BF16; kind++)
        for (int round = 0; round < test_rounds(100, 10000); round++) {
            const float x = round % 4 ? float_ordinary(&random)
                                      : float_ordinary(&random) * (kind == MO_F16 ? 0x1p-16f : 0x1p-120f);
            const uint32_t index = (uint32_t)test_random(&random), step = (uint32_t)test_random(&random);
            const float up = kind == MO_F16 ? mo_f16_to_float(mo_f16_dithered(x, 0xFFFFFFFF))
                                            : mo_bf16_to_float(mo_bf16_dithered(x, 0xFFFFFFFF));
            const float down = kind == MO_F16 ? mo_f16_to_float(mo_f16_dithered(x, 0))
                                              : mo_bf16_to_float(mo_bf16_dithered(x, 0));
            const double unit = fabs((double)up - (double)down);
            double over_steps = 0, over_neighbours = 0;
            CHECK(fabsf(down) <= fabsf(x) && fabsf(x) <= fabsf(up));
            for (uint32_t i = 0; i < 4096; i++) {
                const uint32_t d = mo_dither(index, step + i), e = mo_dither(index + i, step);
                over_steps += kind == MO_F16 ? (double)mo_f16_to_float(mo_f16_dithered(x, d))
                                             : (double)mo_bf16_to_float(mo_bf16_dithered(x, d));
                over_neighbours += kind == MO_F16 ? (double)mo_f16_to_float(mo_f16_dithered(x, e))
                                                  : (double)mo_bf16_to_float(mo_bf16_dithered(x, e));
            }
            CHECK(fabs(over_steps - 4096 * (double)x) <= 8 * unit);
            CHECK(fabs(over_neighbours - 4096 * (double)x) <= 8 * unit);
        }
}

/* The loop around: a run is its elements, each by the formula, and the gradient's own rounding is not the rule's. */
TEST(a_stored_gradient_is_rounded_in_memory_and_not_for_the_rule)
{
    const mo_sgd_termsf c = {.factor = 1, .step_size = -1};
    const float x = mo_bf16_to_float(mo_bf16_from_float(3.14159f));
    uint16_t g[3] = {0};
    float p[3] = {0};
    const mo_run run = {.n = 2, .p = p, .g = g, .kind = MO_F32, .grad_kind = MO_BF16, .stored = 0.3f};

    g[0] = g[1] = g[2] = (uint16_t)mo_bf16_from_float(x);
    mo_update_generic.sgd(&c, 0, &run);
    CHECK(p[0] == -(x * 0.3f) && p[1] == p[0] && p[2] == 0);
    CHECK_EQ(g[0], mo_bf16_from_float(x * 0.3f));
    CHECK_EQ(g[2], mo_bf16_from_float(x));
    CHECK(mo_bf16_to_float(g[0]) != x * 0.3f);
}

TEST(a_master_is_what_is_read_and_the_parameter_is_it_rounded)
{
    const mo_sgd_termsf c = {.factor = 1, .step_size = -1};
    float master[2] = {1 + 0x1p-20f, 2 + 0x1p-20f}, g[2] = {0x1p-19f, 0x1p-5f};
    uint16_t p[2] = {0x7C00, 0x1234}; /* overwritten, not read */
    const mo_run run = {
        .n = 2, .p = p, .g = g, .master = master, .kind = MO_F16, .grad_kind = MO_F32, .stored = 1};

    mo_update_generic.sgd(&c, 0, &run);
    for (int i = 0; i < 2; i++) {
        CHECK(master[i] == (float)(i + 1) + 0x1p-20f - g[i]);
        CHECK_EQ(p[i], mo_f16_from_float(master[i]));
    }
}

TEST_MAIN
