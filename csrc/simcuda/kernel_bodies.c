/* memopt's kernels on the simulated device: each kernel's per-thread text (kernels/…cuh) run by a loop over
 * the blocks and the threads of the launch, in order. So index arithmetic and rounding are those of the real
 * kernel; what threads do at the same time is not simulated, and a fault that needs it does not show here. */
#include "../kernels/gradients.cuh"
#include "../kernels/update.cuh"
#include "../kernels/widen.cuh"

#include "simcuda/kernels.h"

/* As kernels/gradients.cu, where the block that is done last is the grid's last. */
static void gradients(void **arguments, const unsigned grid[3], const unsigned block[3])
{
    const mo_gradients_launch launch = *(const mo_gradients_launch *)arguments[0];
    const float scale = mo_gradients_scale(launch);
    mo_gradients_head *const head = mo_gradients_head_of(launch);
    mo_squares *const partials = mo_gradients_partials(launch);
    mo_squares sum = {0};

    for (unsigned b = 0; b < grid[0]; b++) {
        mo_seen seen = {0};
        for (unsigned thread = 0; b < launch.chunks && thread < block[0]; thread++)
            mo_gradients_thread(launch.passes, mo_gradients_chunks(launch)[b], thread, block[0], scale,
                                &seen);
        if (launch.passes & MO_GRADIENTS_CHECK && seen.not_finite)
            *(float *)launch.found_inf = 1.0f;
        if (launch.passes & MO_GRADIENTS_NORM) {
            partials[b] = seen.sum;
            if (head->blocks_done++ != grid[0] - 1)
                continue;
            for (unsigned i = 0; i < grid[0]; i++)
                sum = mo_squares_add(sum, partials[i], launch.passes);
            mo_gradients_finish(launch, sum, scale);
            head->blocks_done = 0;
        }
    }
}

/* As kernels/update.cu's warps: what lanes exchange in the middle is the largest of both values. */
static void update_codes(const mo_update_work *w)
{
    for (uint64_t block = w->begin / MO_ADAM8_ELEMENTS; block * MO_ADAM8_ELEMENTS < w->end; block++) {
        mo_update_lane held[32];
        float largest_m = 0, largest_v = 0;
        for (unsigned lane = 0; lane < 32; lane++) {
            mo_update_codes_take(w, block, lane, &held[lane]);
            largest_m = held[lane].largest_m > largest_m ? held[lane].largest_m : largest_m;
            largest_v = held[lane].largest_v > largest_v ? held[lane].largest_v : largest_v;
        }
        for (unsigned lane = 0; lane < 32; lane++) {
            held[lane].largest_m = largest_m;
            held[lane].largest_v = largest_v;
            mo_update_codes_put(w, block, lane, &held[lane]);
        }
    }
}

/* As kernels/update.cu. */
static void update(void **arguments, const unsigned grid[3], const unsigned block[3])
{
    const mo_update_launch launch = *(const mo_update_launch *)arguments[0];
    mo_update_head *const head = mo_update_head_of(launch);

    for (unsigned b = 0; b < grid[0] && !mo_update_skipped(launch); b++) {
        mo_update_work work;
        if (b < launch.units) {
            mo_update_prepare(launch, b, &work);
            if (work.a.flags & MO_UPDATE_CODES)
                update_codes(&work);
            else
                for (unsigned thread = 0; thread < block[0]; thread++)
                    mo_update_thread(&work, thread, block[0]);
        }
        if (head->blocks_done++ != grid[0] - 1)
            continue;
        for (unsigned i = 0; i < launch.parameters; i++)
            mo_update_advance(launch, i);
        head->blocks_done = 0;
    }
}

/* As kernels/widen.cu. */
static void widen(void **arguments, const unsigned grid[3], const unsigned block[3])
{
    const mo_widen_launch launch = *(const mo_widen_launch *)arguments[0];

    for (unsigned b = 0; b < grid[0]; b++)
        for (unsigned thread = 0; thread < block[0]; thread++)
            mo_widen_thread(&launch, b, thread, block[0]);
}

void sim_kernel_bodies_register(void)
{
    /* One that finds no memory leaves its kernel doing nothing, which the first test of its values shows. */
    sim_kernel_emulate("memopt_gradients", gradients, 1, (const size_t[]){sizeof(mo_gradients_launch)});
    sim_kernel_emulate("memopt_update", update, 1, (const size_t[]){sizeof(mo_update_launch)});
    sim_kernel_emulate("memopt_widen", widen, 1, (const size_t[]){sizeof(mo_widen_launch)});
}
