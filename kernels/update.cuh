/* The work of one thread of the update kernel (update.cu describes the operation as a whole): parameters, gradients and
 * states of any types through the formulas of adam.cuh, sgd.cuh and adam8.cuh, which the CPU's loops share. Plain C apart
 * from the macros: gcc compiles it within update.cu for the simulated device, which runs the kernel whole
 * (csrc/simcuda/grid.h).
 *
 * A unit is a run of elements of one parameter, processed by one block; it begins at a multiple of 1024 elements. Threads
 * take four elements at a time, eight where states have 8 bits: by one load an array where they lie on the grid of their
 * own size (16 bytes at the most), else one by one. */
#ifndef MO_UPDATE_CUH
#define MO_UPDATE_CUH

#include "adam.cuh"
#include "adam8.cuh"
#include "dither.cuh"
#include "float_bits.cuh"
#include "sgd.cuh"
#include "update_table.cuh"

/* ---- a block --------------------------------------------------------------------------------------------------- */

/* What the threads of a block have in common: in shared memory, made by one of them. */
typedef struct mo_update_work {
    mo_update_parameter a;
    unsigned long long begin, end; /* elements */
    unsigned step;                 /* the number of this step, from 1 */
    float stored; /* what gradients are multiplied with where they lie; 1: they are not touched */
    union {
        mo_adam_terms adam;
        mo_sgd_terms sgd;
    } wide;
    union {
        mo_adam_termsf adam;
        mo_sgd_termsf sgd;
    } narrow;
} mo_update_work;

MO_BODY void mo_update_prepare(mo_update_launch launch, unsigned number, mo_update_work *w)
{
    const mo_update_unit unit = mo_update_units(launch)[number];
    const float factor = launch.factor ? *(const float *)mo_global(launch.factor) : 1.0f;
    const mo_update_group *group;
    float steps = 0, left;
    double lr;

    w->a = mo_update_parameters(launch)[unit.parameter];
    w->begin = (unsigned long long)unit.index * launch.elements;
    w->end = w->a.count - w->begin < launch.elements ? w->a.count : w->begin + launch.elements;
    w->stored = launch.store_gradients ? factor : 1.0f;
    left = launch.store_gradients ? 1.0f : factor;

    group = mo_update_groups(launch) + w->a.group;
    lr = group->lr;
    if (group->lr_address)
        lr = group->lr_kind == MO_F64 ? *(const double *)mo_global(group->lr_address)
                                      : (double)*(const float *)mo_global(group->lr_address);
    if (w->a.step)
        steps = *(const float *)mo_global(w->a.step);
    w->step = (unsigned)mo_step_number(steps);
    if (w->a.flags & MO_UPDATE_SGD) {
        w->wide.sgd = mo_sgd_terms_of(lr, group->weight_decay, group->momentum, group->dampening,
                                      (w->a.flags & MO_UPDATE_MAXIMIZE) != 0, left);
        w->narrow.sgd = mo_sgd_narrow(&w->wide.sgd);
    } else {
        w->wide.adam = mo_adam_terms_of(lr, group->beta1, group->beta2, group->eps, group->weight_decay,
                                        (w->a.flags & MO_UPDATE_DECOUPLED) != 0,
                                        (w->a.flags & MO_UPDATE_MAXIMIZE) != 0, steps, left);
        w->narrow.adam = mo_adam_narrow(&w->wide.adam);
    }
}

/* ---- four elements, of fp32, fp16 or bf16 ------------------------------------------------------------------------ */

/* As they lie in memory: 16 or 8 bytes. Words of 32 bits: those of 64 cost a GPU two of each operation. */
typedef struct MO_ALIGNED(16) mo_four {
    unsigned word[4];
} mo_four;

MO_BODY unsigned long long mo_four_address(mo_float kind, unsigned long long address,
                                           unsigned long long first)
{
    return address + first * mo_float_size(kind);
}

/* Elements first … first + n - 1 of an array, n <= 4; zeros behind them, and where there is no array. */
MO_BODY mo_four mo_four_load(mo_float kind, unsigned long long address, unsigned long long first, unsigned n)
{
    const unsigned long long at = mo_four_address(kind, address, first);
    mo_four raw = {{0, 0, 0, 0}};
    unsigned k;

    if (!address)
        return raw;
    if (kind == MO_F32) {
        if (n == 4 && at % 16 == 0)
            return *(const mo_four *)mo_global(at);
        MO_UNROLL
        for (k = 0; k < 4; k++)
            if (k < n)
                raw.word[k] = ((const unsigned *)mo_global(at))[k];
        return raw;
    }
    if (n == 4 && at % 8 == 0) {
        const mo_eight_bytes halves = *(const mo_eight_bytes *)mo_global(at);
        raw.word[0] = halves.word[0];
        raw.word[1] = halves.word[1];
        return raw;
    }
    MO_UNROLL
    for (k = 0; k < 4; k++)
        if (k < n)
            raw.word[k / 2] |= (unsigned)((const unsigned short *)mo_global(at))[k] << k % 2 * 16;
    return raw;
}

