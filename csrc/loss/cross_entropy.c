/* A row is read by find and again by subtract while it is in the cache; its target's element, one of many, is dealt with apart. */
#include "loss/cross_entropy.h"

#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include "../kernels/float_bits.cuh"
#include "base/parallel.h"
#include "base/size.h"
#include "loss/cross_entropy_kernels.h"

/* Elements that are worth a thread: torch's own grain. */
#define GRAIN ((size_t)32768)

/* ---- the instruction set ------------------------------------------------------------------------------------------- */

static _Atomic(const mo_cross_entropy_kernels *) chosen;

static const mo_cross_entropy_kernels *kernels_of(mo_isa isa)
{
#if defined(__x86_64__)
    if (isa == MO_ISA_AVX512)
        return &mo_cross_entropy_avx512;
    if (isa == MO_ISA_AVX2)
        return &mo_cross_entropy_avx2;
#endif
    (void)isa;
    return &mo_cross_entropy_generic;
}

void mo_cross_entropy_use(mo_isa isa)
{
    atomic_store(&chosen, isa == MO_ISA_COUNT ? NULL : kernels_of(isa));
}

static mo_status choose(const mo_cross_entropy_kernels **out, mo_detail *detail)
{
    const mo_cross_entropy_kernels *kernels = atomic_load_explicit(&chosen, memory_order_acquire);
    mo_status status;
    mo_isa isa;

    if (!kernels) {
        status = mo_isa_choose(getenv("MEMOPT_ISA"), &isa, detail);
        if (status)
            return status;
        kernels = kernels_of(isa);
        atomic_store_explicit(&chosen, kernels, memory_order_release);
    }
    *out = kernels;
    return MO_OK;
}

/* ---- a row --------------------------------------------------------------------------------------------------------- */

typedef struct work {
    const mo_cross_entropy_job *job;
    const mo_cross_entropy_kernels *kernels;
} work;

static float load_one(mo_float kind, uintptr_t at)
{
    return kind == MO_F32   ? *(const float *)at
           : kind == MO_F16 ? mo_f16_to_float(*(const uint16_t *)at)
                            : mo_bf16_to_float(*(const uint16_t *)at);
}

static void store_one(mo_float kind, uintptr_t at, float y)
{
    if (kind == MO_F32)
        *(float *)at = y;
    else
        *(uint16_t *)at = (uint16_t)(kind == MO_F16 ? mo_f16_from_float(y) : mo_bf16_from_float(y));
}

static void run_row(const work *w, size_t row)
{
    const mo_cross_entropy_job *job = w->job;
    const size_t size = mo_float_size(job->kind);
    const uintptr_t logits = job->logits + row * job->columns * size;
    const int capped = job->softcap > 0;
    const float flat = job->smoothing / (float)job->classes, keep = 1 - job->smoothing;
    const uint64_t column = (uint64_t)job->target[row] - job->first;
    const bool here = column < job->columns;
    const uintptr_t at = here ? logits + column * size : 0;
    float tangent = 0, z = 0;

    if (here) {
        z = load_one(job->kind, at);
        tangent = capped ? tanhf(z / job->softcap) : 0;
        z = capped ? tangent * job->softcap : z;
    }
    if (job->passes & MO_LOSS_FIND) {
        const mo_row_sums r =
            w->kernels->find[job->kind][capped]((const void *)logits, job->columns, job->softcap);
        const double smooth = job->smoothing > 0 ? (double)job->smoothing * r.sum / (double)job->classes : 0;
        job->lse[row] = (float)r.lse;
        if (job->loss)
            job->loss[row] = (float)(r.lse - (double)keep * (double)z - smooth);
    }
    if (job->passes & MO_LOSS_SUBTRACT) {
        const float lse = job->lse[row], scale = job->scale[row];
        w->kernels->subtract[job->kind][capped]((void *)logits, job->columns, job->softcap, lse, flat, scale);
        if (here)
            store_one(job->kind, at, scale * (expf(z - lse) - flat - keep) * (1 - tangent * tangent));
    }
}

static void run_rows(void *user, size_t begin, size_t end)
{
    for (size_t row = begin; row < end; row++)
        run_row(user, row);
}

/* ---- a job --------------------------------------------------------------------------------------------------------- */

mo_status mo_cross_entropy_check(const mo_cross_entropy_job *job, mo_detail *detail)
{
    size_t count;

    if ((unsigned)job->kind >= MO_F64)
        return mo_fail(detail, MO_INVALID, 0, "logits of kind %d: expected fp32, fp16 or bf16",
                       (int)job->kind);
    if (!job->columns || !mo_mul_ok(job->rows, job->columns, &count) ||
        job->logits % mo_float_size(job->kind))
        return mo_fail(detail, MO_INVALID, 0, "%zu rows of %zu logits at %#zx: expected whole elements",
                       job->rows, job->columns, (size_t)job->logits);
    if (job->first > job->classes || job->columns > job->classes - job->first ||
        (job->passes & MO_LOSS_FIND && job->columns != job->classes))
        return mo_fail(detail, MO_INVALID, 0, "columns %zu to %zu of %zu classes: expected %s", job->first,
                       job->first + job->columns, job->classes,
                       job->passes & MO_LOSS_FIND ? "all of them" : "some of them");
    if (!(job->smoothing >= 0 && job->smoothing <= 1) || !(job->softcap >= 0) || isinf(job->softcap))
        return mo_fail(detail, MO_INVALID, 0,
                       "smoothing %g, softcap %g: expected one in [0, 1], and one of at least 0",
                       (double)job->smoothing, (double)job->softcap);
    if (job->rows && (!job->target || !job->lse || (job->passes & MO_LOSS_SUBTRACT && !job->scale)))
        return mo_fail(detail, MO_INVALID, 0,
                       "no address of targets, of lse, or of the scales to subtract by");
    return MO_OK;
}

mo_status mo_cross_entropy_cpu(const mo_cross_entropy_job *job, mo_detail *detail)
{
    work w = {.job = job};
    mo_status status = mo_cross_entropy_check(job, detail);

    if (!status)
        status = choose(&w.kernels, detail);
    if (!status && job->rows)
        mo_parallel_for(job->rows, job->columns < GRAIN ? GRAIN / job->columns : 1, run_rows, &w);
    return status;
}
