/* The kernels of every instruction set on single pieces: against the oracle in double, and bit for bit against the specification. */
#include "scaler/gradients_kernels.h"

#include "each_isa.h"
#include "gradients_oracle.h"

static bool same_lanes(const mo_gradients_lanes *a, const mo_gradients_lanes *b)
{
    for (int i = 0; i < 16; i++)
        if (!same_double(a->sums[i], b->sums[i]))
            return false;
    return same_double(a->careful, b->careful) && memcmp(a->tops, b->tops, sizeof a->tops) == 0 &&
           memcmp(a->wide_tops, b->wide_tops, sizeof a->wide_tops) == 0;
}

static double sum_of(const mo_gradients_lanes *lanes)
{
    double sum = lanes->careful;
    for (int i = 0; i < 16; i++)
        sum += lanes->sums[i];
    return sum;
}

static double top_of(const mo_gradients_lanes *lanes)
{
    double top = 0;
    for (int i = 0; i < 16; i++) {
        const double narrow = (double)mo_float_from_bits(lanes->tops[i]);
        const double wide = i < 8 ? mo_double_from_bits(lanes->wide_tops[i]) : 0;
        top = isnan(narrow) || narrow > top ? narrow : top;
        top = isnan(wide) || wide > top ? wide : top;
        if (isnan(top))
            break;
    }
    return top;
}

/* One run over a piece, and over a copy by the specification. */
static void check_run(const mo_gradients_kernels *kernels, const piece *original, unsigned run, float scale)
{
    const mo_float kind = original->kind;
    const size_t shift = ((uintptr_t)original->x & 63) / mo_float_size(kind);
    piece p = make_piece(kind, original->count, shift), q = make_piece(kind, original->count, 0);
    mo_gradients_lanes lanes, specified;
    double sum = 0, top = 0;

    memset(&lanes, 0, sizeof lanes);
    memset(&specified, 0, sizeof specified);
    memcpy(p.x, original->x, p.bytes);
    memcpy(q.x, original->x, q.bytes);
    kernels->run[kind][run](&lanes, p.x, p.count, scale);
    mo_gradients_generic.run[kind][run](&specified, q.x, q.count, scale);
    if ((memcmp(p.x, q.x, p.bytes) != 0 && !isnan(scale)) || !same_lanes(&lanes, &specified))
        TEST_FAIL("%s[%zu] at %zu, run %u, scale %g: not what the specification does", kind_names[kind],
                  p.count, shift, run, (double)scale);

    for (size_t i = 0; i < p.count; i++) {
        const element x = element_at(kind, original->x, i), y = element_at(kind, p.x, i);
        const element expected = run & MO_RUN_STORE ? scaled_element(kind, x, scale) : x;
        if (!same_element(kind, y, expected, scale))
            TEST_FAIL("%s[%zu] at %zu, run %u, scale %g: element %zu became %#" PRIx64 ", not %#" PRIx64,
                      kind_names[kind], p.count, shift, run, (double)scale, i, y.bits, expected.bits);
        const double magnitude = fabs(value_of(kind, x));
        top = isnan(top) || magnitude <= top ? top : magnitude;
        sum += value_of(kind, y) * value_of(kind, y);
    }
    if (!same_double(top_of(&lanes), top))
        TEST_FAIL("%s[%zu] at %zu, run %u: the top is %g, not %g", kind_names[kind], p.count, shift, run,
                  top_of(&lanes), top);
    if (!near_norm(sqrt(sum_of(&lanes)), run & MO_RUN_NORM ? sqrt(sum) : 0))
        TEST_FAIL("%s[%zu] at %zu, run %u, scale %g: the norm is %.17g, not %.17g", kind_names[kind], p.count,
                  shift, run, (double)scale, sqrt(sum_of(&lanes)), sqrt(sum));
    free_piece(&p);
    free_piece(&q);
}

TEST_EACH_ISA(every_size_and_every_start)
{
    const mo_gradients_kernels *kernels = mo_gradients_kernels_of(isa);
    uint64_t seed = test_seed();

    for (mo_float kind = MO_F32; kind < MO_FLOAT_COUNT; kind++)
        for (size_t count = 1; count < 2200; count += count < 140 ? 1 : 97)
            for (size_t shift = 0; shift < 64 / mo_float_size(kind); shift += count < 140 ? 5 : 1) {
                piece p = make_piece(kind, count, shift);
                fill(&p, &seed, -9, 3);
                for (unsigned run = 0; run < MO_RUNS; run++)
                    check_run(kernels, &p, run, 0.3f);
                free_piece(&p);
            }
}

TEST_EACH_ISA(an_infinity_or_a_nan_in_any_place_is_the_top_and_in_the_sum)
{
    const mo_gradients_kernels *kernels = mo_gradients_kernels_of(isa);
    const float bad[] = {INFINITY, -INFINITY, NAN, -NAN};
    uint64_t seed = test_seed();

    for (mo_float kind = MO_F32; kind < MO_FLOAT_COUNT; kind++)
        for (size_t count = 1; count <= 200; count += count < 100 ? 33 : 100) {
            piece p = make_piece(kind, count, 3);
            fill(&p, &seed, -9, 3);
            for (size_t i = 0; i < count; i++)
                for (int b = 0; b < 4; b++) {
                    const element good = element_at(kind, p.x, i);
                    put_element(kind, p.x, i, element_of(kind, bad[b]));
                    for (unsigned run = 0; run < MO_RUNS; run++)
                        check_run(kernels, &p, run, b & 1 ? 0.3f : 0.0f);
                    put_element(kind, p.x, i, good);
                }
            free_piece(&p);
        }
}

