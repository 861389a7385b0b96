/* memopt's kernels on the simulated device: each kernel's per-thread text (kernels/…cuh) run by a loop over
 * the blocks and the threads of the launch, in order. So index arithmetic and rounding are those of the real
 * kernel; what threads do at the same time is not simulated, and a fault that needs it does not show here. */
#include "../kernels/unscale.cuh"

#include "simcuda/kernels.h"

/* Arguments as in kernels/unscale.cu: chunks, inv_scale, found_inf. */
static void unscale(mo_float kind, void **arguments, const unsigned grid[3], const unsigned block[3])
{
    const mo_chunk *chunks = *(const mo_chunk **)arguments[0];
    const float inv_scale = **(const float **)arguments[1];
    float *const found_inf = *(float **)arguments[2];

    for (unsigned b = 0; b < grid[0]; b++) {
        unsigned found = 0;
        for (unsigned thread = 0; thread < block[0]; thread++)
            mo_unscale_thread(kind, chunks[b], thread, block[0], inv_scale, &found);
        if (found)
            *found_inf = 1.0f;
    }
}

#define UNSCALE_BODY(name, kind)                                                                             \
    static void name(void **arguments, const unsigned grid[3], const unsigned block[3])                      \
    {                                                                                                        \
        unscale(kind, arguments, grid, block);                                                               \
    }

UNSCALE_BODY(unscale_f32, MO_F32)
UNSCALE_BODY(unscale_f16, MO_F16)
UNSCALE_BODY(unscale_bf16, MO_BF16)
UNSCALE_BODY(unscale_f64, MO_F64)

void sim_kernel_bodies_register(void)
{
    static const size_t three_pointers[] = {sizeof(void *), sizeof(void *), sizeof(void *)};

    /* One that finds no memory leaves its kernel doing nothing, which the first test of its values shows. */
    sim_kernel_emulate("memopt_unscale_f32", unscale_f32, 3, three_pointers);
    sim_kernel_emulate("memopt_unscale_f16", unscale_f16, 3, three_pointers);
    sim_kernel_emulate("memopt_unscale_bf16", unscale_bf16, 3, three_pointers);
    sim_kernel_emulate("memopt_unscale_f64", unscale_f64, 3, three_pointers);
}
