/* csrc/simcuda/library_stub.S: functions that a simulated library lists and does not implement. They answer by the
 * library's own statuses, are remembered by name, and leave the caller's registers and stack as they were. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test.h"

#define CUBLAS_NOT_SUPPORTED 15

static void *device, *cublas;

/* The simulated libraries beside the one that the tests use. */
static void open_libraries(void)
{
    const char *given = getenv("MEMOPT_TEST_LIBCUDA");
    const char *path = given && *given ? given : "memopt/sim/cu13/sim_cuda.so";
    char beside[512];

    snprintf(beside, sizeof beside, "%.*s/sim_cublas.so", (int)(strrchr(path, '/') - path), path);
    device = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    cublas = device ? dlopen(beside, RTLD_NOW) : NULL;
    if (!cublas)
        TEST_FAIL("%s: `make` builds the simulated libraries", dlerror());
}

static void *function(void *library, const char *name)
{
    void *found = dlsym(library, name);
    if (!found)
        TEST_FAIL("no function %s", name);
    return found;
}

TEST(a_stub_answers_by_its_librarys_status_and_is_remembered)
{
    open_libraries();
    int (*unsupported)(void *, int, double) = function(cublas, "cublasXtCreate");
    int (*nothing)(void *, int) = function(cublas, "cublasCherkx");
    const char *(*text)(int) = function(cublas, "cublasGetStatusString");
    size_t (*missing)(char *, size_t) = function(device, "simcuda_missing");
    volatile long kept[4] = {1, 2, 3, 4};
    char names[4096] = "";

    for (int i = 0; i < 3; i++)
        CHECK_EQ(unsupported(NULL, i, 2.5), CUBLAS_NOT_SUPPORTED);
    CHECK_EQ(nothing(NULL, 1), 0);
    CHECK(strstr(text(3), "not supported"));
    CHECK_EQ(kept[0] + kept[1] + kept[2] + kept[3], 10);
    missing(names, sizeof names);
    CHECK(strstr(names, "cublasXtCreate"));
    CHECK(!strstr(names, "cublasCherkx"));
}

TEST_MAIN
