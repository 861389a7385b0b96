/* The work of one thread of the widening kernel (widen.cu describes the operation as a whole). Plain C apart from the macros: gcc
 * compiles it for the C tests, and within widen.cu for the simulated device, which runs the kernel whole (csrc/simcuda/grid.h).
 * The CPU's loops use the same arithmetic (csrc/data/widen_generic.c).
 *
 *     element i of memory is of channel (i / inner) % channels      inner: elements from one channel to the next
 *     NCHW: inner = H * W     channels_last: inner = 1     no channels: inner = channels = 1
 *
 * A block has MO_WIDEN_UNIT elements in a row, a thread four at a time: by one load and one store, which are a warp's neighbours.
 * What four elements are normalised by is found once for all the fours of a thread that have the same channels, with the
 * reciprocals by which their divisions take three operations each. */
#ifndef MO_WIDEN_CUH
#define MO_WIDEN_CUH

#include "arithmetic.cuh"
#include "float_bits.cuh"

/* What is stored. */
typedef enum mo_number {
    MO_NUMBER_U8,
    MO_NUMBER_I8,
    MO_NUMBER_U16,
    MO_NUMBER_I16,
    MO_NUMBER_F16,
    MO_NUMBER_BF16,
    MO_NUMBER_F32,
    MO_NUMBER_COUNT
} mo_number;

/* Elements a block: a multiple of 4. With 256 threads eight rounds each; 8 KiB of bytes become 32 KiB of fp32. */
#define MO_WIDEN_UNIT 8192u

/* The most that inner * channels may be: then a place in the period and a unit behind it are 32-bit numbers. */
#define MO_WIDEN_PERIOD_MAX 0x80000000ull

typedef struct mo_widen_launch {
    unsigned long long table; /* the mean of each channel, then the deviation of each: fp32 */
    unsigned long long source, target;
    unsigned long long count; /* elements */
    unsigned inner, channels;
    float scale;
    unsigned char divide;                   /* by the scale, instead of a multiplication */
    unsigned char aligned;                  /* both addresses are multiples of four elements */
    unsigned char source_kind, target_kind; /* a mo_number; a mo_float, not fp64 */
} mo_widen_launch;

/* One rounding an operation, in the order in which torch's x.div(scale).sub(mean).div(deviation) does it. */
MO_BODY float mo_widened(float x, float scale, unsigned divide, float mean, float deviation)
{
    x = divide ? mo_divf(x, scale) : mo_mulf(x, scale);
    return mo_divf(mo_subf(x, mean), deviation);
}

/* `bits` hold a number in their lowest 8, 16 or 32. */
MO_BODY float mo_number_value(unsigned kind, unsigned bits)
{
    switch (kind) {
    case MO_NUMBER_U8:
        return (float)(bits & 0xFF);
    case MO_NUMBER_I8:
        return (float)(signed char)bits;
    case MO_NUMBER_U16:
        return (float)(bits & 0xFFFF);
    case MO_NUMBER_I16:
        return (float)(short)bits;
    case MO_NUMBER_F16:
        return mo_f16_to_float(bits & 0xFFFF);
    case MO_NUMBER_BF16:
        return mo_bf16_to_float(bits & 0xFFFF);
    default:
        return mo_float_from_bits(bits);
    }
}

MO_BODY unsigned mo_number_size(unsigned kind)
{
    return kind == MO_NUMBER_F32 ? 4 : kind <= MO_NUMBER_I8 ? 1 : 2;
}

/* The bits of x as a mo_float that is not fp64. */
MO_BODY unsigned mo_widen_bits(unsigned kind, float x)
{
    return kind == MO_F32 ? mo_float_bits(x) : kind == MO_F16 ? mo_f16_from_float(x) : mo_bf16_from_float(x);
}

/* ---- four elements: a loop within each case, as in update.cuh ---------------------------------------------------------- */

/* Integers by way of 2^23 + n, whose lowest bits are n: a GPU converts integers at a quarter of the speed of this. */
#define MO_WIDEN_2_23 0x1p23f

MO_BODY float mo_widen_byte(unsigned word, unsigned k)
{
    return mo_float_from_bits(mo_bytes(word, 0x4B000000, 0x7440 + k));
}

MO_BODY float mo_widen_half(unsigned word, unsigned k)
{
    return mo_float_from_bits(mo_bytes(word, 0x4B000000, 0x7410 + 0x22 * k));
}

