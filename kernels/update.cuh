/* The work of one thread of the update kernel (update.cu describes the operation as a whole): parameters, gradients and
 * states of any types through the formulas of adam.cuh, sgd.cuh and adam_codes.cuh, which the CPU's loops share. Plain C apart
 * from the macros: gcc compiles it within update.cu for the simulated device, which runs the kernel whole
 * (csrc/simcuda/grid.h).
 *
 * A unit is a run of elements of one parameter, processed by one block; it begins at a multiple of 1024 elements. Threads
 * take four elements at a time, eight where all are of one type of 16 bits or states are codes: an array by accesses of 16
 * bytes (8 where they are no more) if it lies on their grid, else one by one. */
#ifndef MO_UPDATE_CUH
#define MO_UPDATE_CUH

#include "adam.cuh"
#include "adam_codes.cuh"
#include "dither.cuh"
#include "factored.cuh"
#include "float_bits.cuh"
#include "sgd.cuh"
#include "update_table.cuh"

/* ---- a block --------------------------------------------------------------------------------------------------- */

/* The type of a parameter, of its gradient and, where they are no codes, of its states. */
typedef enum mo_update_way {
    MO_UPDATE_IN_F32,
    MO_UPDATE_IN_F16,
    MO_UPDATE_IN_BF16,
    MO_UPDATE_MIXED, /* several of them, or a master beside the parameter */
    MO_UPDATE_IN_F64 /* the parameter */
} mo_update_way;

/* Arrays of a parameter, as bits; not the lowest, whose test takes three instructions more of nvcc's. */
enum {
    MO_ARRAY_P = 2,
    MO_ARRAY_G = 4,
    MO_ARRAY_MASTER = 8,
    MO_ARRAY_M = 16,
    MO_ARRAY_V = 32,
    MO_ARRAY_VMAX = 64
};

/* What the threads of a block have in common: in shared memory, made by one of them. */
typedef struct mo_update_work {
    mo_update_parameter a; /* its arrays' addresses are those of the unit's first element */
    unsigned first;        /* the number of that element in the parameter, modulo 2^32 */
    unsigned column;       /* of that element, where its second moment is factored: a.row is its row's then */
    unsigned count;        /* elements of the unit */
    unsigned step;         /* the number of this step, from 1 */
    unsigned decays;       /* not 0: MO_ADAM_L2 */
    unsigned whole;        /* arrays that lie on the grid of the widest access: bits MO_ARRAY_… */
    mo_update_way way;
    float stored;  /* what gradients are multiplied with where they lie; 1: they are not touched */
    float inverse; /* of a factored second moment */
    union {
        mo_adam_terms adam;
        mo_sgd_terms sgd;
    } wide;
    union {
        mo_adam_termsf adam;
        mo_sgd_termsf sgd;
    } narrow;
} mo_update_work;

MO_BODY mo_update_way mo_update_way_of(const mo_update_parameter *a)
{
    const unsigned alike = a->code_bits || a->state_kind == a->kind;

    if (a->kind == MO_F64)
        return MO_UPDATE_IN_F64;
    if (a->grad_kind != a->kind || !alike || a->master)
        return MO_UPDATE_MIXED;
    return a->kind == MO_F32 ? MO_UPDATE_IN_F32 : a->kind == MO_F16 ? MO_UPDATE_IN_F16 : MO_UPDATE_IN_BF16;
}

/* Fours that a thread takes at a time, where states are no codes. */
MO_BODY unsigned mo_update_fours_of(mo_update_way way)
{
    return way == MO_UPDATE_IN_F16 || way == MO_UPDATE_IN_BF16 ? 2 : 1;
}

/* Moves an array's address to element `first`; `array` where a thread's elements from there on, each of so many bits, lie
 * on the grid of the widest access. */
MO_BODY unsigned mo_update_enter(unsigned long long *address, unsigned bits, unsigned long long first,
                                 unsigned fours, unsigned array)
{
    const unsigned size = fours * 4 * bits / 8, width = size < 16 ? size : 16;

    if (!*address)
        return 0;
    *address += first * bits / 8;
    return *address % width == 0 ? array : 0;
}

