/* Random optimizer jobs, copies of them, and the oracle: each parameter by itself, one element after the other, by the texts in
 * kernels/. */
#ifndef MEMOPT_UPDATE_JOBS_H
#define MEMOPT_UPDATE_JOBS_H

#include "optim/update.h"

#include "../kernels/adam_codes.cuh"
#include "../kernels/dither.cuh"
#include "../kernels/factored.cuh"
#include "float_cases.h"
#include "optim/element.h"
#include "optim/update_kernels.h"
#include "test.h"

enum { JOB_MOST = 6, JOB_ARRAYS = 11 };

/* p, g, master, m, v, vmax, m_scale, v_scale, step, row, column of one parameter: the members of mo_parameter, in their order. */
typedef struct job_array {
    unsigned char *block, *x; /* x: where it begins, some elements past a boundary */
    size_t bytes;
    mo_float kind; /* MO_FLOAT_COUNT: codes */
} job_array;

typedef struct job {
    mo_update_job job;
    mo_parameter parameters[JOB_MOST];
    mo_hyper groups[3];
    job_array arrays[JOB_MOST][JOB_ARRAYS];
    float factor, found_inf, lr32;
    double lr64;
    void *scratch;
} job;

__attribute__((unused)) static float job_read(const job_array *a, size_t i)
{
    float x;
    double wide;
    uint16_t half;

    switch (a->kind) {
    case MO_F64:
        memcpy(&wide, a->x + i * 8, 8);
        return (float)wide;
    case MO_F32:
        memcpy(&x, a->x + i * 4, 4);
        return x;
    default:
        memcpy(&half, a->x + i * 2, 2);
        return a->kind == MO_F16 ? mo_f16_to_float(half) : mo_bf16_to_float(half);
    }
}

__attribute__((unused)) static void job_write(const job_array *a, size_t i, float x, const uint32_t *dither)
{
    const double wide = (double)x;
    uint16_t half;

    switch (a->kind) {
    case MO_F64:
        memcpy(a->x + i * 8, &wide, 8);
        break;
    case MO_F32:
        memcpy(a->x + i * 4, &x, 4);
        break;
    case MO_F16:
        half = (uint16_t)(dither ? mo_f16_dithered(x, *dither) : mo_f16_from_float(x));
        memcpy(a->x + i * 2, &half, 2);
        break;
    default:
        half = (uint16_t)(dither ? mo_bf16_dithered(x, *dither) : mo_bf16_from_float(x));
        memcpy(a->x + i * 2, &half, 2);
        break;
    }
}

/* ---- making, copying, comparing ------------------------------------------------------------------------------------------ */

static uintptr_t *job_address(mo_parameter *a, int k)
{
    uintptr_t *const places[JOB_ARRAYS] = {&a->p,       &a->g,       &a->master, &a->m,   &a->v,     &a->vmax,
                                           &a->m_scale, &a->v_scale, &a->step,   &a->row, &a->column};
    return places[k];
}

static void job_array_make(job *j, size_t i, int k, mo_float kind, size_t count, size_t shift)
{
    const size_t size = kind == MO_FLOAT_COUNT ? 1 : mo_float_size(kind);
    job_array *array = &j->arrays[i][k];

    array->kind = kind;
    array->bytes = count * size;
    array->block = malloc(shift * size + array->bytes + !count);
    array->x = array->block + shift * size;
    memset(array->block, 0, shift * size + array->bytes);
    *job_address(&j->parameters[i], k) = count ? (uintptr_t)array->x : 0;
}

static void job_connect(job *j)
{
    j->job.parameters = j->parameters;
    j->job.groups = j->groups;
    for (size_t k = 0; k < j->job.group_count; k++)
        if (j->groups[k].lr_address)
            j->groups[k].lr_address =
                j->groups[k].lr_kind == MO_F64 ? (uintptr_t)&j->lr64 : (uintptr_t)&j->lr32;
    j->job.factor = j->job.factor ? (uintptr_t)&j->factor : 0;
    j->job.found_inf = j->job.found_inf ? (uintptr_t)&j->found_inf : 0;
    j->scratch = aligned_alloc(16, (mo_update_scratch(&j->job) | 15) + 1);
    j->job.scratch = (uintptr_t)j->scratch;
}

