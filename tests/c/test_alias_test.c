/* Over the simulated device: coherent as it is, and with stale aliases. */
#include "driver/alias_test.h"

#include "base/hostmem.h"
#include "child.h"
#include "driver/kernel_module.h"
#include "fake_nvrtc.h"
#include "simulated_contract.h"

static mo_detail detail;

static void configure(const char *image)
{
    static const mo_kernel_settings settings = {
        .no_image = true, .nvrtc_paths = {FAKE_NVRTC_PATH}, .nvrtc_path_count = 1};

    nvrtc_reset();
    nvrtc.image = image;
    CHECK_EQ(mo_kernels_configure(&settings, NULL), MO_OK);
}

/* With the kernels loaded, so that what is live is the test's. */
static mo_driver *ready(void)
{
    const mo_kernel_module *kernels = NULL;

    device();
    configure(NVRTC_KERNELS);
    CHECK_EQ(mo_kernels_get(0, &kernels, &detail), MO_OK);
    return &first.table;
}

#define CHECK_LIVE(before)                                                                                   \
    do {                                                                                                     \
        const simcuda_live after_ = live_on(0);                                                              \
        CHECK(memcmp(&after_, &(before), sizeof after_) == 0);                                               \
    } while (0)

static uint64_t calls_of(const char *name)
{
    return simulated_devices()->calls(name);
}

/* ---- in processes of their own, so before this one has a device ---------------------------------------------------------- */

static void stale_in_child(void)
{
    simulated_device *d = simulated_library();
    const char *why = d->activate("memory=67108864 stale_aliases=1");
    mo_driver *m = &first.table;
    const mo_kernel_module *kernels = NULL;

    if (why)
        TEST_FAIL("%s", why);
    CHECK_EQ(d->api.init(0), CUDA_SUCCESS);
    CHECK_EQ(mo_driver_cuda_open(&d->api, 0, &first, &detail), MO_OK);
    configure(NVRTC_KERNELS);
    CHECK_EQ(mo_kernels_get(0, &kernels, &detail), MO_OK);
    simcuda_counts before, after;
    CHECK_EQ(d->stats(0, &before), 0);
    CHECK_EQ(m->test_aliases(m, &detail), MO_CORRUPT);
    CHECK_EQ(detail.status, MO_CORRUPT);
    CHECK(strstr(detail.text, "on one stream, round 1 of 198") && strstr(detail.text, "a memset wrote"));
    CHECK_EQ(d->stats(0, &after), 0);
    CHECK(memcmp(&before.live, &after.live, sizeof after.live) == 0);
}

TEST(a_device_with_stale_aliases_fails)
{
    CHECK_CHILD(stale_in_child);
}

static void first_load_in_child(void)
{
    const contract_device *c = contract();
    mo_driver *m = &first.table;

    configure(NVRTC_KERNELS);
    begin_capture(c->stream);
    const mo_status status = m->test_aliases(m, &detail); /* which loads the kernels */
    end_capture(c->stream);
    if (status)
        TEST_FAIL("%s", detail.text);
    CHECK(mo_kernels_peek(0) != NULL);
}

TEST(the_kernels_may_be_loaded_during_the_capture)
{
    CHECK_CHILD(first_load_in_child);
}

static void no_kernels_in_child(void)
{
    mo_driver *m = device();
    const simcuda_live before = live_on(0);

    configure("no image");
    CHECK_EQ(simulated_devices()->fail("cuModuleLoadDataEx", 0, UINT64_MAX, CUDA_ERROR_NO_BINARY_FOR_GPU), 0);
    const mo_status status = m->test_aliases(m, &detail);
    CHECK(status && status != MO_CORRUPT);
    CHECK(strstr(detail.text, "memopt's CUDA kernels cannot be loaded"));
    CHECK_EQ(m->test_aliases(m, NULL), status);
    CHECK_LIVE(before);
}

TEST(without_kernels_it_cannot_be_run_and_says_so)
{
    CHECK_CHILD(no_kernels_in_child);
}

/* ---- here --------------------------------------------------------------------------------------------------------------- */

