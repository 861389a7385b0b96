/* The C half of library_stub.S: a stub was called, say which and answer. Linked into every simulated library.
 */
#include "csrc/simcuda/missing.h"

#include <dlfcn.h>

/* Hidden: every library has its own, with its own answer. */
__attribute__((visibility("hidden"))) int sim_stub_called(const char *after);

/* after: the first byte behind the stub. Its last byte is still inside, which is what dladdr needs to find
 * its name. */
int sim_stub_called(const char *after)
{
    Dl_info stub;
    if (dladdr(after - 1, &stub) != 0 && stub.dli_sname != NULL)
        simcuda_missing_add(stub.dli_sname);
    return SIM_NOT_SUPPORTED;
}
