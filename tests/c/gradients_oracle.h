/* What one pass over gradients should do, element by element in double, and gradients to do it on: dense pieces that start at
 * any multiple of their element's size, each in memory that is no larger than the piece, so that a sanitizer sees one step
 * too far, and without a sanitizer the bytes around it do. */
#ifndef MEMOPT_GRADIENTS_ORACLE_H
#define MEMOPT_GRADIENTS_ORACLE_H

#include <math.h>

#include "../kernels/float_bits.cuh"
#include "test.h"

static const char *const kind_names[MO_FLOAT_COUNT] = {"fp32", "fp16", "bf16", "fp64"};

typedef union element {
    uint64_t bits;
    double f64;
    float f32;
    uint16_t half;
} element;

static element element_at(mo_float kind, const void *x, size_t i)
{
    element e = {0};
    memcpy(&e, (const char *)x + i * mo_float_size(kind), mo_float_size(kind));
    return e;
}

static void put_element(mo_float kind, void *x, size_t i, element e)
{
    memcpy((char *)x + i * mo_float_size(kind), &e, mo_float_size(kind));
}

static double value_of(mo_float kind, element e)
{
    switch (kind) {
    case MO_F64:
        return e.f64;
    case MO_F32:
        return (double)e.f32;
    case MO_F16:
        return (double)mo_f16_to_float(e.half);
    default:
        return (double)mo_bf16_to_float(e.half);
    }
}

/* The element of a kind that is nearest to a float. */
static element element_of(mo_float kind, float value)
{
    element e = {0};
    if (kind == MO_F64)
        e.f64 = (double)value;
    else if (kind == MO_F32)
        e.f32 = value;
    else if (isnan(value)) /* as torch: fp16 keeps what fits of the payload, bf16 has one NaN */
        e.half = (uint16_t)(kind == MO_BF16 ? 0x7FC0
                                            : (mo_float_bits(value) >> 16 & 0x8000) | 0x7E00 |
                                                  (mo_float_bits(value) >> 13 & 0x3FF));
    else
        e.half = (uint16_t)(kind == MO_F16 ? mo_f16_from_float(value) : mo_bf16_from_float(value));
    return e;
}

/* x times the scale, as it is stored. */
static element scaled_element(mo_float kind, element x, float scale)
{
    if (kind == MO_F64)
        return (element){.f64 = x.f64 * (double)scale};
    return element_of(kind, (float)value_of(kind, x) * scale);
}

/* A NaN times a NaN is either. */
static bool same_element(mo_float kind, element a, element b, float scale)
{
    return a.bits == b.bits || (isnan(scale) && isnan(value_of(kind, a)) && isnan(value_of(kind, b)));
}

/* ---- pieces ---------------------------------------------------------------------------------------------------- */

enum { GUARD = 64 };

typedef struct piece {
    unsigned char *memory;
    void *x;
    size_t count, bytes;
    mo_float kind;
} piece;

/* Starts `shift` elements after a multiple of 64 bytes. */
static piece make_piece(mo_float kind, size_t count, size_t shift)
{
    piece p = {.count = count, .bytes = count * mo_float_size(kind), .kind = kind};
    const size_t before = GUARD + shift * mo_float_size(kind);
#ifdef __SANITIZE_ADDRESS__
    const size_t after = 0;
#else
    const size_t after = GUARD;
#endif
    if (posix_memalign((void **)&p.memory, 64, before + p.bytes + after) != 0)
        TEST_FAIL("out of memory");
    memset(p.memory, 0xA5, before + p.bytes + after);
    p.x = p.memory + before;
    return p;
}

static void free_piece(piece *p)
{
    const unsigned char *x = p->x;
    for (const unsigned char *at = p->memory; at < x; at++)
        if (*at != 0xA5)
            TEST_FAIL("%s[%zu]: something was written %td bytes before it", kind_names[p->kind], p->count,
                      x - at);
#ifndef __SANITIZE_ADDRESS__
    for (size_t i = 0; i < GUARD; i++)
        if (x[p->bytes + i] != 0xA5)
            TEST_FAIL("%s[%zu]: something was written %zu bytes after it", kind_names[p->kind], p->count, i);
#endif
    free(p->memory);
}

/* Elements of both signs, of magnitudes from 2^low to 2^high. */
__attribute__((unused)) static void fill(piece *p, uint64_t *seed, int low, int high)
{
    for (size_t i = 0; i < p->count; i++) {
        const uint64_t r = test_random(seed);
        const double fraction = 1 + (double)(r >> 40) * 0x1p-24;
        const double x =
            ldexp(r & 1 ? fraction : -fraction, low + (int)((r >> 8) % (uint64_t)(high - low + 1)));
        put_element(p->kind, p->x, i,
                    p->kind == MO_F64 ? (element){.f64 = x} : element_of(p->kind, (float)x));
    }
}

/* ---- results --------------------------------------------------------------------------------------------------- */

static bool same_double(double a, double b)
{
    return memcmp(&a, &b, sizeof a) == 0 || (isnan(a) && isnan(b));
}

/* Where both are numbers, within the bound that gradients.h gives. */
__attribute__((unused)) static bool near_norm(double got, double expected)
{
    if (!isfinite(got) || !isfinite(expected))
        return same_double(got, expected);
    return fabs(got - expected) <= 1e-6 * expected;
}

#endif
