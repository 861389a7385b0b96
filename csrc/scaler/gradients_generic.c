/* The specification of what gradients_avx2.c and gradients_avx512.c compute, bit for bit, for any processor. */
#include "scaler/gradients_kernels.h"

#include "base/simd_generic.h"
#include "scaler/gradients_body.h"

const mo_gradients_kernels mo_gradients_generic = KERNEL_TABLE;

/* ---- where fp32 would not do --------------------------------------------------------------------------- */

double mo_gradients_careful(mo_float kind, const void *x, size_t count)
{
    const size_t size = mo_float_size(kind);
    const char *at = x;
    double total[16] = {0}, sum = 0;
    float each[16];

    for (; count > 0; at += 16 * size) {
        const size_t n = count < 16 ? count : 16;
        const lanes part = load_lanes(kind, at, n);
        memcpy(each, &part, sizeof each);
        for (int i = 0; i < 16; i++)
            total[i] += (double)each[i] * (double)each[i];
        count -= n;
    }
    for (int i = 0; i < 16; i++)
        sum += total[i];
    return sum;
}