MO_BODY void mo_update_enter_unit(mo_update_work *w, unsigned long long first)
{
    mo_update_parameter *const a = &w->a;
    const unsigned fours = a->code_bits ? 2 : mo_update_fours_of(w->way);
    const unsigned p_bits = 8 * mo_float_size((mo_float)a->kind),
                   g_bits = 8 * mo_float_size((mo_float)a->grad_kind),
                   state_bits = a->code_bits ? a->code_bits : 8 * mo_float_size((mo_float)a->state_kind);

    w->first = (unsigned)first;
    w->whole = mo_update_enter(&a->p, p_bits, first, fours, MO_ARRAY_P) |
               mo_update_enter(&a->g, g_bits, first, fours, MO_ARRAY_G) |
               mo_update_enter(&a->master, 32, first, fours, MO_ARRAY_MASTER) |
               mo_update_enter(&a->m, state_bits, first, fours, MO_ARRAY_M) |
               mo_update_enter(&a->v, state_bits, first, fours, MO_ARRAY_V) |
               mo_update_enter(&a->vmax, state_bits, first, fours, MO_ARRAY_VMAX);
    if (a->code_bits) { /* of SGD there is no v, whose scales nobody looks for */
        a->m_scale += first / MO_CODE_ELEMENTS * 4;
        a->v_scale += first / MO_CODE_ELEMENTS * 4;
    }
}

MO_BODY void mo_update_prepare(mo_update_launch launch, unsigned number, mo_update_work *w)
{
    const mo_update_unit unit = mo_update_units(launch)[number];
    const float factor = launch.factor ? *(const float *)mo_global(launch.factor) : 1.0f;
    const unsigned long long first = (unsigned long long)unit.index * launch.elements;
    const mo_update_group *group;
    float steps = 0, left;
    double lr;

    w->a = mo_update_parameters(launch)[unit.parameter];
    w->count = w->a.count - first < launch.elements ? (unsigned)(w->a.count - first) : launch.elements;
    w->way = mo_update_way_of(&w->a);
    w->decays = !(w->a.flags & MO_UPDATE_SGD) && w->a.flags & MO_ADAM_L2;
    mo_update_enter_unit(w, first);
    w->first += launch.first_index;
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
        if (w->a.column) {
            mo_factored_terms(&w->wide.adam);
            w->inverse = *(const float *)mo_global(w->a.inverse);
            w->column = (unsigned)(first % w->a.columns);
            w->a.row += first / w->a.columns * 4;
        }
        w->narrow.adam = mo_adam_narrow(&w->wide.adam);
    }
}

/* ---- four elements, of fp32, fp16 or bf16 ------------------------------------------------------------------------ */

/* As they lie in memory: 16 or 8 bytes. Words of 32 bits: those of 64 cost a GPU two of each operation. */
typedef struct MO_ALIGNED(16) mo_four {
    unsigned word[4];
} mo_four;

/* Elements first … first + 3 of an array that begins at an address, one by one, as far as it has them; zeros behind. */
MO_BODY mo_four mo_four_gather(mo_float kind, unsigned long long address, unsigned first, unsigned count)
{
    mo_four raw = {{0, 0, 0, 0}};
    unsigned k;

    if (kind == MO_F32) {
        MO_UNROLL
        for (k = 0; k < 4; k++)
            if (first + k < count)
                raw.word[k] = ((const unsigned *)mo_global(address))[first + k];
    } else {
        MO_UNROLL
        for (k = 0; k < 4; k++)
            if (first + k < count)
                raw.word[k / 2] |= (unsigned)((const unsigned short *)mo_global(address))[first + k]
                                   << k % 2 * 16;
    }
    return raw;
}

MO_BODY void mo_four_scatter(mo_float kind, unsigned long long address, unsigned first, unsigned count,
                             mo_four raw)
{
    unsigned k;

    if (kind == MO_F32) {
        MO_UNROLL
        for (k = 0; k < 4; k++)
            if (first + k < count)
                ((unsigned *)mo_global(address))[first + k] = raw.word[k];
    } else {
        MO_UNROLL
        for (k = 0; k < 4; k++)
            if (first + k < count)
                ((unsigned short *)mo_global(address))[first + k] =
                    (unsigned short)(raw.word[k / 2] >> k % 2 * 16);
    }
}

