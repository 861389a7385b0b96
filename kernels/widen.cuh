/* The work of one thread of the widening kernel (widen.cu describes the operation as a whole). Plain C apart from the macros: gcc
 * compiles it for the C tests, and within widen.cu for the simulated device, which runs the kernel whole (csrc/simcuda/grid.h).
 * The CPU's loops use the same arithmetic (csrc/data/widen_generic.c).
 *
 *     element i of memory is of channel (i / inner) % channels      inner: elements from one channel to the next
 *     NCHW: inner = H * W     channels_last: inner = 1     no channels: inner = channels = 1
 *
 * A block has MO_WIDEN_UNIT elements in a row, a thread four at a time: by one load and one store, which are a warp's neighbours. */
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

MO_BODY void mo_widen_load(unsigned kind, unsigned long long address, float *x)
{
    const void *const at = mo_global(address);
    unsigned k;

    if (kind == MO_NUMBER_F32) {
        const mo_vector vector = *(const mo_vector *)at;
        MO_UNROLL
        for (k = 0; k < 4; k++)
            x[k] = mo_float_from_bits((unsigned)(vector.word[k / 2] >> k % 2 * 32));
    } else if (kind <= MO_NUMBER_I8) {
        const unsigned word = *(const unsigned *)at;
        if (kind == MO_NUMBER_U8) {
            MO_UNROLL
            for (k = 0; k < 4; k++)
                x[k] = mo_number_value(MO_NUMBER_U8, word >> k * 8);
        } else {
            MO_UNROLL
            for (k = 0; k < 4; k++)
                x[k] = mo_number_value(MO_NUMBER_I8, word >> k * 8);
        }
    } else {
        const mo_eight_bytes halves = *(const mo_eight_bytes *)at;
        if (kind == MO_NUMBER_F16) {
            MO_UNROLL
            for (k = 0; k < 4; k++)
                x[k] = mo_number_value(MO_NUMBER_F16, halves.word[k / 2] >> k % 2 * 16);
        } else if (kind == MO_NUMBER_BF16) {
            MO_UNROLL
            for (k = 0; k < 4; k++)
                x[k] = mo_number_value(MO_NUMBER_BF16, halves.word[k / 2] >> k % 2 * 16);
        } else if (kind == MO_NUMBER_U16) {
            MO_UNROLL
            for (k = 0; k < 4; k++)
                x[k] = mo_number_value(MO_NUMBER_U16, halves.word[k / 2] >> k % 2 * 16);
        } else {
            MO_UNROLL
            for (k = 0; k < 4; k++)
                x[k] = mo_number_value(MO_NUMBER_I16, halves.word[k / 2] >> k % 2 * 16);
        }
    }
}

MO_BODY void mo_widen_store(unsigned kind, unsigned long long address, const float *x)
{
    void *const at = mo_global(address);

    if (kind == MO_F32) {
        const mo_vector vector = {{(unsigned long long)mo_float_bits(x[1]) << 32 | mo_float_bits(x[0]),
                                   (unsigned long long)mo_float_bits(x[3]) << 32 | mo_float_bits(x[2])}};
        *(mo_vector *)at = vector;
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

/* Four elements, the first of them at `place`. */
MO_BODY void mo_widen_four(const mo_widen_launch *a, mo_widen_place place, float *x)
{
    const float *const means = (const float *)mo_global(a->table), *const deviations = means + a->channels;
    float mean[4], deviation[4];
    unsigned k;

    if (a->inner - place.within >= 4) { /* of one channel */
        mean[0] = mean[1] = mean[2] = mean[3] = means[place.channel];
        deviation[0] = deviation[1] = deviation[2] = deviation[3] = deviations[place.channel];
    } else {
        MO_UNROLL
        for (k = 0; k < 4; k++) {
            mean[k] = means[place.channel];
            deviation[k] = deviations[place.channel];
            mo_widen_next(a, &place);
        }
    }
    if (a->divide) {
        MO_UNROLL
        for (k = 0; k < 4; k++)
            x[k] = mo_widened(x[k], a->scale, 1, mean[k], deviation[k]);
    } else {
        MO_UNROLL
        for (k = 0; k < 4; k++)
            x[k] = mo_widened(x[k], a->scale, 0, mean[k], deviation[k]);
    }
}

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

MO_BODY void mo_widen_thread(const mo_widen_launch *a, unsigned block, unsigned thread, unsigned threads)
{
    const unsigned long long begin = (unsigned long long)block * MO_WIDEN_UNIT;
    const unsigned count = a->count - begin < MO_WIDEN_UNIT ? (unsigned)(a->count - begin) : MO_WIDEN_UNIT;
    const unsigned phase = (unsigned)(begin % ((unsigned long long)a->inner * a->channels));
    const unsigned quads = a->aligned ? count / 4 : 0;
    const unsigned source_size = mo_number_size(a->source_kind),
                   target_size = mo_float_size((mo_float)a->target_kind);
    const unsigned long long source = a->source + begin * source_size,
                             target = a->target + begin * target_size;
    mo_widen_place place = mo_widen_place_of(a, phase + 4 * thread);
    const mo_widen_place by = mo_widen_place_of(a, 4 * threads);

    MO_NOT_UNROLLED
    for (unsigned i = thread; i < quads; i += threads) {
        float x[4];
        mo_widen_load(a->source_kind, source + 4 * i * source_size, x);
        mo_widen_four(a, place, x);
        mo_widen_store(a->target_kind, target + 4 * i * target_size, x);
        mo_widen_advance(a, &place, by);
    }
    for (unsigned i = 4 * quads + thread; i < count; i += threads)
        mo_widen_single(a, begin + i, phase + i);
}

#endif