MO_BODY void mo_widen_load(unsigned kind, unsigned long long address, float *x)
{
    const void *const at = mo_global(address);
    unsigned k;

    if (kind <= MO_NUMBER_I8) {
        const unsigned word = *(const unsigned *)at;
        if (kind == MO_NUMBER_U8) {
            MO_UNROLL
            for (k = 0; k < 4; k++)
                x[k] = mo_subf(mo_widen_byte(word, k), MO_WIDEN_2_23);
        } else {
            MO_UNROLL
            for (k = 0; k < 4; k++)
                x[k] = mo_subf(mo_widen_byte(word ^ 0x80808080u, k), MO_WIDEN_2_23 + 128);
        }
    } else if (kind == MO_NUMBER_F32) {
        const mo_vector vector = *(const mo_vector *)at;
        MO_UNROLL
        for (k = 0; k < 4; k++)
            x[k] = mo_float_from_bits((unsigned)(vector.word[k / 2] >> k % 2 * 32));
    } else {
        const mo_eight_bytes halves = *(const mo_eight_bytes *)at;
        if (kind == MO_NUMBER_F16) {
            mo_f16_pair_to_float(halves.word[0], &x[0], &x[1]);
            mo_f16_pair_to_float(halves.word[1], &x[2], &x[3]);
        } else if (kind == MO_NUMBER_BF16) {
            mo_bf16_pair_to_float(halves.word[0], &x[0], &x[1]);
            mo_bf16_pair_to_float(halves.word[1], &x[2], &x[3]);
        } else if (kind == MO_NUMBER_U16) {
            MO_UNROLL
            for (k = 0; k < 4; k++)
                x[k] = mo_subf(mo_widen_half(halves.word[k / 2], k % 2), MO_WIDEN_2_23);
        } else {
            MO_UNROLL
            for (k = 0; k < 4; k++)
                x[k] = mo_subf(mo_widen_half(halves.word[k / 2] ^ 0x80008000u, k % 2), MO_WIDEN_2_23 + 32768);
        }
    }
}

MO_BODY void mo_widen_store(unsigned kind, unsigned long long address, const float *x)
{
    void *const at = mo_global(address);

    if (kind == MO_F32) {
        mo_store_words(address, mo_float_bits(x[0]), mo_float_bits(x[1]), mo_float_bits(x[2]),
                       mo_float_bits(x[3]));
    } else if (kind == MO_F16) {
        const mo_eight_bytes halves = {{mo_f16_pair(x[0], x[1]), mo_f16_pair(x[2], x[3])}};
        *(mo_eight_bytes *)at = halves;
    } else {
        const mo_eight_bytes halves = {{mo_bf16_pair(x[0], x[1]), mo_bf16_pair(x[2], x[3])}};
        *(mo_eight_bytes *)at = halves;
    }
}

/* ---- a place in the period ------------------------------------------------------------------------------------------ */

typedef struct mo_widen_place {
    unsigned within, channel; /* within < inner, channel < channels */
} mo_widen_place;

MO_BODY mo_widen_place mo_widen_place_of(const mo_widen_launch *a, unsigned element)
{
    const unsigned run = element / a->inner;
    mo_widen_place place;

    place.within = element - run * a->inner;
    place.channel = run % a->channels;
    return place;
}

MO_BODY void mo_widen_next(const mo_widen_launch *a, mo_widen_place *place)
{
    if (++place->within == a->inner) {
        place->within = 0;
        if (++place->channel == a->channels)
            place->channel = 0;
    }
}

/* `by` elements on; by is a place too. */
MO_BODY void mo_widen_advance(const mo_widen_launch *a, mo_widen_place *place, mo_widen_place by)
{
    place->within += by.within; /* below 2^32, as both are below MO_WIDEN_PERIOD_MAX */
    place->channel += by.channel;
    if (place->within >= a->inner) {
        place->within -= a->inner;
        place->channel++;
    }
    if (place->channel >= a->channels)
        place->channel -= a->channels;
}

/* ---- four elements -------------------------------------------------------------------------------------------------- */

/* What four elements that follow each other are normalised by; mo_divided serves for all of them where `serves` is not 0. */
typedef struct mo_widen_known {
    float mean[4];
    mo_divisor deviation[4];
    int serves;
} mo_widen_known;

