/* NVRTC, NVIDIA's run-time compiler, found at run time as the driver is. torch's wheels bring it as a package
 * of its own; where that lies is Python's knowledge, so the caller gives the paths. */
#ifndef MO_NVRTC_API_H
#define MO_NVRTC_API_H

#include <stddef.h>

#include "base/status.h"

typedef struct mo_nvrtc_program *mo_nvrtc_handle; /* NVIDIA's nvrtcProgram */

/* nvrtcResult is an int: 0 is success, 6 a source that does not compile. All are in NVRTC since CUDA 11.2.
 *    field               symbol                      parameters */
#define MO_NVRTC_FUNCTIONS(X)                                                                                \
    X(error_string, nvrtcGetErrorString, const char *, (int result))                                         \
    X(version, nvrtcVersion, int, (int *major, int *minor))                                                  \
    X(architecture_count, nvrtcGetNumSupportedArchs, int, (int *out))                                        \
    X(architectures, nvrtcGetSupportedArchs, int, (int *out))                                                \
    X(create, nvrtcCreateProgram, int,                                                                       \
      (mo_nvrtc_handle * out, const char *source, const char *name, int headers, const char *const *texts,   \
       const char *const *names))                                                                            \
    X(destroy, nvrtcDestroyProgram, int, (mo_nvrtc_handle * program))                                        \
    X(compile, nvrtcCompileProgram, int, (mo_nvrtc_handle program, int count, const char *const *options))   \
    X(log_size, nvrtcGetProgramLogSize, int, (mo_nvrtc_handle program, size_t * out))                        \
    X(log, nvrtcGetProgramLog, int, (mo_nvrtc_handle program, char *out))                                    \
    X(ptx_size, nvrtcGetPTXSize, int, (mo_nvrtc_handle program, size_t * out))                               \
    X(ptx, nvrtcGetPTX, int, (mo_nvrtc_handle program, char *out))                                           \
    X(cubin_size, nvrtcGetCUBINSize, int, (mo_nvrtc_handle program, size_t * out))                           \
    X(cubin, nvrtcGetCUBIN, int, (mo_nvrtc_handle program, char *out))

typedef struct mo_nvrtc_api {
#define FIELD(field, symbol, result, parameters) result(*field) parameters;
    MO_NVRTC_FUNCTIONS(FIELD)
#undef FIELD
    void *library; /* what dlopen gave; never closed: a compiler that may have started threads stays */
    int major, minor;
} mo_nvrtc_api;

/* The first of `count` paths (absolute, or a soname for the linker to find) that opens and has every
 * function. MO_NO_LIBRARY, MO_NO_SYMBOL: the text lists what was tried and the mend. */
mo_status mo_nvrtc_open(const char *const *paths, size_t count, mo_nvrtc_api *out, mo_detail *detail);

/* What to compile for. */
typedef struct mo_nvrtc_target {
    int architecture; /* 80 for compute capability 8.0 */
    int ptx; /* 0: machine code for that architecture; 1: PTX, which the driver compiles when it loads */
} mo_nvrtc_target;

/* The best target for a device: machine code for the nearest architecture of its major that is not above it;
 * for a device newer than this NVRTC, PTX of the newest. MO_UNSUPPORTED where the device is older than all.
 */
mo_status mo_nvrtc_choose(const mo_nvrtc_api *api, int device_architecture, mo_nvrtc_target *out,
                          mo_detail *detail);

/* The options that mo_nvrtc_compile passes for a target, as one text: they are part of a cached image's key.
 */
#define MO_NVRTC_OPTIONS_SIZE 64
void mo_nvrtc_options(mo_nvrtc_target target, char out[MO_NVRTC_OPTIONS_SIZE]);

/* Compiles source (NUL-terminated). *out is the image, for mo_host_free; PTX is NUL-terminated and *out_size
 * counts the NUL. MO_COMPILER: the text begins with the compiler's own message. Takes up to a second; call
 * without the GIL. */
mo_status mo_nvrtc_compile(const mo_nvrtc_api *api, const char *source, mo_nvrtc_target target, void **out,
                           size_t *out_size, mo_detail *detail);

#endif
