/* kernels/gradients.cuh, the text that a thread of the kernel runs, on the host: every element once, nothing beside; norms
 * beside those of long double, which neither overflows nor vanishes. */
#include "../kernels/gradients.cuh"

#include <math.h>

#include "test.h"

/* Where threads begin. */
static const mo_seen nothing;

static void run(mo_float kind, mo_chunk chunk, unsigned threads, float inv_scale, unsigned *found)
{
    mo_seen seen = nothing;

    chunk.kind = kind;
    for (unsigned thread = 0; thread < threads; thread++)
        mo_gradients_thread(MO_GRADIENTS_CHECK | MO_GRADIENTS_STORE, chunk, thread, threads, inv_scale,
                            &seen);
    *found |= seen.not_finite != 0;
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
        for (int i = 0; i < 4; i++)
            for (unsigned shift = 0; shift < 64; shift += 8 * mo_float_size(kind)) {
                const unsigned long long word = bits[kind][i] << shift;
                CHECK_EQ(mo_word_scaled(kind, word, 1.0f), word);
                CHECK_EQ(mo_word_not_finite(kind, word), 0);
            }
}

TEST(every_16_bit_pattern_is_finite_or_not_in_every_place_of_a_word)
{
    for (mo_float kind = MO_F16; kind <= MO_BF16; kind++)
        for (unsigned i = 0; i < 0x10000; i++) {
            const float x = kind == MO_F16 ? mo_f16_to_float(i) : mo_bf16_to_float(i);
            for (unsigned shift = 0; shift < 64; shift += 16)
                CHECK((mo_word_not_finite(kind, (unsigned long long)i << shift) == 0) == (isfinite(x) != 0));
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

/* ---- the norm ------------------------------------------------------------------------------------------ */

/* What a whole grid makes of chunks in memory: a sum a chunk, added up in their order. */
static double sum_of(const mo_chunk *chunks, int count, unsigned passes, float scale)
{
    double sum = 0;

    for (int i = 0; i < count; i++) {
        mo_seen seen = nothing;
        for (unsigned thread = 0; thread < 32; thread++)
            mo_gradients_thread(passes, chunks[i], thread, 32, scale, &seen);
        sum = mo_gradients_add(sum, seen.sum, passes);
    }
    return sum;
}

static void random_element(mo_float kind, unsigned char *at, int exponent, int spread, uint64_t *random)
{
    const double mantissa = 1 + (double)(test_random(random) >> 12) * 0x1p-52;
    const int e = exponent + (spread ? (int)(test_random(random) % (unsigned)spread) : 0);
    const double x = ldexp(test_random(random) & 1 ? mantissa : -mantissa, e);

    if (test_random(random) % 16 == 0)
        memset(at, 0, mo_float_size(kind));
    else if (kind == MO_F64)
        memcpy(at, &x, 8);
    else
        put(kind, at, (float)x);
}

/* Exponents of every kind's finite numbers, subnormal ones included. */
static const struct {
    int least, most;
} exponents[MO_FLOAT_COUNT] = {
    [MO_F32] = {-149, 126}, [MO_F16] = {-24, 14}, [MO_BF16] = {-133, 126}, [MO_F64] = {-1074, 1022}};

/* The norm as a launch writes it. */
static float norm_of(double sum, unsigned passes, float scale)
{
    float norm = -1;

    mo_gradients_finish((mo_gradients_launch){.norm = (uintptr_t)&norm, .max_norm = 1, .passes = passes}, sum,
                        scale);
    return norm;
}

TEST(norms_are_within_a_millionth_of_long_doubles_wherever_the_elements_lie)
{
    enum { CHUNKS = 3, BYTES = 4096 };
    static MO_ALIGNED(16) unsigned char memory[CHUNKS][BYTES + 16];
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(4000, 400000); round++) {
        const unsigned store = test_random(&random) % 2 ? MO_GRADIENTS_STORE : 0;
        const int exponent_of_scale =
            store ? (int)(test_random(&random) % 40) - 20 : (int)(test_random(&random) % 277) - 149;
        const float scale = (float)ldexp(1.3, exponent_of_scale);
        long double squares = 0, maximum = 0;
        mo_chunk chunks[CHUNKS];
        double sum;
        float norm;

        for (int i = 0; i < CHUNKS; i++) {
            const mo_float kind = (mo_float)(test_random(&random) % MO_FLOAT_COUNT);
            const unsigned size = mo_float_size(kind), shift = size * (unsigned)(test_random(&random) % 3);
            const int spread = (int)(test_random(&random) % 8),
                      range = exponents[kind].most - exponents[kind].least - spread,
                      exponent = exponents[kind].least + (int)(test_random(&random) % (unsigned)range);
            chunks[i] = (mo_chunk){.address = (uintptr_t)memory[i] + shift,
                                   .count = 1 + (unsigned)(test_random(&random) % (BYTES / size - 1)),
                                   .kind = kind};
            for (unsigned k = 0; k < chunks[i].count; k++)
                random_element(kind, memory[i] + shift + k * size, exponent, spread, &random);
        }
        sum = sum_of(chunks, CHUNKS, MO_GRADIENTS_NORM | store, scale);
        for (int i = 0; i < CHUNKS; i++) /* of what was stored */
            for (unsigned k = 0; k < chunks[i].count; k++) {
                const long double x = fabsl((long double)value(
                    (mo_float)chunks[i].kind, (unsigned char *)(uintptr_t)chunks[i].address +
                                                  k * mo_float_size((mo_float)chunks[i].kind)));
                squares += x * x;
                maximum = x > maximum ? x : maximum;
            }
        norm = norm_of(sum, MO_GRADIENTS_NORM | store, scale);
        const long double want = sqrtl(squares) * (store ? 1 : (long double)scale);
        /* A norm may itself be a subnormal fp32. */
        if (isfinite((float)want) && fabsl((long double)norm - want) > 1e-6L * want + 0x1p-149L)
            TEST_FAIL("round %d: the norm is %.9g, not %.17Lg; kinds %u %u %u", round, (double)norm, want,
                      chunks[0].kind, chunks[1].kind, chunks[2].kind);
        if (want > 0x1.000002p128L)
            CHECK(isinf(norm));
        sum = sum_of(chunks, CHUNKS, MO_GRADIENTS_NORM | MO_GRADIENTS_MAXIMUM, 1.0f);
        CHECK((long double)mo_gradients_norm(sum, MO_GRADIENTS_MAXIMUM) == maximum);
    }
}

TEST(the_norm_of_numbers_beyond_what_is_squared_is_theirs_in_fp32)
{
    enum { COUNT = 1000 };
    static MO_ALIGNED(16) double memory[COUNT];
    static const double large[] = {0x1p480, 0x1.8p480, 0x1p600, 0x1.fffffffffffffp1023},
                        little[] = {0x1p-500, 0x1.8p-501, 0x1p-600, 0x1p-1074};
    const mo_chunk chunk = {.address = (uintptr_t)memory, .count = COUNT, .kind = MO_F64};

    for (unsigned i = 0; i < 4; i++) {
        memory[7] = -large[i];
        CHECK(isinf(norm_of(sum_of(&chunk, 1, MO_GRADIENTS_NORM, 1), MO_GRADIENTS_NORM, 0x1p-149f)));
        CHECK(norm_of(sum_of(&chunk, 1, MO_GRADIENTS_NORM, 1), MO_GRADIENTS_NORM, 0) == 0);
        for (unsigned k = 0; k < COUNT; k++)
            memory[k] = k % 2 ? little[i] : -little[i];
        CHECK(norm_of(sum_of(&chunk, 1, MO_GRADIENTS_NORM, 1), MO_GRADIENTS_NORM, 0x1p127f) == 0);
        CHECK(isinf(norm_of(sum_of(&chunk, 1, MO_GRADIENTS_NORM, 1), MO_GRADIENTS_NORM, INFINITY)));
        memory[7] = 0x1p-270; /* of which fp32 sees something with the largest scale */
        CHECK(norm_of(sum_of(&chunk, 1, MO_GRADIENTS_NORM, 1), MO_GRADIENTS_NORM, 0x1p127f) == 0x1p-143f);
        memset(memory, 0, sizeof memory);
        CHECK(isnan(norm_of(sum_of(&chunk, 1, MO_GRADIENTS_NORM, 1), MO_GRADIENTS_NORM, INFINITY)));
    }
}

TEST(an_infinite_element_makes_the_norm_infinite_and_a_nan_nan_in_every_place)
{
    enum { COUNT = 333 };
    static MO_ALIGNED(16) unsigned char memory[16 + COUNT * 8];

    for (mo_float kind = MO_F32; kind < MO_FLOAT_COUNT; kind++) {
        const unsigned size = mo_float_size(kind);
        const mo_chunk chunk = {.address = (uintptr_t)memory + size, .count = COUNT, .kind = kind};
        for (unsigned i = 0; i < COUNT; i++)
            put(kind, memory + size + i * size, 1);
        for (unsigned i = 0; i < COUNT; i++)
            for (unsigned maximum = 0; maximum <= MO_GRADIENTS_MAXIMUM; maximum += MO_GRADIENTS_MAXIMUM) {
                const unsigned passes = MO_GRADIENTS_NORM | maximum;
                put(kind, memory + size + i * size, -INFINITY);
                CHECK(isinf(mo_gradients_norm(sum_of(&chunk, 1, passes, 1), passes)));
                put(kind, memory + size + i * size, NAN);
                CHECK(isnan(mo_gradients_norm(sum_of(&chunk, 1, passes, 1), passes)));
                put(kind, memory + size + i * size, 1);
            }
    }
}

TEST(what_was_only_read_is_not_touched)
{
    static MO_ALIGNED(16) unsigned char memory[4096], before[4096];
    uint64_t random = test_seed();

    for (mo_float kind = MO_F32; kind < MO_FLOAT_COUNT; kind++) {
        const unsigned size = mo_float_size(kind);
        const mo_chunk chunk = {.address = (uintptr_t)memory + size, .count = 4096 / size - 3, .kind = kind};
        for (size_t i = 0; i < sizeof memory; i++)
            memory[i] = (unsigned char)test_random(&random);
        memcpy(before, memory, sizeof memory);
        sum_of(&chunk, 1, MO_GRADIENTS_CHECK | MO_GRADIENTS_NORM, 0.25f);
        CHECK(memcmp(memory, before, sizeof memory) == 0);
    }
}

TEST(the_clip_and_the_factor_are_made_of_the_norm_as_it_is_written)
{
    float results[3];
    double norm64;
    const mo_gradients_launch launch = {
        .norm = (uintptr_t)&results[0],
        .norm64 = (uintptr_t)&norm64,
        .clip = (uintptr_t)&results[1],
        .factor = (uintptr_t)&results[2],
        .max_norm = 3,
        .passes = MO_GRADIENTS_NORM,
    };

    mo_gradients_finish(launch, 2, 0.5f);
    CHECK(norm64 == sqrt(2) / 2 && results[0] == (float)norm64);
    mo_gradients_finish(launch, 144, 0.5f);
    CHECK(results[0] == 6 && results[1] == (float)(3 / (6 + 1e-6)) && results[2] == 0.5f * results[1]);
    mo_gradients_finish(launch, 4, 0.5f);
    CHECK(results[0] == 1 && results[1] == 1 && results[2] == 0.5f);
    mo_gradients_finish(launch, INFINITY, 0.5f);
    CHECK(isinf(results[0]) && results[1] == 0 && results[2] == 0);
    mo_gradients_finish(launch, 0x1p960, 0.5f); /* more than fp32 holds */
    CHECK(isinf(results[0]) && results[1] == 0 && norm64 == 0x1p479);
}

TEST_MAIN
