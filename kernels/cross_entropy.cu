/* Cross entropy over rows of logits, which become their own gradient in place (csrc/loss/cross_entropy.h).
 *
 *     grid (rows), block (a multiple of 32, at most 512: the host's choice)
 *     reads    the options (16 B) and a target a row; with FIND every element once; with SUBTRACT every element once (again: from
 *              the cache, where the rows of all blocks at work fit), and a scale a row
 *     writes   with FIND lse and, where it has an address, loss: a number a row; with SUBTRACT every element once
 *     bytes    2 * sizeof(element) an element, and the second read
 *
 * The result is the same in every run: a row's sums are added up in the order of its threads.
 *
 * The arithmetic is in cross_entropy.cuh. No -use_fast_math. */
#include "cross_entropy.cuh"

#define CROSS_ENTROPY_THREADS 512

/* What all threads have seen together, in thread 0. All threads meet at a barrier. */
MO_BODY mo_logits_seen cross_entropy_block_seen(mo_logits_seen seen)
{
    __shared__ float warps[3][CROSS_ENTROPY_THREADS / 32];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    mo_logits_seen other;

    for (unsigned apart = 16; apart > 0; apart /= 2) {
        other.top = __shfl_down_sync(0xFFFFFFFFu, seen.top, apart);
        other.powers = __shfl_down_sync(0xFFFFFFFFu, seen.powers, apart);
        other.values = __shfl_down_sync(0xFFFFFFFFu, seen.values, apart);
        seen = mo_logits_joined(seen, other);
    }
    if (lane == 0) {
        warps[0][warp] = seen.top;
        warps[1][warp] = seen.powers;
        warps[2][warp] = seen.values;
    }
    __syncthreads();
    if (threadIdx.x == 0)
        for (unsigned i = 1; i < blockDim.x / 32; i++) {
            other.top = warps[0][i];
            other.powers = warps[1][i];
            other.values = warps[2][i];
            seen = mo_logits_joined(seen, other);
        }
    return seen;
}

MO_ENTRY __global__ void __launch_bounds__(CROSS_ENTROPY_THREADS)
    memopt_cross_entropy(const mo_cross_entropy_launch launch)
{
    mo_logits_row row = mo_logits_row_of(&launch, blockIdx.x);

    if (launch.passes & MO_LOSS_FIND) {
        __shared__ float lse;
        float target = 0;
        mo_logits_seen seen;

        if (threadIdx.x == 0 && row.column < launch.columns) /* before it is overwritten */
            target = mo_logit_load(launch.kind, row.address + (unsigned long long)row.column *
                                                                  mo_float_size((mo_float)launch.kind));
        seen = cross_entropy_block_seen(mo_cross_entropy_find(&launch, &row, threadIdx.x, blockDim.x));
        if (threadIdx.x == 0)
            lse = mo_cross_entropy_finish(&launch, blockIdx.x, &row, seen, target);
        __syncthreads();
        row.lse = lse;
    } else {
        row.lse = *mo_row_number(launch.lse, blockIdx.x);
    }
    if (launch.passes & MO_LOSS_SUBTRACT)
        mo_cross_entropy_subtract(&launch, &row, threadIdx.x, blockDim.x);
}
