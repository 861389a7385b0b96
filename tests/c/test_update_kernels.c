/* Every instruction set's table: the same as the specification's, bit for bit, at every length, kind and misalignment, and nothing beyond
 * the last element; and the choice among the tables. */
#include "optim/update_kernels.h"

#include "../kernels/adam_codes.cuh"
#include "../kernels/dither.cuh"
#include "each_isa.h"
#include "float_cases.h"

static const mo_update_kernels *const tables[] = {
    &mo_update_generic,
#if defined(__x86_64__)
    &mo_update_avx2,
    &mo_update_avx512,
#endif
};

#define MOST 1100

/* Lengths 0 … 70, and some beyond. */
static size_t next_length(size_t n)
{
    return n < 70 ? n + 1 : n + 331;
}

enum { P, G, MASTER, M, V, VMAX, ARRAYS };

/* A run of random kinds, and a copy of it at the same misalignment. Each array is exactly as long as it should be. */
typedef struct pair {
    mo_run one, two;
    void *blocks[2][ARRAYS];
    size_t bytes[ARRAYS];
    mo_float kinds[ARRAYS];
} pair;

static pair pair_of(uint64_t *random, size_t n, bool ordinary)
{
    const uint64_t bits = test_random(random);
    const mo_float kind = (mo_float)(bits % 3), grad_kind = (mo_float)(bits >> 8 & 3) % 3;
    const bool plain = bits >> 12 & 1, master = bits >> 13 & 1 && kind != MO_F32 && !plain;
    pair x = {.kinds = {kind, grad_kind, MO_F32, MO_F32, MO_F32, MO_F32}};
    void **places[2][ARRAYS] = {{&x.one.p, &x.one.g, NULL, &x.one.m, &x.one.v, &x.one.vmax},
                                {&x.two.p, &x.two.g, NULL, &x.two.m, &x.two.v, &x.two.vmax}};

    if (plain)
        x.kinds[P] = x.kinds[G] = MO_F32;
    else if (bits >> 14 & 1)
        x.kinds[M] = x.kinds[V] = x.kinds[VMAX] = kind;
    for (int k = 0; k < ARRAYS; k++) {
        const size_t size = mo_float_size(x.kinds[k]), shift = test_random(random) % 16 * size;
        x.bytes[k] = k == MASTER && !master ? 0 : n * size;
        for (int side = 0; side < 2; side++)
            x.blocks[side][k] = malloc(shift + x.bytes[k] + !(shift + x.bytes[k]));
        for (size_t i = 0; i < x.bytes[k] / size; i++) {
            float value = ordinary ? float_ordinary(random) : float_case(random);
            uint16_t half =
                (uint16_t)(x.kinds[k] == MO_F16 ? mo_f16_from_float(value) : mo_bf16_from_float(value));
            if (k >= V) {
                value = fabsf(value);
                half &= 0x7FFF;
            }
            memcpy((char *)x.blocks[0][k] + shift + i * size, size == 4 ? (void *)&value : (void *)&half,
                   size);
        }
        memcpy((char *)x.blocks[1][k] + shift, (char *)x.blocks[0][k] + shift, x.bytes[k]);
        for (int side = 0; side < 2; side++)
            if (k == MASTER)
                (side ? &x.two : &x.one)->master =
                    master ? (float *)((char *)x.blocks[side][k] + shift) : NULL;
            else
                *places[side][k] = (char *)x.blocks[side][k] + shift;
    }
    x.one.n = x.two.n = n;
    x.one.kind = x.two.kind = x.kinds[P];
    x.one.grad_kind = x.two.grad_kind = x.kinds[G];
    x.one.state_kind = x.two.state_kind = x.kinds[M];
    x.one.stochastic = x.two.stochastic = bits >> 15 & 1;
    x.one.stored = x.two.stored = plain || bits >> 16 & 1 ? 1 : 0.3f;
    x.one.index = x.two.index = (uint32_t)(bits >> 20);
    x.one.step = x.two.step = (uint32_t)(bits >> 30);
    return x;
}

