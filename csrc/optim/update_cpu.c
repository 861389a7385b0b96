/* All parameters are one row of *units*, runs of UNIT elements that never straddle two parameters:
 *
 *     unit u of parameter i is elements [u - before(i), u - before(i) + 1) * UNIT of it, as far as it has them
 *
 * and that row is what the threads share; so it makes no difference whether there are 10^9 elements in one parameter or in 10^6.
 * Everything but fp64 is computed in fp32, by the kernels of one instruction set. */
#include "optim/update.h"

#include "base/hostmem.h"
#include "base/parallel.h"
#include "base/size.h"
#include "../kernels/factored.cuh"
#include "../kernels/float_bits.cuh"
#include "optim/factored.h"
#include "optim/update_kernels.h"

#define UNIT 4096 /* elements; a multiple of MO_CODE_BLOCK, so that no block is shared by two threads */

/* Fewer bytes than this are not worth a second thread: it saves some 10 us of 40, but where no core is free the loop waits
 * for the kernel's time slice, some milliseconds. A parameter costs as much as PARAMETER_BYTES beside its own. */
#define SHARE_BYTES     ((size_t)2 << 20)
#define PARAMETER_BYTES 64

/* What parameters that follow each other in one group at one step have in common. */
typedef struct update_terms {
    union {
        mo_adam_terms adam;
        mo_sgd_terms sgd;
    };
    union {
        mo_adam_termsf adamf;
        mo_sgd_termsf sgdf;
    };
} update_terms;

typedef struct update_row {
    size_t before; /* units of the parameters before */
    size_t terms;
    float step; /* steps counted before this one */
    mo_factored_row *factored;
} update_row;

typedef struct update_plan {
    const mo_update_job *job;
    const mo_update_kernels *kernels;
    float factor,
        stored; /* gradients are multiplied by the first in the rule, or by the second where they lie; the other is 1 */
    update_row *rows;
    update_terms *terms;
    mo_factored_row *factored;
    size_t factored_count;
    size_t units, bytes, terms_count;
} update_plan;

/* ---- one parameter's elements [begin, begin + n) ------------------------------------------------------- */

typedef struct share {
    const mo_parameter *a;
    const mo_hyper *group;
    const update_terms *terms;
    unsigned flags;
    const mo_factored_row *factored; /* or NULL */
    float stored;  /* what gradients are multiplied with where they lie, so that the rule need not; 1: left */
    uint32_t step; /* the number of this step */
    uint32_t first_index;
} share;

static void *place(uintptr_t address, size_t index, size_t size)
{
    return address ? (void *)(address + index * size) : NULL;
}

static void run_fp32(const mo_update_kernels *kernels, const share *s, size_t begin, size_t n, float *v)
{
    const mo_parameter *a = s->a;
    const size_t state_bits = a->code_bits ? a->code_bits : 8 * mo_float_size(a->state_kind);
    const mo_run run = {
        .n = n,
        .p = place(a->p, begin, mo_float_size(a->kind)),
        .g = place(a->g, begin, mo_float_size(a->grad_kind)),
        .master = place(a->master, begin, 4),
        .m = place(a->m, begin * state_bits / 8, 1),
        .v = v ? v : place(a->v, begin * state_bits / 8, 1),
        .vmax = place(a->vmax, begin * state_bits / 8, 1),
        .m_scale = place(a->m_scale, begin / MO_CODE_BLOCK, 4),
        .v_scale = place(a->v_scale, begin / MO_CODE_BLOCK, 4),
        .code_bits = a->code_bits,
        .kind = a->kind,
        .grad_kind = a->grad_kind,
        .state_kind = a->state_kind,
        .factored = v != NULL,
        .stochastic = s->group->stochastic,
        .stored = s->stored,
        .index = s->first_index + (uint32_t)begin,
        .step = s->step,
    };

    if (s->group->rule == MO_SGD && a->code_bits)
        mo_sgd_codes(kernels, &s->terms->sgdf, s->flags, &run);
    else if (s->group->rule == MO_SGD)
        kernels->sgd(&s->terms->sgdf, s->flags, &run);
    else if (a->code_bits)
        kernels->adam_codes(&s->terms->adamf, s->flags, &run);
    else
        kernels->adam(&s->terms->adamf, s->flags, &run);
}

/* A unit at a time, for which its second moments are made. */
static void run_factored(const mo_update_kernels *kernels, const share *s, size_t begin, size_t end)
{
    float v[UNIT];

    for (; begin < end; begin += UNIT) {
        const size_t n = end - begin < UNIT ? end - begin : UNIT;
        mo_factored_moments(kernels, s->factored, begin, n, v);
        run_fp32(kernels, s, begin, n, v);
    }
}