static mo_hyper job_group(uint64_t *random)
{
    const uint64_t bits = test_random(random);
    return (mo_hyper){
        .rule = (mo_rule)(bits % MO_RULE_COUNT),
        .lr = 1e-2,
        .beta1 = 0.9,
        .beta2 = 0.99,
        .eps = 1e-8,
        .weight_decay = bits & 16 ? 0.1 : 0,
        .momentum = bits & 32 ? 0.9 : 0,
        .dampening = bits & 64 ? 0.1 : 0,
        .lr_address = bits & 128 ? 1 : 0,
        .lr_kind = bits & 256 ? MO_F32 : MO_F64,
        .amsgrad = bits & 512,
        .nesterov = bits & 1024,
        .maximize = bits & 2048,
        .stochastic = bits & 4096,
    };
}

static void job_parameter(job *j, size_t i, uint64_t *random, bool ordinary)
{
    static const size_t counts[] = {0,   1,   3,   15,   16,   255,  256,  257,
                                    511, 512, 513, 1000, 4095, 4096, 4097, 9000};
    mo_parameter *a = &j->parameters[i];
    const uint64_t bits = test_random(random);
    const mo_hyper *group;
    unsigned codes; /* bits of one, or 0 */
    size_t columns = 0;

    *a = (mo_parameter){.count = counts[bits % (sizeof counts / sizeof *counts)],
                        .group = (uint32_t)((bits >> 8) % j->job.group_count)};
    group = &j->groups[a->group];
    a->kind = (mo_float)((bits >> 12) % MO_FLOAT_COUNT);
    a->grad_kind = bits >> 16 & 1 ? a->kind : (mo_float)((bits >> 17) % (a->kind == MO_F64 ? 4 : 3));
    a->state_kind = bits >> 20 & 1 ? a->kind : MO_F32;
    a->first = bits >> 21 & 1;
    codes = group->amsgrad || a->kind == MO_F64 ? 0 : bits >> 22 & 12;
    codes = codes == 12 ? 0 : codes;
    if (group->rule == MO_SGD) /* of 8 bits alone, and with a buffer */
        codes = codes && group->momentum != 0 ? 8 : 0;
    a->code_bits = codes;
    if (group->rule != MO_SGD && !group->amsgrad && a->kind != MO_F64 && bits >> 50 & 1 && a->count >= 8) {
        columns = 8 + (bits >> 51) % (a->count - 7);
        while (a->count % columns)
            columns++;
        a->columns = columns;
    }
    for (int k = 0; k < JOB_ARRAYS; k++) {
        const size_t blocks = (a->count + MO_CODE_BLOCK - 1) / MO_CODE_BLOCK, shift = test_random(random) % 9;
        const bool half = a->kind == MO_F16 || a->kind == MO_BF16;
        const mo_float kinds[JOB_ARRAYS] = {a->kind,
                                            a->grad_kind,
                                            MO_F32,
                                            codes ? MO_FLOAT_COUNT : a->state_kind,
                                            codes ? MO_FLOAT_COUNT : a->state_kind,
                                            a->state_kind,
                                            MO_F32,
                                            MO_F32,
                                            MO_F32,
                                            MO_F32,
                                            MO_F32};
        const bool adam = group->rule != MO_SGD;
        const size_t moments = codes == 4 ? (a->count + 1) / 2 : a->count;
        const size_t sizes[JOB_ARRAYS] = {a->count,
                                          a->count,
                                          half && bits >> 23 & 1 ? a->count : 0,
                                          adam || group->momentum != 0 ? moments : 0,
                                          adam && !columns ? moments : 0,
                                          adam && group->amsgrad ? a->count : 0,
                                          codes ? blocks : 0,
                                          codes && adam && !columns ? blocks : 0,
                                          adam || half || codes ? 1 : 0,
                                          columns ? a->count / columns : 0,
                                          columns};
        job_array *array = &j->arrays[i][k];
        job_array_make(j, i, k, kinds[k], sizes[k], shift);
        for (size_t e = 0; e < sizes[k]; e++) {
            float x = ordinary ? float_ordinary(random) : float_case(random);
            if (kinds[k] == MO_FLOAT_COUNT) {
                array->x[e] = (unsigned char)test_random(random);
                continue;
            }
            if (k >= 4)
                x = k == 8             ? (float)(bits >> 40 & 63)
                    : k == 6 || k == 7 ? mo_code_scale(fminf(fabsf(x), 1e30f))
                                       : fabsf(x);
            job_write(array, e, x, NULL);
        }
    }
}

