/* The averages of rows and columns that stand for second moments (factored.cuh), brought up to date before the update kernel reads
 * them: of all parameters that have them, of any types.
 *
 *     grid (the factored units of the update kernel's table, or of one round of them), block (a multiple of 32, at most 256)
 *     reads    the table, *found_inf, *factor; each gradient once, with MO_ADAM_L2 each parameter too; R and C; the sums of tiles
 *     writes   the sums of tiles, 1/32 byte an element; R, C and 1 / mean of R
 *     bytes    sizeof(gradient) an element
 *
 * A warp adds up a tile, four columns and four more a lane. The block that is done last of a parameter's adds up the tiles' sums:
 * always in the same order, so that the bits are the CPU's. Where *found_inf is not 0 each block returns at once. */
#include "update.cuh"

#define FACTORED_THREADS 256

/* The two fours of a lane in a row that begins at an address. */
MO_BODY void factored_load(mo_float kind, unsigned array, unsigned whole, unsigned long long row,
                           unsigned column, unsigned columns, mo_four raw[2])
{
    MO_UNROLL
    for (unsigned i = 0; i < 2; i++) {
        const unsigned first = column + 128 * i, left = first < columns ? columns - first : 0;
        const mo_update_few few = {first, left, 1, left < 4 ? 0 : whole};
        mo_update_load(few, array, kind, row, raw + i);
    }
}

/* The sum of a tile's row, in every lane. */
MO_BODY float factored_row(const float s[8])
{
    float lane[4];

    MO_UNROLL
    for (unsigned k = 0; k < 4; k++) {
        lane[k] = s[k] + s[4 + k];
        MO_UNROLL
        for (unsigned apart = 4; apart < 32; apart *= 2)
            lane[k] += __shfl_xor_sync(0xFFFFFFFFu, lane[k], apart);
    }
    lane[0] = (lane[0] + lane[1]) + (lane[2] + lane[3]);
    lane[0] += __shfl_xor_sync(0xFFFFFFFFu, lane[0], 1);
    return lane[0] + __shfl_xor_sync(0xFFFFFFFFu, lane[0], 2);
}

/* The types are asked for in each row: of a tile each, the code would be three times as long. */
MO_BODY void factored_tile(const mo_update_parameter *a, unsigned tile, float factor, float weight_decay)
{
    const unsigned lane = threadIdx.x % 32, columns = a->columns, rows = (unsigned)(a->count / columns);
    const unsigned tiles = mo_factored_tiles(columns), across = tile % tiles, down = tile / tiles;
    const unsigned column = across * MO_FACTORED_TILE + 4 * lane, first = down * MO_FACTORED_TILE,
                   end = rows - first < MO_FACTORED_TILE ? rows : first + MO_FACTORED_TILE;
    const unsigned flags = a->flags & MO_ADAM_L2;
    const mo_float kind = (mo_float)a->grad_kind, p_kind = a->master ? MO_F32 : (mo_float)a->kind;
    const unsigned long long p = a->master ? a->master : a->p;
    const unsigned whole = columns % 4 ? 0
                                       : (a->g % (4 * mo_float_size(kind)) ? 0 : MO_ARRAY_G) |
                                             (p % (4 * mo_float_size(p_kind)) ? 0 : MO_ARRAY_P);
    float *const sums = (float *)mo_global(a->sums);
    float *const of_rows = sums + (unsigned long long)across * rows;
    float *const of_columns = sums + mo_factored_row_sums(rows, columns) + (unsigned long long)down * columns;
    const unsigned long long before = (unsigned long long)first * columns;
    unsigned long long g_row = a->g + before * mo_float_size(kind),
                       p_row = p + before * mo_float_size(p_kind);
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    mo_four raw[2];

    factored_load(kind, MO_ARRAY_G, whole, g_row, column, columns, raw);
    MO_NOT_UNROLLED
    for (unsigned row = first; row < end; row++) {
        float g[8], old[8] = {0, 0, 0, 0, 0, 0, 0, 0}, s[8], of_row;
        mo_fours_widen(kind, 2, raw, g);
        g_row += (unsigned long long)columns * mo_float_size(kind);
        if (row + 1 < end) /* is on its way while this row is added up */
            factored_load(kind, MO_ARRAY_G, whole, g_row, column, columns, raw);
        if (flags) {
            mo_four raw_p[2];
            factored_load(p_kind, MO_ARRAY_P, whole, p_row, column, columns, raw_p);
            mo_fours_widen(p_kind, 2, raw_p, old);
            p_row += (unsigned long long)columns * mo_float_size(p_kind);
        }
        MO_UNROLL
        for (unsigned k = 0; k < 8; k++) {
            s[k] = mo_factored_square(flags, factor, weight_decay, old[k], g[k]);
            sum[k] += s[k];
        }
        of_row = factored_row(s);
        if (lane == 0)
            of_rows[row] = of_row;
    }
    MO_UNROLL
    for (unsigned k = 0; k < 8; k++) {
        const unsigned at = column + k % 4 + k / 4 * 128;
        if (at < columns)
            of_columns[at] = sum[k];
    }
}

