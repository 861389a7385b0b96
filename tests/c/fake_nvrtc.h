/* An NVRTC for tests: the functions are this test program's own, and the path "" is what dlopen takes for the
 * program itself. It "compiles" any text to "image:made" (or to what the test set) and keeps count. */
#ifndef MEMOPT_FAKE_NVRTC_H
#define MEMOPT_FAKE_NVRTC_H

#include "driver/kernel_module.h"
#include "driver/nvrtc_api.h"
#include "test.h"

#define FAKE_NVRTC_PATH ""

/* An image of every kernel that the simulated device takes. */
#define NVRTC_ENTRY(identifier, name) ".entry " name "\n"
#define NVRTC_KERNELS                 ".version 7.0\n" MO_KERNELS(NVRTC_ENTRY)

static struct fake_nvrtc {
    int programs, compiled, major;
    int architectures[4], architecture_count;
    const char *image; /* what it makes of a text */
    char options[128];
    long countdown; /* fail the call after so many more; negative: never */
} nvrtc;

#define NVRTC_DECLARE(field, symbol, result, parameters) result symbol parameters;
MO_NVRTC_FUNCTIONS(NVRTC_DECLARE)
#undef NVRTC_DECLARE

static int nvrtc_fails(void)
{
    return nvrtc.countdown >= 0 && nvrtc.countdown-- == 0 ? 6 : 0;
}

const char *nvrtcGetErrorString(int result)
{
    return result == 6 ? "NVRTC_ERROR_COMPILATION" : "?";
}

int nvrtcVersion(int *major, int *minor)
{
    *major = nvrtc.major;
    *minor = 5;
    return nvrtc_fails();
}

int nvrtcGetNumSupportedArchs(int *out)
{
    *out = nvrtc.architecture_count;
    return nvrtc_fails();
}

int nvrtcGetSupportedArchs(int *out)
{
    memcpy(out, nvrtc.architectures, (size_t)nvrtc.architecture_count * sizeof *out);
    return nvrtc_fails();
}

int nvrtcCreateProgram(mo_nvrtc_handle *out, const char *source, const char *name, int headers,
                       const char *const *texts, const char *const *names)
{
    (void)source, (void)name, (void)headers, (void)texts, (void)names;
    if (nvrtc_fails())
        return 6;
    *out = (mo_nvrtc_handle)(uintptr_t)0x99;
    nvrtc.programs++;
    return 0;
}

int nvrtcDestroyProgram(mo_nvrtc_handle *program)
{
    *program = NULL;
    nvrtc.programs--;
    return 0;
}

int nvrtcCompileProgram(mo_nvrtc_handle program, int count, const char *const *options)
{
    (void)program;
    nvrtc.options[0] = 0;
    for (int i = 0; i < count; i++)
        snprintf(nvrtc.options + strlen(nvrtc.options), sizeof nvrtc.options - strlen(nvrtc.options), "%s%s",
                 i ? " " : "", options[i]);
    nvrtc.compiled++;
    return nvrtc_fails();
}

#define FAKE_LOG "line 7: a made-up error"

int nvrtcGetProgramLogSize(mo_nvrtc_handle program, size_t *out)
{
    (void)program;
    *out = sizeof FAKE_LOG;
    return 0;
}

int nvrtcGetProgramLog(mo_nvrtc_handle program, char *out)
{
    (void)program;
    memcpy(out, FAKE_LOG, sizeof FAKE_LOG);
    return 0;
}

int nvrtcGetPTXSize(mo_nvrtc_handle program, size_t *out)
{
    return nvrtcGetCUBINSize(program, out);
}

int nvrtcGetPTX(mo_nvrtc_handle program, char *out)
{
    return nvrtcGetCUBIN(program, out);
}

int nvrtcGetCUBINSize(mo_nvrtc_handle program, size_t *out)
{
    (void)program;
    *out = strlen(nvrtc.image) + 1;
    return nvrtc_fails();
}

int nvrtcGetCUBIN(mo_nvrtc_handle program, char *out)
{
    (void)program;
    strcpy(out, nvrtc.image);
    return nvrtc_fails();
}

/* NVRTC 13.5 for the architectures 75, 80, 90 and 120. */
static void nvrtc_reset(void)
{
    CHECK_EQ(nvrtc.programs, 0);
    nvrtc = (struct fake_nvrtc){.major = 13,
                                .image = "image:made",
                                .architectures = {75, 80, 90, 120},
                                .architecture_count = 4,
                                .countdown = -1};
}

#endif