/* In what follows a loop stands within each case, not the cases within one loop, whose unrolled branches, all on the same
 * few conditions, would take a CUDA compiler minutes. */
MO_BODY void mo_fours_widen(mo_float kind, unsigned fours, const mo_four *raw, float *x)
{
    unsigned k;

    if (kind == MO_F32) {
        MO_UNROLL
        for (k = 0; k < 4 * fours; k++)
            x[k] = mo_float_from_bits(raw[k / 4].word[k % 4]);
    } else if (kind == MO_F16) {
        MO_UNROLL
        for (k = 0; k < 2 * fours; k++)
            mo_f16_pair_to_float(raw[k / 2].word[k % 2], &x[2 * k], &x[2 * k + 1]);
    } else {
        MO_UNROLL
        for (k = 0; k < 2 * fours; k++)
            mo_bf16_pair_to_float(raw[k / 2].word[k % 2], &x[2 * k], &x[2 * k + 1]);
    }
}

/* To nearest. */
MO_BODY void mo_fours_narrow(mo_float kind, unsigned fours, const float *x, mo_four *raw)
{
    unsigned k;

    if (kind == MO_F32) {
        MO_UNROLL
        for (k = 0; k < 4 * fours; k++)
            raw[k / 4].word[k % 4] = mo_float_bits(x[k]);
    } else if (kind == MO_F16) {
        MO_UNROLL
        for (k = 0; k < 2 * fours; k++)
            raw[k / 2].word[k % 2] = mo_f16_pair(x[2 * k], x[2 * k + 1]);
    } else {
        MO_UNROLL
        for (k = 0; k < 2 * fours; k++)
            raw[k / 2].word[k % 2] = mo_bf16_pair(x[2 * k], x[2 * k + 1]);
    }
}

/* Up or down, to 16 bits; dither: the first element's. */
MO_BODY void mo_fours_dithered(mo_float kind, unsigned fours, const float *x, unsigned dither, mo_four *raw)
{
    unsigned k;

    if (kind == MO_F16) {
        MO_UNROLL
        for (k = 0; k < 4 * fours; k += 2)
            raw[k / 4].word[k / 2 % 2] = mo_f16_dithered(x[k], dither + k * MO_DITHER_INDEX) |
                                         mo_f16_dithered(x[k + 1], dither + (k + 1) * MO_DITHER_INDEX) << 16;
    } else {
        MO_UNROLL
        for (k = 0; k < 4 * fours; k += 2)
            raw[k / 4].word[k / 2 % 2] = mo_bf16_dithered(x[k], dither + k * MO_DITHER_INDEX) |
                                         mo_bf16_dithered(x[k + 1], dither + (k + 1) * MO_DITHER_INDEX) << 16;
    }
}

/* ---- parameters and gradients ------------------------------------------------------------------------------------- */

/* The types of a parameter, of its gradient and its states. */
typedef struct mo_update_kinds {
    mo_float p, g, state;
    int master;
} mo_update_kinds;

/* `way` is a constant: where all types are the same they are constants too. Where they are mixed they are read anew for each
 * few elements: as values that are the same in a whole loop the compiler would make a loop of its own for each combination. */
MO_BODY mo_update_kinds mo_update_kinds_of(const mo_update_work *w, mo_update_way way)
{
    const volatile mo_update_parameter *const a = &w->a;
    const mo_float kind = way == MO_UPDATE_IN_F16 ? MO_F16 : way == MO_UPDATE_IN_BF16 ? MO_BF16 : MO_F32;
    mo_update_kinds kinds = {kind, kind, kind, 0};

    if (way == MO_UPDATE_MIXED) {
        kinds.p = (mo_float)a->kind;
        kinds.g = (mo_float)a->grad_kind;
        kinds.state = (mo_float)a->state_kind;
        kinds.master = a->master != 0;
    }
    return kinds;
}

/* Elements of a unit that a thread takes at a time: `fours` times four, a constant. */
typedef struct mo_update_few {
    unsigned first; /* in the unit */
    unsigned left;  /* elements that there are from it on, which may be fewer or more */
    unsigned fours;
    unsigned whole; /* arrays that are accessed by all of them at once */
} mo_update_few;

