#include "base/units.h"

#include <stdbool.h>
#include <stdio.h>

typedef struct scanner {
    const char *at, *end;
} scanner;

static void skip_blanks(scanner *s)
{
    while (s->at < s->end && (*s->at == ' ' || *s->at == '\t'))
        s->at++;
}

static bool at_digit(const scanner *s)
{
    return s->at < s->end && *s->at >= '0' && *s->at <= '9';
}

/* Case folded without the locale: a Turkish one would turn I into a letter that no unit has. */
static char at_letter(const scanner *s)
{
    if (s->at == s->end)
        return 0;
    return (char)(*s->at >= 'a' && *s->at <= 'z' ? *s->at - 'a' + 'A' : *s->at);
}

/* number = digits / scale. 19 digits, as 2**63 - 1 has, keep both inside 64 bits. */
static bool scan_number(scanner *s, uint64_t *digits, uint64_t *scale)
{
    bool any = false, fraction = false;
    *digits = 0;
    *scale = 1;
    for (;; s->at++) {
        if (!fraction && s->at < s->end && *s->at == '.') {
            fraction = true;
            continue;
        }
        if (!at_digit(s))
            return any;
        any = true;
        if (*digits > UINT64_C(999999999999999999) || *scale > UINT64_C(1000000000000000000))
            return false;
        *digits = *digits * 10 + (uint64_t)(*s->at - '0');
        if (fraction)
            *scale *= 10;
    }
}

/* The factor of the unit at s, 0 where there is none of that name. */
static uint64_t scan_unit(scanner *s)
{
    static const char prefixes[] = "KMGTPE";
    uint64_t factor = 1;
    for (int i = 0; prefixes[i]; i++) {
        if (at_letter(s) != prefixes[i])
            continue;
        s->at++;
        bool binary = at_letter(s) == 'I', bytes;
        s->at += binary;
        bytes = at_letter(s) == 'B';
        s->at += bytes;
        if (binary && !bytes)
            return 0; /* "Ki" is no size in memory */
        for (int power = 0; power <= i; power++)
            factor *= bytes && !binary ? 1000 : 1024;
        return factor;
    }
    s->at += at_letter(s) == 'B';
    return factor;
}

mo_status mo_parse_size(const char *text, size_t length, uint64_t *out, mo_detail *detail)
{
    scanner s = {text, text + length};
    uint64_t digits, scale, factor;
    int shown = length > 60 ? 60 : (int)length;

    while (shown < (int)length && shown && ((unsigned char)text[shown] & 0xC0) == 0x80)
        shown--; /* whole characters: half a UTF-8 sequence cannot become a Python str */
    skip_blanks(&s);
    bool number = scan_number(&s, &digits, &scale);
    skip_blanks(&s);
    factor = number ? scan_unit(&s) : 0;
    skip_blanks(&s);
    if (!number || !factor || s.at != s.end || (scale > 1 && factor == 1))
        return mo_fail(
            detail, MO_INVALID, 0,
            "'%.*s' is not a size: write bytes as an integer, or a number and a unit such as '8GiB', "
            "'1.5 GB' or '512MiB'",
            shown, text);
    unsigned __int128 bytes = (unsigned __int128)digits * factor / scale;
    if (bytes > INT64_MAX)
        return mo_fail(detail, MO_OVERFLOW, 0, "'%.*s' is more than the largest size, 2**63 - 1 bytes", shown,
                       text);
    *out = (uint64_t)bytes;
    return MO_OK;
}

/* bytes * times in a unit of 1024**unit, rounded to the nearest, halves up. */
static uint64_t in_unit(uint64_t bytes, int unit, unsigned times)
{
    const unsigned __int128 one = (unsigned __int128)1 << 10 * unit;
    return (uint64_t)(((unsigned __int128)bytes * times + one / 2) / one);
}

/* In integers, since printf's %f writes the decimal point of the locale. */
const char *mo_format_size(uint64_t bytes, char out[MO_SIZE_TEXT])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    int unit = 0;

    /* 1023.5 would be written as 1024: one step further up. */
    while (unit < 6 && in_unit(bytes, unit, 1) >= 1024)
        unit++;
    uint64_t tenths = in_unit(bytes, unit, 10), hundredths = in_unit(bytes, unit, 100);
    if (unit && hundredths < 1000)
        snprintf(out, MO_SIZE_TEXT, "%d.%02d %s", (int)(hundredths / 100), (int)(hundredths % 100),
                 units[unit]);
    else if (unit && tenths < 1000)
        snprintf(out, MO_SIZE_TEXT, "%d.%d %s", (int)(tenths / 10), (int)(tenths % 10), units[unit]);
    else
        snprintf(out, MO_SIZE_TEXT, "%d %s", (int)in_unit(bytes, unit, 1), units[unit]);
    return out;
}
