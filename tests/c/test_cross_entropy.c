/* Rows of logits by each instruction set, beside an oracle in fp64 that takes one element at a time; and what is refused. */
#include <math.h>

#include "each_isa.h"

#include "../kernels/float_bits.cuh"
#include "base/parallel.h"
#include "loss/cross_entropy.h"
#include "loss/cross_entropy_kernels.h"

enum { ROWS = 5, COLUMNS_MAX = 2600 };

typedef struct made {
    mo_cross_entropy_job job;
    uint16_t halves[ROWS * COLUMNS_MAX];
    float floats[ROWS * COLUMNS_MAX], lse[ROWS], loss[ROWS], scale[ROWS];
    double before[ROWS * COLUMNS_MAX];
    int64_t target[ROWS];
} made;

static double value(const made *m, size_t i)
{
    return m->job.kind == MO_F32 ? (double)m->floats[i]
                                 : (double)(m->job.kind == MO_F16 ? mo_f16_to_float(m->halves[i])
                                                                  : mo_bf16_to_float(m->halves[i]));
}

static void set(made *m, size_t i, float x)
{
    m->floats[i] = x;
    m->halves[i] = (uint16_t)(m->job.kind == MO_F16 ? mo_f16_from_float(x) : mo_bf16_from_float(x));
    m->before[i] = value(m, i);
}

static double uniform(uint64_t *random)
{
    return (double)(test_random(random) >> 11) * 0x1p-53;
}

static made *make(uint64_t *random, mo_float kind, size_t columns, float smoothing, float softcap)
{
    made *m = calloc(1, sizeof *m);
    const float spread = test_random(random) & 1 ? 4.0f : 120.0f;

    m->job = (mo_cross_entropy_job){
        .passes = MO_LOSS_FIND | MO_LOSS_SUBTRACT,
        .logits = kind == MO_F32 ? (uintptr_t)m->floats : (uintptr_t)m->halves,
        .kind = kind,
        .rows = ROWS,
        .columns = columns,
        .classes = columns,
        .target = m->target,
        .lse = m->lse,
        .loss = m->loss,
        .scale = m->scale,
        .smoothing = smoothing,
        .softcap = softcap,
    };
    for (size_t i = 0; i < ROWS * columns; i++)
        set(m, i, spread * (float)(uniform(random) - 0.5));
    for (size_t row = 0; row < ROWS; row++) {
        m->target[row] = (int64_t)(test_random(random) % columns);
        m->scale[row] = (float)uniform(random);
    }
    return m;
}

static double capped(const made *m, double x)
{
    return m->job.softcap > 0 ? (double)m->job.softcap * tanh(x / (double)m->job.softcap) : x;
}

/* NaN is near NaN, and an infinity near itself. */
static int near(double got, double expected, double error)
{
    return (isnan(got) && isnan(expected)) || got == expected || fabs(got - expected) <= error;
}

static void check_rows(const made *m)
{
    const double smoothing = (double)m->job.smoothing, classes = (double)m->job.columns;
    const double unit = m->job.kind == MO_F32 ? 4e-6 : m->job.kind == MO_F16 ? 6e-4 : 4.5e-3;

    for (size_t row = 0; row < ROWS; row++) {
        const double *x = m->before + row * m->job.columns;
        double top = -INFINITY, sum = 0, total = 0;

        for (size_t k = 0; k < m->job.columns; k++)
            top = fmax(top, capped(m, x[k]));
        for (size_t k = 0; k < m->job.columns; k++) {
            sum += exp(capped(m, x[k]) - top);
            total += capped(m, x[k]);
        }
        const double lse = top + log(sum);
        const double loss = lse - (1 - smoothing) * capped(m, x[m->target[row]]) -
                            (smoothing > 0 ? smoothing * total / classes : 0);
        CHECK(near(m->loss[row], loss, 1e-5 * (1 + fabs(lse))));
        CHECK(near(m->lse[row], lse, 1e-6 * (1 + fabs(lse))));
        for (size_t k = 0; k < m->job.columns; k++) {
            const double t = m->job.softcap > 0 ? tanh(x[k] / (double)m->job.softcap) : 0;
            const double p = exp(capped(m, x[k]) - lse) - smoothing / classes -
                             ((int64_t)k == m->target[row] ? 1 - smoothing : 0);
            const double d = (double)m->scale[row] * p * (1 - t * t);
            CHECK(near(value(m, row * m->job.columns + k), d, unit * fabs(d) + 4e-6));
        }
    }
}

