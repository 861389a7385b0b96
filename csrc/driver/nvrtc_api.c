#include "driver/nvrtc_api.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "base/hostmem.h"

#define MEND                                                                                                 \
    "install it (pip install nvidia-cuda-nvrtc for CUDA 13, nvidia-cuda-nvrtc-cu12 for CUDA 12), or name "   \
    "its libnvrtc.so in the environment variable MEMOPT_NVRTC"

static const char *missing_symbol(const mo_nvrtc_api *api)
{
#define TEST(field, symbol, result, parameters)                                                              \
    if (!api->field)                                                                                         \
        return #symbol;
    MO_NVRTC_FUNCTIONS(TEST)
#undef TEST
    return NULL;
}

static void find_symbols(mo_nvrtc_api *api)
{
#define FIND(field, symbol, result, parameters)                                                              \
    do {                                                                                                     \
        void *found = dlsym(api->library, #symbol);                                                          \
        memcpy(&api->field, &found, sizeof found);                                                           \
    } while (0);
    MO_NVRTC_FUNCTIONS(FIND)
#undef FIND
}

mo_status mo_nvrtc_open(const char *const *paths, size_t count, mo_nvrtc_api *out, mo_detail *detail)
{
    char tried[600] = "no path was given";
    size_t at = 0;
    mo_status status = MO_NO_LIBRARY;

    for (size_t i = 0; i < count; i++) {
        mo_nvrtc_api api = {0};
        const char *why = NULL;
        int result = 0;

        api.library = dlopen(paths[i], RTLD_NOW | RTLD_LOCAL);
        if (!api.library) {
            why = dlerror();
        } else {
            find_symbols(&api);
            why = missing_symbol(&api);
            if (!why && (result = api.version(&api.major, &api.minor)) != 0)
                why = api.error_string(result);
            if (!why) {
                *out = api;
                return MO_OK;
            }
            status = MO_NO_SYMBOL;
        }
        at += (size_t)snprintf(tried + at, sizeof tried - at, "%s%s: %s", at ? "; " : "", paths[i],
                               why ? why : "cannot be opened");
        if (at >= sizeof tried)
            at = sizeof tried - 1;
        if (api.library)
            dlclose(api.library); /* it was never called, or only for its version */
    }
    return mo_fail(detail, status, 0, "NVRTC, the CUDA run-time compiler, cannot be opened (%s): " MEND,
                   tried);
}

mo_status mo_nvrtc_choose(const mo_nvrtc_api *api, int device_architecture, mo_nvrtc_target *out,
                          mo_detail *detail)
{
    int known[64], count = 0, result, same_major = 0, below = 0, least = 0;

    result = api->architecture_count(&count);
    if (!result && (count <= 0 || count > (int)(sizeof known / sizeof *known)))
        return mo_fail(detail, MO_COMPILER, 0, "NVRTC %d.%d reports %d architectures: " MEND, api->major,
                       api->minor, count);
    if (!result)
        result = api->architectures(known);
    if (result)
        return mo_fail(detail, MO_COMPILER, result, "nvrtcGetSupportedArchs: %s", api->error_string(result));
    for (int i = 0; i < count; i++) {
        if (!least || known[i] < least)
            least = known[i];
        if (known[i] <= device_architecture && known[i] > below)
            below = known[i];
        if (known[i] <= device_architecture && known[i] > same_major &&
            known[i] / 10 == device_architecture / 10)
            same_major = known[i];
    }
    if (!below)
        return mo_fail(detail, MO_UNSUPPORTED, 0,
                       "NVRTC %d.%d compiles for compute capability %d.%d and later, but this device has "
                       "%d.%d: use a torch built for an older CUDA, whose NVRTC still supports the device",
                       api->major, api->minor, least / 10, least % 10, device_architecture / 10,
                       device_architecture % 10);
    out->architecture = same_major ? same_major : below;
    out->ptx = !same_major;
    return MO_OK;
}

void mo_nvrtc_options(mo_nvrtc_target target, char out[MO_NVRTC_OPTIONS_SIZE])
{
    snprintf(out, MO_NVRTC_OPTIONS_SIZE, "--gpu-architecture=%s_%d -std=c++17", target.ptx ? "compute" : "sm",
             target.architecture);
}

/* MO_COMPILER with the compiler's log, or with the result's text where there is none. */
static mo_status compile_failure(const mo_nvrtc_api *api, mo_nvrtc_handle program, int result,
                                 const char *options, mo_detail *detail)
{
    size_t size = 0;
    char *log = NULL;
    mo_status status;

    if (api->log_size(program, &size) == 0 && size > 1)
        log = mo_host_alloc(size);
    if (log && api->log(program, log) != 0) {
        mo_host_free(log);
        log = NULL;
    }
    status = mo_fail(detail, MO_COMPILER, result, "%.700s (NVRTC %d.%d, %s: %s)", log ? log : "no message",
                     api->major, api->minor, options, api->error_string(result));
    mo_host_free(log);
    return status;
}

mo_status mo_nvrtc_compile(const mo_nvrtc_api *api, const char *source, mo_nvrtc_target target, void **out,
                           size_t *out_size, mo_detail *detail)
{
    char text[MO_NVRTC_OPTIONS_SIZE], architecture[MO_NVRTC_OPTIONS_SIZE];
    const char *options[] = {architecture, "-std=c++17"};
    mo_nvrtc_handle program = NULL;
    const char *call = "nvrtcCreateProgram";
    mo_status status = MO_OK;
    void *image = NULL;
    size_t size = 0;
    int result;

    mo_nvrtc_options(target, text);
    snprintf(architecture, sizeof architecture, "%.*s", (int)strcspn(text, " "), text);

    result = api->create(&program, source, "memopt_kernels.cu", 0, NULL, NULL);
    if (result)
        goto fail;
    result = api->compile(program, 2, options);
    if (result) {
        status = compile_failure(api, program, result, text, detail);
        goto fail;
    }
    call = target.ptx ? "nvrtcGetPTX" : "nvrtcGetCUBIN";
    result = target.ptx ? api->ptx_size(program, &size) : api->cubin_size(program, &size);
    if (result)
        goto fail;
    image = mo_host_alloc(size);
    if (!image) {
        status =
            mo_fail(detail, MO_NO_HOST_MEMORY, 0, "out of host memory for a kernel image of %zu bytes", size);
        goto fail;
    }
    result = target.ptx ? api->ptx(program, image) : api->cubin(program, image);
    if (result)
        goto fail;
    api->destroy(&program);
    *out = image;
    *out_size = size;
    return MO_OK;
fail:
    if (!status)
        status = mo_fail(detail, MO_COMPILER, result, "%s (NVRTC %d.%d, %s): %s", call, api->major,
                         api->minor, text, api->error_string(result));
    mo_host_free(image);
    if (program)
        api->destroy(&program);
    return status;
}
