#include "loss/cross_entropy.h"

#include "base/size.h"
#include "driver/launch.h"

/* Threads a block: a vector of 16 bytes each, up to the most that cross_entropy.cu allows. Four such blocks fill a
 * multiprocessor, and their rows of 128k classes of 16 bits are 1 MiB, so that those of 132 are nearly three times H100's cache; rows
 * of 32k fit. */
#define THREADS_MOST 512

#define BLOCKS_MOST 0x7FFFFFFF /* the largest gridDim.x */

static unsigned threads_for(const mo_cross_entropy_job *job)
{
    const size_t vectors = mo_ceil_div(job->columns, 16 / mo_float_size(job->kind));

    return vectors >= THREADS_MOST ? THREADS_MOST : (unsigned)mo_ceil_div(vectors, 32) * 32;
}

static mo_status queue(mo_launch *launch, CUstream stream, const mo_cross_entropy_job *job, mo_detail *detail)
{
    mo_cross_entropy_launch argument = {
        .logits = job->logits,
        .target = (uintptr_t)job->target,
        .lse = (uintptr_t)job->lse,
        .loss = (uintptr_t)job->loss,
        .scale = (uintptr_t)job->scale,
        .classes = job->classes,
        .first = job->first,
        .columns = (unsigned)job->columns,
        .passes = (unsigned char)job->passes,
        .kind = (unsigned char)job->kind,
    };
    const mo_launch_shape shape = {
        .kernel = MO_KERNEL_CROSS_ENTROPY,
        .blocks = (unsigned)job->rows,
        .threads = threads_for(job),
        .size = sizeof(mo_cross_entropy_options),
        .bytes = (uint64_t)job->rows * job->columns * mo_float_size(job->kind) *
                 (job->passes & MO_LOSS_SUBTRACT ? 2 : 1),
    };
    mo_cross_entropy_options *options = NULL;
    mo_status status = mo_launch_table(launch, shape.size, (void **)&options, detail);

    if (status)
        return status;
    *options = (mo_cross_entropy_options){
        .smoothing = job->smoothing,
        .flat = job->smoothing / (float)job->classes,
        .softcap = job->softcap,
        .reciprocal = job->softcap > 0 ? 1 / job->softcap : 0,
    };
    return mo_launch_run(launch, stream, shape, &argument, detail);
}

mo_status mo_cross_entropy_cuda(int device, void *stream, const mo_cross_entropy_job *job, mo_detail *detail)
{
    mo_launch launch;
    mo_status status = mo_cross_entropy_check(job, detail);

    if (status || !job->rows)
        return status;
    if (job->rows > BLOCKS_MOST || job->columns > UINT32_MAX)
        return mo_fail(detail, MO_OVERFLOW, 0, "%zu rows of %zu logits are too many for one launch",
                       job->rows, job->columns);
    status = mo_launch_begin(device, "the cross entropy of logits", &launch, detail);
    if (status)
        return status;
    status = queue(&launch, stream, job, detail);
    mo_launch_end(&launch);
    return status;
}