__attribute__((unused)) static void job_make(job *j, uint64_t *random, bool ordinary)
{
    const uint64_t bits = test_random(random);

    *j = (job){.factor = bits & 1 ? 1 : 0.3f, .lr32 = 3e-3f, .lr64 = 2e-3};
    j->job.count = bits >> 8 & 7 ? bits % JOB_MOST + 1 : 0;
    j->job.group_count = bits >> 16 & 1 ? 1 : 3;
    j->job.factor = bits >> 17 & 1;
    j->job.found_inf = bits >> 18 & 1;
    j->job.store_gradients = bits >> 19 & 1;
    for (size_t k = 0; k < j->job.group_count; k++)
        j->groups[k] = job_group(random);
    for (size_t i = 0; i < j->job.count; i++)
        job_parameter(j, i, random, ordinary);
    job_connect(j);
}

/* A deep copy at the same misalignment. */
__attribute__((unused)) static void job_copy(job *to, const job *from)
{
    *to = *from;
    for (size_t i = 0; i < to->job.count; i++)
        for (int k = 0; k < JOB_ARRAYS; k++) {
            const job_array *old = &from->arrays[i][k];
            const size_t before = (size_t)(old->x - old->block);
            job_array *array = &to->arrays[i][k];
            array->block = malloc(before + old->bytes + 1);
            array->x = array->block + before;
            memcpy(array->block, old->block, before + old->bytes);
            if (*job_address(&to->parameters[i], k))
                *job_address(&to->parameters[i], k) = (uintptr_t)array->x;
        }
    job_connect(to);
}

__attribute__((unused)) static void job_free(job *j)
{
    for (size_t i = 0; i < j->job.count; i++)
        for (int k = 0; k < JOB_ARRAYS; k++)
            free(j->arrays[i][k].block);
    free(j->scratch);
}

/* Every number of every array the same; a NaN is any NaN. */
__attribute__((unused)) static void job_same(const job *a, const job *b)
{
    static const char *const names[JOB_ARRAYS] = {"p",       "g",       "master", "m",   "v",     "vmax",
                                                  "m_scale", "v_scale", "step",   "row", "column"};

    for (size_t i = 0; i < a->job.count; i++)
        for (int k = 0; k < JOB_ARRAYS; k++) {
            const job_array *x = &a->arrays[i][k], *y = &b->arrays[i][k];
            const size_t size = x->kind == MO_FLOAT_COUNT ? 1 : mo_float_size(x->kind);
            for (size_t e = 0; e < x->bytes / size; e++) {
                bool same = memcmp(x->x + e * size, y->x + e * size, size) == 0;
                if (!same && x->kind != MO_FLOAT_COUNT)
                    same = isnan(job_read(x, e)) && isnan(job_read(y, e));
                if (!same)
                    TEST_FAIL(
                        "parameter %zu of rule %d, kinds %d %d %d, flags of group %u: %s[%zu] of %zu differs",
                        i, (int)a->groups[a->parameters[i].group].rule, (int)a->parameters[i].kind,
                        (int)a->parameters[i].grad_kind, (int)a->parameters[i].state_kind,
                        a->parameters[i].group, names[k], e, x->bytes / size);
            }
        }
    test_checks++;
}

/* ---- the oracle ------------------------------------------------------------------------------------------------------------ */

