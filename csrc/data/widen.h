/* Numbers of one or two bytes made floating point, and normalised by channel, in one pass:
 *
 *     target[i] = (source[i] * scale - mean[c]) / deviation[c]         or  source[i] / scale, where `divide` says so
 *
 * with one rounding an operation in fp32 and, where the target is of 16 bits, one more: bit for bit what torch's
 * x.float().div(scale).sub(mean).div(deviation).to(target) gives, on the CPU and by the kernel (kernels/widen.cuh) alike. A scale
 * of 1, a mean of 0 and a deviation of 1 change nothing.
 *
 * Element i of memory is of channel c = (i / inner) % channels: NCHW has inner = H * W, channels_last has inner = 1, and a source
 * without channels inner = channels = 1. Source and target lie in the same order. */
#ifndef MO_WIDEN_H
#define MO_WIDEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../kernels/widen.cuh"
#include "base/status.h"

typedef struct mo_widen_job {
    uintptr_t source,
        target;   /* of the first element, each a multiple of its element's size; they do not overlap */
    size_t count; /* elements */
    mo_number source_kind;
    mo_float target_kind; /* not MO_F64 */
    size_t inner, channels;
    const float *mean, *deviation; /* host memory, one a channel; NULL: 0, 1 */
    float scale;
    bool divide;
} mo_widen_job;

/* MO_INVALID: addresses, kinds, no channel, or elements that are no whole number of inner * channels. MO_OVERFLOW: inner * channels
 * above MO_WIDEN_PERIOD_MAX. */
mo_status mo_widen_check(const mo_widen_job *job, mo_detail *detail);

/* Host memory, on torch's threads. MO_NO_HOST_MEMORY, and then nothing is written. Call without the GIL. */
mo_status mo_widen_cpu(const mo_widen_job *job, mo_detail *detail);

/* Queued on a stream of the device, where source and target are; mean and deviation may be changed when it returns. One launch.
 * The host does not wait. */
mo_status mo_widen_cuda(int device, void *stream, const mo_widen_job *job, mo_detail *detail);

/* mo_widen_cpu's work on elements [begin, end). table: of source_kinds of 8 bits the bits of each channel's 256 results, channel by
 * channel, as elements of the target; NULL: computed one by one. */
void mo_widen_range(const mo_widen_job *job, const void *table, size_t begin, size_t end);

/* Such a table: 256 * channels elements of the target's size. */
void mo_widen_fill_table(const mo_widen_job *job, void *table);

#endif
