#include "driver/kernel_module.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/hostmem.h"
#include "child.h"
#include "fake_cuda.h"
#include "fake_nvrtc.h"
#include "simcuda/kernels.h"
#include "simulated_device.h"

/* The kernels' own text, for a device on which they compute. */
#include "csrc/simcuda/kernel_bodies.c"
#include "csrc/simcuda/device_grid.c"

#define SOURCE "the source"

static const mo_kernel_image good = {"image:embedded", 14, SOURCE, sizeof SOURCE - 1};
static const mo_kernel_image bad = {"refused", 7, SOURCE, sizeof SOURCE - 1};
static const mo_kernel_image none = {"", 0, SOURCE, sizeof SOURCE - 1};

static char folder[64];
static mo_kernel_settings settings;
static mo_kernel_module module;
static mo_detail detail;

/* ---- the fake driver, with memory that is there and kernels that compute --------------------------------- */

static sim_body bodies[MO_KERNEL_COUNT];
static const char
    *dead; /* an image whose kernel number dead_kernel does nothing, or all where that is negative */
static int dead_kernel;
static bool image_is_dead; /* the loaded one */
#define LOG_ROOM 400       /* bytes that the loader gives the log */
static size_t log_length;  /* of the next image's error log */
static int launches;

bool sim_kernel_emulate(const char *name, sim_body body, int count, const size_t *sizes)
{
    (void)count, (void)sizes;
    for (int i = 0; i < MO_KERNEL_COUNT; i++)
        if (strcmp(name, mo_kernel_name((mo_kernel)i)) == 0)
            bodies[i] = body;
    return true;
}

static CUresult load_image(CUmodule *out, const void *image, unsigned count, CUjit_option *names,
                           void **values)
{
    for (unsigned i = 0; i < count && log_length; i++)
        if (names[i] == CU_JIT_ERROR_LOG_BUFFER)
            memset(values[i], 'z', log_length < LOG_ROOM ? log_length : LOG_ROOM);
    log_length = 0;
    image_is_dead = dead && strcmp(image, dead) == 0;
    return fake_module_load(out, image, count, names, values);
}

static CUresult allocate(CUdeviceptr *out, size_t size)
{
    if (fake_fails())
        return fake.code;
    *out = (CUdeviceptr)(uintptr_t)aligned_alloc(256, (size + 255) / 256 * 256);
    fake.blocks++;
    return CUDA_SUCCESS;
}

static CUresult release(CUdeviceptr address)
{
    free((void *)(uintptr_t)address);
    fake.blocks--;
    return CUDA_SUCCESS;
}

static int streams; /* live */

FAKE(*out = (CUstream)(uintptr_t)0x50; (void)flags; streams++;, stream_create, CUstream *out, unsigned flags)
FAKE((void)stream; memcpy((void *)(uintptr_t)to, from, size);
     , to_device, CUdeviceptr to, const void *from, size_t size, CUstream stream)
FAKE((void)stream; memcpy(to, (const void *)(uintptr_t)from, size);
     , to_host, void *to, CUdeviceptr from, size_t size, CUstream stream)

static CUresult destroy_stream(CUstream stream)
{
    (void)stream;
    streams--;
    return CUDA_SUCCESS;
}

static CUresult launch_kernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                              unsigned by, unsigned bz, unsigned shared, CUstream stream, void **arguments,
                              void **extra)
{
    (void)shared, (void)stream, (void)extra;
    if (fake_fails())
        return fake.code;
    launches++;
    for (int i = 0; i < MO_KERNEL_COUNT; i++)
        if ((uintptr_t)function == 0xF000 + strlen(mo_kernel_name((mo_kernel)i)) &&
            !(image_is_dead && (dead_kernel < 0 || dead_kernel == i)))
            bodies[i](arguments, (unsigned[]){gx, gy, gz}, (unsigned[]){bx, by, bz});
    return CUDA_SUCCESS;
}

static mo_cuda_api computing;
static const mo_driver_cuda device = {.api = &computing, .context = FAKE_CONTEXT};