static void oracle_fp64(const job *j, size_t i, const mo_hyper *group, const mo_adam_terms *adam,
                        const mo_sgd_terms *sgd, unsigned flags, float stored)
{
    const job_array *arrays = j->arrays[i];

    for (size_t e = 0; e < j->parameters[i].count; e++) {
        double value[6] = {0}, p;
        for (int k = 0; k < 6; k++)
            if (arrays[k].bytes)
                value[k] =
                    arrays[k].kind == MO_F64 ? ((double *)arrays[k].x)[e] : (double)job_read(&arrays[k], e);
        value[1] *= (double)stored;
        p = group->rule == MO_SGD
                ? mo_sgd_element(sgd, flags, value[0], value[1], &value[3])
                : mo_adam_element(adam, flags, value[0], value[1], &value[3], &value[4], &value[5]);
        value[0] = p;
        for (int k = 0; k < 6; k++)
            if (arrays[k].bytes && arrays[k].kind == MO_F64)
                ((double *)arrays[k].x)[e] = value[k];
            else if (arrays[k].bytes)
                job_write(&arrays[k], e, (float)value[k], NULL);
    }
}

/* The averages of rows and columns that are a second moment, and it, of each element. */
static float *oracle_factored(const job *j, size_t i, const mo_hyper *group, const mo_adam_termsf *c,
                              unsigned flags, float stored)
{
    static const size_t aparts[] = {128, 16, 32, 64, 1, 2, 4, 8};
    const job_array *arrays = j->arrays[i], *master = arrays[2].bytes ? &arrays[2] : &arrays[0];
    const size_t count = j->parameters[i].count, columns = j->parameters[i].columns, rows = count / columns;
    float *const row = (float *)arrays[9].x, *const column = (float *)arrays[10].x;
    float *const v = malloc(count * sizeof *v);
    double sums[256] = {0}, inverse;

    for (size_t e = 0; e < count; e++) {
        const float x = job_read(&arrays[1], e) * stored * c->factor;
        v[e] = flags & MO_ADAM_L2 ? fmaf(c->weight_decay, job_read(master, e), x) : x;
        v[e] = isfinite(v[e] * v[e]) ? v[e] * v[e] : 0;
    }
    for (size_t k = 0; k < columns; k++) {
        double sum = 0;
        float of_tile = 0;
        for (size_t r = 0; r < rows; r++) {
            of_tile += v[r * columns + k];
            if (r % 256 == 255 || r == rows - 1) {
                sum += (double)of_tile;
                of_tile = 0;
            }
        }
        column[k] = (float)fma(group->beta2, (double)column[k],
                               (1 - group->beta2) * fmin(sum / (double)rows, 0x1.fffffep127));
    }
    for (size_t r = 0; r < rows; r++) {
        double sum = 0;
        for (size_t first = 0; first < columns; first += 256) {
            float s[256] = {0};
            for (size_t k = first; k < columns && k < first + 256; k++)
                s[k - first] = v[r * columns + k];
            for (size_t a = 0; a < sizeof aparts / sizeof *aparts; a++)
                for (size_t k = 0; k < 256; k++)
                    if (!(k & aparts[a]))
                        s[k] += s[k | aparts[a]];
            sum += (double)s[0];
        }
        row[r] = (float)fma(group->beta2, (double)row[r],
                            (1 - group->beta2) * fmin(sum / (double)columns, 0x1.fffffep127));
        sums[r % 256] += (double)row[r];
    }
    for (size_t apart = 128; apart; apart /= 2)
        for (size_t k = 0; k < apart; k++)
            sums[k] += sums[k + apart];
    inverse = (double)(float)(sums[0] / (double)rows);
    inverse = inverse >= 0x1p-126 ? (double)(1 / (float)inverse) : 0;
    for (size_t e = 0; e < count; e++)
        v[e] = row[e / columns] * (float)inverse * column[e % columns];
    return v;
}

