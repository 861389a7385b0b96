#include "driver/kernel_module.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/hostmem.h"
#include "base/lock.h"
#include "driver/context.h"
#include "driver/forked.h"
#include "driver/kernel_proof.h"

static atomic_uint compilations;

const char *mo_kernel_name(mo_kernel kernel)
{
#define NAME(identifier, name) name,
    static const char *const names[] = {MO_KERNELS(NAME)};
#undef NAME
    return (unsigned)kernel < MO_KERNEL_COUNT ? names[kernel] : "?";
}

const char *mo_kernel_origin_name(mo_kernel_origin origin)
{
    static const char *const names[] = {"not loaded", "embedded", "cached", "compiled"};
    return (unsigned)origin < sizeof names / sizeof *names ? names[origin] : "?";
}

/* ---- one image ----------------------------------------------------------------------------------------- */

/* Whether an error of cuModuleLoadDataEx or cuModuleGetFunction may be the image's, so that another may do: any that does
 * not speak of the device, which is out of memory, or whose context is lost (700 to 719, until the process ends). Drivers
 * differ in what they say to an image that they cannot read. */
static bool is_refusal(CUresult code)
{
    return code != CUDA_SUCCESS && code != CUDA_ERROR_OUT_OF_MEMORY &&
           !(code >= CUDA_ERROR_ILLEGAL_ADDRESS && code <= CUDA_ERROR_LAUNCH_FAILED);
}

/* Loads an image, finds every kernel in it, and sees them compute where `prove`. On failure *refused says whether
 * another image may do. */
