/* Order of work: within a stream, between streams, against the legacy stream, with user code running. Lazy
 * mode shows the order; work runs only when it is needed. */
#include "device.h"

enum { LOG = 64 };
static int log_of[LOG], logged; /* which operations ran, in order */

static void note(void *what)
{
    log_of[logged++] = (int)(intptr_t)what;
}

static void queue(CUstream stream, int what)
{
    OK(cuLaunchHostFunc(stream, note, (void *)(intptr_t)what));
}

static void begin_lazily(void)
{
    open_device();
    simcuda_set_lazy(1);
    logged = 0;
}

static CUstream new_stream(unsigned flags)
{
    CUstream stream;

    OK(cuStreamCreate(&stream, flags));
    return stream;
}

TEST(work_stays_pending_until_something_waits)
{
    begin_lazily();
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);

    queue(stream, 1);
    queue(stream, 2);
    IS(cuStreamQuery(stream), NOT_READY);
    CHECK_EQ(logged, 0);
    CHECK_EQ(live_now().pending, 2);
    CHECK_EQ(simcuda_progress(stream, 1), 1);
    CHECK_EQ(logged, 1);
    OK(cuStreamSynchronize(stream));
    CHECK(logged == 2 && log_of[0] == 1 && log_of[1] == 2);
    OK(cuStreamQuery(stream));
    CHECK_EQ(simcuda_progress(NULL, -1), 0);
    OK(cuStreamDestroy_v2(stream));
}

TEST(waiting_for_one_stream_leaves_others_pending)
{
    begin_lazily();
    CUstream a = new_stream(CU_STREAM_NON_BLOCKING), b = new_stream(CU_STREAM_NON_BLOCKING);

    queue(b, 2);
    queue(a, 1);
    OK(cuStreamSynchronize(a));
    CHECK(logged == 1 && log_of[0] == 1);
    OK(cuCtxSynchronize());
    CHECK_EQ(logged, 2);
    OK(cuStreamDestroy_v2(a));
    OK(cuStreamDestroy_v2(b));
}

TEST(the_legacy_stream_waits_for_blocking_streams_and_they_for_it)
{
    begin_lazily();
    CUstream blocking = new_stream(CU_STREAM_DEFAULT), second = new_stream(CU_STREAM_DEFAULT);
    CUstream free_running = new_stream(CU_STREAM_NON_BLOCKING);

    queue(blocking, 1);
    queue(free_running, 9);
    queue(NULL, 2);   /* waits for 1, not for 9 */
    queue(second, 3); /* waits for 2 */
    OK(cuStreamSynchronize(second));
    CHECK_EQ(logged, 3);
    CHECK(log_of[0] == 1 && log_of[1] == 2 && log_of[2] == 3);
    queue(CU_STREAM_LEGACY, 4);
    OK(cuStreamSynchronize(NULL));
    CHECK(logged == 4 && log_of[3] == 4);
    OK(cuStreamSynchronize(free_running));
    CHECK(logged == 5 && log_of[4] == 9);
    OK(cuStreamDestroy_v2(blocking));
    OK(cuStreamDestroy_v2(second));
    OK(cuStreamDestroy_v2(free_running));
}

TEST(blocking_streams_do_not_order_each_other)
{
    begin_lazily();
    CUstream a = new_stream(CU_STREAM_DEFAULT), b = new_stream(CU_STREAM_DEFAULT);

    queue(a, 1);
    queue(b, 2);
    OK(cuStreamSynchronize(b));
    CHECK(logged == 1 && log_of[0] == 2);
    OK(cuStreamDestroy_v2(a));
    OK(cuStreamDestroy_v2(b));
    OK(cuCtxSynchronize());
    CHECK_EQ(logged, 2);
}

static void *other_thread(void *context)
{
    if (cuCtxSetCurrent(context) == CUDA_SUCCESS &&
        cuLaunchHostFunc(CU_STREAM_PER_THREAD, note, (void *)2) == CUDA_SUCCESS)
        cuStreamSynchronize(CU_STREAM_PER_THREAD);
    return NULL;
}

