/* Jobs of widening for tests: sources of every kind in memory exactly as large as they are, and what they become by an oracle that
 * looks at one element at a time, with a double's precision between the roundings. */
#ifndef MEMOPT_WIDEN_JOBS_H
#define MEMOPT_WIDEN_JOBS_H

#include <math.h>

#include "data/widen.h"
#include "test.h"

typedef struct made_job {
    mo_widen_job job;
    unsigned char *source, *target; /* blocks */
    float mean[8], deviation[8];
} made_job;

/* Values of any bits that are no NaN; shift: bytes from a block's start to the first element, in elements. */
__attribute__((unused)) static made_job *widen_make(uint64_t *random, mo_number kind, mo_float target,
                                                    size_t inner, size_t channels, size_t outer,
                                                    unsigned shift)
{
    made_job *m = calloc(1, sizeof *m);
    const unsigned size = mo_number_size(kind), target_size = mo_float_size(target);
    const size_t count = inner * channels * outer;

    m->source = malloc((count + shift) * size + 1); /* a byte more: malloc(0) may be NULL */
    m->target = malloc((count + shift) * target_size + 1);
    for (size_t i = 0; i < count + shift; i++)
        for (;;) {
            const uint32_t bits = (uint32_t)test_random(random);
            memcpy(m->source + i * size, &bits, size);
            if (!isnan(mo_number_value(kind, bits)))
                break;
        }
    memset(m->target, 0x5A, (count + shift) * target_size);
    for (size_t c = 0; c < channels; c++) {
        m->mean[c] = (float)(test_random(random) >> 40) * 0x1p-24f;
        m->deviation[c] = 0.1f + (float)(test_random(random) >> 40) * 0x1p-24f;
    }
    m->job = (mo_widen_job){
        .source = (uintptr_t)m->source + shift * size,
        .target = (uintptr_t)m->target + shift * target_size,
        .count = count,
        .source_kind = kind,
        .target_kind = target,
        .inner = inner,
        .channels = channels,
        .mean = m->mean,
        .deviation = m->deviation,
        .scale = test_random(random) & 1 ? 255 : 1.0f / 3,
        .divide = test_random(random) & 1,
    };
    return m;
}

__attribute__((unused)) static void widen_free(made_job *m)
{
    free(m->source);
    free(m->target);
    free(m);
}

static float oracle_value(mo_number kind, uintptr_t source, size_t i)
{
    uint32_t bits = 0;

    memcpy(&bits, (const char *)source + i * mo_number_size(kind), mo_number_size(kind));
    switch (kind) {
    case MO_NUMBER_U8:
    case MO_NUMBER_U16:
        return (float)bits;
    case MO_NUMBER_I8:
        return (float)(int8_t)bits;
    case MO_NUMBER_I16:
        return (float)(int16_t)bits;
    default:
        return mo_number_value(kind, bits); /* tests/c/test_float_bits.c */
    }
}

/* Rounding a double's result of one operation on two fp32 numbers to fp32 is the operation in fp32. */
static uint32_t oracle(const mo_widen_job *job, size_t i)
{
    const size_t c = i / job->inner % job->channels;
    const double x = oracle_value(job->source_kind, job->source, i), scale = job->scale;
    volatile float scaled = (float)(job->divide ? x / scale : x * scale);
    volatile float less = (float)((double)scaled - (job->mean ? (double)job->mean[c] : 0));
    volatile float result = (float)((double)less / (job->deviation ? (double)job->deviation[c] : 1));

    return mo_widen_bits(job->target_kind, result);
}

__attribute__((unused)) static void widen_check(const made_job *m, const char *what)
{
    const mo_widen_job *job = &m->job;
    const unsigned size = mo_float_size(job->target_kind);

    for (size_t i = 0; i < job->count; i++) {
        uint32_t got = 0;
        const uint32_t want = oracle(job, i);
        memcpy(&got, (const char *)job->target + i * size, size);
        if (got != want)
            TEST_FAIL("%s: kind %d to %d, %zu x %zu, element %zu of %zu: %#x, not %#x", what,
                      (int)job->source_kind, (int)job->target_kind, job->channels, job->inner, i, job->count,
                      got, want);
    }
    for (const unsigned char *at = m->target; at < (const unsigned char *)job->target; at++)
        CHECK_EQ(*at, 0x5A);
}

#endif
