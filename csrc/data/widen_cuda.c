#include "data/widen.h"

#include "base/size.h"
#include "driver/launch.h"

/* Threads a block, the most that widen.cu allows. */
#define THREADS 256

#define BLOCKS_MOST 0x7FFFFFFF /* the largest gridDim.x */

static mo_status queue(mo_launch *launch, CUstream stream, const mo_widen_job *job, mo_detail *detail)
{
    const size_t blocks = mo_ceil_div(job->count, MO_WIDEN_UNIT);
    mo_widen_launch argument = {
        .source = job->source,
        .target = job->target,
        .count = job->count,
        .inner = (unsigned)job->inner,
        .channels = (unsigned)job->channels,
        .scale = job->scale,
        .divide = job->divide,
        .aligned = job->source % ((uint64_t)4 * mo_number_size(job->source_kind)) == 0 &&
                   job->target % ((uint64_t)4 * mo_float_size(job->target_kind)) == 0,
        .source_kind = (unsigned char)job->source_kind,
        .target_kind = (unsigned char)job->target_kind,
    };
    mo_launch_shape shape = {.kernel = MO_KERNEL_WIDEN, .blocks = (unsigned)blocks, .threads = THREADS};
    float *table = NULL;
    mo_status status;

    if (blocks > BLOCKS_MOST)
        return mo_fail(detail, MO_OVERFLOW, 0, "%zu elements are too many for one launch", job->count);
    shape.bytes = job->count * (mo_number_size(job->source_kind) + mo_float_size(job->target_kind));
    shape.size = 2 * job->channels * sizeof *table; /* channels <= 2^31: no overflow */
    status = mo_launch_table(launch, shape.size, (void **)&table, detail);
    if (status)
        return status;
    for (size_t c = 0; c < job->channels; c++) {
        table[c] = job->mean ? job->mean[c] : 0.0f;
        table[job->channels + c] = job->deviation ? job->deviation[c] : 1.0f;
    }
    return mo_launch_run(launch, stream, shape, &argument, detail);
}

mo_status mo_widen_cuda(int device, void *stream, const mo_widen_job *job, mo_detail *detail)
{
    mo_launch launch;
    mo_status status = mo_widen_check(job, detail);

    if (status || !job->count)
        return status;
    status = mo_launch_begin(device, "widening a batch", &launch, detail);
    if (status)
        return status;
    status = queue(&launch, stream, job, detail);
    mo_launch_end(&launch);
    return status;
}
