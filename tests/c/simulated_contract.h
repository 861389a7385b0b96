/* The simulated device as the device of driver_contract.h: what test_driver_cuda.c and test_context.c run on.
 */
#ifndef MEMOPT_SIMULATED_CONTRACT_H
#define MEMOPT_SIMULATED_CONTRACT_H

#include "driver/driver_cuda.h"
#include "driver_contract.h"
#include "simulated_device.h"

static mo_driver_cuda first, second; /* of devices 0 and 1 */

static mo_driver *device(void)
{
    simulated_device *sim = simulated_devices();
    mo_detail detail;
    if (!first.api && (mo_driver_cuda_open(&sim->api, 0, &first, &detail) != MO_OK ||
                       mo_driver_cuda_open(&sim->api, 1, &second, &detail) != MO_OK))
        TEST_FAIL("%s", detail.text);
    return &first.table;
}

__attribute__((unused)) static simcuda_live live_on(int ordinal)
{
    simcuda_counts counts;
    CHECK_EQ(simulated_devices()->stats(ordinal, &counts), 0);
    return counts.live;
}

static void nothing(void *unused)
{
    (void)unused;
}

/* A program that uses streams has the context current. */
#define IN_CONTEXT(call)                                                                                     \
    do {                                                                                                     \
        CUcontext popped_;                                                                                   \
        CHECK_EQ(simulated_devices()->api.context_push(first.context), CUDA_SUCCESS);                        \
        const CUresult code_ = (call);                                                                       \
        simulated_devices()->api.context_pop(&popped_);                                                      \
        CHECK_EQ(code_, CUDA_SUCCESS);                                                                       \
    } while (0)

static void submit(mo_stream stream)
{
    IN_CONTEXT(simulated_devices()->host_function(stream, nothing, NULL));
}

static void finish(mo_stream stream)
{
    simulated_devices()->progress(stream, -1);
}

static void begin_capture(mo_stream stream)
{
    IN_CONTEXT(simulated_devices()->begin_capture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
}

/* It fails where the capture was broken. */
static void end_capture(mo_stream stream)
{
    CUgraph graph = NULL;
    IN_CONTEXT(simulated_devices()->end_capture(stream, &graph));
    CHECK(graph);
    IN_CONTEXT(simulated_devices()->graph_destroy(graph));
}

static size_t live(void)
{
    const simcuda_live l = live_on(0);
    return l.reservations + l.handles + l.mappings + l.allocations + l.events + l.host_allocations +
           l.streams;
}

/* Everything that the table calls, and that a session of the contract goes through. */
static const char *const used[] = {
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuStreamWaitEvent",
    "cuStreamGetCaptureInfo_v3",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuCtxSynchronize",
    "cuMemGetInfo_v2",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuThreadExchangeStreamCaptureMode",
    "cuCtxPopCurrent_v2",
    NULL,
};

static const char *call_name(int call)
{
    return used[call];
}

static uint64_t calls(int call)
{
    return simulated_devices()->calls(used[call]);
}

static void fail(int call, uint64_t after)
{
    CHECK_EQ(simulated_devices()->fail(used[call], after, 1, CUDA_ERROR_UNKNOWN), 0);
}

/* A failure of putting back what the thread had before: it comes after the call has done its work. The
 * capture mode is exchanged on the way in (heard) and on the way out (not). */
static bool unheard(int call, uint64_t after)
{
    return strcmp(used[call], "cuCtxPopCurrent_v2") == 0 ||
           (strcmp(used[call], "cuThreadExchangeStreamCaptureMode") == 0 && after % 2 == 1);
}

static void fail_never(void)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    simulated_devices()->fail_clear();
    simulated_devices()->set_current(NULL); /* what a failed pop or exchange left */
    CHECK_EQ(simulated_devices()->api.capture_mode(&mode), CUDA_SUCCESS);
}

static const contract_device *contract(void)
{
    static contract_device d = {
        .submit = submit,
        .finish = finish,
        .begin_capture = begin_capture,
        .end_capture = end_capture,
        .live = live,
        .call_name = call_name,
        .calls = calls,
        .fail = fail,
        .unheard = unheard,
        .fail_never = fail_never,
    };
    if (!d.driver) {
        simulated_device *sim = simulated_devices();
        d.driver = device();
        IN_CONTEXT(sim->stream_create((CUstream *)&d.stream, CU_STREAM_DEFAULT));
        IN_CONTEXT(sim->stream_create((CUstream *)&d.other, CU_STREAM_DEFAULT));
    }
    return &d;
}

/* Every call of the table where the driver is gone: what releases is content, all else is MO_DRIVER. */
__attribute__((unused)) static void check_gone(const contract_device *c)
{
    mo_driver *m = c->driver;
    const mo_address a = 2 << 20;
    mo_address out = 77;
    mo_physical h = 77;
    mo_event *e = (mo_event *)77;
    mo_stream stream = (mo_stream)77;
    char byte[1];
    void *pinned = byte;
    uint64_t id = 77;
    size_t free_bytes = 77, total = 77;
    mo_detail detail;

    CHECK_OK(m->unreserve(m, a, 2 << 20, NULL));
    CHECK_OK(m->release(m, 5, NULL));
    CHECK_OK(m->unmap(m, a, 2 << 20, NULL));
    CHECK_OK(m->segment_free(m, a, NULL));
    CHECK_OK(m->event_destroy(m, e, NULL));
    CHECK_EQ(m->reserve(m, 2 << 20, &detail, &out), MO_DRIVER);
    CHECK(detail.text[0]);
    CHECK_EQ(m->create(m, 2 << 20, NULL, &h), MO_DRIVER);
    CHECK_EQ(m->map(m, a, 2 << 20, 5, NULL), MO_DRIVER);
    CHECK_EQ(m->grant(m, a, 2 << 20, NULL), MO_DRIVER);
    CHECK_EQ(m->test_aliases(m, &detail), MO_DRIVER);
    CHECK_EQ(m->segment_alloc(m, 100, NULL, &out), MO_DRIVER);
    CHECK_EQ(m->event_create(m, NULL, &e), MO_DRIVER);
    CHECK_EQ(m->event_record(m, e, c->stream, NULL), MO_DRIVER);
    CHECK_EQ(m->event_query(m, e, NULL), MO_DRIVER);
    CHECK_EQ(m->stream_wait(m, c->stream, e, NULL), MO_DRIVER);
    CHECK_EQ(m->capture_id(m, c->stream, NULL, &id), MO_DRIVER);
    CHECK_EQ(m->synchronize(m, NULL), MO_DRIVER);
    CHECK_OK(m->stream_destroy(m, c->stream, NULL));
    CHECK_OK(m->pinned_free(m, pinned, NULL));
    CHECK_EQ(m->stream_create(m, NULL, &stream), MO_DRIVER);
    CHECK_EQ(m->pinned_alloc(m, 100, NULL, &pinned), MO_DRIVER);
    CHECK_EQ(m->copy_to_host(m, c->stream, byte, a, 1, NULL), MO_DRIVER);
    CHECK_EQ(m->copy_to_device(m, c->stream, a, byte, 1, NULL), MO_DRIVER);
    CHECK(stream == (mo_stream)77 && pinned == byte);
    CHECK_EQ(m->memory_info(m, NULL, &free_bytes, &total), MO_DRIVER);
    CHECK(out == 77 && h == 77 && e == (mo_event *)77 && id == 77 && free_bytes == 77 && total == 77);
    CHECK(m->now(m) > 0);
}

#endif
