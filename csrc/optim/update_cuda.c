#include "optim/update.h"

#include "../kernels/factored.cuh"
#include "../kernels/update.cuh"
#include "base/size.h"
#include "driver/launch.h"

/* ---- geometry ------------------------------------------------------------------------------------------ */

/* Threads a block, the most that update.cu and factored.cu allow. */
#define THREADS 256

/* Blocks a multiprocessor that a large job should have: up to 3 resident times 10, so that the last, partly filled wave
 * wastes little. */
#define BLOCKS_WANTED 32

/* Two rounds of a block: 256 threads with four elements each, or eight warps with 256. A block also computes, in one
 * thread and about a microsecond, what its elements have in common; at 3 TB/s an H100's multiprocessor needs as long for
 * 800 elements of AdamW, and others of its blocks run meanwhile. */
#define UNIT_MIN 2048u

/* More gains nothing, and leaves less to share. A table of 8 bytes a unit is nothing beside its 28 bytes an element. */
#define UNIT_MAX 65536u

#define UNITS_MOST 0x7FFFFFFF /* the largest gridDim.x */

static unsigned unit_elements(size_t elements, int multiprocessors)
{
    const size_t blocks = (size_t)(multiprocessors > 0 ? multiprocessors : 1) * BLOCKS_WANTED;
    unsigned unit = UNIT_MIN;
    while (unit < UNIT_MAX && elements / unit > blocks)
        unit *= 2;
    return unit;
}

/* ---- the table ------------------------------------------------------------------------------------------ */

/* Blocks of the factored kernel. */
static unsigned averaging_blocks(const mo_parameter *a)
{
    const size_t rows = a->column ? a->count / a->columns : 0;

    return rows ? (unsigned)mo_ceil_div((size_t)mo_factored_tiles(rows) * mo_factored_tiles(a->columns),
                                        MO_FACTORED_UNIT)
                : 0;
}

static mo_update_parameter parameter_of(const mo_parameter *a, const mo_hyper *group)
{
    unsigned flags = mo_update_flags(a, group);

    flags |= group->rule == MO_SGD ? MO_UPDATE_SGD : 0u;
    flags |= group->rule == MO_ADAMW ? MO_UPDATE_DECOUPLED : 0u;
    flags |= group->maximize ? MO_UPDATE_MAXIMIZE : 0u;
    flags |= group->stochastic && !a->master ? MO_UPDATE_STOCHASTIC : 0u;
    return (mo_update_parameter){
        .p = a->p,
        .g = a->g,
        .master = a->master,
        .m = a->m,
        .v = a->v,
        .vmax = a->vmax,
        .m_scale = a->m_scale,
        .v_scale = a->v_scale,
        .step = a->step,
        .count = a->count,
        .row = a->row,
        .column = a->column,
        .columns = (unsigned)a->columns,
        .blocks = averaging_blocks(a),
        .flags = flags,
        .group = a->group,
        .kind = (unsigned short)a->kind,
        .grad_kind = (unsigned short)a->grad_kind,
        .state_kind = (unsigned short)a->state_kind,
        .code_bits = (unsigned short)a->code_bits,
    };
}

static mo_update_group group_of(const mo_hyper *group)
{
    return (mo_update_group){
        .lr = group->lr,
        .beta1 = group->beta1,
        .beta2 = group->beta2,
        .eps = group->eps,
        .weight_decay = group->weight_decay,
        .momentum = group->momentum,
        .dampening = group->dampening,
        .lr_address = group->lr_address,
        .lr_kind = group->lr_kind,
    };
}

static void place_sums(const mo_update_job *job, mo_update_parameter *parameters)
{
    for (size_t first = 0; first < job->count;) {
        const size_t end = mo_update_round(job, first);
        uintptr_t sums = job->scratch + job->count * 4;
        for (; first < end; first++) {
            const mo_parameter *a = &job->parameters[first];
            if (!parameters[first].blocks)
                continue;
            parameters[first].inverse = job->scratch + first * 4;
            parameters[first].sums = sums;
            sums += mo_factored_sums(a->count / a->columns, a->columns) * 4;
        }
    }
}

static void fill(const mo_update_job *job, unsigned elements, mo_update_head *head)
{
    mo_update_parameter *const parameters = (mo_update_parameter *)(head + 1);
    mo_update_group *const groups = (mo_update_group *)(parameters + job->count);
    mo_update_unit *unit = (mo_update_unit *)(groups + job->group_count);

    *head = (mo_update_head){0};
    for (size_t i = 0; i < job->count; i++) {
        const mo_parameter *a = &job->parameters[i];
        parameters[i] = parameter_of(a, &job->groups[a->group]);
        for (size_t k = 0; k < mo_ceil_div(a->count, elements); k++)
            *unit++ = (mo_update_unit){.parameter = (unsigned)i, .index = (unsigned)k};
    }
    for (size_t i = 0; i < job->count; i++)
        for (unsigned k = 0; k < parameters[i].blocks; k++)
            *unit++ = (mo_update_unit){.parameter = (unsigned)i, .index = k};
    place_sums(job, parameters);
    for (size_t k = 0; k < job->group_count; k++)
        groups[k] = group_of(&job->groups[k]);
}