TEST(per_thread_streams_are_the_threads_own_and_block_the_legacy_stream)
{
    begin_lazily();
    simcuda_live before = live_now();
    CUcontext context;
    pthread_t thread;

    OK(cuCtxGetCurrent(&context));
    queue(CU_STREAM_PER_THREAD, 1);
    CHECK_EQ(pthread_create(&thread, NULL, other_thread, context), 0);
    pthread_join(thread, NULL);
    CHECK(logged == 1 && log_of[0] == 2); /* the other thread's stream has run, ours has not */
    OK(cuStreamSynchronize(NULL));        /* nothing queued there, so nothing to wait for */
    CHECK_EQ(logged, 1);
    queue(NULL, 3);
    OK(cuStreamSynchronize(NULL));
    CHECK(logged == 3 && log_of[1] == 1 && log_of[2] == 3);
    CHECK_LIVE(before);
}

TEST(a_destroyed_stream_finishes_its_work)
{
    begin_lazily();
    simcuda_live before = live_now();
    CUstream a = new_stream(CU_STREAM_NON_BLOCKING), b = new_stream(CU_STREAM_NON_BLOCKING);
    CUevent event;

    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    queue(a, 1);
    OK(cuEventRecord(event, a));
    OK(cuStreamWaitEvent(b, event, 0));
    queue(b, 2);
    OK(cuStreamDestroy_v2(a));
    CHECK_EQ(logged, 0); /* destroying does not wait */
    IS(cuStreamQuery(a), INVALID_HANDLE);
    IS(cuStreamSynchronize(a), INVALID_HANDLE);
    IS(cuStreamDestroy_v2(a), INVALID_HANDLE);
    IS(cuLaunchHostFunc(a, note, NULL), INVALID_HANDLE);
    OK(cuStreamSynchronize(b));
    CHECK(logged == 2 && log_of[0] == 1 && log_of[1] == 2);
    OK(cuEventDestroy_v2(event));
    OK(cuStreamDestroy_v2(b));
    CHECK_LIVE(before);
}

TEST(long_chains_between_streams_need_no_deep_stack)
{
    begin_lazily();
    enum { LINKS = 20000 };
    CUstream stream[2] = {new_stream(CU_STREAM_NON_BLOCKING), new_stream(CU_STREAM_NON_BLOCKING)};
    CUevent event;

    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    for (int i = 0; i < LINKS; i++) {
        OK(cuEventRecord(event, stream[i % 2]));
        OK(cuStreamWaitEvent(stream[(i + 1) % 2], event, 0));
    }
    queue(stream[LINKS % 2], 1);
    OK(cuStreamSynchronize(stream[LINKS % 2]));
    CHECK_EQ(logged, 1);
    OK(cuCtxSynchronize());
    CHECK_EQ(live_now().pending, 0);
    OK(cuEventDestroy_v2(event));
    OK(cuStreamDestroy_v2(stream[0]));
    OK(cuStreamDestroy_v2(stream[1]));
}

static CUresult from_host_function[2];

static void calls_cuda(void *stream)
{
    CUdeviceptr address;

    from_host_function[0] = cuMemAlloc_v2(&address, 512);
    from_host_function[1] = cuStreamSynchronize(stream);
}

TEST(a_host_function_may_not_call_cuda)
{
    open_device();
    CUstream stream = new_stream(CU_STREAM_DEFAULT);

    OK(cuLaunchHostFunc(stream, calls_cuda, stream));
    OK(cuStreamSynchronize(stream));
    IS(from_host_function[0], NOT_PERMITTED);
    IS(from_host_function[1], NOT_PERMITTED);
    OK(cuStreamDestroy_v2(stream));
}

/* The order of locks that Python brings: one thread calls CUDA holding a lock, and user code of another needs
 * it. */
static pthread_mutex_t interpreter = PTHREAD_MUTEX_INITIALIZER;
static int entered;

