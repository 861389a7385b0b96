#include "scaler/gradients.h"

#include "driver/launch.h"

/* ---- geometry ------------------------------------------------------------------------------------------ */

/* Threads a block, the most that gradients.cu allows: smaller blocks than 512 leave less of a multiprocessor idle when
 * a grid runs out. */
#define THREADS 256

/* Blocks a multiprocessor that a large job should have: up to 8 resident times 4, so that the last, partly filled
 * wave wastes at most a quarter of the time of the others. */
#define BLOCKS_WANTED 32

/* One round of a block: 256 threads with four 16-byte loads each. Less per block would leave threads without
 * work. */
#define CHUNK_MIN ((size_t)16 << 10)

/* More gains nothing in bandwidth; it is bounded because a table of 16 bytes a chunk is then 1/16384 of the
 * data. */
#define CHUNK_MAX ((size_t)256 << 10)

size_t mo_gradients_chunk_bytes(size_t bytes, int multiprocessors)
{
    const size_t blocks = (size_t)(multiprocessors > 0 ? multiprocessors : 1) * BLOCKS_WANTED;
    size_t chunk = CHUNK_MIN;
    while (chunk < CHUNK_MAX && bytes / chunk > blocks)
        chunk *= 2;
    return chunk;
}

/* ---- a job --------------------------------------------------------------------------------------------- */

static mo_status check(const mo_gradients_job *job, mo_detail *detail)
{
    const struct {
        const char *name;
        uintptr_t address;
    } scalars[] = {{"inv_scale", job->inv_scale},
                   {"found_inf", job->found_inf},
                   {"norm", job->norm},
                   {"clip", job->clip},
                   {"factor", job->factor}};

    for (size_t i = 0; i < sizeof scalars / sizeof *scalars; i++)
        if (scalars[i].address % sizeof(float))
            return mo_fail(detail, MO_INVALID, 0, "%s at %#zx: expected the address of an fp32",
                           scalars[i].name, (size_t)scalars[i].address);
    if (job->norm64 % sizeof(double))
        return mo_fail(detail, MO_INVALID, 0, "norm64 at %#zx: expected the address of an fp64",
                       (size_t)job->norm64);
    if (job->passes & MO_GRADIENTS_CHECK && !job->found_inf)
        return mo_fail(detail, MO_INVALID, 0, "a check without found_inf: expected the address of an fp32");
    if (!(job->passes & (MO_GRADIENTS_CHECK | MO_GRADIENTS_STORE | MO_GRADIENTS_NORM)) ||
        job->passes >= 2 * MO_GRADIENTS_MAXIMUM)
        return mo_fail(detail, MO_INVALID, 0, "passes %#x: expected a combination of CHECK, STORE and NORM",
                       job->passes);
    return MO_OK;
}

static mo_status queue(mo_launch *launch, CUstream stream, const mo_gradients_job *job, mo_detail *detail)
{
    mo_gradients_launch argument = {
        .inv_scale = job->inv_scale,
        .found_inf = job->found_inf,
        .norm = job->norm,
        .norm64 = job->norm64,
        .clip = job->clip,
        .factor = job->factor,
        .max_norm = job->max_norm,
        .passes = job->passes,
    };
    mo_launch_shape shape = {.kernel = MO_KERNEL_GRADIENTS, .threads = THREADS};
    size_t bytes, chunk_bytes, chunks = 0;
    mo_gradients_head *table = NULL;
    mo_status status;

    if (!mo_tensors_bytes(job->gradients, job->count, &bytes))
        return mo_fail(detail, MO_OVERFLOW, 0, "the bytes of all %zu gradients do not fit", job->count);
    chunk_bytes = mo_gradients_chunk_bytes(bytes, launch->multiprocessors);
    status = mo_chunks_count(job->gradients, job->count, chunk_bytes, &chunks, detail);
    if (status || (chunks == 0 && !(job->passes & MO_GRADIENTS_NORM)))
        return status;

    argument.chunks = (unsigned)chunks;
    shape.blocks = chunks ? (unsigned)chunks : 1;                       /* an empty list has a norm too */
    shape.size = sizeof(mo_gradients_head) + chunks * sizeof(mo_chunk); /* chunks < 2^31: no overflow */
    shape.bytes = bytes * (job->passes & MO_GRADIENTS_STORE ? 2 : 1);
    shape.room = job->passes & MO_GRADIENTS_NORM ? shape.blocks * sizeof(double) : 0;
    status = mo_launch_table(launch, shape.size, (void **)&table, detail);
    if (status)
        return status;
    *table = (mo_gradients_head){0};
    mo_chunks_fill(job->gradients, job->count, chunk_bytes, (mo_chunk *)(table + 1));
    return mo_launch_run(launch, stream, shape, &argument, detail);
}

mo_status mo_gradients_cuda(int device, void *stream, const mo_gradients_job *job, mo_detail *detail)
{
    mo_launch launch;
    mo_status status = check(job, detail);

    if (status)
        return status;
    status = mo_launch_begin(device, "a pass over gradients", &launch, detail);
    if (status)
        return status;
    status = queue(&launch, stream, job, detail);
    mo_launch_end(&launch);
    return status;
}

mo_status mo_gradients_clip_cuda(int device, void *stream, const mo_gradient *gradients, size_t count,
                                 uintptr_t clip, mo_detail *detail)
{
    const mo_gradients_job job = {
        .gradients = gradients, .count = count, .passes = MO_GRADIENTS_STORE, .inv_scale = clip};

    if (!clip)
        return mo_fail(detail, MO_INVALID, 0, "clip at 0: expected the address of an fp32");
    return mo_gradients_cuda(device, stream, &job, detail);
}
