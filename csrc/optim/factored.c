#include "optim/factored.h"

#include <string.h>

#include "../kernels/factored.cuh"
#include "base/parallel.h"

/* Elements that are worth a second thread: as update_cpu.c's 2 MiB. */
#define SHARE ((size_t)1 << 18)

typedef struct averaging {
    const mo_update_kernels *kernels;
    const mo_parameter *a;
    const mo_adam_termsf *terms;
    unsigned flags;
    float stored;
    double beta2;
    size_t rows, columns;
    float *of_rows, *of_columns; /* sums of tiles */
} averaging;

/* Rows of tiles [begin, end): each along the rows of the matrix, as they lie in memory. */
static void add_up(void *user, size_t begin, size_t end)
{
    const averaging *x = user;
    const mo_parameter *a = x->a;

    for (size_t tile = begin; tile < end; tile++) {
        float *const of_columns = x->of_columns + tile * x->columns;
        const size_t first = tile * MO_FACTORED_TILE,
                     last = x->rows - first < MO_FACTORED_TILE ? x->rows : first + MO_FACTORED_TILE;

        memset(of_columns, 0, x->columns * sizeof *of_columns);
        for (size_t i = first; i < last; i++) {
            const size_t at = i * x->columns;
            const mo_run row = {
                .n = x->columns,
                .p = (void *)(a->p + at * mo_float_size(a->kind)),
                .g = (void *)(a->g + at * mo_float_size(a->grad_kind)),
                .master = a->master ? (float *)a->master + at : NULL,
                .kind = a->kind,
                .grad_kind = a->grad_kind,
                .stored = x->stored,
            };
            x->kernels->factored(x->terms, x->flags, &row, of_columns, x->of_rows + i, x->rows);
        }
    }
}

/* Numbers [begin, end) of C and, behind them, R. */
static void join(void *user, size_t begin, size_t end)
{
    const averaging *x = user;
    float *const row = (float *)x->a->row, *const column = (float *)x->a->column;

    for (size_t i = begin; i < end; i++)
        if (i < x->columns) {
            column[i] = mo_factored_average(column[i], x->of_columns + i, mo_factored_tiles(x->rows),
                                            x->columns, (unsigned)x->rows, x->beta2);
        } else {
            const size_t k = i - x->columns;
            row[k] = mo_factored_average(row[k], x->of_rows + k, mo_factored_tiles(x->columns), x->rows,
                                         (unsigned)x->columns, x->beta2);
        }
}

static float inverse_of(const float *row, size_t rows)
{
    double sums[MO_FACTORED_TILE] = {0};

    for (size_t i = 0; i < rows; i++)
        sums[i % MO_FACTORED_TILE] += (double)row[i];
    for (size_t apart = MO_FACTORED_TILE / 2; apart > 0; apart /= 2)
        for (size_t k = 0; k < apart; k++)
            sums[k] += sums[k + apart];
    return mo_factored_inverse(sums[0], (unsigned)rows);
}

float mo_factored_average_cpu(const mo_update_kernels *kernels, const mo_update_job *job, size_t parameter,
                              const mo_adam_termsf *terms, float stored)
{
    const mo_parameter *a = &job->parameters[parameter];
    const mo_hyper *group = &job->groups[a->group];
    averaging x = {
        .kernels = kernels,
        .a = a,
        .terms = terms,
        .flags = mo_update_flags(a, group),
        .stored = stored,
        .beta2 = group->beta2,
        .rows = a->count / a->columns,
        .columns = a->columns,
        .of_rows = (float *)job->scratch,
    };

    x.of_columns = x.of_rows + mo_factored_row_sums(x.rows, x.columns);
    if (a->count < SHARE) {
        add_up(&x, 0, mo_factored_tiles(x.rows));
        join(&x, 0, x.columns + x.rows);
    } else {
        mo_parallel_for(mo_factored_tiles(x.rows), SHARE / 2 / (MO_FACTORED_TILE * x.columns) + 1, add_up,
                        &x);
        mo_parallel_for(x.columns + x.rows, SHARE / 256, join, &x);
    }
    return inverse_of((const float *)a->row, x.rows);
}

void mo_factored_moments(const mo_update_kernels *kernels, const mo_parameter *a, float inverse, size_t begin,
                         size_t n, float *v)
{
    const float *const column = (const float *)a->column;
    size_t row = begin / a->columns, from = begin % a->columns;

    for (size_t done = 0, part; done < n; done += part, row++, from = 0) {
        part = a->columns - from < n - done ? a->columns - from : n - done;
        kernels->product(mo_mulf(((const float *)a->row)[row], inverse), column + from, part, v + done);
    }
}
