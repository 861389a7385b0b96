#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *mo_status_name(mo_status status)
{
#define NAME(name, text) #name,
    static const char *const names[] = {MO_STATUS_LIST(NAME)};
#undef NAME
    return (unsigned)status < MO_STATUS_COUNT ? names[status] : "MO_?";
}

const char *mo_status_text(mo_status status)
{
#define TEXT(name, text) text,
    static const char *const texts[] = {MO_STATUS_LIST(TEXT)};
#undef TEXT
    return (unsigned)status < MO_STATUS_COUNT ? texts[status] : "an unknown status";
}

/* Takes off the end of a text what a cut left of a UTF-8 sequence: Python would refuse the whole for it. */
static void cut_between_characters(char *text)
{
    const size_t end = strlen(text);
    size_t start = end;
    while (start && ((unsigned char)text[start - 1] & 0xC0) == 0x80)
        start--;
    if (!start || (unsigned char)text[start - 1] < 0xC0)
        return;
    const unsigned char lead = (unsigned char)text[--start];
    if (end - start < (lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2))
        text[start] = 0;
}

void mo_tell(mo_detail *detail, mo_status status, int code, const char *format, ...)
{
    if (detail) {
        va_list args;
        detail->status = status;
        detail->code = code;
        va_start(args, format);
        int length = vsnprintf(detail->text, sizeof detail->text, format, args);
        va_end(args);
        if (length >= (int)sizeof detail->text)
            cut_between_characters(detail->text);
    }
}
