/* factored_generic.c in vectors. Included once by each instruction set's file, after the header that defines the words. */
#include "../kernels/factored.cuh"
#include "optim/vector_run.h"

typedef struct factored_vectors {
    vec factor, weight_decay;
} factored_vectors;

/* The squares of elements i … i + LANES - 1 of a row, those behind its end as 0; added to the column's sums. `plain` is a constant. */
WORD vec factored_squares(const factored_vectors *c, unsigned flags, bool plain, const mo_run *row, size_t i,
                          float *column_sums)
{
    const size_t n = i >= row->n ? 0 : row->n - i < LANES ? row->n - i : LANES;
    vec x;

    if (n == 0)
        return all(0);
    x = mul(plain ? load((const float *)row->g + i, n) : load_as(row->grad_kind, row->g, i, n), c->factor);
    if (flags & MO_ADAM_L2)
        x = mul_add(c->weight_decay, load_p(row, i, n), x);
    x = mul(x, x);
    x = up_to(MO_FACTORED_MOST, x, x);
    store(column_sums + i, sum(load(column_sums + i, n), x), n);
    return x;
}

/* A tile's row, in the order of memory. Vectors that are 128, then 16, 32 and 64 columns apart are added up. */
WORD float factored_tile(const factored_vectors *c, unsigned flags, bool plain, const mo_run *row,
                         size_t first, float *column_sums)
{
    vec t[16 / LANES][8];
    float lane[16];

    for (size_t half = 0; half < 2; half++)
        for (size_t k = 0; k < 8; k++)
            for (size_t l = 0; l < 16 / LANES; l++) {
                const vec x = factored_squares(c, flags, plain, row, first + 128 * half + 16 * k + l * LANES,
                                               column_sums);
                t[l][k] = half ? sum(t[l][k], x) : x;
            }
    for (size_t l = 0; l < 16 / LANES; l++)
        store(lane + l * LANES,
              sum(sum(sum(t[l][0], t[l][1]), sum(t[l][2], t[l][3])),
                  sum(sum(t[l][4], t[l][5]), sum(t[l][6], t[l][7]))),
              LANES);
    return mo_factored_lanes(lane);
}

WORD void factored_with(const mo_adam_termsf *terms, unsigned flags, bool plain, const mo_run *row,
                        float *column_sums, float *row_sums, size_t apart)
{
    /* One of the two is 1, or -1: the product is exact. */
    const factored_vectors c = {all(mo_mulf(row->stored, terms->factor)), all(terms->weight_decay)};
    const mo_run r = *row; /* a copy of its own, which no store can change */

    for (size_t first = 0; first < r.n; first += MO_FACTORED_TILE, row_sums += apart)
        *row_sums = factored_tile(&c, flags, plain, &r, first, column_sums);
}

VECTOR static void factored_row(const mo_adam_termsf *terms, unsigned flags, const mo_run *row,
                                float *column_sums, float *row_sums, size_t apart)
{
    if (row->grad_kind == MO_F32 && !(flags & MO_ADAM_L2))
        factored_with(terms, 0, true, row, column_sums, row_sums, apart);
    else
        factored_with(terms, flags, false, row, column_sums, row_sums, apart);
}

VECTOR static void factored_product(float scale, const float *column, size_t n, float *v)
{
    size_t i = 0;

    for (; i + LANES <= n; i += LANES)
        store(v + i, mul(all(scale), load(column + i, LANES)), LANES);
    if (i < n)
        store(v + i, mul(all(scale), load(column + i, n - i)), n - i);
}