MO_BODY mo_update_few mo_update_few_at(const mo_update_work *w, unsigned first, unsigned fours)
{
    const unsigned left = first < w->count ? w->count - first : 0;
    const mo_update_few few = {first, left, fours, left < fours * 4 ? 0 : w->whole};

    return few;
}

/* Of an array of fp32, fp16 or bf16 that is there. */
MO_BODY void mo_update_load(mo_update_few few, unsigned array, mo_float kind, unsigned long long address,
                            mo_four *raw)
{
    const unsigned long long at = address + few.first * (kind == MO_F32 ? 4 : 2);
    unsigned i;

    if (!(few.whole & array)) {
        MO_UNROLL
        for (i = 0; i < few.fours; i++)
            raw[i] = mo_four_gather(kind, at, i * 4, few.left);
    } else if (kind == MO_F32) {
        MO_UNROLL
        for (i = 0; i < few.fours; i++)
            raw[i] = ((const mo_four *)mo_global(at))[i];
    } else if (few.fours == 2) {
        const mo_four both = *(const mo_four *)mo_global(at);
        raw[0].word[0] = both.word[0];
        raw[0].word[1] = both.word[1];
        raw[1].word[0] = both.word[2];
        raw[1].word[1] = both.word[3];
        raw[0].word[2] = raw[0].word[3] = raw[1].word[2] = raw[1].word[3] = 0;
    } else {
        const mo_eight_bytes halves = *(const mo_eight_bytes *)mo_global(at);
        raw->word[0] = halves.word[0];
        raw->word[1] = halves.word[1];
        raw->word[2] = raw->word[3] = 0;
    }
}

MO_BODY void mo_update_store(mo_update_few few, unsigned array, mo_float kind, unsigned long long address,
                             const mo_four *raw)
{
    const unsigned long long at = address + few.first * (kind == MO_F32 ? 4 : 2);
    unsigned i;

    if (!(few.whole & array)) {
        MO_UNROLL
        for (i = 0; i < few.fours; i++)
            mo_four_scatter(kind, at, i * 4, few.left, raw[i]);
    } else if (kind == MO_F32) {
        MO_UNROLL
        for (i = 0; i < few.fours; i++)
            mo_store_words(at + 16 * i, raw[i].word[0], raw[i].word[1], raw[i].word[2], raw[i].word[3]);
    } else if (few.fours == 2) {
        mo_store_words(at, raw[0].word[0], raw[0].word[1], raw[1].word[0], raw[1].word[1]);
    } else {
        const mo_eight_bytes halves = {{raw->word[0], raw->word[1]}};
        *(mo_eight_bytes *)mo_global(at) = halves;
    }
}

MO_BODY void mo_update_load_p(const mo_update_work *w, mo_update_kinds kinds, mo_update_few few, mo_four *raw)
{
    if (kinds.master)
        mo_update_load(few, MO_ARRAY_MASTER, MO_F32, w->a.master, raw);
    else
        mo_update_load(few, MO_ARRAY_P, kinds.p, w->a.p, raw);
}

MO_BODY void mo_update_widen_p(mo_update_kinds kinds, unsigned fours, const mo_four *raw, float *p)
{
    mo_fours_widen(kinds.master ? MO_F32 : kinds.p, fours, raw, p);
}

/* Gradients as the rule takes them; stored too where they are multiplied where they lie. */
MO_BODY void mo_update_take_g(const mo_update_work *w, mo_update_kinds kinds, mo_update_few few, mo_four *raw,
                              float *g)
{
    unsigned k;

    mo_fours_widen(kinds.g, few.fours, raw, g);
    if (w->stored != 1.0f) {
        MO_UNROLL
        for (k = 0; k < 4 * few.fours; k++)
            g[k] = mo_mulf(g[k], w->stored);
        mo_fours_narrow(kinds.g, few.fours, g, raw);
        mo_update_store(few, MO_ARRAY_G, kinds.g, w->a.g, raw);
    }
}