static mo_status take_image(const mo_cuda_api *api, const void *image, bool prove, mo_kernel_module *m,
                            bool *refused, mo_detail *detail)
{
    char log[400] = "";
    CUjit_option names[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
    void *values[] = {log, (void *)(uintptr_t)sizeof log};
    char call[80] = "cuModuleLoadDataEx";
    CUmodule module = NULL;
    CUresult code = api->module_load(&module, image, 2, names, values);
    mo_status status;

    for (int i = 0; i < MO_KERNEL_COUNT && !code; i++) {
        snprintf(call, sizeof call, "cuModuleGetFunction(%s)", mo_kernel_name((mo_kernel)i));
        code = api->module_function(&m->functions[i], module, mo_kernel_name((mo_kernel)i));
    }
    status = mo_cuda_check(api, code, call, detail);
    log[sizeof log - 1] = 0;
    if (status && *log) { /* behind the code, which no cut may take away */
        const size_t at = strlen(detail->text);
        snprintf(detail->text + at, sizeof detail->text - at, "; %s", log);
    }
    *refused = is_refusal(code);
    if (!status && prove && !api->simulated) {
        status = mo_kernels_prove(api, m->functions, detail);
        *refused = status == MO_CORRUPT || (status && is_refusal((CUresult)detail->code));
    }
    if (!status)
        m->module = module;
    else if (module)
        api->module_unload(module);
    return status;
}

/* ---- the three ways ------------------------------------------------------------------------------------ */

/* Adds a sentence to m->note; one that does not fit is cut. */
__attribute__((format(printf, 2, 3))) static void note(mo_kernel_module *m, const char *format, ...)
{
    size_t at = strlen(m->note);
    va_list args;

    if (at)
        at += (size_t)snprintf(m->note + at, sizeof m->note - at, "; ");
    if (at >= sizeof m->note)
        return;
    va_start(args, format);
    vsnprintf(m->note + at, sizeof m->note - at, format, args);
    va_end(args);
}

/* Way 2. MO_OK with m->origin unchanged where the cache has nothing that serves. */
static mo_status from_cache(const mo_cuda_api *api, const mo_kernel_settings *settings, const char *key,
                            mo_kernel_module *m, mo_detail *detail)
{
    void *image = NULL;
    size_t size = 0;
    bool refused = false;
    mo_status status = mo_cache_load(settings->cache_directory, key, &m->cache, &image, &size, detail);

    if (status)
        return status;
    if (m->cache == MO_CACHE_DAMAGED || m->cache == MO_CACHE_UNREADABLE)
        note(m, "%s", detail->text);
    if (m->cache != MO_CACHE_HIT)
        return MO_OK;
    status = take_image(api, image, true, m, &refused, detail);
    mo_host_free(image);
    if (!status) {
        m->origin = MO_KERNELS_CACHED;
    } else if (
        refused) { /* another driver than the one that took it when it was stored, or kernels that do nothing */
        note(m, "the driver rejected the cached image (%.300s)", detail->text);
        m->cache = MO_CACHE_DAMAGED;
        status = MO_OK;
    }
    return status;
}

/* Way 3. */
static mo_status from_source(const mo_cuda_api *api, const mo_nvrtc_api *nvrtc, const mo_kernel_image *source,
                             const mo_kernel_settings *settings, const char *key, mo_kernel_module *m,
                             mo_detail *detail)
{
    void *image = NULL;
    size_t size = 0;
    bool refused = false;
    mo_status status;

    atomic_fetch_add(&compilations, 1);
    status = mo_nvrtc_compile(nvrtc, source->source, m->target, &image, &size, detail);
    if (!status)
        status = take_image(api, image, true, m, &refused, detail);
    if (!status) {
        m->origin = MO_KERNELS_COMPILED;
        if (settings->cache_directory && *settings->cache_directory) {
            mo_detail why;
            m->stored = mo_cache_store(settings->cache_directory, key, image, size, &why) == MO_OK;
            if (!m->stored)
                note(m, "%s", why.text);
        }
    } else if (status == MO_CORRUPT) {
        mo_detail why = *detail;
        status = mo_fail(detail, status, 0,
                         "the output of NVRTC %d.%d does not work (%.500s): that library is not a complete "
                         "NVRTC; name another libnvrtc.so in the environment variable MEMOPT_NVRTC",
                         nvrtc->major, nvrtc->minor, why.text);
    } else if (refused) {
        mo_detail why = *detail;
        status = mo_fail(
            detail, status, why.code,
            "the driver rejects the output of NVRTC %d.%d (%.500s): most likely it is older than that NVRTC; "
            "update the NVIDIA driver, or use a torch built for the CUDA version of your driver",
            nvrtc->major, nvrtc->minor, why.text);
    }
    mo_host_free(image);
    return status;
}

/* Ways 2 and 3, which need NVRTC: its version is part of the key. */
static mo_status by_compiler(const mo_cuda_api *api, const mo_kernel_image *source,
                             const mo_kernel_settings *settings, mo_kernel_module *m, mo_detail *detail)
{
    char options[MO_NVRTC_OPTIONS_SIZE], key[MO_CACHE_KEY_MAX];
    mo_nvrtc_api nvrtc;
    mo_status status = mo_nvrtc_open(settings->nvrtc_paths, settings->nvrtc_path_count, &nvrtc, detail);

    if (!status) {
        m->nvrtc_major = nvrtc.major;
        m->nvrtc_minor = nvrtc.minor;
        status = mo_nvrtc_choose(&nvrtc, m->architecture, &m->target, detail);
    }
    if (status)
        return status;
    mo_nvrtc_options(m->target, options);
    snprintf(key, sizeof key, "memopt %.100s\nsource %016llx, %zu bytes\noptions %s\nNVRTC %d.%d\n",
             settings->version ? settings->version : "",
             (unsigned long long)mo_cache_hash(MO_CACHE_HASH_START, source->source, source->source_size),
             source->source_size, options, nvrtc.major, nvrtc.minor);
    status = from_cache(api, settings, key, m, detail);
    if (!status && m->origin == MO_KERNELS_NOT_LOADED)
        status = from_source(api, &nvrtc, source, settings, key, m, detail);
    return status;
}

static mo_status load_in_context(const mo_driver_cuda *device, const mo_kernel_image *image,
                                 const mo_kernel_settings *settings, mo_kernel_module *m, mo_detail *detail)
{
    const mo_cuda_api *api = device->api;
    bool refused = false;
    int major = 0, minor = 0;
    mo_detail why;
    mo_status status = mo_cuda_check(
        api, api->device_attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device->handle),
        "cuDeviceGetAttribute(COMPUTE_CAPABILITY_MAJOR)", detail);

    if (!status)
        status = mo_cuda_check(
            api, api->device_attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device->handle),
            "cuDeviceGetAttribute(COMPUTE_CAPABILITY_MINOR)", detail);
    if (status)
        return status;
    m->architecture = 10 * major + minor;

    if (settings->no_image) {
        note(m, "the embedded image was left out, as asked");
    } else if (image->fatbin_size == 0) {
        note(m, "this build of memopt contains no compiled kernels (it was built without nvcc)");
    } else {
        status = take_image(api, image->fatbin, false, m, &refused, detail);
        if (!status)
            m->origin = MO_KERNELS_EMBEDDED;
        if (!status || !refused)
            return status;
        note(m, "the driver rejected the embedded image (%.300s)", detail->text);
    }
    status = by_compiler(api, image, settings, m, &why);
    if (status)
        return mo_fail(detail, status, why.code,
                       "memopt's CUDA kernels cannot be loaded on a device of compute capability %d.%d: "
                       "%.450s; and %.450s",
                       major, minor, m->note, why.text);
    return MO_OK;
}

mo_status mo_kernel_module_load(const mo_driver_cuda *device, const mo_kernel_image *image,
                                const mo_kernel_settings *settings, mo_kernel_module *out, mo_detail *detail)
{
    mo_kernel_module m = {0};
    mo_context_scope scope;
    mo_detail own;
    mo_status status;

    if (!detail)
        detail = &own; /* the texts are needed for the note too */
    status = mo_cuda_check(device->api, mo_context_enter(device, &scope), "cuCtxPushCurrent", detail);
    if (status)
        return status;
    status = load_in_context(device, image, settings, &m, detail);
    mo_context_leave(&scope);
    if (!status)
        *out = m;
    return status;
}