TEST_EACH_ISA(rows_are_the_oracles)
{
    uint64_t random = test_seed();

    mo_cross_entropy_use(isa);
    for (int round = 0; round < test_rounds(20, 500); round++)
        for (mo_float kind = MO_F32; kind < MO_F64; kind++) {
            const size_t columns = 1 + test_random(&random) % (round % 4 ? 70 : COLUMNS_MAX);
            made *m = make(&random, kind, columns, test_random(&random) & 1 ? 0.1f : 0,
                           test_random(&random) & 1 ? 30 : 0);
            CHECK_EQ(mo_cross_entropy_cpu(&m->job, NULL), MO_OK);
            check_rows(m);
            free(m);
        }
    mo_cross_entropy_use(MO_ISA_COUNT);
}

TEST_EACH_ISA(a_class_that_cannot_be_has_no_gradient_and_a_nan_spoils_its_row_alone)
{
    uint64_t random = test_seed();

    mo_cross_entropy_use(isa);
    for (mo_float kind = MO_F32; kind < MO_F64; kind++) {
        made *m = make(&random, kind, 37, 0, 0);

        for (size_t k = 0; k < 37; k++) {
            if (k != (size_t)m->target[0] && k % 3)
                set(m, k, -INFINITY);
            set(m, 3 * 37 + k, -INFINITY); /* no class can be */
        }
        set(m, 37 + 36, NAN);
        set(m, 2 * 37 + 5, INFINITY);
        CHECK_EQ(mo_cross_entropy_cpu(&m->job, NULL), MO_OK);
        for (size_t k = 0; k < 37; k++) {
            if (isinf(m->before[k]))
                CHECK(value(m, k) == 0);
            CHECK(isnan(value(m, 37 + k)) && isnan(value(m, 3 * 37 + k)) && isfinite(value(m, 4 * 37 + k)));
        }
        CHECK(isfinite(m->loss[0]) && isnan(m->loss[1]) && isnan(m->loss[3]) && isfinite(m->loss[4]));
        CHECK(!isfinite(m->loss[2])); /* inf, or NaN where it is the target */
        free(m);
    }
    mo_cross_entropy_use(MO_ISA_COUNT);
}

TEST_EACH_ISA(blocks_of_classes_give_the_gradient_of_the_whole)
{
    uint64_t random = test_seed();

    mo_cross_entropy_use(isa);
    for (mo_float kind = MO_F32; kind < MO_F64; kind++) {
        made *m = make(&random, kind, 50, 0.1f, 30);
        const size_t size = mo_float_size(kind);
        unsigned char block[ROWS * 50 * 4], *logits = (unsigned char *)m->job.logits;

        m->job.passes = MO_LOSS_FIND;
        CHECK_EQ(mo_cross_entropy_cpu(&m->job, NULL), MO_OK);
        for (size_t first = 0; first < 50; first += 20) {
            mo_cross_entropy_job part = m->job;
            part.passes = MO_LOSS_SUBTRACT;
            part.logits = (uintptr_t)block;
            part.first = first;
            part.columns = first == 40 ? 10 : 20;
            for (size_t row = 0; row < ROWS; row++)
                memcpy(block + row * part.columns * size, logits + (row * 50 + first) * size,
                       part.columns * size);
            CHECK_EQ(mo_cross_entropy_cpu(&part, NULL), MO_OK);
            for (size_t row = 0; row < ROWS; row++)
                memcpy(logits + (row * 50 + first) * size, block + row * part.columns * size,
                       part.columns * size);
        }
        check_rows(m);
        free(m);
    }
    mo_cross_entropy_use(MO_ISA_COUNT);
}

TEST(what_cannot_be_is_refused_before_anything_is_written)
{
    uint64_t random = 1;
    made *m = make(&random, MO_F32, 10, 0, 0);
    mo_detail detail;

#define REFUSED(field_, value_)                                                                              \
    do {                                                                                                     \
        mo_cross_entropy_job bad = m->job;                                                                   \
        bad.field_ = value_;                                                                                 \
        CHECK_EQ(mo_cross_entropy_cpu(&bad, &detail), MO_INVALID);                                           \
    } while (0)
    REFUSED(kind, MO_F64);
    REFUSED(columns, 0);
    REFUSED(rows, SIZE_MAX);
    REFUSED(logits, m->job.logits + 1);
    REFUSED(classes, 11);
    REFUSED(first, 1);
    REFUSED(smoothing, 1.5f);
    REFUSED(smoothing, NAN);
    REFUSED(softcap, -1);
    REFUSED(softcap, INFINITY);
    REFUSED(target, NULL);
    REFUSED(lse, NULL);
    REFUSED(scale, NULL);
    CHECK(m->loss[0] == 0 && m->floats[0] == (float)m->before[0]);
    m->job.rows = 0;
    CHECK_EQ(mo_cross_entropy_cpu(&m->job, &detail), MO_OK);
    free(m);
}

TEST_MAIN
