/* Events: what they mark, what queries and times say, and that destroying one changes nothing for those who
 * wait. */
#include "device.h"

static int ran;

static void count(void *unused)
{
    (void)unused;
    ran++;
}

static CUevent new_event(unsigned flags)
{
    CUevent event;

    OK(cuEventCreate(&event, flags));
    return event;
}

static CUstream new_stream(void)
{
    CUstream stream;

    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    return stream;
}

TEST(destroying_a_pending_event_runs_nothing_and_loses_nothing)
{
    open_device();
    simcuda_live before = live_now();
    simcuda_set_lazy(1);
    CUstream a = new_stream(), b = new_stream();
    CUevent event = new_event(CU_EVENT_DISABLE_TIMING);

    ran = 0;
    OK(cuLaunchHostFunc(a, count, NULL));
    OK(cuEventRecord(event, a));
    OK(cuStreamWaitEvent(b, event, 0));
    OK(cuEventDestroy_v2(event));
    CHECK_EQ(ran, 0);
    IS(cuStreamQuery(b), NOT_READY);
    CHECK_EQ(simcuda_progress(b, -1), 0); /* still ordered behind a */
    IS(cuEventQuery(event), INVALID_HANDLE);
    IS(cuEventRecord(event, a), INVALID_HANDLE);
    IS(cuStreamWaitEvent(b, event, 0), INVALID_HANDLE);
    IS(cuEventDestroy_v2(event), INVALID_HANDLE);
    OK(cuStreamSynchronize(b));
    CHECK_EQ(ran, 1);
    OK(cuStreamDestroy_v2(a));
    OK(cuStreamDestroy_v2(b));
    CHECK_LIVE(before);
}

TEST(a_wait_is_for_the_record_that_was_latest_when_it_was_queued)
{
    open_device();
    simcuda_set_lazy(1);
    CUstream a = new_stream(), b = new_stream();
    CUevent event = new_event(CU_EVENT_DISABLE_TIMING);

    ran = 0;
    OK(cuEventRecord(event, a));
    OK(cuStreamWaitEvent(b, event, 0));
    OK(cuLaunchHostFunc(a, count, NULL));
    OK(cuEventRecord(event, a));
    OK(cuStreamSynchronize(b)); /* needs the first record alone */
    CHECK_EQ(ran, 0);
    IS(cuEventQuery(event), NOT_READY);
    OK(cuEventSynchronize(event));
    CHECK_EQ(ran, 1);
    OK(cuEventDestroy_v2(event));
    OK(cuStreamDestroy_v2(a));
    OK(cuStreamDestroy_v2(b));
}

TEST(asking_on_and_on_is_waiting)
{
    open_device();
    simcuda_set_lazy(1);
    CUstream a = new_stream(), b = new_stream();
    CUevent event = new_event(CU_EVENT_DISABLE_TIMING);

    ran = 0;
    OK(cuLaunchHostFunc(a, count, NULL));
    OK(cuEventRecord(event, a));
    for (int i = 1; i < SIMCUDA_PATIENCE; i++)
        IS(cuEventQuery(event), NOT_READY);
    OK(cuLaunchHostFunc(b, count, NULL)); /* it has something else to do, so it is not waiting */
    for (int i = 1; i < SIMCUDA_PATIENCE; i++)
        IS(cuEventQuery(event), NOT_READY);
    CHECK_EQ(ran, 0);
    OK(cuEventQuery(event));
    CHECK_EQ(ran, 1); /* and what it does not depend on has not run */
    IS(cuStreamQuery(b), NOT_READY);
    OK(cuStreamSynchronize(b));
    OK(cuEventDestroy_v2(event));
    OK(cuStreamDestroy_v2(a));
    OK(cuStreamDestroy_v2(b));
}

TEST(an_event_never_recorded_is_complete)
{
    open_device();
    CUevent event = new_event(0);

    OK(cuEventQuery(event));
    OK(cuEventSynchronize(event));
    OK(cuStreamWaitEvent(NULL, event, 0));
    OK(cuEventDestroy_v2(event));
}