TEST_EACH_ISA(every_16_bit_pattern_under_many_scales)
{
    const mo_gradients_kernels *kernels = mo_gradients_kernels_of(isa);
    const float scales[] = {0.3f,   0.5f,  1,     3, 0x1p-16f, 0x1p-24f, 0x1p-126f,
                            1e-45f, 65536, 3e38f, 0, -0.7f,    INFINITY, NAN};

    for (mo_float kind = MO_F16; kind <= MO_BF16; kind++)
        for (size_t s = 0; s < sizeof scales / sizeof *scales; s++) {
            piece p = make_piece(kind, 0x10000, 0);
            for (size_t i = 0; i < p.count; i++)
                put_element(kind, p.x, i, (element){.bits = i});
            check_run(kernels, &p, MO_RUN_STORE, scales[s]);
            free_piece(&p);
            for (size_t i = 0; i < 0x10000; i += 0x80) { /* each 128 alone, so that most are finite */
                p = make_piece(kind, 0x80, 0);
                for (size_t k = 0; k < p.count; k++)
                    put_element(kind, p.x, k, (element){.bits = i + k});
                check_run(kernels, &p, MO_RUN_NORM, 1);
                check_run(kernels, &p, MO_RUN_STORE | MO_RUN_NORM, scales[s]);
                free_piece(&p);
            }
        }
}

/* Where squares of fp32 overflow or vanish, and where some do and some do not. */
TEST_EACH_ISA(norms_of_every_magnitude)
{
    const mo_gradients_kernels *kernels = mo_gradients_kernels_of(isa);
    uint64_t seed = test_seed();
    const int wide[] = {0, 20, 40, 60, 80, 120};

    for (mo_float kind = MO_F32; kind < MO_FLOAT_COUNT; kind++) {
        const int low = kind == MO_F16 ? -24 : -149, high = kind == MO_F16 ? 14 : 126;
        for (int exponent = low; exponent <= high; exponent += kind == MO_F16 ? 1 : 3)
            for (size_t w = 0; w < sizeof wide / sizeof *wide; w++) {
                const int top = exponent + wide[w] < high ? exponent + wide[w] : high;
                piece p = make_piece(kind, 1 + test_random(&seed) % 3000, 1);
                fill(&p, &seed, exponent, top);
                for (size_t i = 0; i < p.count; i++)
                    if (test_random(&seed) % 3 == 0)
                        put_element(kind, p.x, i, (element){0});
                check_run(kernels, &p, MO_RUN_NORM, 1);
                check_run(kernels, &p, MO_RUN_STORE | MO_RUN_NORM, 0x1.8p-20f);
                check_run(kernels, &p, MO_RUN_STORE | MO_RUN_NORM, 0x1.8p-120f);
                check_run(kernels, &p, MO_RUN_STORE | MO_RUN_NORM, 0x1.8p20f);
                check_run(kernels, &p, MO_RUN_STORE | MO_RUN_NORM, 0x1.8p120f);
                free_piece(&p);
            }
    }
}

/* Additions that are all rounded the same way are the worst that can happen to a sum. */
TEST_EACH_ISA(sums_of_equal_numbers_stay_within_the_bound)
{
    const mo_gradients_kernels *kernels = mo_gradients_kernels_of(isa);
    uint64_t seed = test_seed();

    for (int round = 0; round < test_rounds(300, 20000); round++) {
        piece p = make_piece(MO_F32, 8192, 0);
        const float small = 1 + (float)(test_random(&seed) >> 40) * 0x1p-24f;
        const float large =
            ldexpf(1 + (float)(test_random(&seed) >> 40) * 0x1p-24f, (int)(test_random(&seed) % 13));
        for (size_t i = 0; i < p.count; i++)
            put_element(MO_F32, p.x, i, (element){.f32 = i % 1024 < 64 ? large : small});
        check_run(kernels, &p, MO_RUN_NORM, 1);
        free_piece(&p);
    }
}

/* A piece in parts, cut at whole blocks, is the piece; and what came before stays. */
TEST_EACH_ISA(pieces_add_up)
{
    const mo_gradients_kernels *kernels = mo_gradients_kernels_of(isa);
    uint64_t seed = test_seed();

    for (mo_float kind = MO_F32; kind < MO_FLOAT_COUNT; kind++) {
        piece p = make_piece(kind, 5000, 1);
        mo_gradients_lanes whole, parts;
        char *x = p.x;
        fill(&p, &seed, -9, 3);
        memset(&whole, 0, sizeof whole);
        memset(&parts, 0, sizeof parts);
        kernels->run[kind][MO_RUN_NORM](&whole, x, 5000, 1);
        kernels->run[kind][MO_RUN_NORM](&parts, x, 2048, 1);
        CHECK(!same_lanes(&whole, &parts));
        kernels->run[kind][MO_RUN_NORM](&parts, x + 2048 * mo_float_size(kind), 2952, 1);
        if (kind == MO_F64)
            CHECK(near_norm(sqrt(sum_of(&parts)), sqrt(sum_of(&whole))) && top_of(&parts) == top_of(&whole));
        else
            CHECK(same_lanes(&whole, &parts));
        free_piece(&p);
    }
}

TEST_MAIN
