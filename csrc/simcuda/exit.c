/* Ending the process while threads of torch still hold Python objects.
 *
 * A CPython older than 3.14 ends a thread that asks for the interpreter's lock during finalisation with
 * pthread_exit(). torch's autograd threads may be inside a C++ destructor then, where forced unwinding is not
 * allowed: std::terminate, "terminate called without an active exception", SIGABRT, in place of the script's
 * own exit status. On a GPU the last synchronisation hides the race; a simulated device ends the work before
 * the host has finished its own. CPython 3.14 lets such a thread sleep for ever instead
 * (python/cpython#87135). So does this handler, for these threads and nothing else: a terminate with a C++
 * exception in flight, or on the main thread, goes where it went.
 *
 * memopt/sim/_activation.py installs it as the last of Python's exit functions; waiting for the threads
 * to be idle comes first and makes it a second line.
 */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef void (*terminate_handler)(void);

static terminate_handler previous;
static void *(*current_exception_type)(void);
static atomic_int held;

int simcuda_guard_exit(void);
int simcuda_threads_held(void);

static void hold_thread(void)
{
    if (syscall(SYS_gettid) != getpid() && current_exception_type() == NULL) {
        held++;
        for (;;)
            pause();
    }
    if (previous != NULL)
        previous();
    abort();
}

/* 1 when installed, 0 where no C++ runtime is loaded: then there is nothing to guard. */
int simcuda_guard_exit(void)
{
    void *runtime = dlopen("libstdc++.so.6", RTLD_NOW | RTLD_NOLOAD);
    if (runtime == NULL)
        return 0;
    terminate_handler (*set_terminate)(terminate_handler);
    *(void **)&set_terminate = dlsym(runtime, "_ZSt13set_terminatePFvvE");
    *(void **)&current_exception_type = dlsym(runtime, "__cxa_current_exception_type");
    if (set_terminate == NULL || current_exception_type == NULL)
        return 0;
    previous = set_terminate(hold_thread);
    return 1;
}

/* For tests: threads that the handler holds. */
int simcuda_threads_held(void)
{
    return held;
}