TEST(elapsed_time_needs_two_complete_timed_records)
{
    open_device();
    simcuda_set_lazy(1);
    CUstream stream = new_stream();
    CUevent first = new_event(0), second = new_event(0), untimed = new_event(CU_EVENT_DISABLE_TIMING);
    float milliseconds = -1;
    CUdeviceptr memory;
    const int64_t price = simcuda_price("device GiB", 640 * 1000 * 1000);
    CUresult (*elapsed_of_cuda_12)(float *, CUevent, CUevent) = cuEventElapsedTime;

    OK(cuMemAlloc_v2(&memory, 4 * MIB));
    IS(cuEventElapsedTime_v2(&milliseconds, first, second), INVALID_HANDLE); /* not recorded */
    OK(cuEventRecord(first, stream));
    OK(cuMemsetD8Async(memory, 1, 4 * MIB, stream));
    OK(cuEventRecord(second, stream));
    OK(cuEventRecord(untimed, stream));
    IS(cuEventElapsedTime_v2(&milliseconds, first, second), NOT_READY);
    CHECK_EQ(simcuda_progress(stream, 1), 1);
    OK(cuEventSynchronize(untimed));
    OK(cuEventElapsedTime_v2(&milliseconds, first, second));
    CHECK(milliseconds > 2.49f && milliseconds < 2.51f); /* the virtual clock's: at 640 ms a GiB */
    OK(elapsed_of_cuda_12(&milliseconds, second, first));
    CHECK(milliseconds < -2.49f);
    IS(cuEventElapsedTime_v2(&milliseconds, first, untimed), INVALID_HANDLE);
    IS(cuEventElapsedTime_v2(NULL, first, second), INVALID_VALUE);
    CHECK_EQ(simcuda_price("device GiB", price), 640 * 1000 * 1000);
    OK(cuMemFree_v2(memory));
    OK(cuEventDestroy_v2(first));
    OK(cuEventDestroy_v2(second));
    OK(cuEventDestroy_v2(untimed));
    OK(cuStreamDestroy_v2(stream));
}

TEST(bad_event_arguments_are_errors)
{
    open_device();
    CUevent event;
    CUstream stream = new_stream();

    IS(cuEventCreate(NULL, 0), INVALID_VALUE);
    IS(cuEventCreate(&event, 64), INVALID_VALUE);
    IS(cuEventCreate(&event, CU_EVENT_INTERPROCESS), INVALID_VALUE); /* needs DISABLE_TIMING */
    OK(cuEventCreate(&event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
    IS(cuEventRecord(NULL, stream), INVALID_HANDLE);
    IS(cuEventRecord((CUevent)stream, stream), INVALID_HANDLE); /* a handle of another kind */
    IS(cuEventRecord(event, (CUstream)event), INVALID_HANDLE);
    IS(cuEventRecordWithFlags(event, stream, 2), INVALID_VALUE);
    IS(cuStreamWaitEvent(stream, event, 2), INVALID_VALUE);
    OK(cuEventDestroy_v2(event));
    OK(cuStreamDestroy_v2(stream));
}

TEST(waits_between_devices_order_them)
{
    open_device();
    simcuda_set_lazy(1);
    CUstream stream_0 = new_stream(), stream_1;
    CUevent event = new_event(CU_EVENT_DISABLE_TIMING);
    CUcontext other;

    ran = 0;
    OK(cuLaunchHostFunc(stream_0, count, NULL));
    OK(cuEventRecord(event, stream_0));
    OK(cuDevicePrimaryCtxRetain(&other, 1));
    OK(cuCtxPushCurrent_v2(other));
    stream_1 = new_stream();
    OK(cuStreamWaitEvent(stream_1, event, 0));
    OK(cuStreamSynchronize(stream_1));
    CHECK_EQ(ran, 1);
    OK(cuStreamDestroy_v2(stream_1));
    OK(cuCtxPopCurrent_v2(NULL));
    OK(cuDevicePrimaryCtxRelease_v2(1));
    OK(cuEventDestroy_v2(event));
    OK(cuStreamDestroy_v2(stream_0));
}

TEST(stale_handles_never_name_a_later_event)
{
    open_device();
    CUevent old = new_event(0);

    OK(cuEventDestroy_v2(old));
    for (int i = 0; i < 1000; i++) {
        CUevent fresh = new_event(0);
        CHECK(fresh != old);
        IS(cuEventQuery(old), INVALID_HANDLE);
        OK(cuEventDestroy_v2(fresh));
    }
}

TEST_MAIN