static void start(void)
{
    fake_reset();
    nvrtc_reset();
    sim_kernel_bodies_register();
    dead = NULL;
    launches = 0;
    computing = fake_api;
    computing.module_load = load_image;
    computing.memory_alloc = allocate;
    computing.memory_free = release;
    computing.stream_create = fake_stream_create;
    computing.stream_destroy = destroy_stream;
    computing.copy_to_device = fake_to_device;
    computing.copy_to_host = fake_to_host;
    computing.launch = launch_kernel;
    strcpy(folder, "/tmp/memopt-module-XXXXXX");
    CHECK(mkdtemp(folder));
    settings = (mo_kernel_settings){
        .nvrtc_paths = {FAKE_NVRTC_PATH}, .nvrtc_path_count = 1, .cache_directory = folder, .version = "1"};
    memset(&module, 0, sizeof module);
}

static void finish(void)
{
    char command[96];
    fake.modules = 0;
    CHECK_EQ(fake.blocks, 0);
    CHECK_EQ(streams, 0);
    CHECK_EQ(fake.depth, 0);
    CHECK(fake.current == NULL);
    CHECK_EQ(fake.mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    CHECK_EQ(system(command), 0);
}

static mo_status load(const mo_kernel_image *image)
{
    return mo_kernel_module_load(&device, image, &settings, &module, &detail);
}

static void loads(const mo_kernel_image *image, mo_kernel_origin origin, int compiled)
{
    mo_status status = load(image);
    if (status)
        TEST_FAIL("%s: %.400s", mo_status_name(status), detail.text);
    CHECK_STR(mo_kernel_origin_name(module.origin), mo_kernel_origin_name(origin));
    CHECK_EQ(nvrtc.compiled, compiled);
    for (int i = 0; i < MO_KERNEL_COUNT; i++)
        CHECK_EQ((uintptr_t)module.functions[i], 0xF000 + strlen(mo_kernel_name((mo_kernel)i)));
}

TEST(the_embedded_image_is_taken_without_asking_for_nvrtc)
{
    start();
    settings.nvrtc_path_count = 0;
    loads(&good, MO_KERNELS_EMBEDDED, 0);
    CHECK_STR(module.note, "");
    CHECK_EQ(fake.modules, 1);
    CHECK_EQ(launches, 0); /* nobody else can have made it */
    CHECK_EQ(mo_kernel_module_unload(&device, &module, NULL), MO_OK);
    CHECK_EQ(fake.modules, 0);
    finish();
}

TEST(a_refused_image_is_compiled_once_and_then_comes_from_the_cache)
{
    static const CUresult refusals[] = {CUDA_ERROR_NO_BINARY_FOR_GPU,
                                        CUDA_ERROR_INVALID_IMAGE,
                                        CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
                                        CUDA_ERROR_INVALID_PTX,
                                        CUDA_ERROR_JIT_COMPILER_NOT_FOUND,
                                        CUDA_ERROR_INVALID_SOURCE,
                                        CUDA_ERROR_FILE_NOT_FOUND,
                                        CUDA_ERROR_OPERATING_SYSTEM,
                                        (CUresult)699,
                                        CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
                                        CUDA_ERROR_UNKNOWN,
                                        (CUresult)77777};
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        char code[24];
        start();
        fake.refusal = refusals[i];
        snprintf(code, sizeof code, "(%d)", (int)refusals[i]);
        loads(&bad, MO_KERNELS_COMPILED, 1);
        CHECK_EQ(module.cache, MO_CACHE_MISSING);
        CHECK(module.stored);
        CHECK(strstr(module.note, "rejected the embedded image") && strstr(module.note, code));
        loads(&bad, MO_KERNELS_CACHED, 1);
        CHECK_EQ(module.cache, MO_CACHE_HIT);
        finish();
    }
}

