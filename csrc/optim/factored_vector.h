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

/* The vectors of a tile in the order in which vectors that are 128, then 16, 32 and 64 columns apart are added up. */
WORD float factored_tile(const factored_vectors *c, unsigned flags, bool plain, const mo_run *row,
                         size_t first, float *column_sums)
{
    float lane[16];

    for (size_t l = 0; l < 16; l += LANES) {
        vec t[8];
        for (size_t k = 0; k < 8; k++) {
            const size_t i = first + 16 * k + l;
            t[k] = factored_squares(c, flags, plain, row, i, column_sums);
            t[k] = sum(t[k], factored_squares(c, flags, plain, row, i + 128, column_sums));
        }
        t[0] = sum(sum(sum(t[0], t[1]), sum(t[2], t[3])), sum(sum(t[4], t[5]), sum(t[6], t[7])));
        store(lane + l, t[0], LANES);
    }
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
    for (size_t i = 0; i < n; i += LANES) {
        const size_t here = n - i < LANES ? n - i : LANES;
        store(v + i, mul(all(scale), load(column + i, here)), here);
    }
}