/* 2^-30 <= |x| <= 2^30 */
MO_BODY int mo_widen_is_usual(float x)
{
    return (mo_float_bits(x) & 0x7FFFFFFFu) - (97u << 23) <= 60u << 23;
}

/* Whether mo_divided serves with these. With x an integer of 16 bits or a number of fp16, all else as mo_widen_is_usual says, what is
 * divided by the scale is 0 or in 2^[-24, 16], and what is divided by the deviation is 0 or in 2^[-77, 47]; so quotients are normal
 * numbers, and remainders are multiples of 2^-123. No integer is -0, nor is a difference of anything but -0 and 0. fp16 has a -0,
 * which may be taken for +0 where the mean is not 0, and infinities and NaNs, of which a NaN comes. */
MO_BODY int mo_widen_is_known(const mo_widen_launch *a, float mean, float deviation)
{
    return mo_widen_is_usual(deviation) &&
           (mo_widen_is_usual(mean) || (mean == 0 && a->source_kind < MO_NUMBER_F16));
}

/* Of elements whose first is at `place`. */
MO_BODY void mo_widen_know(const mo_widen_launch *a, mo_widen_place place, mo_widen_known *known)
{
    const float *const means = (const float *)mo_global(a->table), *const deviations = means + a->channels;
    unsigned k;

    known->serves = a->source_kind <= MO_NUMBER_F16 && a->scale > 0 && mo_widen_is_usual(a->scale);
    if (a->inner - place.within >= 4) { /* of one channel */
        const float mean = means[place.channel], deviation = deviations[place.channel];
        const mo_divisor by = mo_divisor_of(deviation);
        known->serves &= mo_widen_is_known(a, mean, deviation);
        MO_UNROLL
        for (k = 0; k < 4; k++) {
            known->mean[k] = mean;
            known->deviation[k] = by;
        }
    } else {
        MO_UNROLL
        for (k = 0; k < 4; k++) {
            const float mean = means[place.channel], deviation = deviations[place.channel];
            known->serves &= mo_widen_is_known(a, mean, deviation);
            known->mean[k] = mean;
            known->deviation[k] = mo_divisor_of(deviation);
            mo_widen_next(a, &place);
        }
    }
}

/* x as mo_widened makes it; `quickly` a constant: by mo_divided. */
MO_BODY void mo_widen_normalise(const mo_widen_launch *a, mo_divisor scale, const mo_widen_known *known,
                                int quickly, const float *x, float *y)
{
    unsigned k;

    if (!a->divide) {
        MO_UNROLL
        for (k = 0; k < 4; k++)
            y[k] = mo_mulf(x[k], a->scale);
    } else {
        MO_UNROLL
        for (k = 0; k < 4; k++)
            y[k] = quickly ? mo_divided(x[k], scale) : mo_divf(x[k], a->scale);
    }
    MO_UNROLL
    for (k = 0; k < 4; k++) {
        const float from_mean = mo_subf(y[k], known->mean[k]);
        y[k] = quickly ? mo_divided(from_mean, known->deviation[k])
                       : mo_divf(from_mean, -known->deviation[k].negated);
    }
}

MO_BODY int mo_widen_is_nan(float x)
{
    return x != x;
}

MO_BODY void mo_widen_four(const mo_widen_launch *a, mo_divisor scale, const mo_widen_known *known, float *x)
{
    float y[4];
    unsigned k, done = 0;

    if (known->serves) {
        mo_widen_normalise(a, scale, known, 1, x, y);
        done = a->source_kind != MO_NUMBER_F16 || !mo_widen_is_nan(y[0] + y[1] + (y[2] + y[3]));
    }
    if (!done)
        mo_widen_normalise(a, scale, known, 0, x, y);
    MO_UNROLL
    for (k = 0; k < 4; k++)
        x[k] = y[k];
}

/* ---- one element ------------------------------------------------------------------------------------------------------ */

MO_BODY unsigned mo_widen_one(const mo_widen_launch *a, unsigned channel, unsigned bits)
{
    const float *const table = (const float *)mo_global(a->table);
    const float x = mo_widened(mo_number_value(a->source_kind, bits), a->scale, a->divide, table[channel],
                               table[a->channels + channel]);
    return mo_widen_bits(a->target_kind, x);
}

