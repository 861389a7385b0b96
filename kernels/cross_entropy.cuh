/* The work of one thread of the cross entropy kernel (cross_entropy.cu describes the operation as a whole). Plain C apart from the
 * macros, as in widen.cuh. Names of z, lse and scale as in csrc/loss/cross_entropy.h.
 *
 * A block has one row. A thread takes every so many-th of the row's vectors of 16 bytes; the few elements before the first and
 * behind the last are one thread's each. What a thread has seen of the row is its largest z and a sum of exponentials relative to
 * that, so that one pass over memory finds both; sums are fp32, of at most a row's share of a thread, and then of threads.
 *
 * Exponentials are 2^y by the GPU's instruction: within 2 units in the last place of fp32, and as many more as x = y / log2(e) has
 * units of 1, which is what x itself is rounded by. */
#ifndef MO_CROSS_ENTROPY_CUH
#define MO_CROSS_ENTROPY_CUH

#include "arithmetic.cuh"
#include "float_bits.cuh"

enum { MO_LOSS_FIND = 1, MO_LOSS_SUBTRACT = 2 };

/* The same for all launches of one call. */
typedef struct MO_ALIGNED(16) mo_cross_entropy_options {
    float smoothing, flat;     /* flat: smoothing / classes */
    float softcap, reciprocal; /* 0: none; 1 / softcap */
} mo_cross_entropy_options;

typedef struct mo_cross_entropy_launch {
    unsigned long long table;            /* mo_cross_entropy_options */
    unsigned long long logits;           /* rows of `columns` elements, a row a block */
    unsigned long long target;           /* int64, a class a row */
    unsigned long long lse, loss, scale; /* fp32, a number a row; loss may be 0 */
    unsigned long long classes, first;   /* the columns are of the classes [first, first + columns) */
    unsigned columns;
    unsigned char passes, kind; /* of the above; a mo_float, not fp64 */
} mo_cross_entropy_launch;

/* ---- functions ------------------------------------------------------------------------------------------------------ */

/* e^x; 0 below -87.4. */
MO_BODY float mo_exponential(float x)
{
    const float y = mo_mulf(x, 1.44269504f);
#ifdef __CUDACC__
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(y));
    return power;
#else
    return exp2f(y);
#endif
}

/* tanh(x) to 2^-22 of 1, as 1 - 2 e / (1 + e) with e = exp(-2 |x|). */
MO_BODY float mo_hyperbolic_tangent(float x)
{
    const float e = mo_exponential(-2 * mo_magnitudef(x));
#ifdef __CUDACC__
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(1 + e));
#else
    const float reciprocal = 1 / (1 + e);
#endif
    const float t = 1 - 2 * e * reciprocal;

    return mo_float_from_bits(mo_float_bits(t) | (mo_float_bits(x) & 0x80000000u));
}

/* z, and in *slope dz/dx. */
MO_BODY float mo_capped_logit(unsigned capped, float x, const mo_cross_entropy_options *options, float *slope)
{
    *slope = 1;
    if (!capped)
        return x;
    const float t = mo_hyperbolic_tangent(x * options->reciprocal);
    *slope = 1 - t * t;
    return t * options->softcap;
}

/* ---- elements: `kind` is a constant in each case, as in widen.cuh ------------------------------------------------------ */

#define MO_LOGITS_MOST 8 /* of a vector */

MO_BODY unsigned mo_logits_of_vector(unsigned kind)
{
    return kind == MO_F32 ? 4 : 8;
}

MO_BODY void mo_logits_load(unsigned kind, unsigned long long address, float *x)
{
    const mo_vector vector = *(const mo_vector *)mo_global(address);
    unsigned k;

    MO_UNROLL
    for (k = 0; k < 4; k++) {
        const unsigned word = (unsigned)(vector.word[k / 2] >> k % 2 * 32);
        if (kind == MO_F32)
            x[k] = mo_float_from_bits(word);
        else if (kind == MO_F16)
            mo_f16_pair_to_float(word, &x[2 * k], &x[2 * k + 1]);
        else
            mo_bf16_pair_to_float(word, &x[2 * k], &x[2 * k + 1]);
    }
}

MO_BODY unsigned mo_logits_word(unsigned kind, const float *x, unsigned k)
{
    return kind == MO_F32   ? mo_float_bits(x[k])
           : kind == MO_F16 ? mo_f16_pair(x[2 * k], x[2 * k + 1])
                            : mo_bf16_pair(x[2 * k], x[2 * k + 1]);
}

MO_BODY void mo_logits_store(unsigned kind, unsigned long long address, const float *x)
{
    mo_store_words(address, mo_logits_word(kind, x, 0), mo_logits_word(kind, x, 1),
                   mo_logits_word(kind, x, 2), mo_logits_word(kind, x, 3));
}