static void check_same_and_free(pair *x)
{
    const void *const one[ARRAYS] = {x->one.p, x->one.g, x->one.master, x->one.m, x->one.v, x->one.vmax};
    const void *const two[ARRAYS] = {x->two.p, x->two.g, x->two.master, x->two.m, x->two.v, x->two.vmax};

    for (int k = 0; k < ARRAYS; k++)
        for (size_t i = 0; i < x->bytes[k] / mo_float_size(x->kinds[k]); i++) {
            const bool same =
                x->kinds[k] == MO_F32
                    ? same_float(((const float *)one[k])[i], ((const float *)two[k])[i])
                    : same_half(x->kinds[k], ((const uint16_t *)one[k])[i], ((const uint16_t *)two[k])[i]);
            if (!same)
                TEST_FAIL("array %d of kind %d, element %zu of %zu (kinds %d %d %d)", k, (int)x->kinds[k], i,
                          x->one.n, (int)x->one.kind, (int)x->one.grad_kind, (int)x->one.state_kind);
        }
    for (int k = 0; k < ARRAYS; k++) {
        free(x->blocks[0][k]);
        free(x->blocks[1][k]);
    }
    test_checks++;
}

TEST_EACH_ISA(adam_is_the_specifications_at_every_length_and_kind)
{
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(8, 400); round++)
        for (size_t n = 0; n < MOST; n = next_length(n))
            for (unsigned flags = 0; flags < 4; flags++) {
                pair x = pair_of(&random, n, /* ordinary */ round % 2);
                const mo_adam_terms terms = mo_adam_terms_of(
                    1e-3, 0.9, 0.999, 1e-8, 0.1, (int)(test_random(&random) & 1),
                    (int)(test_random(&random) & 1), (float)(test_random(&random) % 1000), 0.7f);
                const mo_adam_termsf c = mo_adam_narrow(&terms);
                if (!(flags & MO_ADAM_AMSGRAD))
                    x.one.vmax = NULL;
                tables[isa]->adam(&c, flags, &x.one);
                mo_update_generic.adam(&c, flags, &x.two);
                x.bytes[VMAX] = flags & MO_ADAM_AMSGRAD ? x.bytes[VMAX] : 0;
                check_same_and_free(&x);
            }
}

TEST_EACH_ISA(sgd_is_the_specifications_at_every_length_and_kind)
{
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(4, 100); round++)
        for (size_t n = 0; n < MOST; n = next_length(n))
            for (unsigned flags = 0; flags < 16; flags++) {
                pair x = pair_of(&random, n, /* ordinary */ round % 2);
                const mo_sgd_terms terms =
                    mo_sgd_terms_of(0.1, 0.01, 0.9, 0.25, (int)(test_random(&random) & 1), 0.7f);
                const mo_sgd_termsf c = mo_sgd_narrow(&terms);
                if (!(flags & MO_SGD_MOMENTUM))
                    x.one.m = NULL;
                tables[isa]->sgd(&c, flags, &x.one);
                mo_update_generic.sgd(&c, flags, &x.two);
                x.bytes[M] = flags & MO_SGD_MOMENTUM ? x.bytes[M] : 0;
                check_same_and_free(&x);
            }
}

/* Of any bits, and of what goes wrong; an element that is no number is as 0. */
TEST_EACH_ISA(a_blocks_momentum_is_coded_and_decoded_as_specified)
{
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(200, 20000); round++) {
        float m[MO_CODE_ELEMENTS], one[MO_CODE_ELEMENTS], two[MO_CODE_ELEMENTS], scale;
        uint8_t codes[MO_CODE_ELEMENTS], expected[MO_CODE_ELEMENTS];
        const uint32_t dither = (uint32_t)test_random(&random);
        for (size_t i = 0; i < MO_CODE_ELEMENTS; i++)
            m[i] = round % 2 ? float_ordinary(&random) : float_case(&random);
        scale = tables[isa]->encode(m, dither, codes);
        CHECK(scale == mo_update_generic.encode(m, dither, expected));
        CHECK(memcmp(codes, expected, sizeof codes) == 0);
        tables[isa]->decode(codes, scale, one);
        mo_update_generic.decode(codes, scale, two);
        CHECK(memcmp(one, two, sizeof one) == 0);
        for (size_t i = 0; i < MO_CODE_ELEMENTS; i++) {
            const float wanted = fabsf(m[i]) <= MO_CODE_HUGE ? m[i] : 0;
            CHECK(fabsf(one[i] - wanted) <= (fabsf(wanted) + scale / 247) / 16 + MO_CODE_TINY);
        }
    }
}

