#include "optim/update.h"

#include "../kernels/adam.cuh"
#include "../kernels/factored.cuh"
#include "../kernels/sgd.cuh"
#include "base/size.h"

static bool is_place(uintptr_t address, size_t count, size_t size)
{
    size_t bytes, end;
    return address && address % size == 0 && mo_mul_ok(count, size, &bytes) &&
           mo_add_ok(address, bytes, &end);
}

static const char *name_of(mo_float kind)
{
    static const char *const names[MO_FLOAT_COUNT] = {"fp32", "fp16", "bf16", "fp64"};
    return (unsigned)kind < MO_FLOAT_COUNT ? names[kind] : "?";
}

/* What must be there for an array of a parameter: its elements where it is needed, no address where it has
 * no use. */
typedef struct need {
    const char *what;
    uintptr_t address;
    mo_float kind;
    bool needed;
} need;

static mo_status check_arrays(const mo_update_job *job, size_t i, mo_detail *detail)
{
    const mo_parameter *a = &job->parameters[i];
    const mo_hyper *group = &job->groups[a->group];
    const bool adam = group->rule != MO_SGD;
    const need needs[] = {
        {"parameter", a->p, a->kind, true},
        {"gradient", a->g, a->grad_kind, true},
        {"master parameter", a->master, MO_F32, a->master != 0},
        {adam ? "first moment" : "momentum buffer", a->m, a->state_kind, adam || group->momentum != 0},
        {"second moment", a->v, a->state_kind, adam && !a->column},
        {"largest second moment", a->vmax, a->state_kind, adam && group->amsgrad},
    };

    for (size_t k = 0; k < sizeof needs / sizeof *needs; k++) {
        const unsigned bits = k >= 3 ? a->code_bits : 0;
        const size_t size = bits ? 1 : mo_float_size(needs[k].kind);
        if (needs[k].needed &&
            !is_place(needs[k].address, bits == 4 ? mo_ceil_div(a->count, 2) : a->count, size))
            return mo_fail(
                detail, MO_INVALID, 0,
                "parameter %zu: its %s at %#zx does not have %zu elements of %s; give the address of dense "
                "memory",
                i, needs[k].what, (size_t)needs[k].address, a->count,
                bits ? (bits == 8 ? "8 bits" : "4 bits") : name_of(needs[k].kind));
    }
    return MO_OK;
}

static mo_status check_kinds(const mo_update_job *job, size_t i, mo_detail *detail)
{
    const mo_parameter *a = &job->parameters[i];

    if ((unsigned)a->kind >= MO_FLOAT_COUNT || (unsigned)a->grad_kind >= MO_FLOAT_COUNT ||
        (unsigned)a->state_kind >= MO_FLOAT_COUNT)
        return mo_fail(
            detail, MO_INVALID, 0,
            "parameter %zu: kinds %d, %d, %d are not all of 0 (fp32), 1 (fp16), 2 (bf16), 3 (fp64)", i,
            (int)a->kind, (int)a->grad_kind, (int)a->state_kind);
    if (a->grad_kind == MO_F64 && a->kind != MO_F64)
        return mo_fail(detail, MO_INVALID, 0,
                       "parameter %zu is of %s, but its gradient is of fp64; convert one of them", i,
                       name_of(a->kind));
    if (a->state_kind != MO_F32 && a->state_kind != a->kind)
        return mo_fail(
            detail, MO_INVALID, 0,
            "parameter %zu is of %s, but its states are of %s; they must be of fp32 or of the parameter's "
            "type",
            i, name_of(a->kind), name_of(a->state_kind));
    if (a->master && mo_float_size(a->kind) != 2)
        return mo_fail(detail, MO_INVALID, 0,
                       "parameter %zu is of %s and has a master copy; only fp16 and bf16 parameters may "
                       "have one",
                       i, name_of(a->kind));
    return MO_OK;
}

static mo_status check_codes(const mo_update_job *job, size_t i, mo_detail *detail)
{
    const mo_parameter *a = &job->parameters[i];
    const mo_hyper *group = &job->groups[a->group];
    const size_t blocks = mo_ceil_div(a->count, MO_CODE_BLOCK);

    if (!a->code_bits && !a->m_scale && !a->v_scale)
        return MO_OK;
    if (a->code_bits != 8 && a->code_bits != 4)
        return mo_fail(detail, MO_INVALID, 0, "parameter %zu: codes of %u bits, with scales; expected 8 or 4",
                       i, a->code_bits);
    if (group->rule == MO_SGD) {
        if (a->code_bits != 8 || group->momentum == 0 || a->kind == MO_F64 || !a->step ||
            !is_place(a->m_scale, blocks, 4))
            return mo_fail(detail, MO_INVALID, 0,
                           "parameter %zu: SGD has states of %u bits where they are 8, with a momentum, a "
                           "step count and %zu scales, on fp32, fp16 or bf16; use fp32 states",
                           i, a->code_bits, blocks);
        return MO_OK;
    }
    if (!is_place(a->m_scale, blocks, 4) || (!a->column && !is_place(a->v_scale, blocks, 4)))
        return mo_fail(detail, MO_INVALID, 0,
                       "parameter %zu: the scales of its states at %#zx and %#zx are not both %zu of fp32", i,
                       (size_t)a->m_scale, (size_t)a->v_scale, blocks);
    if (group->amsgrad || a->kind == MO_F64)
        return mo_fail(detail, MO_INVALID, 0,
                       "parameter %zu: %u-bit states are supported for Adam and AdamW without amsgrad, on "
                       "fp32, fp16 or bf16; use fp32 states",
                       i, a->code_bits);
    return MO_OK;
}

