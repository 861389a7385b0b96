/* One optimizer step over all parameters (csrc/optim/update.h): any rules, groups and types in one launch.
 *
 *     grid (units, or 1 where there are none), block (a multiple of 32, at most 256: the host's choice)
 *     reads    the table, *found_inf, *factor, each parameter's *step, *lr where it lies on the device; then each
 *              parameter, gradient and state once
 *     writes   each parameter and state once, gradients where they are stored; *step + 1 once a parameter
 *     bytes    AdamW in fp32: 28 an element; with states of 8 bits: 16 and 1/16, of 4 bits: 14 and 1/16; SGD with momentum:
 *              20, of 8 bits: 14 and 1/32
 *
 * Where *found_inf is not 0 each block returns at once. All scalars stay on the device, so that no step waits for the
 * host and a graph can be replayed: what depends on the number of the step is computed by one thread a block, in fp64.
 *
 * The steps are advanced by the block that is done last, when all others have read them. A block of 256 elements with
 * states of 8 or 4 bits belongs to one warp, which shares its two largest values by shuffles: no shared memory, no waiting.
 *
 * The arithmetic is in update.cuh and in the files that it includes, bit for bit the CPU's. No -use_fast_math. */
#include "update.cuh"

#define UPDATE_THREADS 256
#define UPDATE_BLOCKS  3 /* of a multiprocessor at once: 80 registers a thread */

/* Of two values of each lane, which are at least 0 and no NaN, the largest in the warp: of m in the lower sixteen lanes, of v
 * in the upper. */
MO_BODY float update_warp_largest(float m, float v, bool upper)
{
    float x = fmaxf(upper ? v : m, __shfl_xor_sync(0xFFFFFFFFu, upper ? m : v, 16));

    for (unsigned apart = 8; apart > 0; apart /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, apart));
    return x;
}

/* The lower half of a warp finds the new scale of m, with its only division, while the upper half finds that of v, which SGD has
 * not. `bits`, `sgd` and `way` are constants. */
MO_BODY void update_codes_in(const mo_update_work *w, unsigned bits, bool sgd, mo_update_way way)
{
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const bool upper = lane >= 16;

    MO_NOT_UNROLLED
    for (unsigned block = warp; block * MO_CODE_ELEMENTS < w->count; block += warps) {
        const mo_update_few few = mo_update_lane_of(w, block, lane);
        mo_update_lane held;
        float scale, per, other;
        mo_update_codes_take(w, bits, sgd, way, block, few, &held);
        scale = mo_code_scale(update_warp_largest(held.largest_m, held.largest_v, upper));
        per = mo_code_per(upper ? MO_CODE_SPAN_V(bits) : MO_CODE_SPAN_M(bits), scale);
        other = __shfl_xor_sync(0xFFFFFFFFu, per, 16);
        __syncwarp(); /* all lanes have read the scales that one writes: a shuffle orders no memory */
        mo_update_codes_put(w, bits, sgd, few, &held, upper ? other : per, upper ? per : other);
        if (lane == 0 || (lane == 16 && !sgd && !w->a.column))
            ((float *)mo_global(upper ? w->a.v_scale : w->a.m_scale))[block] = scale;
    }
}

MO_BODY void update_codes(const mo_update_work *w, unsigned bits, bool sgd)
{
    switch (w->way) {
    case MO_UPDATE_IN_F32:
        update_codes_in(w, bits, sgd, MO_UPDATE_IN_F32);
        break;
    case MO_UPDATE_IN_F16:
        update_codes_in(w, bits, sgd, MO_UPDATE_IN_F16);
        break;
    case MO_UPDATE_IN_BF16:
        update_codes_in(w, bits, sgd, MO_UPDATE_IN_BF16);
        break;
    default:
        update_codes_in(w, bits, sgd, MO_UPDATE_MIXED);
    }
}

MO_ENTRY __global__ void __launch_bounds__(UPDATE_THREADS, UPDATE_BLOCKS)
    memopt_update(const mo_update_launch launch)
{
    __shared__ mo_update_work work;
    __shared__ bool last;

    if (mo_update_skipped(launch))
        return;
    if (blockIdx.x < launch.units) {
        if (threadIdx.x == 0)
            mo_update_prepare(launch, blockIdx.x, &work);
        __syncthreads();
        if (work.a.code_bits && work.a.flags & MO_UPDATE_SGD)
            update_codes(&work, 8, true);
        else if (work.a.code_bits == 8)
            update_codes(&work, 8, false);
        else if (work.a.code_bits == 4)
            update_codes(&work, 4, false);
        else
            mo_update_thread(&work, threadIdx.x, blockDim.x);
    }
    /* This thread alone has read a step. */
    if (threadIdx.x == 0) {
        __threadfence(); /* this block has read its own, */
        last = atomicAdd(&mo_update_head_of(launch)->blocks_done, 1) == gridDim.x - 1;
        __threadfence(); /* and the others theirs, where it is the last */
    }
    __syncthreads();
    if (last) {
        for (unsigned i = threadIdx.x; i < launch.parameters; i += blockDim.x)
            mo_update_advance(launch, i);
        if (threadIdx.x == 0)
            mo_update_head_of(launch)->blocks_done = 0;
    }
}
