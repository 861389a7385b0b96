#include "driver/nvrtc_api.h"

#include "base/hostmem.h"
#include "fake_nvrtc.h"
#include "test.h"

static mo_nvrtc_api opened(void)
{
    static const char *const paths[] = {FAKE_NVRTC_PATH};
    mo_nvrtc_api api;

    nvrtc_reset();
    CHECK_EQ(mo_nvrtc_open(paths, 1, &api, NULL), MO_OK);
    CHECK_EQ(api.major, 13);
    CHECK_EQ(api.minor, 5);
    return api;
}

TEST(the_first_library_that_is_whole_is_taken)
{
    static const char *const paths[] = {"/nowhere/libnvrtc.so.13", "libm.so.6", FAKE_NVRTC_PATH};
    mo_nvrtc_api api;
    mo_detail detail = {0};

    nvrtc_reset();
    CHECK_EQ(mo_nvrtc_open(paths, 3, &api, &detail), MO_OK);
    CHECK_EQ(mo_nvrtc_open(paths, 1, &api, &detail), MO_NO_LIBRARY);
    CHECK(strstr(detail.text, "/nowhere/libnvrtc.so.13") &&
          strstr(detail.text, "pip install nvidia-cuda-nvrtc"));
    CHECK_EQ(mo_nvrtc_open(paths + 1, 1, &api, &detail), MO_NO_SYMBOL);
    CHECK(strstr(detail.text, "libm.so.6") && strstr(detail.text, "nvrtcGetErrorString"));
    CHECK_EQ(mo_nvrtc_open(NULL, 0, &api, &detail), MO_NO_LIBRARY);
}

TEST(long_paths_that_all_fail_are_reported_as_far_as_they_fit)
{
    char path[900];
    const char *paths[] = {path, path, path};
    mo_nvrtc_api api;
    mo_detail detail = {0};

    memset(path, 'p', sizeof path);
    path[0] = '/';
    path[sizeof path - 1] = 0;
    CHECK_EQ(mo_nvrtc_open(paths, 3, &api, &detail), MO_NO_LIBRARY);
    CHECK(strlen(detail.text) < sizeof detail.text && strstr(detail.text, "pip install"));
}

static void chooses(int device, int architecture, int ptx)
{
    mo_nvrtc_api api = opened();
    mo_nvrtc_target target = {0};

    CHECK_EQ(mo_nvrtc_choose(&api, device, &target, NULL), MO_OK);
    CHECK_EQ(target.architecture, architecture);
    CHECK_EQ(target.ptx, ptx);
}

TEST(machine_code_is_made_for_the_nearest_architecture_of_the_same_major)
{
    chooses(75, 75, 0);
    chooses(80, 80, 0);
    chooses(86, 80, 0);
    chooses(89, 80, 0);
    chooses(121, 120, 0);
}

TEST(a_device_newer_than_the_compiler_gets_ptx_of_the_newest_below_it)
{
    chooses(103, 90, 1);
    chooses(130, 120, 1);
}

TEST(a_device_older_than_all_is_unsupported)
{
    mo_nvrtc_api api = opened();
    mo_nvrtc_target target;
    mo_detail detail = {0};

    CHECK_EQ(mo_nvrtc_choose(&api, 70, &target, &detail), MO_UNSUPPORTED);
    CHECK(strstr(detail.text, "7.0") && strstr(detail.text, "7.5") && strstr(detail.text, "13.5"));
    nvrtc.architecture_count = 0;
    CHECK_EQ(mo_nvrtc_choose(&api, 80, &target, &detail), MO_COMPILER);
    nvrtc.architecture_count = 1000;
    CHECK_EQ(mo_nvrtc_choose(&api, 80, &target, &detail), MO_COMPILER);
}

TEST(the_options_passed_are_those_of_the_key)
{
    mo_nvrtc_api api = opened();
    char options[MO_NVRTC_OPTIONS_SIZE];
    void *image = NULL;
    size_t size = 0;

    for (int ptx = 0; ptx < 2; ptx++) {
        const mo_nvrtc_target target = {.architecture = 120, .ptx = ptx};
        mo_nvrtc_options(target, options);
        CHECK(strstr(options, ptx ? "compute_120" : "sm_120"));
        CHECK_EQ(mo_nvrtc_compile(&api, "text", target, &image, &size, NULL), MO_OK);
        CHECK_STR(nvrtc.options, options);
        CHECK_STR(image, "image:made");
        CHECK_EQ(size, sizeof "image:made");
        mo_host_free(image);
    }
}

TEST(a_failure_in_any_call_is_reported_and_leaks_nothing)
{
    mo_nvrtc_api api = opened();
    const size_t before = mo_host_live();
    void *image = NULL;
    size_t size = 0;
    mo_detail detail = {0};

    for (int n = 0;; n++) {
        nvrtc.countdown = n;
        mo_status status =
            mo_nvrtc_compile(&api, "text", (mo_nvrtc_target){.architecture = 80}, &image, &size, &detail);
        CHECK_EQ(nvrtc.programs, 0);
        if (nvrtc.countdown >= 0) {
            CHECK_EQ(status, MO_OK);
            CHECK_EQ(n, 4); /* create, compile, size, image */
            mo_host_free(image);
            break;
        }
        CHECK_EQ(status, MO_COMPILER);
        CHECK(strstr(detail.text, n == 1 ? FAKE_LOG : "nvrtc") && strstr(detail.text, "sm_80"));
        CHECK_EQ(mo_host_live(), before);
    }
    nvrtc.countdown = -1;
    mo_host_fail_after(0);
    mo_status status =
        mo_nvrtc_compile(&api, "text", (mo_nvrtc_target){.architecture = 80}, &image, &size, &detail);
    mo_host_fail_never();
    CHECK_EQ(status, MO_NO_HOST_MEMORY);
    CHECK_EQ(mo_host_live(), before);
}

TEST_MAIN