TEST(the_note_keeps_the_code_of_a_refusal_beside_a_long_log)
{
    start();
    log_length = 1000;
    loads(&bad, MO_KERNELS_COMPILED, 1);
    CHECK(strstr(module.note, "(209)") && strstr(module.note, "zzzz"));
    CHECK(strstr(module.note, "(209)") < strstr(module.note, "zzzz"));
    finish();
}

TEST(a_build_without_an_image_compiles)
{
    start();
    loads(&none, MO_KERNELS_COMPILED, 1);
    CHECK(strstr(module.note, "without nvcc"));
    CHECK_EQ(fake.loads, 1);
    finish();
}

TEST(an_image_that_is_left_out_is_not_asked_for)
{
    start();
    settings.no_image = true;
    loads(&bad, MO_KERNELS_COMPILED, 1);
    CHECK(strstr(module.note, "left out"));
    CHECK_EQ(fake.loads, 1);
    finish();
}

TEST(source_version_architecture_and_compiler_each_make_a_key_of_their_own)
{
    const mo_kernel_image other = {"", 0, "another source", 14};

    start();
    loads(&none, MO_KERNELS_COMPILED, 1);
    loads(&other, MO_KERNELS_COMPILED, 2);
    settings.version = "2";
    loads(&none, MO_KERNELS_COMPILED, 3);
    fake.architecture = 90;
    loads(&none, MO_KERNELS_COMPILED, 4);
    nvrtc.major = 12;
    loads(&none, MO_KERNELS_COMPILED, 5);
    loads(&none, MO_KERNELS_CACHED, 5);
    finish();
}

TEST(two_devices_of_one_major_share_a_cached_image)
{
    start();
    loads(&none, MO_KERNELS_COMPILED, 1);
    fake.architecture = 86;
    loads(&none, MO_KERNELS_CACHED, 1);
    CHECK_EQ(module.architecture, 86);
    CHECK_EQ(module.target.architecture, 80);
    finish();
}

TEST(a_damaged_cache_file_is_rebuilt_and_said_so)
{
    char command[160];

    start();
    loads(&bad, MO_KERNELS_COMPILED, 1);
    snprintf(command, sizeof command, "for f in %s/*; do truncate -s -1 $f; done", folder);
    CHECK_EQ(system(command), 0);
    loads(&bad, MO_KERNELS_COMPILED, 2);
    CHECK_EQ(module.cache, MO_CACHE_DAMAGED);
    CHECK(module.stored && strstr(module.note, "rebuilt"));
    loads(&bad, MO_KERNELS_CACHED, 2);
    finish();
}

TEST(a_cached_image_that_this_driver_refuses_is_rebuilt)
{
    start();
    loads(&none, MO_KERNELS_COMPILED, 1);
    /* A driver that takes "image:…" no more, as after a downgrade; what is compiled now it takes. */
    snprintf(fake.missing, sizeof fake.missing, "%s", mo_kernel_name(MO_KERNEL_COUNT - 1));
    CHECK_EQ(load(&none), MO_DRIVER); /* both the cached and the new one lack a kernel */
    CHECK(strstr(detail.text, mo_kernel_name(MO_KERNEL_COUNT - 1)) &&
          strstr(detail.text, "update the NVIDIA driver"));
    CHECK_EQ(nvrtc.compiled, 2);
    fake.missing[0] = 0;
    loads(&none, MO_KERNELS_CACHED,
          2); /* what the driver did not take was not stored over what it once took */
    finish();
}

TEST(a_cached_image_of_which_a_kernel_does_nothing_is_rebuilt_and_said_so)
{
    for (int i = -1; i < MO_KERNEL_COUNT; i++) {
        start();
        nvrtc.image = "image:planted";
        loads(&none, MO_KERNELS_COMPILED, 1);
        nvrtc.image = "image:made";
        dead = "image:planted";
        dead_kernel = i;
        loads(&none, MO_KERNELS_COMPILED, 2);
        CHECK_EQ(module.cache, MO_CACHE_DAMAGED);
        CHECK(module.stored && strstr(module.note, "computes wrong results"));
        CHECK(strstr(module.note, mo_kernel_name(i < 0 ? (mo_kernel)0 : (mo_kernel)i)));
        CHECK_EQ(fake.modules, 2); /* the two that serve, and not the planted one */
        loads(&none, MO_KERNELS_CACHED, 2);
        CHECK(!strstr(module.note, "wrong"));
        finish();
    }
}

