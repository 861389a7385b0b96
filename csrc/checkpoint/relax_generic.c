#include "checkpoint/relax.h"

/* min(old, new) without a branch, so that compilers make a vector of it. */
static inline float lesser(float value, float old)
{
    return value < old ? value : old;
}

void mo_relax_generic(float *restrict best, const float *restrict left, const float *restrict right,
                      float seconds, size_t count)
{
    if (!right) {
        for (size_t k = 0; k < count; k++)
            best[k] = lesser(seconds + left[k], best[k]);
        return;
    }
    for (size_t k = 0; k < count; k++)
        best[k] = lesser(seconds + (left[k] + right[k]), best[k]);
}

uint32_t mo_reach_generic(const float *best, const float *left, const float *right, float seconds)
{
    uint32_t mask = 0;

    for (unsigned k = 0; k < MO_RELAX_BLOCKS; k++)
        mask |= (uint32_t)(seconds + (left[k] + right[k]) < best[k]) << k;
    return mask;
}
