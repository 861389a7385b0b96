/* memopt's kernels on the simulated device: the very text that nvcc compiles, run whole by grid.h. */
#include "simcuda/cuda_words.h"

#include "../kernels/cross_entropy.cu"
#include "../kernels/factored.cu"
#include "../kernels/gradients.cu"
#include "../kernels/update.cu"
#include "../kernels/widen.cu"

#include "simcuda/kernels.h"

#include <stdio.h>
#include <stdlib.h>

/* A kernel that cannot end is a fault of the project's own, and there is nothing to go on with. */
static void run_grid(const char *name, void (*kernel)(const void *), void **arguments, const unsigned grid[3],
                     const unsigned block[3])
{
    static _Atomic uint64_t launches;
    const sim_grid launch = {.kernel = kernel,
                             .argument = arguments[0],
                             .blocks = grid[0],
                             .threads = block[0],
                             .seed = launches++};
    char why[200];

    if (!sim_grid_run(&launch, why, sizeof why)) {
        fprintf(stderr, "memopt.sim: %s: %s\n", name, why);
        abort();
    }
}

#define BODY(name, type)                                                                                     \
    static void name##_thread(const void *argument)                                                          \
    {                                                                                                        \
        memopt_##name(*(const type *)argument);                                                              \
    }                                                                                                        \
    static void name##_body(void **arguments, const unsigned grid[3], const unsigned block[3])               \
    {                                                                                                        \
        run_grid("memopt_" #name, name##_thread, arguments, grid, block);                                    \
    }

BODY(cross_entropy, mo_cross_entropy_launch)
BODY(factored, mo_update_launch)
BODY(gradients, mo_gradients_launch)
BODY(update, mo_update_launch)
BODY(widen, mo_widen_launch)

void sim_kernel_bodies_register(void)
{
    /* One that finds no memory leaves its kernel doing nothing, which the first test of its values shows. */
    sim_kernel_emulate("memopt_cross_entropy", cross_entropy_body, 1,
                       (const size_t[]){sizeof(mo_cross_entropy_launch)});
    sim_kernel_emulate("memopt_factored", factored_body, 1, (const size_t[]){sizeof(mo_update_launch)});
    sim_kernel_emulate("memopt_gradients", gradients_body, 1, (const size_t[]){sizeof(mo_gradients_launch)});
    sim_kernel_emulate("memopt_update", update_body, 1, (const size_t[]){sizeof(mo_update_launch)});
    sim_kernel_emulate("memopt_widen", widen_body, 1, (const size_t[]){sizeof(mo_widen_launch)});
}
