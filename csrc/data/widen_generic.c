/* The loops over elements of mo_widen_cpu, in the arithmetic of kernels/widen.cuh: compiled for vectors of any width. */
#include "data/widen.h"

#include <string.h>

/* Numbers that are converted, normalised and stored in three steps while they are in the first cache. */
#define PIECE ((size_t)1024)

static unsigned bits_at(mo_number kind, uintptr_t source, size_t i)
{
    switch (mo_number_size(kind)) {
    case 1:
        return ((const uint8_t *)source)[i];
    case 2:
        return ((const uint16_t *)source)[i];
    default:
        return ((const uint32_t *)source)[i];
    }
}

static float mean_of(const mo_widen_job *job, size_t channel)
{
    return job->mean ? job->mean[channel] : 0.0f;
}

static float deviation_of(const mo_widen_job *job, size_t channel)
{
    return job->deviation ? job->deviation[channel] : 1.0f;
}

/* ---- bytes: a table of all results ------------------------------------------------------------------------------- */

void mo_widen_fill_table(const mo_widen_job *job, void *table)
{
    for (size_t i = 0; i < 256 * job->channels; i++) {
        const size_t channel = i / 256;
        const float x = mo_widened(mo_number_value(job->source_kind, (unsigned)(i % 256)), job->scale,
                                   job->divide, mean_of(job, channel), deviation_of(job, channel));
        if (job->target_kind == MO_F32)
            ((uint32_t *)table)[i] = mo_widen_bits(MO_F32, x);
        else
            ((uint16_t *)table)[i] = (uint16_t)mo_widen_bits(job->target_kind, x);
    }
}

/* One loop for targets of 32 bits and one for 16; `row` are the results of the run's channel. */
#define LOOK_UP(type)                                                                                        \
    static void look_up_##type(const mo_widen_job *job, const type *table, size_t begin, size_t end)         \
    {                                                                                                        \
        const uint8_t *const source = (const uint8_t *)job->source;                                          \
        type *const target = (type *)job->target;                                                            \
        size_t channel = begin / job->inner % job->channels;                                                 \
                                                                                                             \
        for (size_t i = begin; i < end;) {                                                                   \
            const size_t left = job->inner - i % job->inner;                                                 \
            const size_t stop = left < end - i ? i + left : end;                                             \
            const type *const row = table + 256 * channel;                                                   \
            for (; i < stop; i++)                                                                            \
                target[i] = row[source[i]];                                                                  \
            channel = channel + 1 == job->channels ? 0 : channel + 1;                                        \
        }                                                                                                    \
    }                                                                                                        \
                                                                                                             \
    /* Channels beside each other. begin is the first of a pixel. */                                         \
    static void look_up_pixels_##type(const mo_widen_job *job, const type *table, size_t begin, size_t end)  \
    {                                                                                                        \
        const uint8_t *source = (const uint8_t *)job->source + begin;                                        \
        type *target = (type *)job->target + begin;                                                          \
                                                                                                             \
        for (size_t pixels = (end - begin) / job->channels; pixels; pixels--)                                \
            for (size_t channel = 0; channel < job->channels; channel++)                                     \
                *target++ = table[256 * channel + *source++];                                                \
    }

LOOK_UP(uint32_t)
LOOK_UP(uint16_t)

/* ---- the rest ------------------------------------------------------------------------------------------------------ */

static void load(mo_number kind, uintptr_t source, size_t from, size_t count, float *out)
{
    if (kind == MO_NUMBER_I16)
        for (size_t i = 0; i < count; i++)
            out[i] = (float)((const int16_t *)source)[from + i];
    else if (kind == MO_NUMBER_F32)
        memcpy(out, (const float *)source + from, count * sizeof *out);
    else
        for (size_t i = 0; i < count; i++)
            out[i] = mo_number_value(kind, bits_at(kind, source, from + i));
}

/* A run of one channel. Two loops, so that neither decides anything. */
static void normalise_run(float *x, size_t count, const mo_widen_job *job, size_t channel)
{
    const float scale = job->scale, mean = mean_of(job, channel), deviation = deviation_of(job, channel);

    if (job->divide)
        for (size_t i = 0; i < count; i++)
            x[i] = mo_widened(x[i], scale, 1, mean, deviation);
    else
        for (size_t i = 0; i < count; i++)
            x[i] = mo_widened(x[i], scale, 0, mean, deviation);
}

static void normalise(float *x, const mo_widen_job *job, size_t from, size_t count)
{
    size_t channel = from / job->inner % job->channels, within = from % job->inner;

    for (size_t i = 0; i < count;) {
        const size_t left = job->inner - within, run = left < count - i ? left : count - i;
        normalise_run(x + i, run, job, channel);
        i += run;
        within = 0;
        channel = channel + 1 == job->channels ? 0 : channel + 1;
    }
}

static void store(mo_float kind, uintptr_t target, size_t from, size_t count, const float *x)
{
    if (kind == MO_F32)
        memcpy((float *)target + from, x, count * sizeof *x);
    else
        for (size_t i = 0; i < count; i++)
            ((uint16_t *)target)[from + i] = (uint16_t)mo_widen_bits(kind, x[i]);
}

void mo_widen_range(const mo_widen_job *job, const void *table, size_t begin, size_t end)
{
    if (table) {
        /* Whole pixels from the first one that begins here. */
        const size_t first =
            job->inner == 1 ? begin + (job->channels - begin % job->channels) % job->channels : end;
        const size_t pixels = first < end ? (end - first) / job->channels * job->channels : 0;
        const size_t head = first < end ? first : end;

        if (job->target_kind == MO_F32) {
            look_up_uint32_t(job, table, begin, head);
            look_up_pixels_uint32_t(job, table, head, head + pixels);
            look_up_uint32_t(job, table, head + pixels, end);
        } else {
            look_up_uint16_t(job, table, begin, head);
            look_up_pixels_uint16_t(job, table, head, head + pixels);
            look_up_uint16_t(job, table, head + pixels, end);
        }
        return;
    }
    for (size_t from = begin; from < end; from += PIECE) {
        const size_t count = end - from < PIECE ? end - from : PIECE;
        float x[PIECE];
        load(job->source_kind, job->source, from, count, x);
        normalise(x, job, from, count);
        store(job->target_kind, job->target, from, count, x);
    }
}