/* One block, or what there is of the last. factored: the second moments, which are no codes; or NULL. */
static void oracle_block(const job *j, size_t i, const mo_adam_termsf *c, unsigned flags, float *p,
                         const float *g, const float *factored, size_t first, size_t n, uint32_t t)
{
    const job_array *arrays = j->arrays[i];
    const unsigned bits = j->parameters[i].code_bits;
    uint8_t *const m_codes = arrays[3].x + first * bits / 8, *const v_codes = arrays[4].x + first * bits / 8;
    float *const m_scale = (float *)arrays[6].x + first / MO_CODE_BLOCK, *const v_scale =
                                                                             (float *)arrays[7].x +
                                                                             first / MO_CODE_BLOCK;
    float m[MO_CODE_BLOCK], v[MO_CODE_BLOCK], largest_m = 0, largest_v = 0;

    for (size_t e = 0; e < n; e++) {
        m[e] = mo_code_decode_m(bits, mo_element_code(bits, m_codes, e), mo_code_unit_m(bits, *m_scale));
        v[e] = factored ? factored[first + e]
                        : mo_code_decode_v(bits, mo_element_code(bits, v_codes, e),
                                           mo_code_unit_v(bits, *v_scale));
        p[e] = mo_adam_elementf(c, flags, p[e], g[e], &m[e], &v[e], NULL);
        if (!(v[e] <= MO_CODE_HUGE)) /* infinite or NaN: no moments are left */
            m[e] = v[e] = 0;
        largest_m = fmaxf(largest_m, fabsf(m[e]));
        largest_v = fmaxf(largest_v, v[e]);
    }
    *m_scale = mo_code_scale(largest_m);
    if (!factored)
        *v_scale = mo_code_scale(largest_v);
    for (size_t e = 0; e < n; e++) {
        const uint32_t index = (uint32_t)(first + e);
        mo_element_put_code(
            bits, m_codes, e,
            mo_code_encode_m(bits, m[e], mo_code_per_m(bits, *m_scale), mo_code_dither_m(bits, index, t)));
        if (!factored)
            mo_element_put_code(
                bits, v_codes, e,
                mo_code_encode_v(bits, v[e], mo_code_per_v(bits, *v_scale), mo_code_dither(index, t)));
    }
}

/* The same of SGD's buffer. */
static void oracle_buffer(const job *j, size_t i, const mo_sgd_termsf *c, unsigned flags, float *p,
                          const float *g, size_t first, size_t n, uint32_t t)
{
    uint8_t *const codes = j->arrays[i][3].x + first;
    float *const scale = (float *)j->arrays[i][6].x + first / MO_CODE_BLOCK, m[MO_CODE_BLOCK], most = 0;

    for (size_t e = 0; e < n; e++) {
        m[e] = mo_code_decode_m(8, codes[e], mo_code_unit_m(8, *scale));
        p[e] = mo_sgd_elementf(c, flags, p[e], g[e], &m[e]);
        if (!(fabsf(m[e]) <= MO_CODE_HUGE))
            m[e] = 0;
        most = fmaxf(most, fabsf(m[e]));
    }
    *scale = mo_code_scale(most);
    for (size_t e = 0; e < n; e++)
        codes[e] = (uint8_t)mo_code_encode_m(8, m[e], mo_code_per_m(8, *scale),
                                             mo_code_dither_hashed((uint32_t)(first + e), t));
}

