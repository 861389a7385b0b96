#include "base/units.h"

#include "test.h"

#define KIB(n) ((uint64_t)(n) << 10)
#define MIB(n) ((uint64_t)(n) << 20)
#define GIB(n) ((uint64_t)(n) << 30)

static mo_status parse(const char *text, uint64_t *out, mo_detail *detail)
{
    return mo_parse_size(text, strlen(text), out, detail);
}

TEST(sizes_are_read_as_people_write_them)
{
    /* clang-format off */
    static const struct {
        const char *text;
        uint64_t bytes;
    } cases[] = {
        {"0", 0}, {"1", 1}, {"4096", 4096}, {"4096B", 4096}, {"4096 b", 4096}, {" \t12 \t", 12},
        {"8GiB", GIB(8)}, {"8 GiB", GIB(8)}, {"8gib", GIB(8)}, {"8GIB", GIB(8)}, {"8G", GIB(8)}, {"8g", GIB(8)},
        {" 80 G ", GIB(80)}, {"512m", MIB(512)}, {"512 M", MIB(512)}, {"1K", KIB(1)}, {"1KiB", KIB(1)},
        {"1KB", 1000}, {"1 kB", 1000}, {"1MB", 1000000}, {"1GB", 1000000000}, {"1.5 GB", 1500000000},
        {"1.5GiB", GIB(1) + MIB(512)}, {".5K", 512}, {"5.K", KIB(5)}, {"0.001KB", 1}, {"1T", GIB(1024)},
        {"1TB", UINT64_C(1000000000000)}, {"1P", GIB(1 << 20)}, {"1PB", UINT64_C(1000000000000000)},
        {"1EiB", UINT64_C(1) << 60}, {"1EB", UINT64_C(1000000000000000000)}, {"007", 7},
        {"9223372036854775807", INT64_MAX}, {"9223372036854775807 B", INT64_MAX},
        {"9.223372036854775807EB", INT64_MAX},
        {"0000000000000000000000000000000000000004K", KIB(4)}, {"0.1234567890123456789EB", UINT64_C(123456789012345678)},
    };
    /* clang-format on */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint64_t bytes = 77;
        mo_detail detail = {.text = "no detail"};
        if (parse(cases[i].text, &bytes, &detail) != MO_OK || bytes != cases[i].bytes)
            TEST_FAIL("'%s' is %" PRIu64 ", expected %" PRIu64 " (%s)", cases[i].text, bytes, cases[i].bytes,
                      detail.text);
    }
}

TEST(what_is_left_under_one_byte_is_dropped)
{
    uint64_t bytes;
    CHECK(parse("0.0009KB", &bytes, NULL) == MO_OK && bytes == 0);
    CHECK(parse("1.9999KB", &bytes, NULL) == MO_OK && bytes == 1999);
    CHECK(parse("0.1K", &bytes, NULL) == MO_OK && bytes == 102);                            /* 102.4 */
    CHECK(parse("9007199254740991.999K", &bytes, NULL) == MO_OK && bytes == INT64_MAX - 1); /* … 1022.976 */
}

TEST(what_is_not_a_size_is_refused_and_quoted)
{
    /* clang-format off */
    static const char *const nonsense[] = {
        "", " ", "-1", "-8GiB", "+8", "GiB", "G", "B", ".", ". G", ".G", "eight", "8 apples", "8GiBs", "8 GiB GiB", "8Gi", "8 ki",
        "8G B", "8GI B", "8iB", "8BB", "8KBB", "1.2.3G", "1..5G", "1,5G", "1_000", "1e9", "1e3G", "0x10", "inf", "nan", "None",
        "0.5", "1.5", "1.5B", "1.0", "8 G 1", "1 000", "8\n", "\n8", "8GiB\r\n", "8\vG", "$8", "8%", "8ZiB", "8YB",
        "\xD9\xA3GB", "\xEF\xBC\x98GB", "8\xC2\xA0GB", "99999999999999999999", "0.00000000000000000001G", "12345678901234567890",
    };
    /* clang-format on */
    for (size_t i = 0; i < sizeof nonsense / sizeof *nonsense; i++) {
        uint64_t bytes = 77;
        mo_detail detail;
        char quoted[64];
        if (parse(nonsense[i], &bytes, &detail) != MO_INVALID || bytes != 77)
            TEST_FAIL("'%s' was taken for a size of %" PRIu64, nonsense[i], bytes);
        snprintf(quoted, sizeof quoted, "'%s' is not a size", nonsense[i]);
        CHECK(strstr(detail.text, quoted) != NULL);
        CHECK(strstr(detail.text, "GiB") != NULL);
        CHECK_EQ(parse(nonsense[i], &bytes, NULL), MO_INVALID);
    }
}

TEST(a_nul_byte_inside_is_not_the_end)
{
    uint64_t bytes = 77;
    CHECK_EQ(mo_parse_size("8\0GiB", 5, &bytes, NULL), MO_INVALID);
    CHECK_EQ(mo_parse_size("8\0", 2, &bytes, NULL), MO_INVALID);
    CHECK_EQ(bytes, 77);
    CHECK_EQ(mo_parse_size("8GiBs and more", 4, &bytes, NULL), MO_OK); /* length, not NUL, ends it */
    CHECK_EQ(bytes, GIB(8));
}