MO_BODY void mo_four_store(mo_float kind, unsigned long long address, unsigned long long first, unsigned n,
                           mo_four raw)
{
    const unsigned long long at = mo_four_address(kind, address, first);
    unsigned k;

    if (kind == MO_F32) {
        if (n == 4 && at % 16 == 0) {
            /* In words of 64 bits, or nvcc makes four stores of it. */
            const mo_vector vector = {{(unsigned long long)raw.word[1] << 32 | raw.word[0],
                                       (unsigned long long)raw.word[3] << 32 | raw.word[2]}};
            *(mo_vector *)mo_global(at) = vector;
            return;
        }
        MO_UNROLL
        for (k = 0; k < 4; k++)
            if (k < n)
                ((unsigned *)mo_global(at))[k] = raw.word[k];
        return;
    }
    if (n == 4 && at % 8 == 0) {
        const mo_eight_bytes halves = {{raw.word[0], raw.word[1]}};
        *(mo_eight_bytes *)mo_global(at) = halves;
        return;
    }
    MO_UNROLL
    for (k = 0; k < 4; k++)
        if (k < n)
            ((unsigned short *)mo_global(at))[k] = (unsigned short)(raw.word[k / 2] >> k % 2 * 16);
}

/* In what follows a loop stands within each case, not the cases within one loop, whose unrolled branches, all on the same
 * few conditions, would take a CUDA compiler minutes. */
MO_BODY void mo_four_widen(mo_float kind, mo_four raw, float *x)
{
    unsigned k;

    if (kind == MO_F32) {
        MO_UNROLL
        for (k = 0; k < 4; k++)
            x[k] = mo_float_from_bits(raw.word[k]);
    } else if (kind == MO_F16) {
        MO_UNROLL
        for (k = 0; k < 4; k++)
            x[k] = mo_f16_to_float(raw.word[k / 2] >> k % 2 * 16 & 0xFFFFu);
    } else {
        MO_UNROLL
        for (k = 0; k < 4; k++)
            x[k] = mo_float_from_bits(k % 2 ? raw.word[k / 2] & 0xFFFF0000u : raw.word[k / 2] << 16);
    }
}

/* To nearest. */
MO_BODY mo_four mo_four_narrow(mo_float kind, const float *x)
{
    mo_four raw = {{0, 0, 0, 0}};
    unsigned k;

    if (kind == MO_F32) {
        MO_UNROLL
        for (k = 0; k < 4; k++)
            raw.word[k] = mo_float_bits(x[k]);
    } else if (kind == MO_F16) {
        raw.word[0] = mo_f16_pair(x[0], x[1]);
        raw.word[1] = mo_f16_pair(x[2], x[3]);
    } else {
        raw.word[0] = mo_bf16_pair(x[0], x[1]);
        raw.word[1] = mo_bf16_pair(x[2], x[3]);
    }
    return raw;
}

/* Up or down, to 16 bits; x is of elements first, first + 1 … */
MO_BODY mo_four mo_four_dithered(mo_float kind, const float *x, unsigned first, unsigned step)
{
    mo_four raw = {{0, 0, 0, 0}};
    unsigned k;

    if (kind == MO_F16) {
        MO_UNROLL
        for (k = 0; k < 4; k++)
            raw.word[k / 2] |= mo_f16_dithered(x[k], mo_dither(first + k, step)) << k % 2 * 16;
    } else {
        MO_UNROLL
        for (k = 0; k < 4; k++)
            raw.word[k / 2] |= mo_bf16_dithered(x[k], mo_dither(first + k, step)) << k % 2 * 16;
    }
    return raw;
}

/* ---- parameters and gradients ------------------------------------------------------------------------------------- */

/* The types of a parameter, of its gradient and its states. */
typedef struct mo_update_kinds {
    mo_float p, g, state;
    int master;
} mo_update_kinds;