MO_BODY void mo_update_put_p(const mo_update_work *w, mo_update_kinds kinds, mo_update_few few,
                             const float *p)
{
    mo_four raw[2];

    if (kinds.master) {
        mo_fours_narrow(MO_F32, few.fours, p, raw);
        mo_update_store(few, MO_ARRAY_MASTER, MO_F32, w->a.master, raw);
    }
    /* One store for both would read better, and keeps nvcc 13.0 busy for ever. */
    if (kinds.p != MO_F32 && w->a.flags & MO_UPDATE_STOCHASTIC) {
        mo_fours_dithered(kinds.p, few.fours, p, mo_dither(w->first + few.first, w->step), raw);
        mo_update_store(few, MO_ARRAY_P, kinds.p, w->a.p, raw);
    } else {
        mo_fours_narrow(kinds.p, few.fours, p, raw);
        mo_update_store(few, MO_ARRAY_P, kinds.p, w->a.p, raw);
    }
}

/* The factored second moment of each element, and numbers of no meaning behind the last: of one row, or of the next too. */
MO_BODY void mo_update_factored(const mo_update_work *w, mo_update_few few, float *v)
{
    const float *const column = (const float *)mo_global(w->a.column);
    const unsigned columns = w->a.columns, number = w->column + few.first, at = number % columns;
    const float *const row = (const float *)mo_global(w->a.row) + number / columns;
    const float here = few.left ? row[0] : 0, next = columns - at < few.left ? row[1] : 0;
    const float scale[2] = {mo_mulf(here, w->inverse), mo_mulf(next, w->inverse)};
    unsigned k;

    MO_UNROLL
    for (k = 0; k < 4 * few.fours; k++) {
        const unsigned behind = at + k >= columns;
        v[k] = mo_mulf(behind ? scale[1] : scale[0], column[behind ? at + k - columns : at + k]);
    }
}

/* ---- a thread: states of 16, 32 or 64 bits -------------------------------------------------------------------------- */

/* Of a rule whose flags are a constant, so that none is asked for an element. */
MO_BODY void mo_update_adam_as(const mo_update_work *w, unsigned flags, unsigned count, float *p,
                               const float *g, float *m, float *v, float *vmax)
{
    unsigned k;

    MO_UNROLL
    for (k = 0; k < count; k++)
        p[k] = mo_adam_elementf(&w->narrow.adam, flags, p[k], g[k], &m[k], &v[k], &vmax[k]);
}

MO_BODY void mo_update_adam_elements(const mo_update_work *w, unsigned flags, unsigned count, float *p,
                                     const float *g, float *m, float *v, float *vmax)
{
    if (flags & MO_ADAM_AMSGRAD)
        mo_update_adam_as(w, flags, count, p, g, m, v, vmax);
    else if (flags & MO_ADAM_L2)
        mo_update_adam_as(w, MO_ADAM_L2, count, p, g, m, v, vmax);
    else
        mo_update_adam_as(w, 0, count, p, g, m, v, vmax);
}

