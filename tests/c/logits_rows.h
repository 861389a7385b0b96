/* Rows of logits for tests of cross entropy, and an oracle in fp64 that takes one element at a time. */
#ifndef MEMOPT_LOGITS_ROWS_H
#define MEMOPT_LOGITS_ROWS_H

#include <math.h>

#include "test.h"

#include "../kernels/float_bits.cuh"
#include "loss/cross_entropy.h"

enum { ROWS = 5, COLUMNS_MAX = 2600 };

#define KERNEL_TANGENT 0x1p-22 /* as cross_entropy.cuh says */

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

__attribute__((unused)) static made *make(uint64_t *random, mo_float kind, size_t columns, float smoothing,
                                          float softcap)
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

/* tangent: by how much a tanh may be off. */
__attribute__((unused)) static void check_rows(const made *m, double tangent)
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
        CHECK(near(m->lse[row], lse, 1e-6 * (1 + fabs(lse)) + tangent * (double)m->job.softcap));
        for (size_t k = 0; k < m->job.columns; k++) {
            const double t = m->job.softcap > 0 ? tanh(x[k] / (double)m->job.softcap) : 0;
            const double p = exp(capped(m, x[k]) - lse) - smoothing / classes -
                             ((int64_t)k == m->target[row] ? 1 - smoothing : 0);
            const double d = (double)m->scale[row] * p * (1 - t * t);
            CHECK(near(value(m, row * m->job.columns + k), d, unit * fabs(d) + 4e-6));
        }
    }
}

#endif