/* ---- fp64: by the specification ------------------------------------------------------------------------ */

static double read_wide(mo_float kind, uintptr_t address, size_t i)
{
    switch (kind) {
    case MO_F64:
        return *(const double *)place(address, i, 8);
    case MO_F32:
        return (double)*(const float *)place(address, i, 4);
    case MO_F16:
        return (double)mo_f16_to_float(*(const uint16_t *)place(address, i, 2));
    default:
        return (double)mo_bf16_to_float(*(const uint16_t *)place(address, i, 2));
    }
}

/* To 16 bits by way of fp32, as torch converts. */
static void write_wide(mo_float kind, uintptr_t address, size_t i, double x)
{
    switch (kind) {
    case MO_F64:
        *(double *)place(address, i, 8) = x;
        break;
    case MO_F32:
        *(float *)place(address, i, 4) = (float)x;
        break;
    case MO_F16:
        *(uint16_t *)place(address, i, 2) = (uint16_t)mo_f16_from_float((float)x);
        break;
    default:
        *(uint16_t *)place(address, i, 2) = (uint16_t)mo_bf16_from_float((float)x);
        break;
    }
}

static void run_fp64(const share *s, size_t begin, size_t n)
{
    const mo_parameter *a = s->a;
    const bool sgd = s->group->rule == MO_SGD, has_m = !sgd || s->flags & MO_SGD_MOMENTUM;
    const bool has_vmax = !sgd && s->flags & MO_ADAM_AMSGRAD;

    for (size_t i = begin; i < begin + n; i++) {
        double p = read_wide(MO_F64, a->p, i), g = read_wide(a->grad_kind, a->g, i);
        double m = has_m ? read_wide(a->state_kind, a->m, i) : 0,
               v = sgd ? 0 : read_wide(a->state_kind, a->v, i);
        double vmax = has_vmax ? read_wide(a->state_kind, a->vmax, i) : 0;

        if (s->stored != 1) {
            g = mo_mul(g, (double)s->stored);
            write_wide(a->grad_kind, a->g, i, g);
        }
        p = sgd ? mo_sgd_element(&s->terms->sgd, s->flags, p, g, &m)
                : mo_adam_element(&s->terms->adam, s->flags, p, g, &m, &v, &vmax);
        write_wide(MO_F64, a->p, i, p);
        if (has_m)
            write_wide(a->state_kind, a->m, i, m);
        if (!sgd)
            write_wide(a->state_kind, a->v, i, v);
        if (has_vmax)
            write_wide(a->state_kind, a->vmax, i, vmax);
    }
}

/* ---- a thread's share ---------------------------------------------------------------------------------- */

static void run_elements(const update_plan *plan, size_t parameter, size_t begin, size_t end)
{
    const mo_parameter *a = &plan->job->parameters[parameter];
    const mo_hyper *group = &plan->job->groups[a->group];
    const update_row *row = &plan->rows[parameter];
    const share s = {
        .a = a,
        .group = group,
        .terms = &plan->terms[row->terms],
        .flags = mo_update_flags(a, group),
        .factored = row->factored,
        .stored = plan->stored,
        .step = (uint32_t)mo_step_number(row->step),
        .first_index = plan->job->first_index,
    };

    if (a->kind == MO_F64)
        run_fp64(&s, begin, end - begin);
    else if (row->factored)
        run_factored(plan->kernels, &s, begin, end);
    else
        run_fp32(plan->kernels, &s, begin, end - begin, NULL);
}

static void run_units(void *user, size_t unit, size_t end)
{
    const update_plan *plan = user;
    size_t i = 0, above = plan->job->count;

    while (above - i > 1) { /* the last parameter that has no more than `unit` units before it */
        const size_t middle = i + (above - i) / 2;
        if (plan->rows[middle].before <= unit)
            i = middle;
        else
            above = middle;
    }
    for (; i < plan->job->count && plan->rows[i].before < end; i++) {
        const size_t before = plan->rows[i].before, count = plan->job->parameters[i].count;
        const size_t from = unit > before ? (unit - before) * UNIT : 0;
        const size_t to = (end - before) > count / UNIT ? count : (end - before) * UNIT;
        if (from < to)
            run_elements(plan, i, from, to);
    }
}

/* ---- what is known before the first element ------------------------------------------------------------ */

static bool is_factored(const mo_parameter *a)
{
    return a->count && a->column;
}