/* 0 + g: what a gradient of 16 bits is as fp32. */
TEST_EACH_ISA(each_16_bit_number_is_widened_as_specified)
{
    const mo_sgd_termsf c = {.factor = 1, .step_size = 1};

    for (mo_float kind = MO_F16; kind <= MO_BF16; kind++)
        for (unsigned first = 0; first < 3; first++) { /* misaligned, and never whole vectors only */
            const size_t n = 65536 - first;
            uint16_t *g = malloc(n * sizeof *g);
            float *p = calloc(n, sizeof *p);
            const mo_run run = {.n = n, .p = p, .g = g, .kind = MO_F32, .grad_kind = kind, .stored = 1};
            for (size_t i = 0; i < n; i++)
                g[i] = (uint16_t)(first + i);
            tables[isa]->sgd(&c, 0, &run);
            for (size_t i = 0; i < n; i++) { /* 0 + -0 is 0 */
                const float expected = kind == MO_F16 ? mo_f16_to_float(g[i]) : mo_bf16_to_float(g[i]);
                CHECK(same_float(p[i], expected) || (p[i] == 0 && expected == 0));
            }
            free(p);
            free(g);
        }
}

/* 0 + g, from fp32 of any bits to 16. */
TEST_EACH_ISA(rounding_to_16_bits_is_the_specifications_nearest_or_dithered)
{
    const mo_sgd_termsf c = {.factor = 1, .step_size = 1};
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(40, 4000); round++)
        for (size_t n = 0; n < MOST; n = next_length(n)) {
            const mo_float kind = round & 1 ? MO_F16 : MO_BF16;
            float *g = malloc(n * sizeof *g + 1);
            uint16_t *p = calloc(n + 1, sizeof *p);
            const mo_run run = {.n = n,
                                .p = p,
                                .g = g,
                                .kind = kind,
                                .grad_kind = MO_F32,
                                .stored = 1,
                                .stochastic = round & 2,
                                .index = (uint32_t)test_random(&random),
                                .step = (uint32_t)test_random(&random)};
            for (size_t i = 0; i < n; i++) /* any bits at all, or the special ones */
                g[i] = i % 2 ? mo_float_from_bits((unsigned)test_random(&random)) : float_case(&random);
            tables[isa]->sgd(&c, 0, &run);
            for (size_t i = 0; i < n; i++) {
                const uint32_t d = mo_dither(run.index + (uint32_t)i, run.step);
                const float x = g[i] == 0 ? 0 : g[i];
                const unsigned expected =
                    !run.stochastic  ? (kind == MO_F16 ? mo_f16_from_float(x) : mo_bf16_from_float(x))
                    : kind == MO_F16 ? mo_f16_dithered(x, d)
                                     : mo_bf16_dithered(x, d);
                if (!same_half(kind, p[i], (uint16_t)expected))
                    TEST_FAIL("%a with dither %#x: %#x, expected %#x", (double)x, d, p[i], expected);
                test_checks++;
            }
            CHECK_EQ(p[n], 0);
            free(g);
            free(p);
        }
}

/* ---- the choice ---------------------------------------------------------------------------------------------- */

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
    for (size_t k = 0; k < sizeof tables / sizeof *tables; k++) {
        const mo_update_kernels *t = tables[k];
        CHECK_EQ(t->isa, k);
        CHECK(t->adam && t->adam_codes && t->sgd && t->decode && t->encode && t->factored && t->product);
    }
}

TEST_MAIN
