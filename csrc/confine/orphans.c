#include <errno.h>
#include <string.h>
#include <sys/prctl.h>

#include "confine/confine.h"

mo_status mo_adopt_orphans(mo_detail *detail)
{
    if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
        return mo_fail(detail, MO_UNSUPPORTED, errno, "becoming a subreaper: %s", strerror(errno));
    return MO_OK;
}
