/* Multi-tensor unscale with finite check: the gradients of one element type, all tensors in one launch.
 *
 *     grid (chunks), block (any multiple of 32; the host launches 256)
 *     reads    chunks[gridDim.x] (16 B a chunk), *inv_scale (fp32), every element once
 *     writes   every element once unless *inv_scale is exactly 1, then none; *found_inf = 1 if any was inf or
 * NaN bytes    2 * sizeof(element) an element, sizeof(element) where *inv_scale is 1
 *
 * inv_scale and found_inf stay on the device, so that no step waits for the host. found_inf is never cleared:
 * that is the caller's part, as in torch. Several blocks may store the same 1.0f; the order does not matter.
 * The arithmetic is in unscale.cuh. No -use_fast_math here or in the build: denormals must survive. */
#include "unscale.cuh"

static __device__ __forceinline__ void unscale(mo_float kind, const mo_chunk *chunks, const float *inv_scale,
                                               float *found_inf)
{
    unsigned found = 0;

    mo_unscale_thread(kind, chunks[blockIdx.x], threadIdx.x, blockDim.x, *inv_scale, &found);
    if (__syncthreads_or((int)found) && threadIdx.x == 0)
        *found_inf = 1.0f;
}

#define UNSCALE_KERNEL(name, kind)                                                                           \
    extern "C" __global__ void __launch_bounds__(256)                                                        \
        name(const mo_chunk *chunks, const float *inv_scale, float *found_inf)                               \
    {                                                                                                        \
        unscale(kind, chunks, inv_scale, found_inf);                                                         \
    }

UNSCALE_KERNEL(memopt_unscale_f32, MO_F32)
UNSCALE_KERNEL(memopt_unscale_f16, MO_F16)
UNSCALE_KERNEL(memopt_unscale_bf16, MO_BF16)
UNSCALE_KERNEL(memopt_unscale_f64, MO_F64)
