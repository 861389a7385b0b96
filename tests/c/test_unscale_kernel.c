/* kernels/unscale.cuh, the text that a thread of the kernel runs, on the host: every element once, nothing
 * beside. */
#include "../kernels/unscale.cuh"

#include <math.h>

#include "test.h"

static void run(mo_float kind, mo_chunk chunk, unsigned threads, float inv_scale, unsigned *found)
{
    for (unsigned thread = 0; thread < threads; thread++)
        mo_unscale_thread(kind, chunk, thread, threads, inv_scale, found);
}

static double value(mo_float kind, const unsigned char *at)
{
    unsigned short half;
    double wide;
    float single;

    switch (kind) {
    case MO_F64:
        memcpy(&wide, at, 8);
        return wide;
    case MO_F32:
        memcpy(&single, at, 4);
        return (double)single;
    default:
        memcpy(&half, at, 2);
        return (double)(kind == MO_F16 ? mo_f16_to_float(half) : mo_bf16_to_float(half));
    }
}

static void put(mo_float kind, unsigned char *at, float x)
{
    const double wide = (double)x;
    unsigned short half = (unsigned short)(kind == MO_F16 ? mo_f16_from_float(x) : mo_bf16_from_float(x));

    memcpy(at,
           kind == MO_F64   ? (const void *)&wide
           : kind == MO_F32 ? (const void *)&x
                            : (const void *)&half,
           mo_float_size(kind));
}

TEST(every_element_is_scaled_once_at_every_size_and_misalignment)
{
    for (mo_float kind = MO_F32; kind < MO_FLOAT_COUNT; kind++) {
        const unsigned size = mo_float_size(kind);
        for (unsigned threads = 32; threads <= 256; threads *= 8)
            for (unsigned shift = 0; shift < 16; shift += size)
                for (unsigned count = 1; count < 5000; count += count < 70 ? 1 : 613) {
                    /* Exactly as large as the elements need, so that a sanitizer sees one step too far. */
                    unsigned char *memory = malloc(shift + (size_t)count * size), *first = memory + shift;
                    unsigned found = 0;
                    CHECK_EQ((uintptr_t)memory % 16, 0);
                    for (unsigned i = 0; i < count; i++)
                        put(kind, first + i * size, (float)(i % 100 + 1));
                    run(kind, (mo_chunk){.address = (uintptr_t)first, .count = count}, threads, 0.5f, &found);
                    for (unsigned i = 0; i < count; i++)
                        if (value(kind, first + i * size) != (i % 100 + 1) / 2.0)
                            TEST_FAIL("kind %d, %u threads, shift %u, count %u: element %u is %g", kind,
                                      threads, shift, count, i, value(kind, first + i * size));
                    CHECK_EQ(found, 0);
                    free(memory);
                }
    }
}

TEST(one_element_that_is_not_finite_is_found_in_every_place)
{
    const float bad[] = {INFINITY, -INFINITY, NAN};

    for (mo_float kind = MO_F32; kind < MO_FLOAT_COUNT; kind++) {
        const unsigned size = mo_float_size(kind), count = 333;
        MO_ALIGNED(16) unsigned char memory[16 + 333 * 8] = {0};
        for (unsigned i = 0; i < count; i++)
            for (int b = 0; b < 3; b++)
                for (unsigned scaled = 0; scaled < 2; scaled++) {
                    unsigned found = 0;
                    put(kind, memory + size + i * size, bad[b]);
                    run(kind, (mo_chunk){.address = (uintptr_t)memory + size, .count = count}, 32,
                        scaled ? 0.25f : 1.0f, &found);
                    CHECK_EQ(found, 1);
                    CHECK(!isfinite(value(kind, memory + size + i * size)));
                    put(kind, memory + size + i * size, 0);
                }
    }
}

TEST(the_largest_finite_and_the_smallest_numbers_are_not_taken_for_infinite)
{
    static const unsigned long long bits[MO_FLOAT_COUNT][4] = {
        [MO_F32] = {0x7F7FFFFF, 0xFF7FFFFF, 1, 0x80000000},
        [MO_F16] = {0x7BFF, 0xFBFF, 1, 0x8000},
        [MO_BF16] = {0x7F7F, 0xFF7F, 1, 0x8000},
        [MO_F64] = {0x7FEFFFFFFFFFFFFF, 0xFFEFFFFFFFFFFFFF, 1, 0x8000000000000000},
    };
    for (mo_float kind = MO_F32; kind < MO_FLOAT_COUNT; kind++)
        for (int i = 0; i < 4; i++) {
            unsigned found = 0;
            CHECK_EQ(mo_unscale_bits(kind, bits[kind][i], 1.0f, &found), bits[kind][i]);
            mo_unscale_bits(kind, bits[kind][i], 4.0f,
                            &found); /* an overflow by the scaling is not found, as in torch */
            CHECK_EQ(found, 0);
        }
}

TEST(a_scale_of_one_leaves_every_16_bit_pattern_as_it_is)
{
    static unsigned short memory[2][0x10000];

    for (mo_float kind = MO_F16; kind <= MO_BF16; kind++) {
        unsigned found = 0;
        for (unsigned i = 0; i < 0x10000; i++)
            memory[0][i] = memory[1][i] = (unsigned short)i;
        run(kind, (mo_chunk){.address = (uintptr_t)memory[0], .count = 0x10000}, 256, 1.0f, &found);
        CHECK_EQ(found, 1);
        CHECK(memcmp(memory[0], memory[1], sizeof memory[0]) == 0); /* NaN payloads too */
    }
}

TEST_MAIN