/* plain: all are fp32, which makes the text that follows a quarter as long. Else they are read anew for each few elements:
 * as values that are the same in a whole loop the compiler would make a loop of its own for each combination. */
MO_BODY mo_update_kinds mo_update_kinds_of(const mo_update_work *w, int plain)
{
    const volatile mo_update_parameter *const a = &w->a;
    mo_update_kinds kinds = {MO_F32, MO_F32, MO_F32, 0};

    if (!plain) {
        kinds.p = (mo_float)a->kind;
        kinds.g = (mo_float)a->grad_kind;
        kinds.state = (mo_float)a->state_kind;
        kinds.master = a->master != 0;
    }
    return kinds;
}

MO_BODY mo_four mo_update_load_p(const mo_update_work *w, mo_update_kinds kinds, unsigned long long first,
                                 unsigned n)
{
    return kinds.master ? mo_four_load(MO_F32, w->a.master, first, n)
                        : mo_four_load(kinds.p, w->a.p, first, n);
}

MO_BODY void mo_update_widen_p(mo_update_kinds kinds, mo_four raw, float *p)
{
    mo_four_widen(kinds.master ? MO_F32 : kinds.p, raw, p);
}

/* The gradient as the rule takes it; stored too where it is multiplied where it lies. */
MO_BODY void mo_update_take_g(const mo_update_work *w, mo_update_kinds kinds, mo_four raw,
                              unsigned long long first, unsigned n, float *g)
{
    unsigned k;

    mo_four_widen(kinds.g, raw, g);
    if (w->stored != 1.0f) {
        MO_UNROLL
        for (k = 0; k < 4; k++)
            g[k] = mo_mulf(g[k], w->stored);
        mo_four_store(kinds.g, w->a.g, first, n, mo_four_narrow(kinds.g, g));
    }
}

MO_BODY void mo_update_put_p(const mo_update_work *w, mo_update_kinds kinds, unsigned long long first,
                             unsigned n, const float *p)
{
    if (kinds.master)
        mo_four_store(MO_F32, w->a.master, first, n, mo_four_narrow(MO_F32, p));
    /* One store for both would read better, and keeps nvcc 13.0 busy for ever. */
    if (kinds.p != MO_F32 && w->a.flags & MO_UPDATE_STOCHASTIC)
        mo_four_store(kinds.p, w->a.p, first, n, mo_four_dithered(kinds.p, p, (unsigned)first, w->step));
    else
        mo_four_store(kinds.p, w->a.p, first, n, mo_four_narrow(kinds.p, p));
}

/* ---- a thread: states of 16, 32 or 64 bits -------------------------------------------------------------------------- */

MO_BODY void mo_update_adam(const mo_update_work *w, mo_update_kinds kinds, unsigned long long first,
                            unsigned n)
{
    const unsigned flags = w->a.flags & MO_UPDATE_RULE;
    /* All loads are on their way before the first is waited for. */
    const mo_four raw_p = mo_update_load_p(w, kinds, first, n),
                  raw_g = mo_four_load(kinds.g, w->a.g, first, n),
                  raw_m = mo_four_load(kinds.state, w->a.m, first, n),
                  raw_v = mo_four_load(kinds.state, w->a.v, first, n);
    float p[4], g[4], m[4], v[4], vmax[4] = {0, 0, 0, 0};
    unsigned k;

    if (flags & MO_ADAM_AMSGRAD)
        mo_four_widen(kinds.state, mo_four_load(kinds.state, w->a.vmax, first, n), vmax);
    mo_update_widen_p(kinds, raw_p, p);
    mo_update_take_g(w, kinds, raw_g, first, n, g);
    mo_four_widen(kinds.state, raw_m, m);
    mo_four_widen(kinds.state, raw_v, v);
    MO_UNROLL
    for (k = 0; k < 4; k++)
        p[k] = mo_adam_elementf(&w->narrow.adam, flags, p[k], g[k], &m[k], &v[k], &vmax[k]);
    mo_four_store(kinds.state, w->a.m, first, n, mo_four_narrow(kinds.state, m));
    mo_four_store(kinds.state, w->a.v, first, n, mo_four_narrow(kinds.state, v));
    if (flags & MO_ADAM_AMSGRAD)
        mo_four_store(kinds.state, w->a.vmax, first, n, mo_four_narrow(kinds.state, vmax));
    mo_update_put_p(w, kinds, first, n, p);
}