TEST(a_compiler_that_makes_kernels_that_do_nothing_is_an_error_and_nothing_is_cached)
{
    start();
    nvrtc.image = dead = "image:of a stand-in";
    dead_kernel = -1;
    CHECK_EQ(load(&none), MO_CORRUPT);
    CHECK(strstr(detail.text, "NVRTC 13.5") && strstr(detail.text, "MEMOPT_NVRTC"));
    CHECK_EQ(fake.modules, 0);
    nvrtc.image = "image:made";
    loads(&none, MO_KERNELS_COMPILED, 2);
    CHECK_EQ(module.cache, MO_CACHE_MISSING);
    finish();
}

TEST(without_a_cache_or_with_one_that_cannot_be_written_the_kernels_still_load)
{
    start();
    settings.cache_directory = NULL;
    loads(&bad, MO_KERNELS_COMPILED, 1);
    CHECK_EQ(module.cache, MO_CACHE_OFF);
    CHECK(!module.stored && !strstr(module.note, "cached"));
    settings.cache_directory = "/proc/memopt";
    loads(&bad, MO_KERNELS_COMPILED, 2);
    CHECK(!module.stored && strstr(module.note, "cannot be cached in /proc/memopt"));
    finish();
}

TEST(when_nothing_serves_the_error_tells_everything_tried_and_the_mend)
{
    start();
    settings.nvrtc_paths[0] = "/nowhere/libnvrtc.so.13";
    CHECK_EQ(load(&bad), MO_NO_LIBRARY);
    CHECK(strstr(detail.text, "compute capability 8.0") &&
          strstr(detail.text, "rejected the embedded image"));
    CHECK(strstr(detail.text, "/nowhere/libnvrtc.so.13") &&
          strstr(detail.text, "pip install nvidia-cuda-nvrtc"));
    settings.nvrtc_paths[0] = FAKE_NVRTC_PATH;
    nvrtc.image = "refused, too";
    CHECK_EQ(load(&bad), MO_DRIVER);
    CHECK(strstr(detail.text, "driver rejects the output of NVRTC 13.5"));
    CHECK_EQ(module.origin, MO_KERNELS_NOT_LOADED); /* an output is only written on success */
    finish();
}

TEST(an_error_of_the_device_ends_the_search)
{
    start();
    for (int code = CUDA_ERROR_ILLEGAL_ADDRESS; code <= CUDA_ERROR_LAUNCH_FAILED; code++) {
        fake.refusal = (CUresult)code;
        CHECK_EQ(load(&bad), MO_DRIVER);
        CHECK_EQ(detail.code, code);
        CHECK_EQ(nvrtc.compiled, 0);
    }
    fake.refusal = CUDA_ERROR_OUT_OF_MEMORY;
    CHECK_EQ(load(&bad), MO_NO_DEVICE_MEMORY);
    CHECK_EQ(nvrtc.compiled, 0);
    finish();
}

/* Each of the three ways, with every driver call failing in turn. */
TEST(failing_each_driver_call_in_turn_leaves_no_module_and_the_context_as_it_was)
{
    for (int way = 0; way < 3; way++)
        for (int n = 0, done = 0; !done; n++) {
            const size_t before = mo_host_live();
            start();
            if (way == 1)
                loads(&none, MO_KERNELS_COMPILED, 1);
            fake.modules = 0;
            fake.countdown = n;
            fake.code = CUDA_ERROR_OUT_OF_MEMORY;
            mo_status status = load(way == 0 ? &good : &none);
            done = fake.countdown >= 0;
            CHECK_EQ(status, done ? MO_OK : MO_NO_DEVICE_MEMORY);
            CHECK_EQ(fake.modules, done ? 1 : 0);
            CHECK_EQ(mo_host_live(), before);
            CHECK(n < 100);
            finish();
        }
}

