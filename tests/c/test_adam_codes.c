/* The codes themselves: the bounds that kernels/adam_codes.cuh states, over all codes of 8 and of 4 bits and over scales of every
 * size. */
#include "optim/update.h"

#include "../kernels/adam_codes.cuh"
#include "float_cases.h"
#include "optim/element.h"

enum { BLOCK = MO_CODE_BLOCK };

/* What the header says of a format, to nearest: |m' - m| <= (|m| + scale / m_zero) / m_parts, v in the same way; dithered half as
 * exact. */
typedef struct format {
    unsigned bits;
    double m_zero, m_parts, v_zero, v_parts, v_least;
} format;

static const format formats[] = {{8, 247, 32, 63487, 32, 1015792}, {4, 11, 4, 32767, 2, 32767}};
#define EACH_FORMAT(f) (const format *f = formats; f < formats + 2; f++)

/* 1e-29 … 1e37 */
static float some_scale(uint64_t *random)
{
    return exp2f((float)(test_random(random) >> 40) * 0x1p-24f * 219 - 96);
}

TEST(every_code_survives_a_way_through_fp32)
{
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(4000, 100000); round++)
        for
            EACH_FORMAT(f)
    for (int second = 0; second < 2; second++) {
        const float scale = some_scale(&random);
        const int count = 1 << f->bits, sign = count / 2;
        uint8_t codes[BLOCK], again[BLOCK];
        float values[BLOCK], scale_again;
        for (int i = 0; i < count; i++)
            mo_element_put_code(f->bits, codes, (size_t)i, (unsigned)i);
        mo_code_decode(f->bits, second, codes, &scale, (size_t)count, values);
        mo_code_encode(f->bits, second, values, (size_t)count, again, &scale_again);
        CHECK(fabsf(scale_again - scale) <= scale * 3e-7f);
        for (int i = 0; i < count; i++) /* a negative zero becomes a positive one */
            CHECK_EQ(mo_element_code(f->bits, again, (size_t)i), second || i != sign ? i : 0);
        CHECK(values[0] == 0);
        CHECK(second || values[sign] == 0);
        CHECK(fabsf(values[second ? count - 1 : sign - 1] - scale) <= scale * 3e-7f);
        CHECK(second || values[count - 1] == -values[sign - 1]);
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
        for
            EACH_FORMAT(f)
            {
                mo_code_encode(f->bits, false, values, count, codes, &scale);
                mo_code_decode(f->bits, false, codes, &scale, count, back);
                CHECK(scale == mo_code_scale(largest));
                for (size_t i = 0; i < count && scale > 0; i++)
                    CHECK(fabs((double)back[i] - (double)values[i]) <=
                          (fabs((double)values[i]) + (double)scale / f->m_zero) / f->m_parts * 1.0004);
                for (size_t i = 0; i < count && scale > 0; i++) {
                    const float unit = mo_code_unit_m(f->bits, scale);
                    const unsigned code = mo_code_encode_m(f->bits, values[i], mo_code_per_m(f->bits, scale),
                                                           (uint32_t)test_random(&random));
                    back[i] = mo_code_decode_m(f->bits, code, unit);
                    CHECK(fabs((double)back[i] - (double)values[i]) <=
                          (fabs((double)values[i]) + (double)scale / f->m_zero) / f->m_parts * 2.0004);
                    CHECK((back[i] <= 0 || values[i] > 0) && (back[i] >= 0 || values[i] < 0));
                }
            }
    }
}

TEST(the_second_moment_is_within_its_bound_and_never_0_where_it_was_not)
{
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(1000, 100000); round++) {
        const format *f = &formats[round % 2];
        const float scale = some_scale(&random), per = mo_code_per_v(f->bits, scale),
                    unit = mo_code_unit_v(f->bits, scale);
        for (int i = 0; i < 200; i++) {
            const float v = scale * exp2f(-(float)(test_random(&random) >> 40) * 0x1p-24f * 40);
            const unsigned code = mo_code_encode_v(f->bits, v, per, (uint32_t)test_random(&random));
            const double back = (double)mo_code_decode_v(f->bits, code, unit);
            CHECK(code >= 1 && code < 1u << f->bits);
            CHECK(back >= (double)scale / f->v_least * 0.99999);
            CHECK(fabs(back - (double)v) <= ((double)v + (double)scale / f->v_zero) / f->v_parts * 2.0004);
        }
        CHECK_EQ(mo_code_encode_v(f->bits, 0, per, 0xFFFFFFFF), 0);
        CHECK_EQ(mo_code_encode_v(f->bits, 0x1p-149f, per, 0), 1);
        CHECK_EQ(mo_code_encode_v(f->bits, scale, per, 0xFFFFFFFF), (1u << f->bits) - 1);
        CHECK_EQ(mo_code_encode_m(f->bits, scale, mo_code_per_m(f->bits, scale), 0xFFFFFFFF),
                 (1u << (f->bits - 1)) - 1);
    }
}