static void oracle_fp32(const job *j, size_t i, const mo_hyper *group, const mo_adam_termsf *adam,
                        const mo_sgd_termsf *sgd, unsigned flags, float stored, uint32_t t)
{
    const job_array *arrays = j->arrays[i], *master = arrays[2].bytes ? &arrays[2] : &arrays[0];
    const size_t count = j->parameters[i].count;
    float *const factored = arrays[9].bytes ? oracle_factored(j, i, group, adam, flags, stored) : NULL;

    for (size_t first = 0; first < count; first += MO_CODE_BLOCK) {
        const size_t n = count - first < MO_CODE_BLOCK ? count - first : MO_CODE_BLOCK;
        float p[MO_CODE_BLOCK] = {0}, g[MO_CODE_BLOCK] = {0};
        for (size_t e = 0; e < n; e++) {
            p[e] = job_read(master, first + e);
            g[e] = job_read(&arrays[1], first + e) * stored;
            if (stored != 1)
                job_write(&arrays[1], first + e, g[e], NULL);
        }
        if (arrays[6].bytes && group->rule == MO_SGD)
            oracle_buffer(j, i, sgd, flags, p, g, first, n, t);
        else if (arrays[6].bytes)
            oracle_block(j, i, adam, flags, p, g, factored, first, n, t);
        for (size_t e = 0; e < n && !arrays[6].bytes; e++) {
            float state[3] = {0};
            for (int k = 0; k < 3; k++)
                state[k] = arrays[3 + k].bytes ? job_read(&arrays[3 + k], first + e) : 0;
            if (factored)
                state[1] = factored[first + e];
            p[e] = group->rule == MO_SGD
                       ? mo_sgd_elementf(sgd, flags, p[e], g[e], &state[0])
                       : mo_adam_elementf(adam, flags, p[e], g[e], &state[0], &state[1], &state[2]);
            if (factored && !(state[1] <= MO_CODE_HUGE))
                state[0] = 0;
            for (int k = 0; k < 3; k++)
                if (arrays[3 + k].bytes)
                    job_write(&arrays[3 + k], first + e, state[k], NULL);
        }
        for (size_t e = 0; e < n; e++) {
            const uint32_t dither = mo_dither((uint32_t)(first + e), t);
            if (arrays[2].bytes)
                job_write(&arrays[2], first + e, p[e], NULL);
            job_write(&arrays[0], first + e, p[e], !arrays[2].bytes && group->stochastic ? &dither : NULL);
        }
    }
    free(factored);
}

__attribute__((unused)) static void job_oracle(job *j)
{
    const float factor = j->job.factor ? j->factor : 1, stored = j->job.store_gradients ? factor : 1;

    for (size_t i = 0; i < j->job.count && !(j->job.found_inf && j->found_inf != 0); i++) {
        const mo_hyper *group = &j->groups[j->parameters[i].group];
        const double lr = !group->lr_address         ? group->lr
                          : group->lr_kind == MO_F64 ? j->lr64
                                                     : (double)j->lr32;
        const bool counts = j->arrays[i][8].bytes;
        const float steps = counts ? job_read(&j->arrays[i][8], 0) : 0,
                    left = j->job.store_gradients ? 1 : factor;
        mo_adam_terms adam = mo_adam_terms_of(lr, group->beta1, group->beta2, group->eps, group->weight_decay,
                                              group->rule == MO_ADAMW, group->maximize, steps, left);
        const mo_sgd_terms sgd = mo_sgd_terms_of(lr, group->weight_decay, group->momentum, group->dampening,
                                                 group->maximize, left);
        if (j->arrays[i][9].bytes)
            mo_factored_terms(&adam);
        const mo_adam_termsf adamf = mo_adam_narrow(&adam);
        const mo_sgd_termsf sgdf = mo_sgd_narrow(&sgd);
        unsigned flags = 0;

        if (group->rule == MO_SGD) {
            flags |= group->weight_decay != 0 ? MO_SGD_L2 : 0u;
            flags |= group->momentum != 0 ? MO_SGD_MOMENTUM : 0u;
            flags |= j->parameters[i].first ? MO_SGD_FIRST : 0u;
            flags |= group->nesterov ? MO_SGD_NESTEROV : 0u;
        } else {
            flags |= group->rule == MO_ADAM && group->weight_decay != 0 ? MO_ADAM_L2 : 0u;
            flags |= group->amsgrad ? MO_ADAM_AMSGRAD : 0u;
        }
        if (j->parameters[i].kind == MO_F64)
            oracle_fp64(j, i, group, &adam, &sgd, flags, stored);
        else
            oracle_fp32(j, i, group, &adamf, &sgdf, flags, stored, (uint32_t)steps + 1);
        if (counts)
            job_write(&j->arrays[i][8], 0, steps + 1, NULL);
    }
}

#endif
