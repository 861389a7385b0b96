/* csrc/driver/context.c through the calls of mo_driver_cuda: what a call leaves of the thread's state, of a
 * capture that is going on, and of a process that was forked. */
#include "driver/context.h"

#include <pthread.h>
#include <stdatomic.h>

#include "child.h"
#include "driver/forked.h"
#include "simulated_contract.h"

/* First: its child is of a process that has not opened a device yet. */
static void forked_before_in_child(void)
{
    simulated_device *sim = simulated_library();
    pid_t child = fork();
    if (child == 0) { /* of a process that never opened a device: as good as any */
        mo_driver_cuda d;
        _exit(!sim->activate("devices=1") && sim->api.init(0) == CUDA_SUCCESS &&
                      mo_driver_cuda_open(&sim->api, 0, &d, NULL) == MO_OK
                  ? 0
                  : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK_EQ(status, 0);
}

TEST(a_child_of_a_process_that_never_used_cuda_can_use_it)
{
    CHECK_CHILD(forked_before_in_child);
}

/* ---- what the calling thread had stays ----------------------------------------------------------------- */

static CUcontext current(void)
{
    CUcontext now = (CUcontext)1;
    CHECK_EQ(simulated_devices()->api.context_current(&now), CUDA_SUCCESS);
    return now;
}

TEST(a_call_leaves_the_threads_context_as_it_was)
{
    const contract_device *c = contract();
    CUcontext const before[] = {NULL, first.context, second.context};
    for (int i = 0; i < 3; i++) {
        simulated_devices()->set_current(before[i]);
        CHECK_OK(contract_session(c));
        CHECK(current() == before[i]);
        mo_address a;
        CHECK(c->driver->segment_alloc(c->driver, (size_t)1 << 40, NULL, &a) ==
              MO_NO_DEVICE_MEMORY); /* nor does a failure */
        CHECK(current() == before[i]);
    }
    simulated_devices()->set_current(NULL);
}

TEST(nothing_is_pushed_where_the_context_is_current_already)
{
    simulated_device *sim = simulated_devices();
    const contract_device *c = contract();
    sim->set_current(first.context);
    const uint64_t pushes = sim->calls("cuCtxPushCurrent_v2"), pops = sim->calls("cuCtxPopCurrent_v2");
    CHECK_OK(contract_session(c));
    CHECK_EQ(sim->calls("cuCtxPushCurrent_v2"), pushes);
    CHECK_EQ(sim->calls("cuCtxPopCurrent_v2"), pops);
    sim->set_current(NULL);
}

TEST(a_call_acts_on_its_own_device_whichever_is_current)
{
    device();
    mo_address a;
    simulated_devices()->set_current(first.context);
    const uint64_t before = live_on(0).allocations;
    CHECK_OK(second.table.segment_alloc(&second.table, 1 << 20, NULL, &a));
    CHECK_EQ(live_on(0).allocations, before);
    CHECK_EQ(live_on(1).allocations, 1);
    CHECK_OK(second.table.segment_free(&second.table, a, NULL));
    mo_physical h;
    CHECK_OK(second.table.create(&second.table, 2 << 20, NULL, &h));
    CHECK_EQ(live_on(1).handles, 1);
    CHECK_OK(second.table.release(&second.table, h, NULL));
    simulated_devices()->set_current(NULL);
}

static void *session_on_a_thread(void *unused)
{
    mo_driver *m = &first.table;
    (void)unused;
    for (int i = 0, n = test_rounds(100, 20000); i < n; i++) {
        mo_address a;
        mo_physical h;
        mo_event *e;
        if (m->reserve(m, 2 << 20, NULL, &a) || m->create(m, 2 << 20, NULL, &h) ||
            m->map(m, a, 2 << 20, h, NULL) || m->grant(m, a, 2 << 20, NULL) || m->event_create(m, NULL, &e) ||
            m->event_query(m, e, NULL) || m->event_destroy(m, e, NULL) || m->unmap(m, a, 2 << 20, NULL) ||
            m->release(m, h, NULL) || m->unreserve(m, a, 2 << 20, NULL))
            return NULL;
    }
    return &first;
}

TEST(threads_that_never_saw_cuda_can_call)
{
    const contract_device *c = contract();
    const contract_state start = contract_look(c);
    pthread_t threads[4];
    void *done;
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, session_on_a_thread, NULL), 0);
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], &done);
        CHECK(done == &first);
    }
    CHECK_SAME(c, start);
}

/* ---- while a stream is captured ------------------------------------------------------------------------ */

