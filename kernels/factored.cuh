/* Adafactor's second moment (Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018): of a
 * matrix of rows and columns two vectors, the averages of the squares' means of each row, R, and of each column, C.
 *
 *     s = x * x, or 0 where that is not finite              x: adam.cuh's, which are all read for it before the update
 *     R = beta2 * R + (1 - beta2) * the mean of its row's s                in fp64, rounded once
 *     C = beta2 * C + (1 - beta2) * the mean of its column's s             likewise
 *     v = (R * (1 / mean of all R)) * C                                    each operation rounded to fp32
 *
 * and then adam.cuh's formula with this v, with beta2 = 1 and rest2 = 2^-40 instead of what made v there:
 *
 *     v = fma(1, v, 2^-40 * (x * x))
 *
 * which adds less than is rounded off, or 1e-6 of v, as long as |x| < 1000 * sqrt(v). But where x or its square is not finite, v
 * is infinite or NaN, as Adam's is: its parameter is not moved, or NaN. Such an element leaves no trace in the vectors, and its m
 * becomes 0, as among codes (mo_code_is_kept): what becomes of other elements, and of later steps, does not depend on it.
 *
 * The sums are the same on every processor. A tile of 256 rows and 256 columns adds up each column from its first row to its last,
 * and each row as a tree, in fp32: all s are at least 0, so the sums are right to 2^-16 of themselves. Sums of tiles are added up
 * from the first to the last in fp64, and all R in 256 rows of sums, which a tree joins. */
#ifndef MO_FACTORED_CUH
#define MO_FACTORED_CUH

#include "adam.cuh"

#define MO_FACTORED_TILE          256 /* rows, and columns; also the rows of sums of which the mean of R is made */
#define MO_FACTORED_UNIT          8 /* tiles of a block of threads: one a warp */
#define MO_FACTORED_LEAST_COLUMNS 8 /* so that what a thread takes at a time is of two rows at most */

#define MO_FACTORED_MOST 0x1.fffffep127f
#define MO_FACTORED_TINY 0x1p-126f /* a mean of R below this is as 0, and so is v */

MO_BODY void mo_factored_terms(mo_adam_terms *c)
{
    c->beta2 = 1;
    c->rest2 = 0x1p-40;
}

/* s of an element; factor and weight_decay are the rule's. */
MO_BODY float mo_factored_square(unsigned flags, float factor, float weight_decay, float p, float g)
{
    float x = mo_mulf(g, factor);

    if (flags & MO_ADAM_L2)
        x = mo_fmaf(weight_decay, p, x);
    x = mo_mulf(x, x);
    return x <= MO_FACTORED_MOST ? x : 0;
}

/* The end of the tree over a row's 256 columns of a tile: number l has the sum of columns l, l + 16 … l + 240, of which those 128
 * apart were added up first, then those 16, 32 and 64 apart. */
MO_BODY float mo_factored_lanes(const float lane[16])
{
    float four[4];
    unsigned k;

    MO_UNROLL
    for (k = 0; k < 4; k++)
        four[k] = (lane[4 * k] + lane[4 * k + 1]) + (lane[4 * k + 2] + lane[4 * k + 3]);
    return (four[0] + four[1]) + (four[2] + four[3]);
}

/* A new R or C. sums: of `count` elements in all, one a tile, `apart` numbers apart. */
MO_BODY float mo_factored_average(float old, const volatile float *sums, unsigned tiles,
                                  unsigned long long apart, unsigned count, double beta2)
{
    double sum = 0, mean;
    unsigned k;

    MO_NOT_UNROLLED
    for (k = 0; k < tiles; k++)
        sum += (double)sums[k * apart];
    mean = mo_div(sum, (double)count);
    if (!(mean <= (double)MO_FACTORED_MOST)) /* squares are finite, but their sum need not be */
        mean = (double)MO_FACTORED_MOST;
    return (float)mo_fma(beta2, (double)old, mo_mul(1 - beta2, mean));
}

/* 1 / mean of R, from R's sum. */
MO_BODY float mo_factored_inverse(double sum, unsigned rows)
{
    const float mean = (float)mo_div(sum, (double)rows);

    return mean >= MO_FACTORED_TINY ? mo_divf(1, mean) : 0;
}

/* ---- sums of tiles: those of rows, all of the first column of tiles first, then those of columns, all of the first row of tiles first */

MO_BODY unsigned mo_factored_tiles(unsigned long long count)
{
    return (unsigned)((count + MO_FACTORED_TILE - 1) / MO_FACTORED_TILE);
}

MO_BODY unsigned long long mo_factored_row_sums(unsigned long long rows, unsigned long long columns)
{
    return rows * mo_factored_tiles(columns);
}

MO_BODY unsigned long long mo_factored_sums(unsigned long long rows, unsigned long long columns)
{
    return mo_factored_row_sums(rows, columns) + columns * mo_factored_tiles(rows);
}

#endif
