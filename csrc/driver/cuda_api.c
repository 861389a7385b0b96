#include "driver/cuda_api.h"

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

#include "base/lock.h"
#include "driver/forked.h"

mo_status mo_cuda_api_open(const char *path, mo_cuda_api *out, mo_detail *detail)
{
    mo_cuda_api api = {0};
    const char *missing = NULL;

    api.library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!api.library) {
        const char *why = dlerror();
        return mo_fail(
            detail, MO_NO_LIBRARY, 0,
            "the CUDA driver cannot be opened (%s): this machine has no NVIDIA driver, or it is not on the "
            "linker's path; CPU features work without it, and memopt.sim provides a simulated device",
            why ? why : path);
    }
    /* POSIX lets dlsym's object pointer be taken for a function pointer; C asks for the copy. */
#define FIND(field, symbol, parameters)                                                                      \
    do {                                                                                                     \
        void *found = dlsym(api.library, #symbol);                                                           \
        memcpy(&api.field, &found, sizeof found);                                                            \
    } while (0);
    MO_CUDA_REQUIRED(FIND)
    MO_CUDA_OPTIONAL(FIND)
#undef FIND
#define DEMAND(field, symbol, parameters)                                                                    \
    if (!missing && !api.field)                                                                              \
        missing = #symbol;
    MO_CUDA_REQUIRED(DEMAND)
#undef DEMAND
    if (missing) {
        dlclose(api.library); /* nothing of it was called yet */
        return mo_fail(
            detail, MO_NO_SYMBOL, 0,
            "%s has no function %s: the NVIDIA driver is too old; memopt needs the driver of CUDA 11.2 or "
            "later (driver 460)",
            path, missing);
    }
    api.simulated = dlsym(api.library, "simcuda_activate") != NULL;
    *out = api;
    return MO_OK;
}

mo_status mo_cuda_check(const mo_cuda_api *api, CUresult code, const char *call, mo_detail *detail)
{
    const char *name = NULL, *text = NULL;
    mo_status status = MO_DRIVER;

    if (code == CUDA_SUCCESS)
        return MO_OK;
    if (code == CUDA_ERROR_OUT_OF_MEMORY)
        status = MO_NO_DEVICE_MEMORY;
    else if (code == CUDA_ERROR_NOT_READY)
        status = MO_NOT_READY;
    else if (code == CUDA_ERROR_NOT_SUPPORTED)
        status = MO_UNSUPPORTED;
    else if (code == CUDA_ERROR_NO_DEVICE || code == CUDA_ERROR_INVALID_DEVICE)
        status = MO_NO_DEVICE;
    if (!detail)
        return status;
    if (api->error_name(code, &name) != CUDA_SUCCESS)
        name = NULL;
    if (api->error_string(code, &text) != CUDA_SUCCESS)
        text = NULL;
    return mo_fail(detail, status, (int)code, "%s: %s (%d)%s%s", call, name ? name : "an unknown error",
                   (int)code, text ? ": " : "", text ? text : "");
}

mo_status mo_cuda_api_get(const mo_cuda_api **out, mo_detail *detail)
{
    static mo_lock lock = MO_LOCK_INIT;
    static mo_cuda_api api;
    static _Atomic(const mo_cuda_api *) ready;
    const mo_cuda_api *found = atomic_load_explicit(&ready, memory_order_acquire);

    if (mo_forked())
        return mo_forked_refuse("cuInit(0)", detail);
    if (!found) {
        mo_status status = MO_OK;
        mo_forked_watch(); /* before the lock: a child forked during cuInit could wait for it for ever */
        mo_lock_take(&lock);
        if (!atomic_load_explicit(&ready, memory_order_relaxed)) { /* nobody did it while we waited */
            if (!api.library)
                status = mo_cuda_api_open("libcuda.so.1", &api, detail);
            if (!status)
                status = mo_cuda_check(&api, api.init(0), "cuInit(0)", detail);
            if (!status)
                atomic_store_explicit(&ready, &api, memory_order_release);
        }
        mo_lock_give(&lock);
        if (status) {
            mo_forked_unwatch();
            return status;
        }
        found = &api;
    }
    *out = found;
    return MO_OK;
}

const char *mo_cuda_api_symbol(int index, int *required)
{
#define NAME(field, symbol, parameters) #symbol,
    static const char *const needed[] = {MO_CUDA_REQUIRED(NAME)};
    static const char *const wanted[] = {MO_CUDA_OPTIONAL(NAME)};
#undef NAME
    const int count = (int)(sizeof needed / sizeof *needed), more = (int)(sizeof wanted / sizeof *wanted);

    if (index < 0 || index >= count + more)
        return NULL;
    *required = index < count;
    return index < count ? needed[index] : wanted[index - count];
}