MO_BODY float mo_logit_load(unsigned kind, unsigned long long address)
{
    const void *const at = mo_global(address);

    return kind == MO_F32   ? *(const float *)at
           : kind == MO_F16 ? mo_f16_to_float(*(const unsigned short *)at)
                            : mo_bf16_to_float(*(const unsigned short *)at);
}

MO_BODY void mo_logit_store(unsigned kind, unsigned long long address, float x)
{
    void *const at = mo_global(address);

    if (kind == MO_F32)
        *(float *)at = x;
    else
        *(unsigned short *)at =
            (unsigned short)(kind == MO_F16 ? mo_f16_from_float(x) : mo_bf16_from_float(x));
}

/* ---- a row ---------------------------------------------------------------------------------------------------------- */

typedef struct mo_logits_row {
    unsigned long long address;
    mo_split split;
    unsigned column; /* the target's; no column where the target is not among them */
    float lse, scale;
    mo_cross_entropy_options options;
} mo_logits_row;

MO_BODY float *mo_row_number(unsigned long long numbers, unsigned row)
{
    return (float *)mo_global(numbers + 4ull * row);
}

/* Without lse. */
MO_BODY mo_logits_row mo_logits_row_of(const mo_cross_entropy_launch *a, unsigned row)
{
    const unsigned size = mo_float_size((mo_float)a->kind);
    const unsigned long long target = *(const unsigned long long *)mo_global(a->target + 8ull * row);
    const unsigned long long column = target - a->first;
    mo_logits_row made;
    mo_chunk chunk;

    made.options = *(const mo_cross_entropy_options *)mo_global(a->table);
    made.address = chunk.address = a->logits + (unsigned long long)row * a->columns * size;
    chunk.count = a->columns;
    made.split = mo_chunk_split(chunk, size);
    made.column = column < a->columns ? (unsigned)column : a->columns;
    made.scale = a->passes & MO_LOSS_SUBTRACT ? *mo_row_number(a->scale, row) : 0;
    return made;
}

/* ---- finding -------------------------------------------------------------------------------------------------------- */

/* Of elements: the largest z, the sum of exp(z - top), the sum of z. */
typedef struct mo_logits_seen {
    float top, powers, values;
} mo_logits_seen;

/* Of none. Not an infinity, which is no distance from another. */
MO_BODY mo_logits_seen mo_logits_none(void)
{
    const mo_logits_seen none = {-0x1.fffffep127f, 0, 0};

    return none;
}

MO_BODY mo_logits_seen mo_logits_joined(mo_logits_seen a, mo_logits_seen b)
{
    mo_logits_seen both;

    both.top = mo_largerf(a.top, b.top);
    both.powers = a.powers * mo_exponential(a.top - both.top) + b.powers * mo_exponential(b.top - both.top);
    both.values = a.values + b.values;
    return both;
}

/* Adds elements: `count` is a constant. */
MO_BODY void mo_logits_see(unsigned capped, const mo_cross_entropy_options *options, const float *x,
                           unsigned count, mo_logits_seen *seen)
{
    float z[MO_LOGITS_MOST], slope, top = seen->top, powers = 0;
    unsigned k;

    MO_UNROLL
    for (k = 0; k < count; k++) {
        z[k] = mo_capped_logit(capped, x[k], options, &slope);
        top = mo_largerf(top, z[k]);
        seen->values += z[k];
    }
    MO_UNROLL
    for (k = 0; k < count; k++)
        powers += mo_exponential(z[k] - top);
    seen->powers = seen->powers * mo_exponential(seen->top - top) + powers;
    seen->top = top;
}

MO_BODY mo_logits_seen mo_logits_find(unsigned kind, unsigned capped, const mo_logits_row *row,
                                      unsigned thread, unsigned threads)
{
    const unsigned size = mo_float_size((mo_float)kind);
    unsigned long long address = row->address + row->split.head * size + 16ull * thread;
    mo_logits_seen seen = mo_logits_none();
    float x[MO_LOGITS_MOST];
    unsigned i;

    MO_NOT_UNROLLED
    for (i = thread; i < row->split.vectors; i += threads) {
        mo_logits_load(kind, address, x);
        mo_logits_see(capped, &row->options, x, mo_logits_of_vector(kind), &seen);
        address += 16ull * threads;
    }
    return seen;
}

/* The row's lse, from what all threads have seen of it and the target's logit; writes it, and the loss. One thread does. */
MO_BODY float mo_cross_entropy_finish(const mo_cross_entropy_launch *a, unsigned row, const mo_logits_row *of,
                                      mo_logits_seen seen, float target)
{
    const mo_cross_entropy_options *const options = &of->options;
    const float lse = seen.top + logf(seen.powers);
    float slope, loss = lse;

    loss -= (1 - options->smoothing) * mo_capped_logit(options->softcap > 0, target, options, &slope);
    if (options->smoothing > 0)
        loss -= options->smoothing * (seen.values / (float)a->classes);
    *mo_row_number(a->lse, row) = lse;
    if (a->loss)
        *mo_row_number(a->loss, row) = loss;
    return lse;
}