TEST(a_capture_in_global_mode_ends_by_an_allocation_that_is_not_ours)
{
    simulated_device *sim = simulated_devices();
    const contract_device *c = contract();
    CUdeviceptr address = 0;
    CUgraph graph = NULL;
    begin_capture(c->stream);
    sim->set_current(first.context);
    CHECK(sim->api.memory_alloc(&address, 4096) != CUDA_SUCCESS);
    CHECK(sim->end_capture(c->stream, &graph) != CUDA_SUCCESS);
    sim->set_current(NULL);
}

TEST(a_capture_in_global_mode_survives_every_call_that_acquires_or_releases)
{
    const contract_device *c = contract();
    mo_driver *m = c->driver;
    const contract_state start = contract_look(c);
    const size_t g = m->granularity;
    size_t free_bytes, total;
    mo_event *kept = contract_event(m);

    begin_capture(c->stream);
    const mo_address a = contract_reserve(m, 2);
    const mo_physical h = contract_create(m, 2);
    contract_map(m, a, 2, h);
    mo_address segment;
    CHECK_OK(m->segment_alloc(m, 4096, NULL, &segment));
    mo_event *e = contract_event(m);
    CHECK_OK(m->event_record(m, e, c->other, NULL));
    CHECK_OK(m->event_query(m, kept, NULL));
    CHECK_OK(m->memory_info(m, NULL, &free_bytes, &total));
    CHECK_OK(m->event_destroy(m, e, NULL));
    CHECK_EQ(m->segment_alloc(m, (size_t)1 << 40, NULL, &segment),
             MO_NO_DEVICE_MEMORY); /* nor does a failure end it */
    CHECK_OK(m->unmap(m, a, 2 * g, NULL));
    CHECK_OK(m->release(m, h, NULL));
    CHECK_OK(m->unreserve(m, a, 2 * g, NULL));
    uint64_t id = 0;
    CHECK_OK(m->capture_id(m, c->stream, NULL, &id));
    CHECK(id != 0);
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    CHECK_EQ(simulated_devices()->api.capture_mode(&mode), CUDA_SUCCESS);
    CHECK_EQ(mode, CU_STREAM_CAPTURE_MODE_GLOBAL); /* the thread's own is back */
    end_capture(c->stream);
    CHECK_OK(m->segment_free(m, segment, NULL));
    CHECK_OK(m->event_destroy(m, kept, NULL));
    CHECK_OK(m->synchronize(m, NULL));
    CHECK_SAME(c, start);
}

/* ---- after a fork -------------------------------------------------------------------------------------- */

static void forked_child(void)
{
    const contract_device *c = contract();
    mo_driver_cuda d = {.handle = 77};
    mo_driver *m = NULL;
    mo_detail detail;
    uint64_t before[sizeof used / sizeof *used];

    for (int i = 0; used[i]; i++)
        before[i] = calls(i);
    CHECK(mo_forked());
    check_gone(c);
    c->driver->segment_alloc(c->driver, 100, &detail, &(mo_address){0});
    CHECK(strstr(detail.text, "forked") && strstr(detail.text, "'spawn'"));
    CHECK_EQ(mo_driver_cuda_open(first.api, 0, &d, &detail), MO_DRIVER);
    CHECK(strstr(detail.text, "'spawn'"));
    CHECK_EQ(d.handle, 77);
    CHECK_EQ(mo_driver_cuda_get(0, &m, &detail), MO_DRIVER);
    CHECK(strstr(detail.text, "'spawn'") && !m);
    CHECK_OK(mo_driver_cuda_close(&first, NULL));
    for (int i = 0; used[i]; i++)
        CHECK_EQ(calls(i), before[i]); /* the driver was not entered */
}

TEST(in_a_forked_child_calls_answer_without_entering_the_driver_and_say_what_to_do)
{
    contract();
    CHECK(!mo_forked());
    CHECK_CHILD(forked_child);
    CHECK(!mo_forked());
    CHECK_OK(contract_session(contract())); /* the parent goes on */
}

static atomic_bool stop;

static void *open_and_close(void *unused)
{
    mo_driver_cuda d;
    while (!atomic_load(&stop)) {
        if (mo_driver_cuda_open(first.api, 1, &d, NULL) == MO_OK)
            mo_driver_cuda_close(&d, NULL);
    }
    return unused;
}

TEST(a_fork_while_other_threads_are_in_the_driver_does_not_hang_the_child)
{
    pthread_t threads[2];
    contract();
    atomic_store(&stop, false);
    for (int i = 0; i < 2; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, open_and_close, NULL), 0);
    child_end end = {0};
    for (int i = 0, n = test_rounds(20, 500); i < n && child_passed(&end); i++)
        end = in_child(forked_child);
    atomic_store(&stop, true);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    if (!child_passed(&end))
        TEST_FAIL("the child ended with %#x: %.300s", end.status, end.said);
}

TEST_MAIN