TEST(memory_that_is_coherent_passes_and_nothing_stays)
{
    mo_driver *m = ready();
    const simcuda_live before = live_on(0);
    const size_t host = mo_host_live();
    const uint64_t sets = calls_of("cuMemsetD8Async"), copies = calls_of("cuMemcpyDtoDAsync_v2"),
                   launches = calls_of("cuLaunchKernel"), graphs = calls_of("cuGraphLaunch"),
                   waits = calls_of("cuStreamWaitEvent"), whole = calls_of("cuCtxSynchronize");

    if (m->test_aliases(m, &detail))
        TEST_FAIL("%s", detail.text);
    CHECK_LIVE(before);
    CHECK_EQ(mo_host_live(), host);
    /* Three ways to write, two to read, on one stream, on two and in a graph. */
    CHECK_EQ(calls_of("cuMemsetD8Async") - sets, MO_ALIAS_ROUNDS / 3);
    CHECK_EQ(calls_of("cuMemcpyDtoDAsync_v2") - copies, MO_ALIAS_ROUNDS / 3 + MO_ALIAS_ROUNDS / 2);
    CHECK_EQ(calls_of("cuLaunchKernel") - launches, MO_ALIAS_ROUNDS / 3 + MO_ALIAS_ROUNDS / 2);
    CHECK_EQ(calls_of("cuGraphLaunch") - graphs, 1);
    CHECK_EQ(calls_of("cuStreamWaitEvent") - waits, MO_ALIAS_ROUNDS / 3);
    CHECK_EQ(calls_of("cuCtxSynchronize"), whole);
}

/* ---- what is stale is seen ------------------------------------------------------------------------------------------------ */

/* One operation in turn does nothing, as if what it wrote, or read, were not what the others see. */
static struct {
    uint64_t calls, lost; /* of those three functions, in their order */
    mo_cuda_api api;      /* the device's */
} losing;

static bool lose(void)
{
    return losing.calls++ == losing.lost;
}

static CUresult lossy_set(CUdeviceptr to, unsigned char value, size_t size, CUstream stream)
{
    return lose() ? CUDA_SUCCESS : losing.api.memory_set(to, value, size, stream);
}

static CUresult lossy_copy(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    return lose() ? CUDA_SUCCESS : losing.api.copy_on_device(to, from, size, stream);
}

static CUresult lossy_launch(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                             unsigned by, unsigned bz, unsigned shared, CUstream stream, void **arguments,
                             void **extra)
{
    return lose() ? CUDA_SUCCESS
                  : losing.api.launch(function, gx, gy, gz, bx, by, bz, shared, stream, arguments, extra);
}

TEST(each_write_and_each_read_counts)
{
    mo_driver *m = ready();
    static const char *const sections[] = {"(on one stream,", "(on two streams,", "(in a captured graph,"};
    mo_cuda_api lossy;

    losing.api = lossy = *first.api;
    lossy.memory_set = lossy_set;
    lossy.copy_on_device = lossy_copy;
    lossy.launch = lossy_launch;
    first.api = &lossy;
    for (losing.lost = 0; losing.lost < 2 * MO_ALIAS_ROUNDS; losing.lost++) {
        char round[32];
        losing.calls = 0;
        const mo_status status = m->test_aliases(m, &detail);
        snprintf(round, sizeof round, "round %d of", (int)losing.lost / 2 + 1);
        if (status != MO_CORRUPT || !strstr(detail.text, round) ||
            !strstr(detail.text, sections[losing.lost / 2 / (MO_ALIAS_ROUNDS / 3)]))
            TEST_FAIL("operation %d lost: %s %s", (int)losing.lost, mo_status_name(status), detail.text);
    }
    CHECK_EQ(losing.calls, 2 * MO_ALIAS_ROUNDS);
    losing.lost = UINT64_MAX;
    CHECK_EQ(m->test_aliases(m, NULL), MO_OK); /* none is lost */
    first.api = &simulated_devices()->api;
}

/* Work waits until somebody waits for it (lazy), so that a missing event is seen: the two streams run in an order that
 * nothing else than the events decides. */
static CUresult no_wait(CUstream stream, CUevent event, unsigned flags)
{
    (void)stream, (void)event, (void)flags;
    return CUDA_SUCCESS;
}

TEST(without_the_events_the_streams_are_not_in_order)
{
    mo_driver *m = ready();
    mo_cuda_api unordered = *first.api;

    unordered.stream_wait = no_wait;
    first.api = &unordered;
    const mo_status status = m->test_aliases(m, &detail);
    first.api = &simulated_devices()->api;
    CHECK_EQ(status, MO_CORRUPT);
    CHECK(strstr(detail.text, "on two streams"));
}

/* ---- beside a capture ------------------------------------------------------------------------------------------------ */

