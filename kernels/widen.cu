/* Numbers of one or two bytes made floating point, scaled and normalised by channel, in one pass (csrc/data/widen.h): images
 * travel to the device as they are stored, and are widened there.
 *
 *     grid (units of MO_WIDEN_UNIT elements), block (at most 256: the host's choice)
 *     reads    every element once; the table (8 B a channel) from the cache
 *     writes   every element once
 *     bytes    uint8 to fp32: 5 an element, where four passes of torch's move 29
 *
 * The arithmetic is in widen.cuh, bit for bit the CPU's. No -use_fast_math. */
#include "widen.cuh"

#define WIDEN_THREADS 256
#define WIDEN_BLOCKS                                                                                         \
    4 /* of a multiprocessor at once: 64 registers a thread, of which each waits for two loads */

MO_ENTRY __global__ void __launch_bounds__(WIDEN_THREADS, WIDEN_BLOCKS)
    memopt_widen(const mo_widen_launch launch)
{
    mo_widen_thread(&launch, blockIdx.x, threadIdx.x, blockDim.x);
}