MO_BODY void mo_update_sgd(const mo_update_work *w, mo_update_kinds kinds, unsigned long long first,
                           unsigned n)
{
    const unsigned flags = w->a.flags & MO_UPDATE_RULE, momentum = flags & MO_SGD_MOMENTUM;
    const mo_four raw_p = mo_update_load_p(w, kinds, first, n),
                  raw_g = mo_four_load(kinds.g, w->a.g, first, n),
                  raw_m = mo_four_load(kinds.state, momentum ? w->a.m : 0, first, n);
    float p[4], g[4], m[4];
    unsigned k;

    mo_update_widen_p(kinds, raw_p, p);
    mo_update_take_g(w, kinds, raw_g, first, n, g);
    mo_four_widen(kinds.state, raw_m, m);
    MO_UNROLL
    for (k = 0; k < 4; k++)
        p[k] = mo_sgd_elementf(&w->narrow.sgd, flags, p[k], g[k], &m[k]);
    if (momentum)
        mo_four_store(kinds.state, w->a.m, first, n, mo_four_narrow(kinds.state, m));
    mo_update_put_p(w, kinds, first, n, p);
}

MO_BODY void mo_update_fours(const mo_update_work *w, int plain, unsigned thread, unsigned threads)
{
    unsigned long long first;

    MO_NOT_UNROLLED
    for (first = w->begin + 4 * thread; first < w->end; first += 4 * threads) {
        const unsigned n = w->end - first < 4 ? (unsigned)(w->end - first) : 4;
        const mo_update_kinds kinds = mo_update_kinds_of(w, plain);
        if (w->a.flags & MO_UPDATE_SGD)
            mo_update_sgd(w, kinds, first, n);
        else
            mo_update_adam(w, kinds, first, n);
    }
}

MO_BODY double mo_update_read(unsigned kind, unsigned long long address, unsigned long long i)
{
    const void *const at = mo_global(address + i * mo_float_size((mo_float)kind));

    switch (kind) {
    case MO_F64:
        return *(const double *)at;
    case MO_F32:
        return (double)*(const float *)at;
    case MO_F16:
        return (double)mo_f16_to_float(*(const unsigned short *)at);
    default:
        return (double)mo_bf16_to_float(*(const unsigned short *)at);
    }
}

/* To 16 bits by way of fp32, as torch converts. */
MO_BODY void mo_update_write(unsigned kind, unsigned long long address, unsigned long long i, double x)
{
    void *const at = mo_global(address + i * mo_float_size((mo_float)kind));

    switch (kind) {
    case MO_F64:
        *(double *)at = x;
        break;
    case MO_F32:
        *(float *)at = (float)x;
        break;
    case MO_F16:
        *(unsigned short *)at = (unsigned short)mo_f16_from_float((float)x);
        break;
    default:
        *(unsigned short *)at = (unsigned short)mo_bf16_from_float((float)x);
    }
}

/* fp64 is rare and its arithmetic slow: an element at a time. */
MO_BODY void mo_update_wide(const mo_update_work *w, unsigned long long i)
{
    const mo_update_parameter *a = &w->a;
    const unsigned flags = a->flags & MO_UPDATE_RULE, sgd = a->flags & MO_UPDATE_SGD;
    const unsigned has_m = !sgd || flags & MO_SGD_MOMENTUM, has_vmax = !sgd && flags & MO_ADAM_AMSGRAD;
    double p = mo_update_read(MO_F64, a->p, i), g = mo_update_read(a->grad_kind, a->g, i), m = 0, v = 0,
           vmax = 0;

    if (has_m)
        m = mo_update_read(a->state_kind, a->m, i);
    if (!sgd)
        v = mo_update_read(a->state_kind, a->v, i);
    if (has_vmax)
        vmax = mo_update_read(a->state_kind, a->vmax, i);
    if (w->stored != 1.0f) {
        g = mo_mul(g, (double)w->stored);
        mo_update_write(a->grad_kind, a->g, i, g);
    }
    p = sgd ? mo_sgd_element(&w->wide.sgd, flags, p, g, &m)
            : mo_adam_element(&w->wide.adam, flags, p, g, &m, &v, &vmax);
    mo_update_write(MO_F64, a->p, i, p);
    if (has_m)
        mo_update_write(a->state_kind, a->m, i, m);
    if (!sgd)
        mo_update_write(a->state_kind, a->v, i, v);
    if (has_vmax)
        mo_update_write(a->state_kind, a->vmax, i, vmax);
}