TEST(it_runs_while_another_stream_is_captured_and_leaves_that_whole)
{
    const contract_device *c = contract();
    mo_driver *m = ready();
    uint64_t id = 0;

    begin_capture(c->stream); /* global mode */
    const mo_status status = m->test_aliases(m, &detail);
    CHECK_OK(m->capture_id(m, c->stream, NULL, &id));
    end_capture(c->stream);
    if (status)
        TEST_FAIL("%s", detail.text);
    CHECK(id != 0);
}

/* ---- what cannot be had ---------------------------------------------------------------------------------------------- */

TEST(a_driver_that_lacks_a_function_or_virtual_memory_is_told)
{
    mo_driver *m = ready();
    mo_cuda_api older = *first.api;
    const size_t granularity = m->granularity;

    older.graph_instantiate = NULL; /* CUDA 11.2, 11.3 */
    first.api = &older;
    CHECK_EQ(m->test_aliases(m, &detail), MO_NO_SYMBOL);
    CHECK(strstr(detail.text, "lacks a function"));
    first.api = &simulated_devices()->api;
    m->granularity = 0;
    CHECK_EQ(m->test_aliases(m, &detail), MO_UNSUPPORTED);
    CHECK(strstr(detail.text, "virtual memory"));
    m->granularity = granularity;
}

TEST(a_failure_of_host_memory_is_told)
{
    mo_driver *m = ready();
    const simcuda_live before = live_on(0);
    const size_t host = mo_host_live();

    mo_host_fail_after(0);
    const mo_status status = m->test_aliases(m, &detail);
    mo_host_fail_never();
    CHECK_EQ(status, MO_NO_HOST_MEMORY);
    CHECK_EQ(mo_host_live(), host);
    CHECK_LIVE(before);
}

/* Every driver call that it makes, failing in turn: each failure is heard where it may change the outcome, and whatever it
 * comes to, nothing stays. */
TEST(each_call_failing_in_turn_leaves_nothing_behind)
{
    static const struct {
        const char *name;
        bool releases; /* and does so when it is tried again, unheard */
    } functions[] = {
        {"cuMemAddressReserve", false},
        {"cuMemCreate", false},
        {"cuMemMap", false},
        {"cuMemSetAccess", false},
        {"cuStreamCreate", false},
        {"cuEventCreate", false},
        {"cuMemcpyHtoDAsync_v2", false},
        {"cuMemcpyDtoHAsync_v2", false},
        {"cuMemsetD8Async", false},
        {"cuMemcpyDtoDAsync_v2", false},
        {"cuLaunchKernel", false},
        {"cuEventRecord", false},
        {"cuStreamWaitEvent", false},
        {"cuStreamBeginCapture_v2", false},
        {"cuStreamEndCapture", false},
        {"cuGraphInstantiateWithFlags", false},
        {"cuGraphLaunch", false},
        {"cuCtxGetCurrent", true},     /* of the releases' own */
        {"cuStreamSynchronize", true}, /* the first of them is heard, as of all that are false */
        {"cuGraphExecDestroy", true},
        {"cuGraphDestroy", true},
        {"cuStreamDestroy_v2", true},
        {"cuEventDestroy_v2", true},
        {"cuMemUnmap", true},
        {"cuMemRelease", true},
        {"cuMemAddressFree", true},
    };
    mo_driver *m = ready();
    const simcuda_live before = live_on(0);
    const size_t host = mo_host_live();
    size_t total = 0;

    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        const uint64_t start = calls_of(functions[i].name);
        CHECK_OK(m->test_aliases(m, NULL));
        const uint64_t calls = calls_of(functions[i].name) - start;
        CHECK(calls > 0);
        total += calls;
        for (uint64_t after = 0; after < calls; after++) {
            CHECK_EQ(simulated_devices()->fail(functions[i].name, after, 1, CUDA_ERROR_UNKNOWN), 0);
            const mo_status status = m->test_aliases(m, &detail);
            fail_never();
            if (status == MO_CORRUPT || (!status && !functions[i].releases))
                TEST_FAIL("%s failing after %d: %s", functions[i].name, (int)after, mo_status_name(status));
            CHECK_EQ(mo_host_live(), host);
            CHECK_LIVE(before);
        }
    }
    CHECK(total > 550 && total < 700);
    CHECK_OK(m->test_aliases(m, NULL));
}

TEST_MAIN
