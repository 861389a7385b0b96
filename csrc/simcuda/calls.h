/* Every API function passes here: one lock, one count and one fault plan a function.
 *
 *     SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuMemAlloc_v2, (CUdeviceptr *out, size_t size), (out, size))
 *     {
 *         ...the meaning alone; runs with the device's lock held; returns a CUresult...
 *     }
 *
 * defines the exported cuMemAlloc_v2 around the body that follows: it counts the call, lets the fault plan
 * refuse it, checks what the function needs, takes the lock, runs the body, releases the lock. SIM_RUNTIME
 * does the same for a runtime function and remembers its error for cudaGetLastError. The third argument
 * repeats the names of the parameters, because C cannot.
 *
 * One mutex guards everything in the device: order of streams and memory of all devices change together. It
 * is released only around user code (kernel bodies, host functions), so that such code may wait for a lock of
 * its own, Python's for one, that another thread holds while it calls CUDA. */
#ifndef SIM_CALLS_H
#define SIM_CALLS_H

#include "driver/cuda_types.h"
#include "control.h"

#include <stdbool.h>

/* What a function needs, checked before its body. Driver functions fail with NOT_INITIALIZED before cuInit
 * unless they work anytime; runtime functions initialise by themselves. */
enum {
    SIM_INITIALISED = 0,
    /* Works before activation, after a sticky error, in a forked child, in a host function. */
    SIM_ANYTIME = 1,
    /* Needs a current context; the runtime makes the primary one current. */
    SIM_CONTEXT = 2,
    /* "Potentially unsafe" while a stream is captured (cudaStreamBeginCapture's documentation). */
    SIM_UNSAFE = 4,
    /* Runtime: reports on the device, does not initialise a context. */
    SIM_QUERY = 8,
    /* Runtime: answers for itself where there is no device. */
    SIM_DEVICELESS = 16
};

typedef struct sim_call {
    const char *name;
    void *function;
    uint64_t count;
    uint64_t passes, failures; /* the fault plan: so many more pass, then so many fail with `code` */
    int code;
    struct sim_call *next;
    uint64_t price; /* nanoseconds of the host's clock (clock.h) */
} sim_call;

void sim_calls_add(sim_call *call);
/* The exported function of that name, or of its newest version; NULL when it is not implemented. */
void *sim_calls_function(const char *name);

/* 0 with the lock held, or the error with the lock free. */
CUresult sim_driver_enter(sim_call *call, int needs);
CUresult sim_runtime_enter(sim_call *call, int needs);
void sim_leave(void);

#define SIM_CALL(name)                                                                                       \
    static sim_call name##_call = {#name, (void *)name, 0, 0, 0, 0, NULL, 0};                                \
    __attribute__((constructor)) static void name##_register(void)                                           \
    {                                                                                                        \
        sim_calls_add(&name##_call);                                                                         \
    }

#define SIM_DRIVER(needs, name, parameters, arguments)                                                       \
    SIM_CALL(name)                                                                                           \
    static CUresult name##_body parameters;                                                                  \
    CUresult name parameters                                                                                 \
    {                                                                                                        \
        CUresult result = sim_driver_enter(&name##_call, needs);                                             \
        if (result == CUDA_SUCCESS) {                                                                        \
            result = name##_body arguments;                                                                  \
            sim_leave();                                                                                     \
        }                                                                                                    \
        return result;                                                                                       \
    }                                                                                                        \
    static CUresult name##_body parameters

/* The body returns a CUresult too: the numbers of cudaError_t are the driver's wherever both exist. */
#define SIM_RUNTIME(needs, name, parameters, arguments)                                                      \
    SIM_CALL(name)                                                                                           \
    static CUresult name##_body parameters;                                                                  \
    cudaError_t name parameters                                                                              \
    {                                                                                                        \
        CUresult result = sim_runtime_enter(&name##_call, needs);                                            \
        if (result == CUDA_SUCCESS) {                                                                        \
            result = name##_body arguments;                                                                  \
            sim_leave();                                                                                     \
        }                                                                                                    \
        if (result != CUDA_SUCCESS)                                                                          \
            sim_self()->last_error = result;                                                                 \
        return (cudaError_t)result;                                                                          \
    }                                                                                                        \
    static CUresult name##_body parameters

/* ---- a thread's own state --------------------------------------------------------------------------- */
struct sim_context;
struct sim_stream;

enum { SIM_CONTEXT_DEPTH = 64 };

typedef struct sim_thread {
    uint64_t id;         /* never 0, never used again */
    int device;          /* what cudaSetDevice chose; the current context decides while there is one */
    CUresult last_error; /* what cudaGetLastError answers */
    int depth;           /* of the stack of current contexts */
    struct sim_context *contexts[SIM_CONTEXT_DEPTH];
    struct sim_stream *default_streams[SIM_MAX_DEVICES]; /* CU_STREAM_PER_THREAD, made at first use */
    CUstreamCaptureMode capture_mode;                    /* cudaThreadExchangeStreamCaptureMode */
    bool in_user_code;    /* a kernel body or host function runs on this thread */
    const sim_call *call; /* that the thread is in, with the lock held */
} sim_thread;

sim_thread *sim_self(void);

/* ---- the lock, for what is not an API function -------------------------------------------------------- */
void sim_lock(void);
void sim_unlock(void);
/* Waits, the lock released meanwhile, until another thread has finished a piece of user code. */
void sim_wait_for_user_code(void);
/* The first releases the lock; the second takes it and wakes the waiting. Nothing of the device may be touched
 * between them. */
void sim_user_code_begin(void);
void sim_user_code_end(void);

bool sim_forked(void); /* this process is a child of one that had used the device */

#endif