TEST(a_size_beyond_the_largest_is_an_overflow_that_quotes_it)
{
    static const char *const large[] = {
        "9223372036854775808",    "9999999999999999999", "8EiB",    "8E", "9.3EB",
        "9999999999999999999EiB", "9007199254740992K",   "8388608T"};
    for (size_t i = 0; i < sizeof large / sizeof *large; i++) {
        uint64_t bytes = 77;
        mo_detail detail;
        CHECK_EQ(parse(large[i], &bytes, &detail), MO_OVERFLOW);
        CHECK(strstr(detail.text, large[i]) != NULL);
        CHECK_EQ(bytes, 77);
    }
}

TEST(a_long_text_is_quoted_in_part_and_between_characters)
{
    for (int ascii = 0; ascii < 8; ascii++) {
        char text[400] = "";
        uint64_t bytes;
        mo_detail detail;
        memset(text, 'x', (size_t)ascii);
        for (int i = 0; i < 90; i++)
            strcat(text, "\xE2\x82\xAC"); /* € */
        CHECK_EQ(parse(text, &bytes, &detail), MO_INVALID);
        const char *end = strchr(detail.text + 1, '\'');
        const int quoted = (int)(end - detail.text) - 1;
        CHECK(quoted > 57 && quoted <= 60);
        CHECK_EQ((quoted - ascii) % 3, 0);
    }
}

/* A decimal with a unit, taken digit by digit: the model of mo_parse_size that has no scanner. */
TEST(random_decimals_are_read_exactly)
{
    /* clang-format off */
    static const struct {
        const char *unit;
        int base, power;
    } units[] = {{"", 1, 0}, {"B", 1, 0}, {"K", 1024, 1}, {"KiB", 1024, 1}, {"kb", 1000, 1}, {"m", 1024, 2},
                 {"MB", 1000, 2}, {" GiB", 1024, 3}, {"gB", 1000, 3}, {"TiB", 1024, 4}, {"TB", 1000, 4},
                 {"pib", 1024, 5}, {"PB", 1000, 5}, {"e", 1024, 6}, {" EB ", 1000, 6}};
    /* clang-format on */
    uint64_t state = test_seed();

    for (int round = 0, rounds = test_rounds(20000, 2000000); round < rounds; round++) {
        const int unit = (int)(test_random(&state) % (sizeof units / sizeof *units));
        const int whole = 1 + (int)(test_random(&state) % 10);
        const int places = units[unit].power ? (int)(test_random(&state) % 10) : 0;
        unsigned __int128 value = 0, divisor = 1;
        char text[64];
        int n = 0;
        for (int i = 0; i < whole + places; i++) {
            const int digit = (int)(test_random(&state) % 10);
            if (i == whole)
                text[n++] = '.';
            text[n++] = (char)('0' + digit);
            value = value * 10 + (unsigned)digit;
        }
        strcpy(text + n, units[unit].unit);
        for (int i = 0; i < units[unit].power; i++)
            value *= (unsigned)units[unit].base;
        for (int i = 0; i < places; i++)
            divisor *= 10;
        value /= divisor;

        uint64_t bytes = 77;
        const mo_status status = parse(text, &bytes, NULL);
        const bool fits = value <= INT64_MAX;
        if (status != (fits ? MO_OK : MO_OVERFLOW) || bytes != (fits ? (uint64_t)value : 77))
            TEST_FAIL("'%s' is %s, %" PRIu64, text, mo_status_name(status), bytes);
    }
}

TEST(bytes_are_written_with_three_or_four_digits)
{
    /* clang-format off */
    static const struct {
        uint64_t bytes;
        const char *text;
    } cases[] = {
        {0, "0 B"}, {1, "1 B"}, {999, "999 B"}, {1023, "1023 B"}, {1024, "1.00 KiB"}, {1536, "1.50 KiB"},
        {KIB(10) - 6, "9.99 KiB"}, {KIB(10) - 5, "10.0 KiB"}, {KIB(10), "10.0 KiB"}, {KIB(100) - 52, "99.9 KiB"}, {KIB(100) - 51, "100 KiB"},
        {KIB(1023), "1023 KiB"}, {KIB(1023) + 511, "1023 KiB"}, {KIB(1023) + 512, "1.00 MiB"}, {MIB(1) - 1, "1.00 MiB"},
        {MIB(1), "1.00 MiB"}, {GIB(79) + MIB(205), "79.2 GiB"}, {GIB(1024) - 1, "1.00 TiB"},
        {(uint64_t)INT64_MAX, "8.00 EiB"}, {UINT64_MAX, "16.0 EiB"},
    };
    /* clang-format on */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[MO_SIZE_TEXT];
        CHECK_STR(mo_format_size(cases[i].bytes, text), cases[i].text);
    }
}

/* What is written can be read, and is the size within half of its last digit, which is 5 in 1000 at most. */
TEST(every_size_is_written_so_that_reading_it_gives_it_back_nearly)
{
    uint64_t state = test_seed();
    for (int i = 0, n = test_rounds(20000, 2000000); i < n; i++) {
        const int shift = 1 + (int)(test_random(&state) % 63);
        const uint64_t bytes = test_random(&state) >> shift;
        char text[MO_SIZE_TEXT];
        uint64_t back = 0;
        mo_format_size(bytes, text);
        CHECK(strlen(text) < MO_SIZE_TEXT);
        if (bytes > (UINT64_C(8) << 60) - (UINT64_C(1) << 54)) /* "8.00 EiB" cannot be read back */
            continue;
        CHECK_EQ(parse(text, &back, NULL), MO_OK);
        const uint64_t off = back > bytes ? back - bytes : bytes - back;
        if (bytes < 1024 ? off != 0 : off > bytes / 200 + 1)
            TEST_FAIL("%" PRIu64 " is written %s, which is %" PRIu64, bytes, text, back);
    }
}

TEST_MAIN
