/* The codes themselves: the bounds that kernels/adam_codes.cuh states, over all codes and over scales of every size. */
#include "optim/update.h"

#include "../kernels/adam_codes.cuh"
#include "float_cases.h"

enum { BLOCK = MO_CODE_BLOCK };

/* 1e-29 … 1e37 */
static float some_scale(uint64_t *random)
{
    return exp2f((float)(test_random(random) >> 40) * 0x1p-24f * 219 - 96);
}

TEST(every_code_survives_a_way_through_fp32)
{
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(4000, 100000); round++)
        for (int second = 0; second < 2; second++) {
            const float scale = some_scale(&random);
            uint8_t codes[BLOCK], again[BLOCK];
            float values[BLOCK], scale_again;
            for (int i = 0; i < BLOCK; i++)
                codes[i] = (uint8_t)i;
            mo_code_decode(second, codes, &scale, BLOCK, values);
            mo_code_encode(second, values, BLOCK, again, &scale_again);
            CHECK(fabsf(scale_again - scale) <= scale * 3e-7f);
            for (int i = 0; i < BLOCK; i++)
                if (again[i] != codes[i] &&
                    (second || i != 128 || again[i] != 0)) /* a negative zero becomes a positive one */
                    CHECK_EQ(again[i], codes[i]);
            CHECK(values[0] == 0);
            CHECK(second || values[128] == 0);
            CHECK(fabsf(values[second ? 255 : 127] - scale) <= scale * 3e-7f);
            CHECK(second || values[255] == -values[127]);
        }
}

TEST(the_first_moment_is_within_its_bound)
{
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(1000, 100000); round++) {
        const size_t count = 1 + test_random(&random) % BLOCK;
        const float size = some_scale(&random) * 0x1p-10f;
        float values[BLOCK], back[BLOCK], scale, largest = 0;
        uint8_t codes[BLOCK];
        for (size_t i = 0; i < count; i++) {
            values[i] = float_ordinary(&random) * size;
            largest = fmaxf(largest, fabsf(values[i]));
        }
        mo_code_encode(false, values, count, codes, &scale);
        mo_code_decode(false, codes, &scale, count, back);
        CHECK(scale == mo_code_scale(largest));
        for (size_t i = 0; i < count && scale > 0; i++)
            CHECK(fabs((double)back[i] - (double)values[i]) <=
                  (fabs((double)values[i]) + (double)scale / 247) / 31.99);
    }
}

TEST(the_second_moment_is_within_its_bound_and_never_0_where_it_was_not)
{
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(1000, 100000); round++) {
        const float scale = some_scale(&random), per = mo_code_per_v(scale), unit = mo_code_unit_v(scale);
        for (int i = 0; i < 200; i++) {
            const float v = scale * exp2f(-(float)(test_random(&random) >> 40) * 0x1p-24f * 40);
            const unsigned code = mo_code_encode_v(v, per, (uint32_t)test_random(&random));
            const double back = (double)mo_code_decode_v(code, unit);
            CHECK(code >= 1 && code <= 255);
            CHECK(back >= (double)scale / 1015800);
            CHECK(fabs(back - (double)v) <= ((double)v + (double)scale / 63487) / 15.99);
        }
        CHECK_EQ(mo_code_encode_v(0, per, 0xFFFFFFFF), 0);
        CHECK_EQ(mo_code_encode_v(0x1p-149f, per, 0), 1);
        CHECK_EQ(mo_code_encode_v(scale, per, 0xFFFFFFFF), 255);
    }
}

TEST(a_block_of_almost_nothing_is_0_and_what_is_not_finite_is_0_beside_the_others)
{
    float values[BLOCK + 4] = {1e-31f, -1e-35f, 0x1p-149f}, scales[2], back[BLOCK + 4];
    uint8_t codes[BLOCK + 4];

    values[BLOCK] = NAN; /* in a second, short block */
    values[BLOCK + 1] = 2;
    values[BLOCK + 2] = -1;
    values[BLOCK + 3] = -INFINITY;
    mo_code_encode(false, values, BLOCK + 4, codes, scales);
    mo_code_decode(false, codes, scales, BLOCK + 4, back);
    CHECK(scales[0] == 0 && scales[1] == 2);
    for (int i = 0; i < BLOCK; i++)
        CHECK(back[i] == 0);
    CHECK(codes[BLOCK] == 0 && codes[BLOCK + 3] == 0);
    CHECK(fabsf(back[BLOCK + 1] - 2) < 1e-6f && fabsf(back[BLOCK + 2] + 1) < 0.04f);
    mo_code_encode(true, NULL, 0, codes, scales);
}

TEST(the_largest_numbers_come_back_finite)
{
    for (int second = 0; second < 2; second++) {
        const float values[] = {FLT_MAX, MO_CODE_HUGE, 1};
        float scale, back[3];
        uint8_t codes[3];
        mo_code_encode(second, values, 3, codes, &scale);
        mo_code_decode(second, codes, &scale, 3, back);
        CHECK(scale == MO_CODE_HUGE);
        CHECK(fabsf(back[0] / MO_CODE_HUGE - 1) < 3e-7f && back[1] == back[0]);
        CHECK(isfinite(back[2]));
    }
}

TEST(four_elements_in_a_word_are_as_each_alone)
{
    uint64_t random = 9;

    for (int round = 0; round < 20000; round++) {
        const float scale = some_scale(&random), unit_m = mo_code_unit_m(scale),
                    unit_v = mo_code_unit_v(scale);
        const float per_m = mo_code_per_m(scale), per_v = mo_code_per_v(scale);
        const unsigned word = (unsigned)test_random(&random), dither = (unsigned)test_random(&random);
        float m[4], v[4], magnitude[4];

        mo_code_decode_four_m(word, unit_m, m);
        mo_code_decode_four_v(word, unit_v, v);
        for (unsigned k = 0; k < 4; k++) {
            const unsigned code = word >> 8 * k & 255;
            CHECK_EQ(mo_float_bits(m[k]), mo_float_bits(mo_code_decode_m(code, unit_m))); /* -0 too */
            CHECK_EQ(mo_float_bits(v[k]), mo_float_bits(mo_code_decode_v(code, unit_v)));
            if (test_random(&random) & 1) {
                m[k] *= (float)(test_random(&random) >> 40) * 0x1p-24f;
                v[k] *= (float)(test_random(&random) >> 40) * 0x1p-24f;
            }
            magnitude[k] = fabsf(m[k]);
        }
        const unsigned codes_m = mo_code_encode_four_m(magnitude, mo_code_signs(m), per_m);
        const unsigned codes_v = mo_code_encode_four_v(v, per_v, dither);
        for (unsigned k = 0; k < 4; k++) {
            CHECK_EQ(codes_m >> 8 * k & 255, mo_code_encode_m(m[k], per_m));
            CHECK_EQ(codes_v >> 8 * k & 255,
                     mo_code_encode_v(v[k], per_v, dither + k * MO_CODE_DITHER_INDEX));
        }
    }
}

TEST_MAIN
