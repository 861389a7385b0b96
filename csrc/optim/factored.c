#include "optim/factored.h"

#include <string.h>

#include "../kernels/factored.cuh"
#include "base/parallel.h"

/* Elements that are worth a second thread: as update_cpu.c's 2 MiB. */
#define SHARE ((size_t)1 << 18)

typedef struct averaging {
    const mo_update_kernels *kernels;
    const mo_update_job *job;
    float stored;
    mo_factored_row *rows;
    size_t count, tiles, elements;
} averaging;

static size_t rows_of(const mo_parameter *a)
{
    return a->count / a->columns;
}

/* Row `tile` of a parameter's tiles, along the rows of the matrix, as they lie in memory. */
static void add_up_tiles(const averaging *x, const mo_factored_row *row, size_t tile)
{
    const mo_parameter *a = row->a;
    const unsigned flags = mo_update_flags(a, &x->job->groups[a->group]);
    const size_t rows = rows_of(a), columns = a->columns, first = tile * MO_FACTORED_TILE,
                 end = rows - first < MO_FACTORED_TILE ? rows : first + MO_FACTORED_TILE;
    float *const of_columns = row->sums + mo_factored_row_sums(rows, columns) + tile * columns;

    memset(of_columns, 0, columns * sizeof *of_columns);
    for (size_t i = first; i < end; i++) {
        const size_t at = i * columns;
        const mo_run run = {
            .n = columns,
            .p = (void *)(a->p + at * mo_float_size(a->kind)),
            .g = (void *)(a->g + at * mo_float_size(a->grad_kind)),
            .master = a->master ? (float *)a->master + at : NULL,
            .kind = a->kind,
            .grad_kind = a->grad_kind,
            .stored = x->stored,
        };
        x->kernels->factored(row->terms, flags, &run, of_columns, row->sums + i, rows);
    }
}

static void add_up(void *user, size_t begin, size_t end)
{
    const averaging *x = user;

    for (size_t k = 0; k < x->count; k++) {
        const mo_factored_row *row = &x->rows[k];
        const size_t after = row->before + mo_factored_tiles(rows_of(row->a));
        for (size_t i = begin > row->before ? begin : row->before; i < end && i < after; i++)
            add_up_tiles(x, row, i - row->before);
    }
}

/* What the sums of tiles make of the vectors. */
static void join(void *user, size_t begin, size_t end)
{
    const averaging *x = user;

    for (size_t k = begin; k < end; k++) {
        mo_factored_row *const row = &x->rows[k];
        const mo_parameter *a = row->a;
        const double beta2 = x->job->groups[a->group].beta2;
        const size_t rows = rows_of(a), columns = a->columns;
        const float *const of_columns = row->sums + mo_factored_row_sums(rows, columns);
        float *const r = (float *)a->row, *const c = (float *)a->column;
        double sums[MO_FACTORED_TILE] = {0};

        for (size_t i = 0; i < columns; i++)
            c[i] = mo_factored_average(c[i], of_columns + i, mo_factored_tiles(rows), columns, (unsigned)rows,
                                       beta2);
        for (size_t i = 0; i < rows; i++) {
            r[i] = mo_factored_average(r[i], row->sums + i, mo_factored_tiles(columns), rows,
                                       (unsigned)columns, beta2);
            sums[i % MO_FACTORED_TILE] += (double)r[i];
        }
        for (size_t apart = MO_FACTORED_TILE / 2; apart > 0; apart /= 2)
            for (size_t i = 0; i < apart; i++)
                sums[i] += sums[i + apart];
        row->inverse = mo_factored_inverse(sums[0], (unsigned)rows);
    }
}

void mo_factored_averages(const mo_update_kernels *kernels, const mo_update_job *job, mo_factored_row *rows,
                          size_t count, float stored)
{
    averaging x = {.kernels = kernels, .job = job, .stored = stored, .rows = rows, .count = count};
    float *sums = (float *)job->scratch + job->count;

    for (size_t k = 0; k < count; k++) {
        const mo_parameter *a = rows[k].a;
        rows[k].sums = sums;
        rows[k].before = x.tiles;
        sums += mo_factored_sums(rows_of(a), a->columns);
        x.tiles += mo_factored_tiles(rows_of(a));
        x.elements += a->count;
    }
    if (x.elements < SHARE) {
        add_up(&x, 0, x.tiles);
        join(&x, 0, x.count);
    } else {
        mo_parallel_for(x.tiles, x.tiles / (x.elements / (SHARE / 2)) + 1, add_up, &x);
        mo_parallel_for(x.count, 1, join, &x);
    }
}

void mo_factored_moments(const mo_update_kernels *kernels, const mo_factored_row *row, size_t begin, size_t n,
                         float *v)
{
    const mo_parameter *a = row->a;
    const float *const column = (const float *)a->column;
    size_t i = begin / a->columns, from = begin % a->columns;

    for (size_t done = 0, part; done < n; done += part, i++, from = 0) {
        part = a->columns - from < n - done ? a->columns - from : n - done;
        kernels->product(mo_mulf(((const float *)a->row)[i], row->inverse), column + from, part, v + done);
    }
}
