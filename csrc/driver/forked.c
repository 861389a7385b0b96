#include "driver/forked.h"

#include <pthread.h>
#include <stdatomic.h>

#include "driver/cuda_types.h"

static atomic_uint watchers;
static atomic_bool forked;

static void note_fork(void)
{
    if (atomic_load(&watchers))
        atomic_store(&forked, true);
}

static void install(void)
{
    pthread_atfork(NULL, NULL, note_fork);
}

void mo_forked_watch(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    /* Installed before anything that a fork could tear: glibc holds its list of handlers while a fork is under way. */
    pthread_once(&once, install);
    atomic_fetch_add(&watchers, 1);
}

void mo_forked_unwatch(void)
{
    atomic_fetch_sub(&watchers, 1);
}

bool mo_forked(void)
{
    return atomic_load_explicit(&forked, memory_order_relaxed);
}

mo_status mo_forked_refuse(const char *call, mo_detail *detail)
{
    return mo_fail(
        detail, MO_DRIVER, CUDA_ERROR_NOT_INITIALIZED,
        "%s: this process was forked from one that had used CUDA, and CUDA does not work after a fork: "
        "start the process with multiprocessing's 'spawn' or 'forkserver' method",
        call);
}
