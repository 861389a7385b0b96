#include "calls.h"
#include "capture.h"
#include "clock.h"
#include "context.h"
#include "device.h"
#include "streams.h"

#include <fnmatch.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t user_code_done = PTHREAD_COND_INITIALIZER;
static bool forked;
static sim_call *calls; /* written by constructors, before there are threads */

void sim_lock(void)
{
    pthread_mutex_lock(&lock);
}

void sim_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

bool sim_forked(void)
{
    return forked;
}

void sim_wait_for_user_code(void)
{
    pthread_cond_wait(&user_code_done, &lock);
}

void sim_user_code_begin(void)
{
    sim_self()->in_user_code = true;
    sim_unlock();
}

void sim_user_code_end(void)
{
    sim_lock();
    sim_self()->in_user_code = false;
    pthread_cond_broadcast(&user_code_done);
}

/* fork() copies the calling thread alone. The lock is held across it, so that the child's copy of the device
 * is whole and its lock has an owner that can release it; where the parent has used the device, the child then
 * answers NOT_INITIALIZED to everything, as CUDA does, and else has a device of its own. The condition variable
 * may have had waiters, who are gone: it is made anew. */
static void after_fork_in_child(void)
{
    forked = forked || sim_initialised;
    for (int device = 0; sim_activated() && device < sim_device_count; device++)
        forked = forked || !sim_store_of_child(&sim_devices[device].store);
    user_code_done = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    sim_unlock();
}

__attribute__((constructor)) static void prepare_for_fork(void)
{
    pthread_atfork(sim_lock, sim_unlock, after_fork_in_child);
}

/* ---- a thread's own state --------------------------------------------------------------------------- */
static _Thread_local sim_thread self;
static pthread_key_t at_thread_exit;
static pthread_once_t key_once = PTHREAD_ONCE_INIT;

static void release_default_streams(void *thread)
{
    sim_thread *leaving = thread;

    sim_lock();
    for (int device = 0; device < SIM_MAX_DEVICES; device++)
        if (leaving->default_streams[device]) {
            sim_stream_destroy(leaving->default_streams[device]);
            leaving->default_streams[device] = NULL;
        }
    sim_unlock();
}

static void make_key(void)
{
    pthread_key_create(&at_thread_exit, release_default_streams);
}

sim_thread *sim_self(void)
{
    static uint64_t threads;

    if (!self.id) {
        self.id = __atomic_add_fetch(&threads, 1, __ATOMIC_RELAXED);
        pthread_once(&key_once, make_key);
        pthread_setspecific(at_thread_exit, &self);
    }
    return &self;
}

/* ---- counts and the fault plan ------------------------------------------------------------------------ */
void sim_calls_add(sim_call *call)
{
    call->next = calls;
    call->price = sim_price_of(call->name);
    calls = call;
}

static sim_call *find(const char *name)
{
    static const char *const suffixes[] = {"_v4", "_v3", "_v2", ""};
    char versioned[128];

    for (size_t i = 0; name && i < sizeof suffixes / sizeof *suffixes; i++) {
        snprintf(versioned, sizeof versioned, "%s%s", name, suffixes[i]);
        for (sim_call *call = calls; call; call = call->next)
            if (strcmp(call->name, versioned) == 0)
                return call;
    }
    return NULL;
}

void *sim_calls_function(const char *name)
{
    const sim_call *call = find(name);

    return call ? call->function : NULL;
}

/* The error a function most likely meets on a real device, for plans that name none. First match wins. */
static CUresult natural_error(const char *name)
{
    static const struct {
        const char *pattern;
        CUresult code;
    } rules[] = {
        {"nvml*", CUDA_ERROR_UNKNOWN},
        {"*Init", CUDA_ERROR_NO_DEVICE},
        {"*GetDeviceCount", CUDA_ERROR_NO_DEVICE},
        {"*AddressFree*", CUDA_ERROR_INVALID_VALUE},
        {"*Free*", CUDA_ERROR_INVALID_VALUE},
        {"*Release*", CUDA_ERROR_INVALID_VALUE},
        {"*Unmap*", CUDA_ERROR_INVALID_VALUE},
        {"*Destroy*", CUDA_ERROR_INVALID_HANDLE},
        {"*Unload*", CUDA_ERROR_INVALID_HANDLE},
        {"*Query*", CUDA_ERROR_NOT_READY},
        {"*ModuleGetFunction*", CUDA_ERROR_NOT_FOUND},
        {"*LibraryGetKernel*", CUDA_ERROR_NOT_FOUND},
        {"*ModuleLoad*", CUDA_ERROR_NO_BINARY_FOR_GPU},
        {"*LibraryLoad*", CUDA_ERROR_NO_BINARY_FOR_GPU},
        {"*Launch*", CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES},
        {"*[Aa]lloc*", CUDA_ERROR_OUT_OF_MEMORY},
        {"*Create*", CUDA_ERROR_OUT_OF_MEMORY},
        {"*Reserve*", CUDA_ERROR_OUT_OF_MEMORY},
        {"*MemMap*", CUDA_ERROR_OUT_OF_MEMORY},
        {"*SetAccess*", CUDA_ERROR_OUT_OF_MEMORY},
        {"*Register*", CUDA_ERROR_OUT_OF_MEMORY},
        {"*Instantiate*", CUDA_ERROR_OUT_OF_MEMORY},
        {"*BeginCapture*", CUDA_ERROR_ILLEGAL_STATE},
    };

    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (fnmatch(rules[i].pattern, name, 0) == 0)
            return rules[i].code;
    return CUDA_ERROR_UNKNOWN;
}