TEST(a_failure_of_host_memory_leaves_nothing_behind)
{
    const size_t before = mo_host_live();

    for (int n = 0, done = 0; !done; n++) {
        start();
        mo_host_fail_after((uint64_t)n);
        mo_status status = load(&none);
        mo_host_fail_never();
        done = status == MO_OK;
        CHECK(done || (status == MO_NO_HOST_MEMORY && fake.modules == 0));
        CHECK_EQ(mo_host_live(), before);
        CHECK(n < 100);
        finish();
    }
    for (int n = 0, done = 0; !done; n++) {
        const mo_kernel_settings full = {
            .nvrtc_paths = {"a", "b"}, .nvrtc_path_count = 2, .cache_directory = "c", .version = "d"};
        mo_host_fail_after((uint64_t)n);
        done = mo_kernels_configure(&full, &detail) == MO_OK;
        mo_host_fail_never();
        CHECK_EQ(mo_host_live(), done ? before + 4 : before);
    }
    CHECK_EQ(mo_kernels_configure(&(mo_kernel_settings){0}, &detail), MO_OK);
    CHECK_EQ(mo_host_live(), before);
}

TEST(too_many_paths_and_foreign_device_numbers_are_refused)
{
    const mo_kernel_module *found = NULL;

    CHECK_EQ(mo_kernels_configure(&(mo_kernel_settings){.nvrtc_path_count = MO_NVRTC_PATHS_MAX + 1}, &detail),
             MO_INVALID);
    CHECK_EQ(mo_kernels_get(-1, &found, &detail), MO_NO_DEVICE);
    CHECK_EQ(mo_kernels_get(1000000, &found, &detail), MO_NO_DEVICE);
    CHECK(strstr(detail.text, "1000000"));
    CHECK(mo_kernels_peek(-1) == NULL && mo_kernels_peek(1000000) == NULL && mo_kernels_peek(0) == NULL);
}

TEST(the_source_of_this_build_has_every_kernel)
{
    const mo_kernel_image image = mo_kernel_image_get();

    for (int i = 0; i < MO_KERNEL_COUNT; i++)
        CHECK(strstr(image.source, mo_kernel_name((mo_kernel)i)));
}

/* ---- the process's modules, each in a process of its own ----------------------------------------------- */

/* A simulated device that takes no image, and the NVRTC above. */
static simulated_device *refusing_device(void)
{
    simulated_device *sim = simulated_devices();
    nvrtc_reset();
    settings = (mo_kernel_settings){.nvrtc_paths = {FAKE_NVRTC_PATH}, .nvrtc_path_count = 1};
    CHECK_EQ(mo_kernels_configure(&settings, &detail), MO_OK);
    CHECK_EQ(sim->fail("cuModuleLoadDataEx", 0, UINT64_MAX, CUDA_ERROR_NO_BINARY_FOR_GPU), 0);
    return sim;
}