/* ---- subtracting ------------------------------------------------------------------------------------------------------ */

/* Elements from number `first` on become their gradients: `count` is a constant. */
MO_BODY void mo_logits_gradients(unsigned capped, const mo_logits_row *row, float *x, unsigned first,
                                 unsigned count)
{
    const unsigned hit = row->column - first; /* below count where the target is among them */
    float slope[MO_LOGITS_MOST];
    unsigned k;

    MO_UNROLL
    for (k = 0; k < count; k++) {
        const float z = mo_capped_logit(capped, x[k], &row->options, &slope[k]);
        x[k] = mo_exponential(z - row->lse) - row->options.flat;
    }
    if (hit < count) {
        MO_UNROLL
        for (k = 0; k < count; k++)
            x[k] -= k == hit ? 1 - row->options.smoothing : 0;
    }
    MO_UNROLL
    for (k = 0; k < count; k++)
        x[k] = row->scale * x[k] * slope[k];
}

MO_BODY void mo_logits_subtract(unsigned kind, unsigned capped, const mo_logits_row *row, unsigned thread,
                                unsigned threads)
{
    const unsigned size = mo_float_size((mo_float)kind), count = mo_logits_of_vector(kind);
    unsigned long long address = row->address + row->split.head * size + 16ull * thread;
    float x[MO_LOGITS_MOST];
    unsigned i;

    MO_NOT_UNROLLED
    for (i = thread; i < row->split.vectors; i += threads) {
        mo_logits_load(kind, address, x);
        mo_logits_gradients(capped, row, x, row->split.head + i * count, count);
        mo_logits_store(kind, address, x);
        address += 16ull * threads;
    }
}

/* ---- a thread: a switch over calls with constants --------------------------------------------------------------------- */

#define MO_LOGITS_CASES(call)                                                                                \
    switch (a->kind * 2 + (row->options.softcap > 0)) {                                                      \
    case MO_F32 * 2:                                                                                         \
        call(MO_F32, 0);                                                                                     \
        break;                                                                                               \
    case MO_F32 * 2 + 1:                                                                                     \
        call(MO_F32, 1);                                                                                     \
        break;                                                                                               \
    case MO_F16 * 2:                                                                                         \
        call(MO_F16, 0);                                                                                     \
        break;                                                                                               \
    case MO_F16 * 2 + 1:                                                                                     \
        call(MO_F16, 1);                                                                                     \
        break;                                                                                               \
    case MO_BF16 * 2:                                                                                        \
        call(MO_BF16, 0);                                                                                    \
        break;                                                                                               \
    default:                                                                                                 \
        call(MO_BF16, 1);                                                                                    \
    }

/* The address of the single element that this thread has; 0 where it has none. *column: its number in the row. */
MO_BODY unsigned long long mo_logits_single(const mo_cross_entropy_launch *a, const mo_logits_row *row,
                                            unsigned thread, unsigned *column)
{
    const mo_split split = row->split;

    if (thread >= split.head + split.tail) /* together at most 14, fewer than a warp */
        return 0;
    *column = thread < split.head ? thread : a->columns - split.tail + (thread - split.head);
    return row->address + (unsigned long long)*column * mo_float_size((mo_float)a->kind);
}

MO_BODY mo_logits_seen mo_cross_entropy_find(const mo_cross_entropy_launch *a, const mo_logits_row *row,
                                             unsigned thread, unsigned threads)
{
    unsigned column;
    const unsigned long long single = mo_logits_single(a, row, thread, &column);
    mo_logits_seen seen;

#define MO_LOGITS_CALL(kind, capped) seen = mo_logits_find(kind, capped, row, thread, threads)
    MO_LOGITS_CASES(MO_LOGITS_CALL)
#undef MO_LOGITS_CALL
    if (single) {
        const float x = mo_logit_load(a->kind, single);
        mo_logits_see(row->options.softcap > 0, &row->options, &x, 1, &seen);
    }
    return seen;
}

MO_BODY void mo_cross_entropy_subtract(const mo_cross_entropy_launch *a, const mo_logits_row *row,
                                       unsigned thread, unsigned threads)
{
    unsigned column;
    const unsigned long long single = mo_logits_single(a, row, thread, &column);

#define MO_LOGITS_CALL(kind, capped) mo_logits_subtract(kind, capped, row, thread, threads)
    MO_LOGITS_CASES(MO_LOGITS_CALL)
#undef MO_LOGITS_CALL
    if (single) {
        float x = mo_logit_load(a->kind, single);
        mo_logits_gradients(row->options.softcap > 0, row, &x, column, 1);
        mo_logit_store(a->kind, single, x);
    }
}

#endif