TEST(a_block_of_almost_nothing_is_0_and_what_is_not_finite_is_0_beside_the_others)
{
    float values[BLOCK + 5] = {1e-31f, -1e-35f, 0x1p-149f}, scales[2], back[BLOCK + 5];
    uint8_t codes[BLOCK + 5];

    values[BLOCK] = NAN; /* in a second, short block */
    values[BLOCK + 1] = 2;
    values[BLOCK + 2] = -1;
    values[BLOCK + 3] = -INFINITY;
    values[BLOCK + 4] = 2;
    for
        EACH_FORMAT(f)
        {
            memset(codes, 0xFF, sizeof codes);
            mo_code_encode(f->bits, false, values, BLOCK + 5, codes, scales);
            mo_code_decode(f->bits, false, codes, scales, BLOCK + 5, back);
            CHECK(scales[0] == 0 && scales[1] == 2);
            for (int i = 0; i < BLOCK; i++)
                CHECK(back[i] == 0);
            CHECK(back[BLOCK] == 0 && back[BLOCK + 3] == 0);
            CHECK(fabsf(back[BLOCK + 1] - 2) < 1e-6f &&
                  fabsf(back[BLOCK + 2] + 1) < (f->bits == 8 ? 0.04f : 0.3f));
            if (f->bits == 4) /* half a byte that is left over is 0 */
                CHECK_EQ(codes[BLOCK / 2 + 2], 7);
            mo_code_encode(f->bits, true, NULL, 0, codes, scales);
        }
}

TEST(the_largest_numbers_come_back_finite)
{
    for (int round = 0; round < 4; round++) {
        const unsigned bits = formats[round / 2].bits;
        const bool second = round % 2;
        const float values[] = {FLT_MAX, MO_CODE_HUGE, 1};
        float scale, back[3];
        uint8_t codes[3];
        mo_code_encode(bits, second, values, 3, codes, &scale);
        mo_code_decode(bits, second, codes, &scale, 3, back);
        CHECK(scale == MO_CODE_HUGE);
        CHECK(fabsf(back[0] / MO_CODE_HUGE - 1) < 3e-7f && back[1] == back[0]);
        CHECK(isfinite(back[2]));
    }
}

TEST(the_elements_of_a_word_are_as_each_alone)
{
    uint64_t random = 9;

    for (int round = 0; round < 20000; round++) {
        const unsigned bits = formats[round % 2].bits, count = MO_CODE_IN_WORD(bits);
        const float scale = some_scale(&random), unit_m = mo_code_unit_m(bits, scale),
                    unit_v = mo_code_unit_v(bits, scale);
        const float per_m = mo_code_per_m(bits, scale), per_v = mo_code_per_v(bits, scale);
        const unsigned word = (unsigned)test_random(&random), dither = (unsigned)test_random(&random);
        const unsigned apart = test_random(&random) & 1 ? MO_CODE_DITHER_INDEX : 0;
        float m[8], v[8], magnitude[8];

        mo_code_decode_word_m(bits, word, unit_m, m);
        mo_code_decode_word_v(bits, word, unit_v, v);
        for (unsigned k = 0; k < count; k++) {
            const unsigned code = mo_element_code(bits, (const uint8_t *)&word, k);
            CHECK_EQ(mo_float_bits(m[k]), mo_float_bits(mo_code_decode_m(bits, code, unit_m))); /* -0 too */
            CHECK_EQ(mo_float_bits(v[k]), mo_float_bits(mo_code_decode_v(bits, code, unit_v)));
            if (test_random(&random) & 1) {
                m[k] *= (float)(test_random(&random) >> 40) * 0x1p-24f;
                v[k] *= (float)(test_random(&random) >> 40) * 0x1p-24f;
            }
            magnitude[k] = fabsf(m[k]);
        }
        const unsigned codes_m =
            mo_code_encode_word_m(bits, magnitude, mo_code_signs(bits, m), per_m, dither, apart);
        const unsigned codes_v = mo_code_encode_word_v(bits, v, per_v, dither);
        for (unsigned k = 0; k < count; k++) {
            CHECK_EQ(mo_element_code(bits, (const uint8_t *)&codes_m, k),
                     mo_code_encode_m(bits, m[k], per_m, dither + k * apart));
            CHECK_EQ(mo_element_code(bits, (const uint8_t *)&codes_v, k),
                     mo_code_encode_v(bits, v[k], per_v, dither + k * MO_CODE_DITHER_INDEX));
        }
    }
}

/* The 16 values over the scale, as whole numbers; what is to nearest is the nearest of them. */
TEST(codes_of_4_bits_are_the_numbers_of_two_tables)
{
    static const float m_values[] = {0, 1, 2, 4, 6, 10, 14, 22};
    static const float v_values[] = {0,   1,   3,    7,    15,   31,   63,    127,
                                     255, 511, 1023, 2047, 4095, 8191, 16383, 32767};

    for (int second = 0; second < 2; second++) {
        const float *const table = second ? v_values : m_values, scale = second ? 32767 : 22;
        float values[BLOCK], back[BLOCK], scale_again;
        uint8_t codes[BLOCK];

        for (int i = 0; i < BLOCK; i++)
            values[i] = second ? scale * exp2f(-(float)i / 16) : scale * (float)(255 - i) / 255;
        for (int i = 1; i < BLOCK && !second; i += 2)
            values[i] = -values[i];
        mo_code_encode(4, second, values, BLOCK, codes, &scale_again);
        mo_code_decode(4, second, codes, &scale_again, BLOCK, back);
        for (int i = 0; i < BLOCK; i++) {
            const float size = fabsf(values[i]);
            float nearest = 0;
            for (int k = 0; k < (second ? 16 : 8); k++)
                if (fabsf(table[k] - size) < fabsf(nearest - size))
                    nearest = table[k];
            CHECK(fabsf(fabsf(back[i]) - nearest) <= nearest * 1e-6f &&
                  (nearest == 0 || back[i] * values[i] > 0));
        }
    }
}

TEST_MAIN
