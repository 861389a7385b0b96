#include "base/parallel.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "base/assert.h"

/* libtorch's C ABI (torch/csrc/stable/c/shim.h, torch 2.10 and later). Both return 0, or 1 where C++ threw. */
typedef void range_function(int64_t begin, int64_t end, void *user);
typedef int32_t parallel_for_function(int64_t begin, int64_t end, int64_t grain, range_function *range,
                                      void *user);
typedef int32_t get_threads_function(uint32_t *out);

static _Atomic(parallel_for_function *) parallel_for; /* published last: what is not NULL here has both */
static _Atomic(get_threads_function *) get_threads;
static _Atomic(mo_parallel_way) other_way;

/* ---- forks --------------------------------------------------------------------------------------------- */

/* A child has none of its parent's threads, but libgomp's pool, a copy of the parent's, still counts on them: a parallel
 * region there waits for ever. So the children of a process that found the pool work alone. */
static atomic_bool forked;

static void note_fork(void)
{
    atomic_store(&forked, true);
}

static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, note_fork);
}

/* ---- what torch has ------------------------------------------------------------------------------------ */

/* dlsym gives an object pointer; POSIX lets it be a function's. */
static bool look_up(void *library, const char *symbol, void *slot)
{
    void *address = dlsym(library, symbol);
    if (address)
        memcpy(slot, &address, sizeof address);
    return address != NULL;
}

/* NULL as long as torch is not loaded: nothing is loaded for this. Two threads that look at once find the same. */
static parallel_for_function *torch_parallel_for(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    parallel_for_function *found = atomic_load_explicit(&parallel_for, memory_order_acquire);
    get_threads_function *threads;
    void *library;

    if (found)
        return found;
    library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (look_up(library ? library : RTLD_DEFAULT, "torch_parallel_for", &found) &&
        look_up(library ? library : RTLD_DEFAULT, "torch_get_num_threads", &threads)) {
        pthread_once(&once, watch_forks); /* before the pool is used */
        atomic_store_explicit(&get_threads, threads, memory_order_relaxed);
        atomic_store_explicit(&parallel_for, found, memory_order_release);
    } else {
        found = NULL;
    }
    if (library)
        dlclose(library); /* torch keeps it loaded; ours was one more count */
    return found;
}

/* ---- the loop ------------------------------------------------------------------------------------------ */

typedef struct loop {
    mo_parallel_body body;
    void *user;
    atomic_bool begun;
} loop;

static void run_range(int64_t begin, int64_t end, void *user)
{
    loop *l = user;
    atomic_store_explicit(&l->begun, true, memory_order_relaxed);
    l->body(l->user, (size_t)begin, (size_t)end);
}

void mo_parallel_for(size_t count, size_t grain, mo_parallel_body body, void *user)
{
    const mo_parallel_way way = atomic_load_explicit(&other_way, memory_order_acquire);
    parallel_for_function *torch;
    loop l = {body, user, false};

    if (count == 0)
        return;
    if (way) {
        way(count, grain, body, user);
        return;
    }
    if (count > grain && count > 1 && !atomic_load_explicit(&forked, memory_order_relaxed) &&
        (torch = torch_parallel_for())) {
        if (torch(0, (int64_t)count, grain ? (int64_t)grain : 1, run_range, &l) == 0)
            return;
        /* No body throws: what failed did so before the first range, and nothing has been done. */
        MO_ASSERT(!atomic_load(&l.begun));
    }
    if (!atomic_load_explicit(&l.begun, memory_order_relaxed))
        body(user, 0, count);
}

unsigned mo_parallel_threads(void)
{
    uint32_t threads = 0;

    if (atomic_load_explicit(&forked, memory_order_relaxed) || !torch_parallel_for() ||
        atomic_load_explicit(&get_threads, memory_order_relaxed)(&threads) != 0 || threads == 0)
        return 1;
    return threads;
}

void mo_parallel_use(mo_parallel_way way)
{
    atomic_store_explicit(&other_way, way, memory_order_release);
}