/* Bytes of a parameter's arrays: what a step reads and, but for a gradient that it does not store, writes. */
static uint64_t bytes_of(const mo_parameter *a, bool store_gradients)
{
    const uint64_t states = (uint64_t)(a->m != 0) + (a->v != 0) + (a->vmax != 0);
    const uint64_t state_bits = a->code_bits ? a->code_bits : 8 * mo_float_size(a->state_kind);
    const uint64_t written = mo_float_size(a->kind) + (a->master ? 4 : 0);
    const uint64_t gradient = (uint64_t)mo_float_size(a->grad_kind) * (store_gradients ? 2 : 1);

    return a->count * (2 * written + gradient) + a->count * 2 * states * state_bits / 8;
}

/* One launch a round of factored second moments. All launches of a step have one table, which is uploaded once. */
static mo_status queue_averages(mo_launch *launch, CUstream stream, const mo_update_job *job,
                                mo_launch_shape shape, mo_update_launch argument, mo_detail *detail)
{
    mo_status status = MO_OK;

    shape.kernel = MO_KERNEL_FACTORED;
    argument.first_unit = argument.units;
    for (size_t i = 0; i < job->count && !status; argument.first_unit += shape.blocks) {
        const size_t end = mo_update_round(job, i);
        for (shape.blocks = 0, shape.bytes = 0; i < end; i++) {
            const mo_parameter *a = &job->parameters[i];
            shape.blocks += averaging_blocks(a);
            shape.bytes += a->column ? a->count * mo_float_size(a->grad_kind) : 0;
        }
        if (shape.blocks)
            status = mo_launch_run(launch, stream, shape, &argument, detail);
    }
    return status;
}

static mo_status queue(mo_launch *launch, CUstream stream, const mo_update_job *job, mo_detail *detail)
{
    size_t elements = 0, units = 0, averaging = 0;
    mo_update_launch argument = {
        .factor = job->factor,
        .found_inf = job->found_inf,
        .parameters = (unsigned)job->count,
        .groups = (unsigned)job->group_count,
        .store_gradients = job->store_gradients,
        .first_index = job->first_index,
    };
    mo_launch_shape shape = {.kernel = MO_KERNEL_UPDATE, .threads = THREADS};
    void *table = NULL;
    mo_status status;

    for (size_t i = 0; i < job->count; i++)
        if (!mo_add_ok(elements, job->parameters[i].count, &elements))
            return mo_fail(detail, MO_OVERFLOW, 0, "the elements of all %zu parameters do not fit",
                           job->count);
    argument.elements = unit_elements(elements, launch->multiprocessors);
    for (size_t i = 0; i < job->count; i++) {
        units += mo_ceil_div(job->parameters[i].count, argument.elements);
        averaging += averaging_blocks(&job->parameters[i]);
    }
    if (job->count > UNITS_MOST || job->group_count > UNITS_MOST || units + averaging > UNITS_MOST)
        return mo_fail(detail, MO_OVERFLOW, 0, "%zu parameters in %zu groups are too many for one launch",
                       job->count, job->group_count);

    argument.units = (unsigned)units;
    shape.blocks = units ? (unsigned)units : 1; /* steps are counted without elements too */
    /* Each of the numbers is below 2^31: no overflow. */
    shape.size = sizeof(mo_update_head) + job->count * sizeof(mo_update_parameter) +
                 job->group_count * sizeof(mo_update_group) + (units + averaging) * sizeof(mo_update_unit);
    status = mo_launch_table(launch, shape.size, &table, detail);
    if (status)
        return status;
    fill(job, argument.elements, table);
    for (size_t i = 0; i < job->count; i++)
        shape.bytes += bytes_of(&job->parameters[i], job->store_gradients);
    if (averaging)
        status = queue_averages(launch, stream, job, shape, argument, detail);
    return status ? status : mo_launch_run(launch, stream, shape, &argument, detail);
}

mo_status mo_update_cuda(int device, void *stream, const mo_update_job *job, mo_detail *detail)
{
    mo_launch launch;
    mo_status status = mo_update_check(job, detail);

    if (status || job->count == 0)
        return status;
    status = mo_launch_begin(device, "an optimizer step", &launch, detail);
    if (status)
        return status;
    status = queue(&launch, stream, job, detail);
    mo_launch_end(&launch);
    return status;
}