static void remembers_in_child(void)
{
    const mo_kernel_module *found = NULL;
    simulated_device *sim = refusing_device();
    const unsigned start_count = mo_kernels_compilations();
    mo_detail again;

    CHECK_EQ(mo_kernels_get(0, &found, &detail), MO_DRIVER);
    CHECK_EQ(mo_kernels_compilations() - start_count, 1);
    const uint64_t before = sim->calls("cuModuleLoadDataEx");
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(mo_kernels_get(0, &found, &again), MO_DRIVER);
        CHECK_EQ(again.status, MO_DRIVER);
        CHECK_EQ(again.code, detail.code);
        CHECK_STR(again.text, detail.text);
        CHECK_EQ(mo_kernels_get(0, &found, NULL), MO_DRIVER);
    }
    CHECK_EQ(mo_kernels_compilations() - start_count, 1);
    CHECK_EQ(sim->calls("cuModuleLoadDataEx"), before);
    CHECK_EQ(mo_kernels_get(1, &found, NULL), MO_DRIVER); /* a device's failure is its own */
    CHECK_EQ(mo_kernels_compilations() - start_count, 2);
    CHECK_EQ(mo_kernels_configure(&settings, NULL), MO_OK);
    CHECK_EQ(mo_kernels_get(0, &found, &detail), MO_DRIVER);
    CHECK_EQ(mo_kernels_compilations() - start_count, 3);
    CHECK(!found);
    sim->fail_clear();
    nvrtc.image = NVRTC_KERNELS;
    CHECK_EQ(mo_kernels_get(0, &found, &detail), MO_DRIVER); /* nobody told it that anything changed */
    CHECK_EQ(mo_kernels_configure(&settings, NULL), MO_OK);
    CHECK_EQ(mo_kernels_get(0, &found, &detail), MO_OK);
    CHECK(found && found == mo_kernels_peek(0));
}

TEST(a_search_that_failed_is_not_repeated_until_the_settings_are_given_again)
{
    CHECK_CHILD(remembers_in_child);
}

static void memory_in_child(void)
{
    const mo_kernel_module *found = NULL;
    simulated_device *sim = refusing_device();
    CHECK_EQ(sim->fail("cuModuleLoadDataEx", 0, 1, CUDA_ERROR_OUT_OF_MEMORY), 0);
    CHECK_EQ(mo_kernels_get(0, &found, &detail), MO_NO_DEVICE_MEMORY);
    CHECK_EQ(detail.status, MO_NO_DEVICE_MEMORY);
    nvrtc.image = NVRTC_KERNELS;
    CHECK_EQ(mo_kernels_get(0, &found, &detail), MO_OK);
    CHECK(found);
}

TEST(a_load_that_found_no_memory_is_tried_again)
{
    CHECK_CHILD(memory_in_child);
}

static void forked_grandchild(void)
{
    const mo_kernel_module *found = NULL;
    CHECK_EQ(mo_kernels_get(0, &found, &detail), MO_DRIVER);
    CHECK(strstr(detail.text, "'spawn'"));
    CHECK_EQ(mo_kernels_configure(&settings, &detail), MO_DRIVER);
    CHECK(strstr(detail.text, "'spawn'"));
    CHECK(!found);
}

static atomic_bool compiling;

/* In the middle of a load, so under the lock. */
static CUresult slow_load(CUmodule *out, const void *image, unsigned count, CUjit_option *names,
                          void **values)
{
    (void)out, (void)image, (void)count, (void)names, (void)values;
    atomic_store(&compiling, true);
    while (atomic_load(&compiling))
        usleep(1000);
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
}

static void *get_on_a_thread(void *unused)
{
    const mo_kernel_module *found = NULL;
    mo_kernels_get(0, &found, NULL);
    return unused;
}

static void forked_during_a_load_in_child(void)
{
    const mo_cuda_api *api;
    pthread_t loading;
    refusing_device();
    CHECK_EQ(mo_cuda_api_get(&api, NULL), MO_OK);
    ((mo_cuda_api *)api)->module_load = slow_load;
    CHECK_EQ(pthread_create(&loading, NULL, get_on_a_thread, NULL), 0);
    while (!atomic_load(&compiling))
        usleep(1000);
    child_end end = in_child(forked_grandchild);
    ((mo_cuda_api *)api)->module_load = simulated_devices()->api.module_load;
    atomic_store(&compiling, false);
    pthread_join(loading, NULL);
    if (!child_passed(&end))
        TEST_FAIL("the child ended with %#x: %.300s", end.status, end.said);
    CHECK_EQ(mo_kernels_configure(&settings, &detail), MO_OK); /* the parent goes on */
}

TEST(a_child_forked_while_another_thread_loads_kernels_is_told_so_and_does_not_hang)
{
    CHECK_CHILD(forked_during_a_load_in_child);
}

TEST_MAIN
