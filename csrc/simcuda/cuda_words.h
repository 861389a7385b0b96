/* CUDA's words in C, for the text of a .cu that is included after this: only those that memopt's kernels use, so that a new one is a
 * compile error. The arithmetic is that of the .cuh files, as the host compiles them. */
#ifndef SIM_CUDA_WORDS_H
#define SIM_CUDA_WORDS_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "simcuda/grid.h"

#define __global__
#define __launch_bounds__(...)

/* One copy in the process, which the grid puts by when it goes from block to block. */
#define __shared__ static __attribute__((section("sim_shared")))

#define threadIdx (sim_here->thread)
#define blockIdx  (sim_here->block)
#define blockDim  (sim_here->block_size)
#define gridDim   (sim_here->grid_size)

#define __syncthreads()             ((void)sim_barrier(__LINE__, 0))
#define __syncthreads_or(predicate) sim_barrier(__LINE__, predicate)
#define __syncwarp()                sim_warp_barrier(__LINE__)
#define __threadfence()             sim_fence()
#define atomicAdd(at, by)           sim_atomic_add(at, by)

static inline float sim_shuffled_float(int line, unsigned mask, float value, unsigned by, bool exclusive_or)
{
    uint64_t bits = 0;

    memcpy(&bits, &value, sizeof value);
    bits = sim_shuffle(line, mask, bits, by, exclusive_or);
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline double sim_shuffled_double(int line, unsigned mask, double value, unsigned by,
                                         bool exclusive_or)
{
    uint64_t bits;

    memcpy(&bits, &value, sizeof value);
    bits = sim_shuffle(line, mask, bits, by, exclusive_or);
    memcpy(&value, &bits, sizeof value);
    return value;
}

#define SIM_SHUFFLED(value)               _Generic((value), float : sim_shuffled_float, double : sim_shuffled_double)
#define __shfl_down_sync(mask, value, by) SIM_SHUFFLED(value)(__LINE__, mask, value, by, false)
#define __shfl_xor_sync(mask, value, by)  SIM_SHUFFLED(value)(__LINE__, mask, value, by, true)

#endif