static void needs_the_interpreter(void *unused)
{
    (void)unused;
    __atomic_store_n(&entered, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_lock(&interpreter);
    pthread_mutex_unlock(&interpreter);
}

static void *launches(void *context)
{
    CUstream stream;

    if (cuCtxSetCurrent(context) != CUDA_SUCCESS ||
        cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
        return NULL;
    cuLaunchHostFunc(stream, needs_the_interpreter, NULL);
    cuStreamSynchronize(stream);
    cuStreamDestroy_v2(stream);
    return NULL;
}

TEST(user_code_that_waits_for_a_lock_does_not_stop_other_threads)
{
    open_device();
    CUcontext context;
    CUdeviceptr address;
    pthread_t thread;

    OK(cuCtxGetCurrent(&context));
    entered = 0;
    pthread_mutex_lock(&interpreter);
    CHECK_EQ(pthread_create(&thread, NULL, launches, context), 0);
    while (!__atomic_load_n(&entered, __ATOMIC_SEQ_CST))
        usleep(100);
    OK(cuMemAlloc_v2(&address, 512)); /* would hang if the device were locked */
    pthread_mutex_unlock(&interpreter);
    pthread_join(thread, NULL);
    OK(cuMemFree_v2(address));
}

static void told(CUstream stream, CUresult status, void *data)
{
    (void)stream;
    *(CUresult *)data = status;
}

TEST(callbacks_learn_of_a_fault_and_host_functions_do_not_run_after_one)
{
    begin_lazily();
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    CUdeviceptr address;
    CUresult status = CUDA_ERROR_UNKNOWN;
    void *host;

    OK(cuStreamAddCallback(stream, told, &status, 0));
    OK(cuStreamSynchronize(stream));
    OK(status);
    OK(cuMemHostAlloc(&host, FRAME, 0));
    OK(cuMemAllocAsync(&address, FRAME, stream));
    OK(cuMemFreeAsync(address, stream));
    OK(cuMemcpyDtoHAsync_v2(host, address, 16, stream)); /* queued behind the free */
    queue(stream, 1);
    OK(cuStreamAddCallback(stream, told, &status, 0));
    IS(cuStreamSynchronize(stream), ILLEGAL_ADDRESS);
    IS(status, ILLEGAL_ADDRESS);
    CHECK_EQ(logged, 0);
    simcuda_forget_fault();
    OK(cuMemFreeHost(host));
    OK(cuStreamDestroy_v2(stream));
}

TEST(bad_stream_arguments_are_errors)
{
    open_device();
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    int priority;
    unsigned flags;
    unsigned long long id, legacy_id;

    IS(cuStreamCreate(NULL, 0), INVALID_VALUE);
    IS(cuStreamCreate(&stream, 2), INVALID_VALUE);
    IS(cuStreamDestroy_v2(NULL), INVALID_HANDLE);
    IS(cuStreamDestroy_v2(CU_STREAM_LEGACY), INVALID_HANDLE);
    IS(cuStreamDestroy_v2((CUstream)&stream), INVALID_HANDLE); /* a pointer is no handle */
    IS(cuStreamQuery((CUstream)0x1234), INVALID_HANDLE);
    IS(cuLaunchHostFunc(stream, NULL, NULL), INVALID_VALUE);
    OK(cuStreamGetFlags(stream, &flags));
    CHECK_EQ(flags, CU_STREAM_NON_BLOCKING);
    OK(cuStreamGetId(stream, &id));
    OK(cuStreamGetId(NULL, &legacy_id));
    CHECK(id != legacy_id);
    OK(cuStreamDestroy_v2(stream));
    OK(cuStreamCreateWithPriority(&stream, CU_STREAM_DEFAULT, -100));
    OK(cuStreamGetPriority(stream, &priority));
    CHECK_EQ(priority, -5); /* clamped to the greatest */
    OK(cuStreamDestroy_v2(stream));
}

TEST(a_copy_may_go_to_another_devices_stream_and_an_event_may_not)
{
    open_device();
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    CUcontext other;
    CUevent event;
    CUdeviceptr address;

    OK(cuMemAlloc_v2(&address, 512));
    OK(cuDevicePrimaryCtxRetain(&other, 1));
    OK(cuCtxPushCurrent_v2(other));
    OK(cuMemsetD8Async(address, 1, 512, stream));
    OK(cuEventCreate(&event, 0));
    IS(cuEventRecord(event, stream), INVALID_HANDLE); /* event and stream of different devices */
    OK(cuEventDestroy_v2(event));
    OK(cuCtxPopCurrent_v2(NULL));
    OK(cuDevicePrimaryCtxRelease_v2(1));
    OK(cuMemFree_v2(address));
    OK(cuStreamDestroy_v2(stream));
}

/* ---- random programs against a model ------------------------------------------------------------------ */
enum { STREAMS = 4, EVENTS = 4, STEPS = 40 };

/* What a step must come after: a step of its own stream, marks it waits for, and the legacy rules. */
typedef struct program {
    int count;
    struct {
        int stream;
        bool after[STEPS];
    } step[STEPS];
    bool ran[STEPS];
    int ran_count;
} program;

static program now;

static void check_order(void *step)
{
    int at = (int)(intptr_t)step;

    for (int before = 0; before < now.count; before++)
        if (now.step[at].after[before] && !now.ran[before])
            now.ran_count = -1000; /* out of order: seen at the end, as a test can't fail inside user code */
    now.ran[at] = true;
    now.ran_count++;
}

TEST(random_programs_run_in_an_order_their_dependencies_allow)
{
    open_device();
    uint64_t state = test_seed();
    simcuda_live before = live_now();

    for (int round = 0, rounds = test_rounds(200, 20000); round < rounds; round++) {
        CUstream stream[STREAMS] = {NULL, new_stream(0), new_stream(0), new_stream(CU_STREAM_NON_BLOCKING)};
        CUevent event[EVENTS];
        int point[EVENTS], waits[STREAMS][STEPS] = {
                               {0}}; /* event: steps 0..point-1 of its stream; what a stream waits for */
        int recorded_in[EVENTS];

        for (int i = 0; i < EVENTS; i++) {
            OK(cuEventCreate(&event[i], CU_EVENT_DISABLE_TIMING));
            point[i] = 0;
            recorded_in[i] = -1;
        }
        memset(&now, 0, sizeof now);
        simcuda_set_lazy(1);
        while (now.count < STEPS) {
            int s = (int)(test_random(&state) % STREAMS), e = (int)(test_random(&state) % EVENTS),
                at = now.count;
            switch (test_random(&state) % 8) {
            case 0:
                OK(cuEventRecord(event[e], stream[s]));
                point[e] = at;
                recorded_in[e] = s;
                break;
            case 1:
                OK(cuStreamWaitEvent(stream[s], event[e], 0));
                for (int i = 0; recorded_in[e] >= 0 && i < point[e]; i++)
                    waits[s][i] |= now.step[i].stream == recorded_in[e];
                break;
            case 2: /* a new event in its place: whoever waits for the old one goes on waiting */
                OK(cuEventDestroy_v2(event[e]));
                OK(cuEventCreate(&event[e], CU_EVENT_DISABLE_TIMING));
                recorded_in[e] = -1;
                break;
            case 3:
                simcuda_progress(test_random(&state) % 2 ? stream[1 + s % (STREAMS - 1)] : NULL, 1);
                break;
            default:
                now.step[at].stream = s;
                for (int i = 0; i < at; i++) {
                    int of = now.step[i].stream;
                    now.step[at].after[i] = of == s || waits[s][i] || (s == 0 && (of == 1 || of == 2)) ||
                                            (of == 0 && (s == 1 || s == 2));
                }
                now.count++; /* before it is queued: a wait's bound is a number of steps */
                OK(cuLaunchHostFunc(stream[s], check_order, (void *)(intptr_t)at));
            }
        }
        int asked = (int)(test_random(&state) % STREAMS);
        OK(cuStreamSynchronize(stream[asked]));
        for (int i = 0; i < now.count; i++)
            CHECK(now.step[i].stream != asked || now.ran[i]);
        OK(cuCtxSynchronize());
        CHECK_EQ(now.ran_count, STEPS);
        simcuda_set_lazy(0);
        for (int i = 1; i < STREAMS; i++)
            OK(cuStreamDestroy_v2(stream[i]));
        for (int i = 0; i < EVENTS; i++)
            OK(cuEventDestroy_v2(event[i]));
    }
    CHECK_LIVE(before);
}

TEST_MAIN
