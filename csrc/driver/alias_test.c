#include "driver/alias_test.h"

#include <string.h>

#include "../kernels/widen.cuh"
#include "base/hostmem.h"
#include "base/size.h"
#include "driver/context.h"
#include "driver/kernel_module.h"

#define SIZE    256 /* bytes that are written and read */
#define SECTION (MO_ALIAS_ROUNDS / 3)
#define THREADS 32

/* What the handle holds. Every byte that is not of `shared` is used by the first address alone. */
typedef struct contents {
    MO_ALIGNED(16) unsigned char shared[SIZE]; /* written by the first address, read by the second */
    MO_ALIGNED(16) unsigned char patterns[MO_ALIAS_ROUNDS][SIZE];
    MO_ALIGNED(16) unsigned char results[MO_ALIAS_ROUNDS][SIZE];
    struct {
        float mean, deviation;
    } widen;
} contents;

typedef struct alias_test {
    mo_driver *driver;
    const mo_cuda_api *api;
    CUfunction widen;
    size_t granule; /* bytes of the handle */
    mo_address first, second;
    CUstream streams[2];
    CUevent event;
    contents *host; /* as it is on the device at the beginning, and in the end */
} alias_test;

#define AT(t, member) ((t)->first + offsetof(contents, member))

/* ---- what writes and reads ------------------------------------------------------------------------------------- */

typedef enum way { SET, COPY, KERNEL } way; /* a read is one of the latter two */

static const char *const way_names[] = {"memset", "copy", "kernel"};

static way written_by(int round)
{
    return (way)(round % 3);
}

static way read_by(int round)
{
    return round / 3 % 2 ? KERNEL : COPY;
}

/* Never that of the round before. Repeated, it is a normal float, which the kernel copies as it is. */
static unsigned char pattern(int round)
{
    return (unsigned char)(1 + round % 126);
}

static CUresult move(const alias_test *t, way by, CUdeviceptr to, CUdeviceptr from, CUstream stream)
{
    mo_widen_launch launch = {.table = AT(t, widen),
                              .source = from,
                              .target = to,
                              .count = SIZE / sizeof(float),
                              .inner = 1,
                              .channels = 1,
                              .scale = 1,
                              .aligned = 1,
                              .source_kind = MO_NUMBER_F32,
                              .target_kind = MO_F32};
    void *arguments[] = {&launch};

    if (by == COPY)
        return t->api->copy_on_device(to, from, SIZE, stream);
    return t->api->launch(t->widen, 1, 1, 1, THREADS, 1, 1, /* shared_bytes */ 0, stream, arguments, NULL);
}

static CUresult run_round(const alias_test *t, int round, CUstream writer, CUstream reader)
{
    const CUdeviceptr to = AT(t, shared), from = t->second + offsetof(contents, shared);
    CUresult code = written_by(round) == SET ? t->api->memory_set(to, pattern(round), SIZE, writer)
                                             : move(t, written_by(round), to, AT(t, patterns[round]), writer);

    if (!code && writer != reader) {
        code = t->api->event_record(t->event, writer);
        if (!code)
            code = t->api->stream_wait(reader, t->event, 0);
    }
    return code ? code : move(t, read_by(round), AT(t, results[round]), from, reader);
}

/* ---- the sections: on one stream, on two, in a graph --------------------------------------------------------------- */

/* Twice, where it fails: what fails once may not leak. */
#define RELEASE(call)                                                                                        \
    do {                                                                                                     \
        if (call)                                                                                            \
            (void)(call);                                                                                    \
    } while (0)

/* From `round` on. Each stream writes in turn, behind its own read: so the reads are ordered, too. */
static CUresult run_section(const alias_test *t, int round, int streams)
{
    CUresult code = CUDA_SUCCESS;

    for (int i = 0; i < SECTION && !code; i++)
        code = run_round(t, round + i, t->streams[i % streams], t->streams[(i + 1) % streams]);
    return code;
}

static CUresult run_in_graph(const alias_test *t, int round)
{
    const CUstream stream = t->streams[0];
    CUgraph graph = NULL;
    CUgraphExec executable = NULL;
    CUresult code = t->api->begin_capture(stream, CU_STREAM_CAPTURE_MODE_RELAXED), ended;

    if (code)
        return code;
    code = run_section(t, round, 1);
    ended = t->api->end_capture(stream, &graph);
    if (ended)
        (void)t->api->end_capture(stream, &graph);
    if (!code)
        code = ended;
    if (!code)
        code = t->api->graph_instantiate(&executable, graph, 0);
    if (!code)
        code = t->api->graph_launch(executable, stream);
    if (executable) { /* what was launched runs to its end */
        RELEASE(t->api->graph_exec_destroy(executable));
    }
    if (graph) {
        RELEASE(t->api->graph_destroy(graph));
    }
    return code;
}