static void count_units(update_plan *plan)
{
    for (size_t i = 0; i < plan->job->count; i++) {
        const mo_parameter *a = &plan->job->parameters[i];
        update_row *row = &plan->rows[i];
        const mo_parameter *last = i ? a - 1 : a;

        row->before = plan->units;
        row->step = a->step ? *(const float *)a->step : 0;
        plan->terms_count += i == 0 || a->group != last->group || row->step != row[-1].step ||
                             is_factored(a) != is_factored(last);
        row->terms = plan->terms_count - 1;
        plan->factored_count += is_factored(a);
        plan->units += mo_ceil_div(a->count, UNIT);
        plan->bytes += a->count * 28 + PARAMETER_BYTES; /* wraps only where memory would have ended before */
    }
}

static double lr_of(const mo_hyper *group)
{
    if (!group->lr_address)
        return group->lr;
    return group->lr_kind == MO_F64 ? *(const double *)group->lr_address
                                    : (double)*(const float *)group->lr_address;
}

static void compute_terms(update_plan *plan)
{
    for (size_t i = 0; i < plan->job->count; i++) {
        const mo_hyper *group = &plan->job->groups[plan->job->parameters[i].group];
        update_terms *c = &plan->terms[plan->rows[i].terms];

        if (i && plan->rows[i].terms == plan->rows[i - 1].terms)
            continue;
        if (group->rule == MO_SGD) {
            c->sgd = mo_sgd_terms_of(lr_of(group), group->weight_decay, group->momentum, group->dampening,
                                     group->maximize, plan->factor);
            c->sgdf = mo_sgd_narrow(&c->sgd);
        } else {
            c->adam =
                mo_adam_terms_of(lr_of(group), group->beta1, group->beta2, group->eps, group->weight_decay,
                                 group->rule == MO_ADAMW, group->maximize, plan->rows[i].step, plan->factor);
            if (is_factored(&plan->job->parameters[i]))
                mo_factored_terms(&c->adam);
            c->adamf = mo_adam_narrow(&c->adam);
        }
    }
}

static void average(update_plan *plan)
{
    mo_factored_row *next = plan->factored;

    for (size_t i = 0; i < plan->job->count;) {
        const size_t end = mo_update_round(plan->job, i);
        mo_factored_row *const begin = next;

        for (; i < end; i++)
            if (is_factored(&plan->job->parameters[i])) {
                *next = (mo_factored_row){.a = &plan->job->parameters[i],
                                          .terms = &plan->terms[plan->rows[i].terms].adamf};
                plan->rows[i].factored = next++;
            }
        mo_factored_averages(plan->kernels, plan->job, begin, (size_t)(next - begin), plan->stored);
    }
}

static void advance_steps(const mo_update_job *job)
{
    for (size_t i = 0; i < job->count; i++)
        if (job->parameters[i].step)
            *(float *)job->parameters[i].step += 1;
}

static mo_status no_memory(const mo_update_job *job, mo_detail *detail)
{
    return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "out of host memory for a table of %zu parameters",
                   job->count);
}

mo_status mo_update_cpu(const mo_update_job *job, mo_detail *detail)
{
    update_plan plan = {.job = job, .factor = 1, .stored = 1};
    mo_status status = mo_update_check(job, detail);

    if (!status)
        status = mo_update_kernels_get(&plan.kernels, detail);
    if (status || job->count == 0 || (job->found_inf && *(const float *)job->found_inf != 0))
        return status;
    if (job->factor)
        *(job->store_gradients ? &plan.stored : &plan.factor) = *(const float *)job->factor;
    plan.rows = mo_host_calloc(job->count, sizeof *plan.rows);
    if (!plan.rows)
        return no_memory(job, detail);
    count_units(&plan);
    plan.terms = mo_host_calloc(plan.terms_count, sizeof *plan.terms);
    if (plan.factored_count)
        plan.factored = mo_host_calloc(plan.factored_count, sizeof *plan.factored);
    if (plan.terms && (plan.factored || !plan.factored_count)) {
        compute_terms(&plan);
        average(&plan);
        if (plan.bytes < SHARE_BYTES)
            run_units(&plan, 0, plan.units);
        else
            mo_parallel_for(plan.units, plan.units / (plan.bytes / (SHARE_BYTES / 2)) + 1, run_units, &plan);
        advance_steps(job);
    } else {
        status = no_memory(job, detail);
    }
    mo_host_free(plan.factored);
    mo_host_free(plan.terms);
    mo_host_free(plan.rows);
    return status;
}
