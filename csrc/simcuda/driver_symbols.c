/* cuGetProcAddress: the driver's functions by name, among those that are implemented. A stub is not found:
 * who asks this way wants to know what works. */
#include "driver_api.h"

#include <string.h>

/* A name without its version means the newest signature that the asked-for version of CUDA has. Where we
 * implement two of them: the newer one, and the version it came with. */
static const struct {
    const char *name, *older;
    int newer_from;
} changed[] = {
    {"cuStreamGetCaptureInfo", "cuStreamGetCaptureInfo_v2", 12030},
};

void *sim_driver_function(const char *name, int version)
{
    for (size_t i = 0; i < sizeof changed / sizeof *changed; i++)
        if (strcmp(name, changed[i].name) == 0 && version < changed[i].newer_from)
            name = changed[i].older;
    return strncmp(name, "cu", 2) == 0 && strncmp(name, "cuda", 4) != 0 ? sim_calls_function(name) : NULL;
}

SIM_DRIVER(SIM_ANYTIME, cuGetProcAddress_v2,
           (const char *name, void **out, int version, cuuint64_t flags,
            CUdriverProcAddressQueryResult *status),
           (name, out, version, flags, status))
{
    if (!name || !out || flags > CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM)
        return CUDA_ERROR_INVALID_VALUE;
    if (flags == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM)
        return CUDA_ERROR_NOT_SUPPORTED; /* functions whose stream 0 is the thread's own are not made */
    *out = sim_driver_function(name, version);
    if (status)
        *status = *out ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    /* With a place for the status, "not found" is no error of the call (cuGetProcAddress's documentation). */
    return *out || status ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