static mo_status compare(const alias_test *t, mo_detail *detail)
{
    static const char *const sections[] = {"on one stream", "on two streams", "in a captured graph"};

    for (int i = 0; i < MO_ALIAS_ROUNDS; i++)
        for (int byte = 0; byte < SIZE; byte++)
            if (t->host->results[i][byte] != pattern(i))
                return mo_fail(
                    detail, MO_CORRUPT, 0,
                    "what a %s wrote by one address of memory that is mapped at two, a %s behind it "
                    "did not read by the other (%s, round %d of %d)",
                    way_names[written_by(i)], way_names[read_by(i)], sections[i / SECTION], i + 1,
                    MO_ALIAS_ROUNDS);
    return MO_OK;
}

/* With everything there. */
static mo_status run(const alias_test *t, mo_detail *detail)
{
    mo_driver *m = t->driver;
    mo_status status = m->copy_to_device(m, t->streams[0], t->first, t->host, sizeof *t->host, detail);

    if (!status)
        status = mo_cuda_check(t->api, run_section(t, 0, 1), "testing aliased memory on one stream", detail);
    if (!status)
        status = mo_cuda_check(t->api, run_section(t, SECTION, 2), "testing aliased memory on two streams",
                               detail);
    if (!status) /* the last round of the two streams ended on the first */
        status =
            mo_cuda_check(t->api, run_in_graph(t, 2 * SECTION), "testing aliased memory in a graph", detail);
    if (!status)
        status = m->copy_to_host(m, t->streams[0], t->host, t->first, sizeof *t->host, detail);
    if (!status)
        status =
            mo_cuda_check(t->api, t->api->stream_synchronize(t->streams[0]), "cuStreamSynchronize", detail);
    return status ? status : compare(t, detail);
}

/* ---- what it needs ----------------------------------------------------------------------------------------------------- */

static mo_status load_kernel(alias_test *t, mo_detail *detail)
{
    const mo_kernel_module *kernels = NULL;
    const mo_status status = mo_kernels_get(t->driver->device, &kernels, detail);

    if (!status)
        t->widen = kernels->functions[MO_KERNEL_WIDEN];
    return status;
}

static void fill(contents *host)
{
    memset(host, 0, sizeof *host);
    for (int i = 0; i < MO_ALIAS_ROUNDS; i++)
        memset(host->patterns[i], pattern(i), SIZE);
    host->widen.deviation = 1;
}

/* In the device's context. */
static mo_status run_with_memory(alias_test *t, mo_detail *detail)
{
    mo_driver *m = t->driver;
    mo_physical handle = 0;
    mo_address range = 0;
    mo_event *event = NULL;
    int mapped = 0, streams = 0;
    mo_status status = m->reserve(m, 2 * t->granule, detail, &range);

    if (!status)
        status = m->create(m, t->granule, detail, &handle);
    for (; mapped < 2 && !status; mapped += !status)
        status = m->map(m, range + (size_t)mapped * t->granule, t->granule, handle, detail);
    if (!status)
        status = m->grant(m, range, 2 * t->granule, detail);
    for (; streams < 2 && !status; streams += !status)
        status = m->stream_create(m, detail, (mo_stream *)&t->streams[streams]);
    if (!status)
        status = m->event_create(m, detail, &event);
    if (!status) {
        t->first = range;
        t->second = range + t->granule;
        t->event = (CUevent)event;
        status = run(t, detail);
    }
    for (int i = 0; i < streams; i++) { /* what was queued uses the memory below, and what is of the host */
        RELEASE(t->api->stream_synchronize(t->streams[i]));
        RELEASE(m->stream_destroy(m, t->streams[i], NULL));
    }
    if (event) {
        RELEASE(m->event_destroy(m, event, NULL));
    }
    if (mapped) {
        RELEASE(m->unmap(m, range, (size_t)mapped * t->granule, NULL));
    }
    if (handle) {
        RELEASE(m->release(m, handle, NULL));
    }
    if (range) {
        RELEASE(m->unreserve(m, range, 2 * t->granule, NULL));
    }
    return status;
}

mo_status mo_alias_test(mo_driver_cuda *device, mo_detail *detail)
{
    const mo_cuda_api *api = device->api;
    alias_test t = {.driver = &device->table, .api = api};
    mo_context_scope scope;
    mo_status status;

    if (!t.driver->granularity)
        return mo_fail(detail, MO_UNSUPPORTED, 0, "the device has no virtual memory management");
    if (!api->memory_set || !api->copy_on_device || !api->begin_capture || !api->end_capture ||
        !api->graph_instantiate || !api->graph_launch || !api->graph_exec_destroy || !api->graph_destroy)
        return mo_fail(detail, MO_NO_SYMBOL, 0, "the driver lacks a function that the test needs");
    if (!mo_align_up_ok(sizeof(contents), t.driver->granularity, &t.granule))
        return mo_fail(detail, MO_OVERFLOW, 0, "a granularity of %zu bytes", t.driver->granularity);
    status = mo_cuda_check(api, mo_context_enter(device, &scope), "cuCtxPushCurrent", detail);
    if (status)
        return status;
    status = load_kernel(&t, detail);
    t.host = status ? NULL : mo_host_alloc(sizeof *t.host);
    if (!status && !t.host)
        status = mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory for %zu bytes", sizeof *t.host);
    if (!status) {
        fill(t.host);
        status = run_with_memory(&t, detail);
    }
    mo_host_free(t.host);
    mo_context_leave(&scope);
    return status;
}
