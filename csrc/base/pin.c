#include "base/pin.h"

#include <dlfcn.h>

mo_status mo_pin_library(mo_detail *detail)
{
    static const char here;
    Dl_info info;

    if (!dladdr(&here, &info))
        return mo_fail(detail, MO_NO_LIBRARY, 0, "the dynamic loader cannot locate memopt's library");
    /* The count that this adds is never given back, and NODELETE makes even a dlclose of it do nothing. */
    if (!dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE)) {
        const char *why = dlerror();
        return mo_fail(detail, MO_NO_LIBRARY, 0, "%s cannot be pinned in memory: %s", info.dli_fname,
                       why ? why : "?");
    }
    return MO_OK;
}