/* The share of thread number `thread` of `threads` in the block's unit, whose states are no codes. */
MO_BODY void mo_update_thread(const mo_update_work *w, unsigned thread, unsigned threads)
{
    unsigned long long i;

    if (w->a.kind == MO_F64)
        for (i = w->begin + thread; i < w->end; i += threads)
            mo_update_wide(w, i);
    else if (w->a.kind == MO_F32 && w->a.grad_kind == MO_F32 && w->a.state_kind == MO_F32)
        mo_update_fours(w, 1, thread, threads);
    else
        mo_update_fours(w, 0, thread, threads);
}

/* ---- a warp: states of 8 bits ----------------------------------------------------------------------------------------- */

/* What a lane has of a block of 256 elements between its two halves: eight elements that follow each other. */
typedef struct mo_update_lane {
    float m[8], v[8];
    float largest_m, largest_v; /* |m| and v */
} mo_update_lane;

/* How many of a lane's eight elements there are. */
MO_BODY unsigned mo_update_lane_count(const mo_update_work *w, unsigned long long first)
{
    return first >= w->end ? 0 : w->end - first < 8 ? (unsigned)(w->end - first) : 8;
}

MO_BODY mo_eight_bytes mo_update_load_codes(unsigned long long address, unsigned long long first, unsigned n)
{
    const unsigned long long at = address + first;
    mo_eight_bytes codes = {{0, 0}};
    unsigned k;

    if (n == 8 && at % 8 == 0)
        return *(const mo_eight_bytes *)mo_global(at);
    MO_UNROLL
    for (k = 0; k < 8; k++)
        if (k < n)
            codes.word[k / 4] |= (unsigned)((const unsigned char *)mo_global(at))[k] << k % 4 * 8;
    return codes;
}

MO_BODY void mo_update_store_codes(unsigned long long address, unsigned long long first, unsigned n,
                                   mo_eight_bytes codes)
{
    const unsigned long long at = address + first;
    unsigned k;

    if (n == 8 && at % 8 == 0) {
        *(mo_eight_bytes *)mo_global(at) = codes;
        return;
    }
    MO_UNROLL
    for (k = 0; k < 8; k++)
        if (k < n)
            ((unsigned char *)mo_global(at))[k] = (unsigned char)(codes.word[k / 4] >> k % 4 * 8);
}

/* Eight elements in two fours, of which the first `count` are there: those of 16 bits by one access where they lie on the
 * grid of 16 bytes. */
MO_BODY void mo_update_load_eight(mo_float kind, unsigned long long address, unsigned long long first,
                                  unsigned count, mo_four *raw)
{
    const unsigned long long at = mo_four_address(kind, address, first);

    if (kind != MO_F32 && count == 8 && at % 16 == 0) {
        const mo_four both = *(const mo_four *)mo_global(at);
        raw[0].word[0] = both.word[0];
        raw[0].word[1] = both.word[1];
        raw[1].word[0] = both.word[2];
        raw[1].word[1] = both.word[3];
        raw[0].word[2] = raw[0].word[3] = raw[1].word[2] = raw[1].word[3] = 0;
    } else {
        raw[0] = mo_four_load(kind, address, first, count < 4 ? count : 4);
        raw[1] = mo_four_load(kind, address, first + 4, count < 4 ? 0 : count - 4);
    }
}

MO_BODY void mo_update_store_eight(mo_float kind, unsigned long long address, unsigned long long first,
                                   unsigned count, mo_four low, mo_four high)
{
    const unsigned long long at = mo_four_address(kind, address, first);

    if (kind != MO_F32 && count == 8 && at % 16 == 0) {
        const mo_vector both = {{(unsigned long long)low.word[1] << 32 | low.word[0],
                                 (unsigned long long)high.word[1] << 32 | high.word[0]}};
        *(mo_vector *)mo_global(at) = both;
    } else {
        mo_four_store(kind, address, first, count < 4 ? count : 4, low);
        mo_four_store(kind, address, first + 4, count < 4 ? 0 : count - 4, high);
    }
}

MO_BODY void mo_update_put_eight(const mo_update_work *w, mo_update_kinds kinds, unsigned long long first,
                                 unsigned count, const float *p)
{
    const unsigned element = (unsigned)first;

    if (kinds.master)
        mo_update_store_eight(MO_F32, w->a.master, first, count, mo_four_narrow(MO_F32, p),
                              mo_four_narrow(MO_F32, p + 4));
    if (kinds.p != MO_F32 && w->a.flags & MO_UPDATE_STOCHASTIC)
        mo_update_store_eight(kinds.p, w->a.p, first, count, mo_four_dithered(kinds.p, p, element, w->step),
                              mo_four_dithered(kinds.p, p + 4, element + 4, w->step));
    else
        mo_update_store_eight(kinds.p, w->a.p, first, count, mo_four_narrow(kinds.p, p),
                              mo_four_narrow(kinds.p, p + 4));
}