/* What the sums of a parameter's tiles make of its vectors; all threads of a block do. */
MO_BODY void factored_finish(const mo_update_parameter *a, double beta2)
{
    __shared__ double row_sums[MO_FACTORED_TILE];
    const unsigned columns = a->columns, rows = (unsigned)(a->count / columns);
    /* volatile: this block must not find in its cache what was there before the others wrote. */
    const volatile float *const sums = (const volatile float *)mo_global(a->sums);
    const volatile float *const of_columns = sums + mo_factored_row_sums(rows, columns);
    float *const row = (float *)mo_global(a->row), *const column = (float *)mo_global(a->column);

    MO_NOT_UNROLLED
    for (unsigned i = threadIdx.x; i < columns; i += blockDim.x)
        column[i] =
            mo_factored_average(column[i], of_columns + i, mo_factored_tiles(rows), columns, rows, beta2);
    MO_NOT_UNROLLED
    for (unsigned k = threadIdx.x; k < MO_FACTORED_TILE; k += blockDim.x) {
        double sum = 0;
        MO_NOT_UNROLLED
        for (unsigned i = k; i < rows; i += MO_FACTORED_TILE) {
            row[i] = mo_factored_average(row[i], sums + i, mo_factored_tiles(columns), rows, columns, beta2);
            sum += (double)row[i];
        }
        row_sums[k] = sum;
    }
    MO_NOT_UNROLLED
    for (unsigned apart = MO_FACTORED_TILE / 2; apart > 0; apart /= 2) {
        __syncthreads();
        for (unsigned k = threadIdx.x; k < apart; k += blockDim.x)
            row_sums[k] += row_sums[k + apart];
    }
    if (threadIdx.x == 0)
        *(float *)mo_global(a->inverse) = mo_factored_inverse(row_sums[0], rows);
}

MO_ENTRY __global__ void __launch_bounds__(FACTORED_THREADS) memopt_factored(const mo_update_launch launch)
{
    __shared__ bool last;

    if (mo_update_skipped(launch))
        return;
    const mo_update_unit unit = mo_update_units(launch)[launch.first_unit + blockIdx.x];
    mo_update_parameter *const a = (mo_update_parameter *)mo_update_parameters(launch) + unit.parameter;
    const mo_update_group *const group = mo_update_groups(launch) + a->group;
    const float scale = launch.factor ? *(const float *)mo_global(launch.factor) : 1.0f;
    const float factor = a->flags & MO_UPDATE_MAXIMIZE ? -scale : scale;
    const unsigned tiles = mo_factored_tiles(a->columns) * mo_factored_tiles(a->count / a->columns);

    MO_NOT_UNROLLED
    for (unsigned k = threadIdx.x / 32; k < MO_FACTORED_UNIT; k += blockDim.x / 32) {
        const unsigned tile = unit.index * MO_FACTORED_UNIT + k;
        if (tile >= tiles)
            break;
        factored_tile(a, tile, factor, (float)group->weight_decay);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence(); /* this block's sums before its count, */
        last = atomicAdd(&a->blocks_done, 1) == a->blocks - 1;
        __threadfence(); /* and the others' before they are read */
    }
    __syncthreads();
    if (last) {
        factored_finish(a, group->beta2);
        if (threadIdx.x == 0)
            a->blocks_done = 0;
    }
}
