/* One pass over all gradients, whatever their types: the check for inf and NaN, the multiplication by a scale, the norm
 * and what clipping makes of it (csrc/scaler/gradients.h), each where it is asked for.
 *
 *     grid (chunks, or 1 where there are none), block (a multiple of 32, at most 256: the host's choice)
 *     reads    the table (16 B a chunk), *inv_scale, every element once
 *     writes   with STORE every element once unless *inv_scale is exactly 1, then none; *found_inf = 1 if any was inf
 *              or NaN; with NORM 8 B a block, and norm, clip, factor
 *     bytes    with STORE 2 * sizeof(element) an element, else sizeof(element)
 *
 * All scalars stay on the device, so that no step waits for the host. found_inf is never cleared: that is the caller's
 * part, as in torch. Several blocks may store the same 1.0f, volatile so that this is no race.
 *
 * The norm is the same in every run: each block writes its sum, the one that is done last adds them up in the order of
 * the chunks and writes the results. Only that counter is atomic, and an integer.
 *
 * The arithmetic is in gradients.cuh. No -use_fast_math here or in the build: denormals must survive. */
#include "gradients.cuh"

#define GRADIENTS_THREADS 256

/* The sum of all threads' in thread 0, always added in the same order. Between two calls all threads meet at a barrier. */
MO_BODY double gradients_block_sum(double sum, unsigned passes)
{
    __shared__ double warps[GRADIENTS_THREADS / 32];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    for (unsigned apart = 16; apart > 0; apart /= 2)
        sum = mo_gradients_add(sum, __shfl_down_sync(0xFFFFFFFFu, sum, apart), passes);
    if (lane == 0)
        warps[warp] = sum;
    __syncthreads();
    if (threadIdx.x == 0)
        for (unsigned i = 1; i < blockDim.x / 32; i++)
            sum = mo_gradients_add(sum, warps[i], passes);
    return sum;
}

MO_ENTRY __global__ void __launch_bounds__(GRADIENTS_THREADS)
    memopt_gradients(const mo_gradients_launch launch)
{
    const float scale = mo_gradients_scale(launch);
    mo_gradients_head *const head = mo_gradients_head_of(launch);
    mo_seen seen = {0, 0};

    if (launch.passes == MO_GRADIENTS_STORE && scale == 1.0f)
        return;
    if (blockIdx.x < launch.chunks)
        mo_gradients_thread(launch.passes, mo_gradients_chunks(launch)[blockIdx.x], threadIdx.x, blockDim.x,
                            scale, &seen);
    if (launch.passes & MO_GRADIENTS_CHECK && __syncthreads_or(seen.not_finite != 0) && threadIdx.x == 0)
        *(volatile float *)mo_global(launch.found_inf) = 1.0f;

    if (launch.passes & MO_GRADIENTS_NORM) {
        __shared__ bool last;
        double sum = gradients_block_sum(seen.sum, launch.passes);
        /* volatile: the last block must not find in its cache what was there before the others wrote. */
        volatile double *const partials = mo_gradients_partials(launch);

        if (threadIdx.x == 0) {
            partials[blockIdx.x] = sum;
            __threadfence();
            last = atomicAdd(&head->blocks_done, 1) == gridDim.x - 1;
            __threadfence(); /* of the thread that counted, before the barrier: so the whole block is after the others */
        }
        __syncthreads();
        if (last) {
            sum = 0;
            for (unsigned i = threadIdx.x; i < gridDim.x; i += blockDim.x)
                sum = mo_gradients_add(sum, partials[i], launch.passes);
            sum = gradients_block_sum(sum, launch.passes);
            if (threadIdx.x == 0) {
                mo_gradients_finish(launch, sum, scale);
                head->blocks_done = 0;
            }
        }
    }
}