/* The first half: everything but the new codes, which need the whole block's largest values. `block` is its number in the
 * parameter. */
MO_BODY void mo_update_codes_take(const mo_update_work *w, unsigned long long block, unsigned lane,
                                  mo_update_lane *held)
{
    const mo_update_kinds kinds = mo_update_kinds_of(w, 0);
    const unsigned long long first = block * MO_ADAM8_ELEMENTS + lane * 8;
    const unsigned count = mo_update_lane_count(w, first), flags = w->a.flags & MO_UPDATE_RULE;
    const float unit_m = mo_adam8_unit_m(((const float *)mo_global(w->a.m_scale))[block]);
    const float unit_v = mo_adam8_unit_v(((const float *)mo_global(w->a.v_scale))[block]);
    const mo_eight_bytes codes_m = mo_update_load_codes(w->a.m, first, count),
                         codes_v = mo_update_load_codes(w->a.v, first, count);
    mo_four raw_p[2], raw_g[2];
    float p[8], g[4];
    unsigned half, k;

    held->largest_m = held->largest_v = 0;
    if (kinds.master)
        mo_update_load_eight(MO_F32, w->a.master, first, count, raw_p);
    else
        mo_update_load_eight(kinds.p, w->a.p, first, count, raw_p);
    mo_update_load_eight(kinds.g, w->a.g, first, count, raw_g);
    MO_UNROLL
    for (half = 0; half < 2; half++) {
        const unsigned n = count <= half * 4 ? 0 : count - half * 4 < 4 ? count - half * 4 : 4;
        mo_update_widen_p(kinds, raw_p[half], p + half * 4);
        mo_update_take_g(w, kinds, raw_g[half], first + half * 4, n, g);
        MO_UNROLL
        for (k = 0; k < 4; k++) {
            float *const x = &p[half * 4 + k], *const m = &held->m[half * 4 + k],
                         *const v = &held->v[half * 4 + k], unused = 0;
            *m = mo_adam8_decode_m(codes_m.word[half] >> k * 8 & 255, unit_m);
            *v = mo_adam8_decode_v(codes_v.word[half] >> k * 8 & 255, unit_v);
            *x = mo_adam_elementf(&w->narrow.adam, flags, *x, g[k], m, v, &unused);
            if (!mo_adam8_is_kept(*v))
                *m = *v = 0;
            if (k < n) {
                const float magnitude = mo_float_from_bits(mo_float_bits(*m) & 0x7FFFFFFFu);
                if (magnitude > held->largest_m)
                    held->largest_m = magnitude;
                if (*v > held->largest_v)
                    held->largest_v = *v;
            }
        }
    }
    mo_update_put_eight(w, kinds, first, count, p);
}

/* The second half; *held's largest values are the whole block's. */
MO_BODY void mo_update_codes_put(const mo_update_work *w, unsigned long long block, unsigned lane,
                                 const mo_update_lane *held)
{
    const unsigned long long first = block * MO_ADAM8_ELEMENTS + lane * 8;
    const unsigned count = mo_update_lane_count(w, first);
    const float scale_m = mo_adam8_scale(held->largest_m), scale_v = mo_adam8_scale(held->largest_v);
    const float per_m = mo_adam8_per_m(scale_m), per_v = mo_adam8_per_v(scale_v);
    mo_eight_bytes codes_m = {{0, 0}}, codes_v = {{0, 0}};
    unsigned k;

    MO_UNROLL
    for (k = 0; k < 8; k++) {
        const unsigned dither = mo_adam8_dither((unsigned)first + k, w->step);
        codes_m.word[k / 4] |= mo_adam8_encode_m(held->m[k], per_m) << k % 4 * 8;
        codes_v.word[k / 4] |= mo_adam8_encode_v(held->v[k], per_v, dither) << k % 4 * 8;
    }
    mo_update_store_codes(w->a.m, first, count, codes_m);
    mo_update_store_codes(w->a.v, first, count, codes_v);
    if (lane == 0) {
        ((float *)mo_global(w->a.m_scale))[block] = scale_m;
        ((float *)mo_global(w->a.v_scale))[block] = scale_v;
    }
}

#endif
