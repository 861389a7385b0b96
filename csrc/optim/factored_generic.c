/* The specification: a tile's squares, then their tree. */
#include "../kernels/factored.cuh"
#include "optim/element.h"

static float tree(const float s[MO_FACTORED_TILE])
{
    float lane[16];

    for (size_t l = 0; l < 16; l++) {
        float t[8];
        for (size_t k = 0; k < 8; k++)
            t[k] = s[16 * k + l] + s[128 + 16 * k + l];
        lane[l] = ((t[0] + t[1]) + (t[2] + t[3])) + ((t[4] + t[5]) + (t[6] + t[7]));
    }
    return mo_factored_lanes(lane);
}

void mo_factored_generic(const mo_adam_termsf *terms, unsigned flags, const mo_run *row, float *column_sums,
                         float *row_sums, size_t apart)
{
    for (size_t first = 0; first < row->n; first += MO_FACTORED_TILE, row_sums += apart) {
        float s[MO_FACTORED_TILE] = {0};
        for (size_t i = first; i < row->n && i < first + MO_FACTORED_TILE; i++) {
            const float g = mo_mulf(mo_element_read(row->grad_kind, row->g, i), row->stored);
            s[i - first] =
                mo_factored_square(flags, terms->factor, terms->weight_decay, mo_element_read_p(row, i), g);
            column_sums[i] += s[i - first];
        }
        *row_sums = tree(s);
    }
}

void mo_product_generic(float scale, const float *column, size_t n, float *v)
{
    for (size_t i = 0; i < n; i++)
        v[i] = mo_mulf(scale, column[i]);
}
