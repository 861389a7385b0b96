/* mo_parse_size against a model without a scanner: the text is cut at its ends and at its first letter, the
 * unit is looked up in the list of all of them. */
#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/units.h"
#include "random_input.h"

FUZZ_SEEDS(FUZZ_SEED("8GiB"), FUZZ_SEED("1.5 GB"), FUZZ_SEED("512m"), FUZZ_SEED(" 80 G "), FUZZ_SEED("4096"),
           FUZZ_SEED("0"), FUZZ_SEED(".5K"), FUZZ_SEED("5.kib"), FUZZ_SEED("9223372036854775807"),
           FUZZ_SEED("7.999EiB"), FUZZ_SEED("1tb"), FUZZ_SEED("3 PiB"), FUZZ_SEED("12 b"), FUZZ_SEED("-1"),
           FUZZ_SEED("1e9"), FUZZ_SEED("8Gi"), FUZZ_SEED("0.0000000000000000001EB"), FUZZ_SEED("8\0GiB"),
           FUZZ_SEED("\xE2\x82\xAC 100"))

/* clang-format off */
static const struct {
    const char *name;
    int base, power;
} units[] = {
    {"", 1, 0}, {"b", 1, 0}, {"k", 1024, 1}, {"kib", 1024, 1}, {"kb", 1000, 1}, {"m", 1024, 2}, {"mib", 1024, 2},
    {"mb", 1000, 2}, {"g", 1024, 3}, {"gib", 1024, 3}, {"gb", 1000, 3}, {"t", 1024, 4}, {"tib", 1024, 4},
    {"tb", 1000, 4}, {"p", 1024, 5}, {"pib", 1024, 5}, {"pb", 1000, 5}, {"e", 1024, 6}, {"eib", 1024, 6},
    {"eb", 1000, 6},
};
/* clang-format on */

static char *cut_blanks(char *text)
{
    size_t end = strlen(text);
    while (end && (text[end - 1] == ' ' || text[end - 1] == '\t'))
        text[--end] = 0;
    return text + strspn(text, " \t");
}

/* text is spoiled. */
static mo_status model(char *text, uint64_t *out)
{
    char digits[1024] = "";
    unsigned __int128 value = 0;
    int places = 0, unit = -1;

    text = cut_blanks(text);
    const size_t length = strspn(text, "0123456789."), number = length;
    const char *dot = memchr(text, '.', length);
    for (size_t i = 0; i < length; i++)
        if (text[i] != '.')
            strncat(digits, text + i, 1);
    if (!*digits || (dot && memchr(dot + 1, '.', length - (size_t)(dot + 1 - text))))
        return MO_INVALID;
    if (dot)
        places = (int)(text + length - dot) - 1;
    if (strlen(digits + strspn(digits, "0")) > 19 || places > 19)
        return MO_INVALID;
    text = cut_blanks(text + number);
    for (char *c = text; *c; c++)
        *c = (char)((unsigned char)*c < 128 ? tolower(*c) : *c);
    for (int i = 0; i < (int)(sizeof units / sizeof *units); i++)
        if (strcmp(text, units[i].name) == 0)
            unit = i;
    if (unit < 0 || (places && !units[unit].power))
        return MO_INVALID;
    for (const char *c = digits; *c; c++)
        value = value * 10 + (unsigned)(*c - '0');
    for (int i = 0; i < units[unit].power; i++)
        value *= (unsigned)units[unit].base;
    for (; places; places--)
        value /= 10; /* floor of floors is the floor */
    if (value > INT64_MAX)
        return MO_OVERFLOW;
    *out = (uint64_t)value;
    return MO_OK;
}

/* Well-formed UTF-8 by its lengths alone, as a str's always is. */
static bool is_text(const uint8_t *data, size_t size)
{
    for (size_t i = 0; i < size;) {
        const size_t n = data[i] < 0x80   ? 1
                         : data[i] < 0xC0 ? 0
                         : data[i] < 0xE0 ? 2
                         : data[i] < 0xF0 ? 3
                                          : 4;
        if (!n || n > size - i)
            return false;
        for (size_t j = 1; j < n; j++)
            if ((data[i + j] & 0xC0) != 0x80)
                return false;
        i += n;
    }
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char copy[1024], shown[MO_SIZE_TEXT];
    uint64_t bytes = 77, expected = 77, any = 0;
    mo_detail detail = {.text = ""};

    if (size >= sizeof copy)
        return 0;
    memcpy(copy, data, size);
    copy[size] = 0;
    const mo_status status = mo_parse_size((const char *)data, size, &bytes, &detail);
    const mo_status right =
        strlen(copy) == size ? model(copy, &expected) : MO_INVALID; /* a NUL is in no size */
    FUZZ_CHECK(status == right);
    FUZZ_CHECK(bytes == expected);
    if (status) {
        FUZZ_CHECK(detail.status == status && detail.text[0] == '\'');
        FUZZ_CHECK(!is_text(data, size) || is_text((const uint8_t *)detail.text, strlen(detail.text)));
    }
    FUZZ_CHECK(mo_parse_size((const char *)data, size, &bytes, NULL) == status);

    memcpy(&any, data, size < sizeof any ? size : sizeof any);
    FUZZ_CHECK(strlen(mo_format_size(any, shown)) < sizeof shown);
    return 0;
}
