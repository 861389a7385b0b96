/* The kernels, loaded on a device and ready to launch. Tried in this order, the first that the driver takes
 * wins:
 *
 *     1. the fatbin that this library carries (absent when it was built without nvcc; refused by a driver older than
 *        the nvcc that made it, or on a GPU that it has neither code nor PTX for)
 *     2. the cache's image of our source for this GPU and this NVRTC
 *     3. the source, compiled by NVRTC now, and stored in the cache once it serves
 *
 * 2 and 3 serve when each kernel has computed what is known beforehand (kernel_proof.h): a cached image may be one that
 * a stand-in for NVRTC made, whose kernels do nothing. On the simulated device, whose launches run the host's bodies,
 * that proves nothing and is left out; the caller names no cache directory for it.
 *
 * Out of memory and a lost context (codes 700 to 719) are the device's errors and end the search; after any other the next
 * way is tried, and the note keeps the error's code.
 *
 * mo_kernel_module_load is the whole of it over given parts and knows no process state; mo_kernels_get is the
 * process's: one module a device, loaded at the first call that succeeds, under one lock, and never unloaded. A search
 * that failed is not repeated, since it may have compiled: its error is given again until mo_kernels_configure is
 * called. (Out of host or device memory is no result of a search, and is tried again.) */
#ifndef MO_KERNEL_MODULE_H
#define MO_KERNEL_MODULE_H

#include "base/status.h"
#include "driver/driver_cuda.h"
#include "driver/kernel_cache.h"
#include "driver/kernel_image.h"
#include "driver/nvrtc_api.h"

/* Every kernel: X(identifier, name in the image). */
#define MO_KERNELS(X)                                                                                        \
    X(MO_KERNEL_GRADIENTS, "memopt_gradients")                                                               \
    X(MO_KERNEL_UPDATE, "memopt_update")                                                                     \
    X(MO_KERNEL_FACTORED, "memopt_factored")                                                                 \
    X(MO_KERNEL_WIDEN, "memopt_widen")                                                                       \
    X(MO_KERNEL_CROSS_ENTROPY, "memopt_cross_entropy")

#define MO_KERNEL_ENUM(identifier, name) identifier,
typedef enum mo_kernel { MO_KERNELS(MO_KERNEL_ENUM) MO_KERNEL_COUNT } mo_kernel;
#undef MO_KERNEL_ENUM

const char *mo_kernel_name(mo_kernel kernel);

typedef enum mo_kernel_origin {
    MO_KERNELS_NOT_LOADED,
    MO_KERNELS_EMBEDDED, /* way 1 */
    MO_KERNELS_CACHED,   /* way 2 */
    MO_KERNELS_COMPILED  /* way 3 */
} mo_kernel_origin;

/* "not loaded", "embedded", "cached", "compiled" */
const char *mo_kernel_origin_name(mo_kernel_origin origin);

#define MO_NVRTC_PATHS_MAX 8

/* What only the caller knows. Nothing is kept: mo_kernels_configure copies. */
typedef struct mo_kernel_settings {
    const char *nvrtc_paths[MO_NVRTC_PATHS_MAX]; /* candidates in order; see mo_nvrtc_open */
    size_t nvrtc_path_count;
    const char *cache_directory; /* NULL or "": no cache */
    const char *version;         /* memopt's, part of the key; NULL counts as "" */
    bool no_image;               /* leaves way 1 out, so that a check can see the others */
} mo_kernel_settings;

typedef struct mo_kernel_module {
    CUmodule module;
    CUfunction functions[MO_KERNEL_COUNT];
    mo_kernel_origin origin;
    int architecture;       /* the device's: 80 for compute capability 8.0 */
    mo_nvrtc_target target; /* what NVRTC's image is for; zeros where NVRTC was not needed */
    int nvrtc_major, nvrtc_minor;
    mo_cache_finding cache; /* what a search of the cache found; MO_CACHE_OFF where it was not searched */
    bool stored;            /* a freshly compiled image is in the cache now */
    char note[1024]; /* what was tried before and why it did not serve, in words; "" if the first did */
} mo_kernel_module;

/* Loads on an open device. On failure *out is as before, nothing stays loaded, and *detail tells each thing
 * that was tried and the mend. A cache that cannot be read or written is no failure: it is told in out->note.
 */
mo_status mo_kernel_module_load(const mo_driver_cuda *device, const mo_kernel_image *image,
                                const mo_kernel_settings *settings, mo_kernel_module *out, mo_detail *detail);

/* Unloads; for tests, and for whoever loaded a module of their own. */
mo_status mo_kernel_module_unload(const mo_driver_cuda *device, mo_kernel_module *module, mo_detail *detail);

/* The settings of loads to come in this process, whose failures so far are forgotten. MO_NO_HOST_MEMORY leaves the
 * former settings and failures. Waits for a load that is going on, so call without the GIL. MO_DRIVER in a child of a
 * process that used CUDA (forked.h). */
mo_status mo_kernels_configure(const mo_kernel_settings *settings, mo_detail *detail);

/* The process's module of a device. Compiling takes seconds, so call without the GIL. *out lives for ever.
 * MO_DRIVER in a child of a process that used CUDA (forked.h). */
mo_status mo_kernels_get(int ordinal, const mo_kernel_module **out, mo_detail *detail);

/* The same, only if it is loaded already, else NULL. */
const mo_kernel_module *mo_kernels_peek(int ordinal);

/* How often this process has called the compiler. */
unsigned mo_kernels_compilations(void);

#endif