static mo_status check_factored(const mo_update_job *job, size_t i, mo_detail *detail)
{
    const mo_parameter *a = &job->parameters[i];
    const mo_hyper *group = &job->groups[a->group];
    const size_t columns = a->columns, rows = columns ? a->count / columns : 0;

    if (!a->row && !a->column)
        return MO_OK;
    if (columns < MO_FACTORED_LEAST_COLUMNS || columns > INT32_MAX || rows > INT32_MAX ||
        rows * columns != a->count)
        return mo_fail(detail, MO_INVALID, 0,
                       "parameter %zu: its %zu elements are no matrix of %zu columns, at least %d; rows and "
                       "columns must be fewer than 2^31",
                       i, a->count, columns, MO_FACTORED_LEAST_COLUMNS);
    if (!is_place(a->row, rows, 4) || !is_place(a->column, columns, 4))
        return mo_fail(
            detail, MO_INVALID, 0,
            "parameter %zu: the averages of its rows at %#zx and of its columns at %#zx are not %zu "
            "and %zu of fp32",
            i, (size_t)a->row, (size_t)a->column, rows, columns);
    if (group->rule == MO_SGD || group->amsgrad || a->kind == MO_F64)
        return mo_fail(detail, MO_INVALID, 0,
                       "parameter %zu: factored second moments are supported for Adam and AdamW without "
                       "amsgrad, on fp32, fp16 or bf16; use whole ones",
                       i);
    if (!job->scratch || job->scratch % 16)
        return mo_fail(detail, MO_INVALID, 0,
                       "parameter %zu: its factored second moment needs scratch memory, not what is at %#zx",
                       i, (size_t)job->scratch);
    return MO_OK;
}

static mo_status check_parameter(const mo_update_job *job, size_t i, mo_detail *detail)
{
    const mo_parameter *a = &job->parameters[i];
    const mo_hyper *group;
    mo_status status;

    if (a->group >= job->group_count)
        return mo_fail(detail, MO_INVALID, 0, "parameter %zu is in group %u of %zu", i, a->group,
                       job->group_count);
    group = &job->groups[a->group];
    status = check_kinds(job, i, detail);
    if (status)
        return status;
    if (a->step % 4 || (!a->step && group->rule != MO_SGD))
        return mo_fail(detail, MO_INVALID, 0, "parameter %zu: its step at %#zx is not a single fp32", i,
                       (size_t)a->step);
    if (!a->step && group->stochastic && !a->master && mo_float_size(a->kind) == 2)
        return mo_fail(detail, MO_INVALID, 0,
                       "parameter %zu uses stochastic rounding, so it must have a step count", i);
    if (a->count == 0)
        return MO_OK;
    status = check_factored(job, i, detail);
    if (!status)
        status = check_codes(job, i, detail);
    return status ? status : check_arrays(job, i, detail);
}

mo_status mo_update_check(const mo_update_job *job, mo_detail *detail)
{
    if (job->factor % 4 || job->found_inf % 4)
        return mo_fail(detail, MO_INVALID, 0,
                       "factor at %#zx, found_inf at %#zx: expected addresses of fp32, or 0",
                       (size_t)job->factor, (size_t)job->found_inf);
    for (size_t k = 0; k < job->group_count; k++) {
        const mo_hyper *group = &job->groups[k];
        if ((unsigned)group->rule >= MO_RULE_COUNT)
            return mo_fail(detail, MO_INVALID, 0, "group %zu: there is no rule %d", k, (int)group->rule);
        if (group->lr_address && ((group->lr_kind != MO_F32 && group->lr_kind != MO_F64) ||
                                  group->lr_address % mo_float_size(group->lr_kind)))
            return mo_fail(detail, MO_INVALID, 0, "group %zu: lr at %#zx is not fp32 or fp64", k,
                           (size_t)group->lr_address);
    }
    for (size_t i = 0; i < job->count; i++) {
        const mo_status status = check_parameter(job, i, detail);
        if (status)
            return status;
    }
    return MO_OK;
}

#define ROUND ((size_t)4 << 20) /* sums of a round of several parameters */

static size_t sums_of(const mo_parameter *a)
{
    return a->columns ? mo_factored_sums(a->count / a->columns, a->columns) : 0;
}

size_t mo_update_round(const mo_update_job *job, size_t first)
{
    size_t end = first, sums = 0;

    for (; end < job->count; end++) {
        const size_t more = sums_of(&job->parameters[end]);
        if (sums && sums + more > ROUND)
            break;
        sums += more;
    }
    return end;
}

size_t mo_update_scratch(const mo_update_job *job)
{
    size_t all = 0, largest = 0;

    for (size_t i = 0; i < job->count; i++) {
        const size_t sums = sums_of(&job->parameters[i]);
        all += sums;
        largest = sums > largest ? sums : largest;
    }
    all = all < ROUND ? all : ROUND;
    all = all > largest ? all : largest;
    return all ? (job->count + all) * sizeof(float) : 0;
}

unsigned mo_update_flags(const mo_parameter *a, const mo_hyper *group)
{
    if (group->rule == MO_SGD)
        return (group->weight_decay != 0 ? MO_SGD_L2 : 0u) | (group->momentum != 0 ? MO_SGD_MOMENTUM : 0u) |
               (a->first ? MO_SGD_FIRST : 0u) | (group->nesterov ? MO_SGD_NESTEROV : 0u);
    return (group->rule == MO_ADAM && group->weight_decay != 0 ? MO_ADAM_L2 : 0u) |
           (group->amsgrad ? MO_ADAM_AMSGRAD : 0u);
}
