#include "data/widen.h"

#include "base/hostmem.h"
#include "base/parallel.h"
#include "base/size.h"

/* Elements that are worth a thread: torch's own grain. */
#define GRAIN ((size_t)32768)

mo_status mo_widen_check(const mo_widen_job *job, mo_detail *detail)
{
    size_t period;

    if ((unsigned)job->source_kind >= MO_NUMBER_COUNT || (unsigned)job->target_kind >= MO_F64)
        return mo_fail(detail, MO_INVALID, 0,
                       "kinds %d and %d: expected a numeric source and fp32, fp16 "
                       "or bf16 as target",
                       (int)job->source_kind, (int)job->target_kind);
    if (job->source % mo_number_size(job->source_kind) || job->target % mo_float_size(job->target_kind))
        return mo_fail(detail, MO_INVALID, 0, "elements at %#zx and %#zx: expected multiples of their sizes",
                       (size_t)job->source, (size_t)job->target);
    if (!job->inner || !job->channels)
        return mo_fail(detail, MO_INVALID, 0, "%zu channels, %zu elements apart: expected at least 1",
                       job->channels, job->inner);
    if (!mo_mul_ok(job->inner, job->channels, &period) || period > MO_WIDEN_PERIOD_MAX)
        return mo_fail(detail, MO_OVERFLOW, 0,
                       "%zu channels of %zu elements in a row are more than 2^31: normalise such samples "
                       "in the loader",
                       job->channels, job->inner);
    if (job->count % period)
        return mo_fail(detail, MO_INVALID, 0,
                       "%zu elements are not a multiple of %zu channels of %zu "
                       "elements",
                       job->count, job->channels, job->inner);
    return MO_OK;
}

typedef struct ranges {
    const mo_widen_job *job;
    const void *table;
} ranges;

static void run(void *user, size_t begin, size_t end)
{
    const ranges *r = user;
    mo_widen_range(r->job, r->table, begin, end);
}

mo_status mo_widen_cpu(const mo_widen_job *job, mo_detail *detail)
{
    mo_status status = mo_widen_check(job, detail);
    ranges r = {job, NULL};
    void *table = NULL;

    if (status || !job->count)
        return status;
    /* Sixteen times as many elements as a table has: then it takes the time of a few of them. */
    if (mo_number_size(job->source_kind) == 1 && job->count / job->channels / 256 >= 16) {
        table = mo_host_alloc(256 * job->channels * mo_float_size(job->target_kind));
        if (!table)
            return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "out of host memory for a table of %zu channels",
                           job->channels);
        mo_widen_fill_table(job, table);
        r.table = table;
    }
    mo_parallel_for(job->count, GRAIN, run, &r);
    mo_host_free(table);
    return MO_OK;
}