/* One element, wherever it lies. */
MO_BODY void mo_widen_single(const mo_widen_launch *a, unsigned long long element, unsigned in_period)
{
    const unsigned size = mo_number_size(a->source_kind);
    const unsigned long long from = a->source + element * size;
    const unsigned bits = size == 1   ? *(const unsigned char *)mo_global(from)
                          : size == 2 ? *(const unsigned short *)mo_global(from)
                                      : *(const unsigned *)mo_global(from);
    const unsigned out = mo_widen_one(a, mo_widen_place_of(a, in_period).channel, bits);

    if (a->target_kind == MO_F32)
        *(unsigned *)mo_global(a->target + element * 4) = out;
    else
        *(unsigned short *)mo_global(a->target + element * 2) = (unsigned short)out;
}

/* ---- a thread --------------------------------------------------------------------------------------------------------- */

/* How many of the threads share the fours of a block, each taking every so many-th of them: all; or a few less, where then a
 * thread's fours have all the same channels, as those of images with channels_last have. */
MO_BODY unsigned mo_widen_sharing(const mo_widen_launch *a, unsigned threads)
{
    const unsigned period = a->inner * a->channels;
    const unsigned fours = period % 4 == 0 ? period / 4 : period % 2 == 0 ? period / 2 : period;
    const unsigned left = threads % fours;

    return left <= threads / 8 ? threads - left : threads;
}

/* So many fours of a thread, a constant, of the channels that are known: all are loaded before the first is waited for. */
MO_BODY void mo_widen_fours(const mo_widen_launch *a, mo_divisor scale, const mo_widen_known *known,
                            unsigned long long source, unsigned long long source_step,
                            unsigned long long target, unsigned long long target_step, unsigned fours)
{
    float x[8];
    unsigned i;

    MO_UNROLL
    for (i = 0; i < fours; i++)
        mo_widen_load(a->source_kind, source + i * source_step, x + 4 * i);
    MO_UNROLL
    for (i = 0; i < fours; i++) {
        mo_widen_four(a, scale, known, x + 4 * i);
        mo_widen_store(a->target_kind, target + i * target_step, x + 4 * i);
    }
}

MO_BODY void mo_widen_thread(const mo_widen_launch *a, unsigned block, unsigned thread, unsigned threads)
{
    const unsigned long long begin = (unsigned long long)block * MO_WIDEN_UNIT;
    const unsigned count = a->count - begin < MO_WIDEN_UNIT ? (unsigned)(a->count - begin) : MO_WIDEN_UNIT;
    const unsigned phase = (unsigned)(begin % ((unsigned long long)a->inner * a->channels));
    const unsigned fours = a->aligned ? count / 4 : 0, sharing = mo_widen_sharing(a, threads);
    const unsigned source_size = 4 * mo_number_size(a->source_kind),
                   target_size = 4 * mo_float_size((mo_float)a->target_kind); /* of four */
    const unsigned long long source_step = sharing * source_size, target_step = sharing * target_size;
    const mo_divisor scale = mo_divisor_of(a->scale);
    const mo_widen_place by = mo_widen_place_of(a, 4 * sharing);
    const unsigned always = a->channels == 1 || (by.within == 0 && by.channel == 0);
    unsigned long long source = a->source + begin / 4 * source_size + thread * source_size,
                       target = a->target + begin / 4 * target_size + thread * target_size;
    mo_widen_place place = mo_widen_place_of(a, phase + 4 * thread);
    unsigned i = thread < sharing ? thread : fours;

    while (i < fours) {
        /* Those before `stop` have the channels of this one. */
        const unsigned run = a->inner - place.within < 4 ? 1 : (a->inner - place.within) / 4;
        const unsigned begun = i, stop = always || run > fours - i ? fours : i + run;
        mo_widen_known known;

        mo_widen_know(a, place, &known);
        MO_NOT_UNROLLED
        for (; i + sharing < stop; i += 2 * sharing) {
            mo_widen_fours(a, scale, &known, source, source_step, target, target_step, 2);
            source += 2 * source_step;
            target += 2 * target_step;
        }
        if (i < stop) {
            mo_widen_fours(a, scale, &known, source, source_step, target, target_step, 1);
            source += source_step;
            target += target_step;
            i += sharing;
        }
        place.within += 4 * (i - sharing - begun); /* of the last one */
        mo_widen_advance(a, &place, by);
    }
    for (i = 4 * fours + thread; i < count; i += threads)
        mo_widen_single(a, begin + i, phase + i);
}

#endif