MO_BODY void mo_update_adam(const mo_update_work *w, mo_update_kinds kinds, mo_update_few few)
{
    const unsigned flags = w->a.flags & MO_UPDATE_RULE;
    mo_four raw_p[2], raw_g[2], raw_m[2], raw_v[2];
    float p[8], g[8], m[8], v[8], vmax[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    unsigned k;

    /* All loads are on their way before the first is waited for. */
    mo_update_load_p(w, kinds, few, raw_p);
    mo_update_load(few, MO_ARRAY_G, kinds.g, w->a.g, raw_g);
    mo_update_load(few, MO_ARRAY_M, kinds.state, w->a.m, raw_m);
    if (w->a.column)
        mo_update_factored(w, few, v);
    else
        mo_update_load(few, MO_ARRAY_V, kinds.state, w->a.v, raw_v);
    if (flags & MO_ADAM_AMSGRAD) {
        mo_four raw[2];
        mo_update_load(few, MO_ARRAY_VMAX, kinds.state, w->a.vmax, raw);
        mo_fours_widen(kinds.state, few.fours, raw, vmax);
    }
    mo_update_widen_p(kinds, few.fours, raw_p, p);
    mo_update_take_g(w, kinds, few, raw_g, g);
    mo_fours_widen(kinds.state, few.fours, raw_m, m);
    if (!w->a.column)
        mo_fours_widen(kinds.state, few.fours, raw_v, v);
    mo_update_adam_elements(w, flags, 4 * few.fours, p, g, m, v, vmax);
    if (w->a.column) {
        MO_UNROLL
        for (k = 0; k < 4 * few.fours; k++)
            m[k] = mo_code_is_kept(v[k]) ? m[k] : 0;
    } else {
        mo_fours_narrow(kinds.state, few.fours, v, raw_v);
        mo_update_store(few, MO_ARRAY_V, kinds.state, w->a.v, raw_v);
    }
    mo_fours_narrow(kinds.state, few.fours, m, raw_m);
    mo_update_store(few, MO_ARRAY_M, kinds.state, w->a.m, raw_m);
    if (flags & MO_ADAM_AMSGRAD) {
        mo_four raw[2];
        mo_fours_narrow(kinds.state, few.fours, vmax, raw);
        mo_update_store(few, MO_ARRAY_VMAX, kinds.state, w->a.vmax, raw);
    }
    mo_update_put_p(w, kinds, few, p);
}

MO_BODY void mo_update_sgd_as(const mo_update_work *w, unsigned flags, unsigned count, float *p,
                              const float *g, float *m)
{
    unsigned k;

    MO_UNROLL
    for (k = 0; k < count; k++)
        p[k] = mo_sgd_elementf(&w->narrow.sgd, flags, p[k], g[k], &m[k]);
}

MO_BODY void mo_update_sgd(const mo_update_work *w, mo_update_kinds kinds, mo_update_few few)
{
    const unsigned flags = w->a.flags & MO_UPDATE_RULE, momentum = flags & MO_SGD_MOMENTUM;
    mo_four raw_p[2], raw_g[2], raw_m[2] = {{{0, 0, 0, 0}}, {{0, 0, 0, 0}}};
    float p[8], g[8], m[8];

    mo_update_load_p(w, kinds, few, raw_p);
    mo_update_load(few, MO_ARRAY_G, kinds.g, w->a.g, raw_g);
    if (momentum)
        mo_update_load(few, MO_ARRAY_M, kinds.state, w->a.m, raw_m);
    mo_update_widen_p(kinds, few.fours, raw_p, p);
    mo_update_take_g(w, kinds, few, raw_g, g);
    mo_fours_widen(kinds.state, few.fours, raw_m, m);
    if (flags == MO_SGD_MOMENTUM)
        mo_update_sgd_as(w, MO_SGD_MOMENTUM, 4 * few.fours, p, g, m);
    else
        mo_update_sgd_as(w, flags, 4 * few.fours, p, g, m);
    if (momentum) {
        mo_fours_narrow(kinds.state, few.fours, m, raw_m);
        mo_update_store(few, MO_ARRAY_M, kinds.state, w->a.m, raw_m);
    }
    mo_update_put_p(w, kinds, few, p);
}

/* `way` is a constant. */
MO_BODY void mo_update_narrow(const mo_update_work *w, mo_update_way way, unsigned thread, unsigned threads)
{
    const unsigned fours = mo_update_fours_of(way);
    unsigned first;

    MO_NOT_UNROLLED
    for (first = 4 * fours * thread; first < w->count; first += 4 * fours * threads) {
        const mo_update_few few = mo_update_few_at(w, first, fours);
        const mo_update_kinds kinds = mo_update_kinds_of(w, way);
        if (w->a.flags & MO_UPDATE_SGD)
            mo_update_sgd(w, kinds, few);
        else
            mo_update_adam(w, kinds, few);
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
    unsigned i;

    switch (w->way) {
    case MO_UPDATE_IN_F64:
        for (i = thread; i < w->count; i += threads)
            mo_update_wide(w, i);
        break;
    case MO_UPDATE_IN_F32:
        mo_update_narrow(w, MO_UPDATE_IN_F32, thread, threads);
        break;
    case MO_UPDATE_IN_F16:
        mo_update_narrow(w, MO_UPDATE_IN_F16, thread, threads);
        break;
    case MO_UPDATE_IN_BF16:
        mo_update_narrow(w, MO_UPDATE_IN_BF16, thread, threads);
        break;
    default:
        mo_update_narrow(w, MO_UPDATE_MIXED, thread, threads);
    }
}

/* ---- a warp: states of 8 or 4 bits; `bits` is a constant, and `sgd`, which has m alone ------------------------------------ */

/* What a lane has of a block of 256 elements between its two halves: eight elements that follow each other. */
typedef struct mo_update_lane {
    float m[8], v[8];
    unsigned signs[2]; /* of m, which is |m| now: as codes have them */
    float largest_m, largest_v;
} mo_update_lane;

/* A lane's eight elements of a block of 256, which is counted from the unit's first. */
MO_BODY mo_update_few mo_update_lane_of(const mo_update_work *w, unsigned block, unsigned lane)
{
    return mo_update_few_at(w, block * MO_CODE_ELEMENTS + lane * 8, 2);
}

/* In the first word where they have 4 bits. */
MO_BODY mo_eight_bytes mo_update_load_codes(unsigned bits, mo_update_few few, unsigned array,
                                            unsigned long long address)
{
    const unsigned long long at = address + few.first * bits / 8;
    mo_eight_bytes codes = {{0, 0}};
    unsigned k;

    if (few.whole & array && bits == 8)
        return *(const mo_eight_bytes *)mo_global(at);
    if (few.whole & array) {
        codes.word[0] = *(const unsigned *)mo_global(at);
        return codes;
    }
    MO_UNROLL
    for (k = 0; k < bits; k++)
        if (k * 8 / bits < few.left)
            codes.word[k / 4] |= (unsigned)((const unsigned char *)mo_global(at))[k] << k % 4 * 8;
    if (bits == 4 && few.left < 8) /* half a byte is no element's, whatever it holds */
        codes.word[0] &= (1u << 4 * few.left) - 1;
    return codes;
}

MO_BODY void mo_update_store_codes(unsigned bits, mo_update_few few, unsigned array,
                                   unsigned long long address, mo_eight_bytes codes)
{
    const unsigned long long at = address + few.first * bits / 8;
    unsigned k;

    if (few.whole & array) {
        if (bits == 8)
            *(mo_eight_bytes *)mo_global(at) = codes;
        else
            *(unsigned *)mo_global(at) = codes.word[0];
        return;
    }
    MO_UNROLL
    for (k = 0; k < bits; k++)
        if (k * 8 / bits < few.left)
            ((unsigned char *)mo_global(at))[k] = (unsigned char)(codes.word[k / 4] >> k % 4 * 8);
}

/* Puts m's signs by and finds the largest of |m| and v, of the elements that leave the block their moments; the others' are
 * set to 0. Elements that are not there have neither. */
MO_BODY void mo_update_lane_measure(unsigned bits, mo_update_few few, mo_update_lane *held)
{
    unsigned most = 0,
             k; /* v's bits, ordered as numbers that are not negative: above them infinities and NaNs */

    MO_UNROLL
    for (k = 0; k < 8; k++)
        most = mo_float_bits(held->v[k]) > most ? mo_float_bits(held->v[k]) : most;
    if (most > mo_float_bits(MO_CODE_HUGE)) {
        most = 0;
        MO_UNROLL
        for (k = 0; k < 8; k++) {
            if (!mo_code_is_kept(held->v[k]))
                held->m[k] = held->v[k] = 0;
            if (k < few.left && held->v[k] > mo_float_from_bits(most))
                most = mo_float_bits(held->v[k]);
        }
    }
    held->largest_v = mo_float_from_bits(most);
    held->largest_m = 0;
    MO_UNROLL
    for (k = 0; k < bits / 4; k++)
        held->signs[k] = mo_code_signs(bits, held->m + k * MO_CODE_IN_WORD(bits));
    MO_UNROLL
    for (k = 0; k < 8; k++) {
        held->m[k] = mo_magnitudef(held->m[k]);
        held->largest_m = mo_largerf(held->largest_m, held->m[k]);
    }
}

/* The first half: everything but the new codes, which need the whole block's largest values. */
MO_BODY void mo_update_codes_take(const mo_update_work *w, unsigned bits, unsigned sgd, mo_update_way way,
                                  unsigned block, mo_update_few few, mo_update_lane *held)
{
    const mo_update_kinds kinds = mo_update_kinds_of(w, way);
    const unsigned flags = w->a.flags & MO_UPDATE_RULE;
    const float unit_m = mo_code_unit_m(bits, ((const float *)mo_global(w->a.m_scale))[block]);
    const mo_eight_bytes codes_m = mo_update_load_codes(bits, few, MO_ARRAY_M, w->a.m);
    mo_eight_bytes codes_v = {{0, 0}};
    float unit_v = 0;
    mo_four raw_p[2], raw_g[2];
    float p[8], g[8], vmax[8]; /* vmax is not there */
    unsigned i;

    if (!sgd && !w->a.column) {
        codes_v = mo_update_load_codes(bits, few, MO_ARRAY_V, w->a.v);
        unit_v = mo_code_unit_v(bits, ((const float *)mo_global(w->a.v_scale))[block]);
    }
    mo_update_load_p(w, kinds, few, raw_p);
    mo_update_load(few, MO_ARRAY_G, kinds.g, w->a.g, raw_g);
    mo_update_widen_p(kinds, few.fours, raw_p, p);
    mo_update_take_g(w, kinds, few, raw_g, g);
    MO_UNROLL
    for (i = 0; i < bits / 4; i++)
        mo_code_decode_word_m(bits, codes_m.word[i], unit_m, held->m + i * MO_CODE_IN_WORD(bits));
    if (!sgd && w->a.column) {
        mo_update_factored(w, few, held->v);
    } else if (!sgd) {
        MO_UNROLL
        for (i = 0; i < bits / 4; i++)
            mo_code_decode_word_v(bits, codes_v.word[i], unit_v, held->v + i * MO_CODE_IN_WORD(bits));
    }
    if (sgd) {
        if (flags == MO_SGD_MOMENTUM)
            mo_update_sgd_as(w, MO_SGD_MOMENTUM, 8, p, g, held->m);
        else
            mo_update_sgd_as(w, flags, 8, p, g, held->m);
        MO_UNROLL
        for (i = 0; i < 8; i++)
            held->v[i] = mo_magnitudef(held->m[i]); /* whether m is kept */
    } else if (w->decays) {
        mo_update_adam_as(w, MO_ADAM_L2, 8, p, g, held->m, held->v, vmax);
    } else {
        mo_update_adam_as(w, 0, 8, p, g, held->m, held->v, vmax);
    }
    mo_update_lane_measure(bits, few, held);
    mo_update_put_p(w, kinds, few, p);
}

/* The second half; per_m and per_v are of the whole block's largest values. */
MO_BODY void mo_update_codes_put(const mo_update_work *w, unsigned bits, unsigned sgd, mo_update_few few,
                                 const mo_update_lane *held, float per_m, float per_v)
{
    const unsigned index = w->first + few.first, dither_v = mo_code_dither(index, w->step),
                   dither_m =
                       sgd ? mo_code_dither_hashed(index, w->step) : mo_code_dither_m(bits, index, w->step),
                   apart_m = sgd ? MO_CODE_DITHER_INDEX : MO_CODE_DITHER_M(bits);
    mo_eight_bytes codes_m = {{0, 0}}, codes_v = {{0, 0}};
    unsigned i;

    MO_UNROLL
    for (i = 0; i < bits / 4; i++) {
        const unsigned first = i * MO_CODE_IN_WORD(bits);
        codes_m.word[i] = mo_code_encode_word_m(bits, held->m + first, held->signs[i], per_m,
                                                dither_m + first * apart_m, apart_m);
    }
    mo_update_store_codes(bits, few, MO_ARRAY_M, w->a.m, codes_m);
    if (sgd || w->a.column)
        return;
    MO_UNROLL
    for (i = 0; i < bits / 4; i++) {
        const unsigned first = i * MO_CODE_IN_WORD(bits);
        codes_v.word[i] =
            mo_code_encode_word_v(bits, held->v + first, per_v, dither_v + first * MO_CODE_DITHER_INDEX);
    }
    mo_update_store_codes(bits, few, MO_ARRAY_V, w->a.v, codes_v);
}

#endif