uint64_t simcuda_calls(const char *function)
{
    sim_lock();
    const sim_call *call = find(function);
    uint64_t count = call ? call->count : UINT64_MAX;
    sim_unlock();
    return count;
}

int simcuda_fail(const char *function, uint64_t after, uint64_t count, int code)
{
    sim_lock();
    sim_call *call = find(function);
    if (call) {
        call->passes = after;
        call->failures = count;
        call->code = code ? code : (int)natural_error(call->name);
    }
    sim_unlock();
    return call ? 0 : -1;
}

void simcuda_fail_clear(void)
{
    sim_lock();
    for (sim_call *call = calls; call; call = call->next)
        call->failures = 0;
    sim_unlock();
}

int64_t simcuda_price(const char *what, int64_t nanoseconds)
{
    sim_lock();
    sim_call *call = sim_activated() ? find(what) : NULL;
    uint64_t *price = call ? &call->price : sim_activated() ? sim_device_price(what) : NULL;
    int64_t before = price ? (int64_t)*price : -1;
    if (price && nanoseconds >= 0)
        *price = (uint64_t)nanoseconds;
    sim_unlock();
    return before;
}

static CUresult planned(sim_call *call)
{
    if (!call->failures)
        return CUDA_SUCCESS;
    if (call->passes) {
        call->passes--;
        return CUDA_SUCCESS;
    }
    call->failures--;
    return (CUresult)call->code;
}

/* ---- entering ----------------------------------------------------------------------------------------- */
static CUresult state_allows(int needs, CUresult not_activated)
{
    if (needs & SIM_ANYTIME)
        return CUDA_SUCCESS;
    if (forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!sim_activated())
        return needs & SIM_DEVICELESS ? CUDA_SUCCESS : not_activated;
    if (self.in_user_code)
        return CUDA_ERROR_NOT_PERMITTED;
    if (sim_fault)
        return sim_fault;
    if (needs & SIM_UNSAFE)
        return sim_capture_check_unsafe();
    return CUDA_SUCCESS;
}

static void begin(sim_call *call)
{
    sim_thread *thread = sim_self();

    sim_lock();
    thread->call = call;
    call->count++;
    sim_host_time += call->price;
}

CUresult sim_driver_enter(sim_call *call, int needs)
{
    begin(call);
    CUresult result = planned(call);
    if (result == CUDA_SUCCESS && !(needs & SIM_ANYTIME) && !sim_initialised)
        result = CUDA_ERROR_NOT_INITIALIZED;
    if (result == CUDA_SUCCESS)
        result = state_allows(needs, CUDA_ERROR_NOT_INITIALIZED);
    if (result == CUDA_SUCCESS && needs & SIM_CONTEXT && !sim_context_current())
        result = CUDA_ERROR_INVALID_CONTEXT;
    if (result != CUDA_SUCCESS)
        sim_leave();
    return result;
}

CUresult sim_runtime_enter(sim_call *call, int needs)
{
    begin(call);
    CUresult result = planned(call);
    if (result == CUDA_SUCCESS)
        result = state_allows(needs, CUDA_ERROR_NO_DEVICE);
    if (result == CUDA_SUCCESS && !(needs & SIM_ANYTIME) && sim_activated())
        sim_initialised = true;
    if (result == CUDA_SUCCESS && needs & SIM_CONTEXT)
        result = sim_context_bind_primary();
    if (result != CUDA_SUCCESS)
        sim_leave();
    return result;
}

void sim_leave(void)
{
    sim_self()->call = NULL;
    sim_unlock();
}
