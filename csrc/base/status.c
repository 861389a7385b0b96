#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>

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

mo_status mo_fail(mo_detail *detail, mo_status status, int code, const char *format, ...)
{
    if (detail) {
        va_list args;
        detail->status = status;
        detail->code = code;
        va_start(args, format);
        vsnprintf(detail->text, sizeof detail->text, format, args);
        va_end(args);
    }
    return status;
}