mo_status mo_kernel_module_unload(const mo_driver_cuda *device, mo_kernel_module *module, mo_detail *detail)
{
    mo_context_scope scope;
    CUresult code = mo_context_enter(device, &scope);

    if (!code) {
        code = device->api->module_unload(module->module);
        mo_context_leave(&scope);
    }
    return mo_cuda_check(device->api, code, "cuModuleUnload", detail);
}

/* ---- the process's modules ----------------------------------------------------------------------------- */

static mo_lock lock = MO_LOCK_INIT;              /* of all below; held while a module is loaded */
static mo_kernel_settings configured;            /* its strings are ours */
static mo_kernel_module modules[MO_MAX_DEVICES]; /* written once each, before loaded[] says so */
static atomic_bool loaded[MO_MAX_DEVICES];
static mo_detail failures[MO_MAX_DEVICES]; /* of searches with these settings; MO_OK: none */

static void forget(mo_kernel_settings *settings)
{
    for (size_t i = 0; i < settings->nvrtc_path_count; i++)
        mo_host_free((void *)settings->nvrtc_paths[i]);
    mo_host_free((void *)settings->cache_directory);
    mo_host_free((void *)settings->version);
}

static bool copy_text(const char **out, const char *text)
{
    char *copy;
    size_t size;
    if (!text)
        return true;
    size = strlen(text) + 1;
    copy = mo_host_alloc(size);
    if (copy)
        memcpy(copy, text, size);
    *out = copy;
    return copy != NULL;
}

mo_status mo_kernels_configure(const mo_kernel_settings *settings, mo_detail *detail)
{
    mo_kernel_settings fresh = {.no_image = settings->no_image}, former;
    bool ok;

    if (mo_forked())
        return mo_forked_refuse("configuring memopt's kernels", detail);
    if (settings->nvrtc_path_count > MO_NVRTC_PATHS_MAX)
        return mo_fail(detail, MO_INVALID, 0, "%zu paths of NVRTC: at most %d are allowed",
                       settings->nvrtc_path_count, MO_NVRTC_PATHS_MAX);
    ok = copy_text(&fresh.cache_directory, settings->cache_directory) &&
         copy_text(&fresh.version, settings->version);
    for (size_t i = 0; ok && i < settings->nvrtc_path_count; i++) {
        ok = copy_text(&fresh.nvrtc_paths[i], settings->nvrtc_paths[i]);
        fresh.nvrtc_path_count += ok;
    }
    if (!ok) {
        forget(&fresh);
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "out of host memory for the kernels' settings");
    }
    mo_forked_watch(); /* a child of this moment would find the lock taken */
    mo_lock_take(&lock);
    former = configured;
    configured = fresh;
    for (int i = 0; i < MO_MAX_DEVICES; i++)
        failures[i].status = MO_OK;
    mo_lock_give(&lock);
    mo_forked_unwatch();
    forget(&former);
    return MO_OK;
}

const mo_kernel_module *mo_kernels_peek(int ordinal)
{
    if (ordinal < 0 || ordinal >= MO_MAX_DEVICES)
        return NULL;
    return atomic_load_explicit(&loaded[ordinal], memory_order_acquire) ? &modules[ordinal] : NULL;
}

/* As mo_kernels_get of a device that is open and in range. */
static mo_status get_locked(const mo_driver_cuda *device, mo_detail *detail)
{
    const int ordinal = device->table.device;
    const mo_kernel_image image = mo_kernel_image_get();
    mo_detail *failure = &failures[ordinal], why;
    mo_status status;

    MO_ASSERT(mo_lock_held(&lock));
    if (mo_kernels_peek(ordinal)) /* another thread was faster */
        return MO_OK;
    if (!failure->status) {
        status = mo_kernel_module_load(device, &image, &configured, &modules[ordinal], &why);
        if (!status) {
            atomic_store_explicit(&loaded[ordinal], true, memory_order_release);
            return MO_OK;
        }
        if (status == MO_NO_HOST_MEMORY || status == MO_NO_DEVICE_MEMORY) {
            if (detail)
                *detail = why;
            return status;
        }
        *failure = why;
    }
    if (detail)
        *detail = *failure;
    return failure->status;
}

mo_status mo_kernels_get(int ordinal, const mo_kernel_module **out, mo_detail *detail)
{
    const mo_kernel_module *found = mo_kernels_peek(ordinal);
    mo_driver *driver = NULL;
    mo_status status = MO_OK;

    if (mo_forked())
        return mo_forked_refuse("loading memopt's kernels", detail);
    if (!found) {
        if (ordinal < 0 || ordinal >= MO_MAX_DEVICES)
            return mo_fail(detail, MO_NO_DEVICE, 0, "device %d: expected a device number from 0 to %d",
                           ordinal, MO_MAX_DEVICES - 1);
        status = mo_driver_cuda_get(ordinal, &driver, detail);
        if (status)
            return status;
        mo_lock_take(&lock);
        status = get_locked((const mo_driver_cuda *)driver, detail);
        mo_lock_give(&lock);
        if (status)
            return status;
        found = &modules[ordinal];
    }
    *out = found;
    return MO_OK;
}

unsigned mo_kernels_compilations(void)
{
    return atomic_load(&compilations);
}
