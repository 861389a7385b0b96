/* The simulated CUDA device: its control interface, for Python (ctypes) and for tests.
 *
 * Until simcuda_activate() succeeds the libraries behave as on a machine with no GPU: cuInit answers
 * CUDA_ERROR_NO_DEVICE and cudaGetDeviceCount cudaErrorNoDevice, with a count of 0. Nothing here reads an
 * environment variable.
 *
 * All functions may be called from any thread; none may be called from a kernel body or a host function. */
#ifndef SIM_CONTROL_H
#define SIM_CONTROL_H

#include <stddef.h>
#include <stdint.h>

#define SIM_MAX_DEVICES 8

/* What a device holds (all zero but the bytes of the context when nothing leaks: a leak test is one
 * comparison of this struct before and after) ... */
typedef struct simcuda_live {
    uint64_t bytes;       /* physical bytes taken, the context's included */
    uint64_t handles;     /* physical allocations whose handle is not released (cuMemCreate) */
    uint64_t mappings;    /* live cuMemMap ranges */
    uint64_t allocations; /* cuMemAlloc, cudaMalloc, cuMemAllocAsync */
    uint64_t streams;     /* created, not destroyed; default streams not counted */
    uint64_t events;
    uint64_t graphs;           /* graphs and executable graphs */
    uint64_t modules;          /* modules and libraries */
    uint64_t pending;          /* operations queued and not run (lazy mode) */
    uint64_t reservations;     /* of the process, not of one device: cuMemAddressReserve ranges, */
    uint64_t reserved_bytes;   /* their bytes, */
    uint64_t host_allocations; /* pinned host blocks and registrations, */
    uint64_t host_bytes;       /* and the blocks' bytes */
} simcuda_live;

/* ... and what it has done so far. */
typedef struct simcuda_counts {
    simcuda_live live;
    uint64_t memory;                   /* bytes the device claims to have */
    uint64_t bytes_peak;               /* since activation or simcuda_reset_peak */
    uint64_t host_bytes_peak;          /* since activation, of the process */
    uint64_t pool_reserved, pool_used; /* of the device's default pool; part of live.bytes */
    uint64_t launches, copies, copied_bytes, memsets, syncs;
    uint64_t ooms;                         /* requests refused for want of memory */
    uint64_t faults;                       /* illegal addresses met by device work */
    uint64_t to_device, to_host;           /* bytes copied between the host and the device, each way */
    uint64_t side_to_device, side_to_host; /* those of them on created streams */
} simcuda_counts;

#define SIMCUDA_PATIENCE 100

/* settings: "key=value key=value", any order, each at most once; sizes in bytes.
 *   memory=2147483648  devices=1  cc=80  sms=108  context=0     (memory and context: a device; context is
 *   lazy=0             blank=0            stale_aliases=0         taken off the free memory)
 *   dead_handles=0     cudnn_workspace=0  cudnn_version=0         (the last two: kept for the library they name)
 * lazy: device work runs only when something waits for it (or has asked for SIMCUDA_PATIENCE times in a row, queueing
 * nothing meanwhile, whether it is done), or at simcuda_progress. blank: copies to the device and memsets are dropped,
 * reads give zeros. stale_aliases: a broken device: what is written by one address of memory that is mapped at two is
 * never seen by the other, as if each had a cache that nobody invalidates. dead_handles: a call that is given a destroyed
 * stream's or event's handle, which CUDA calls undefined, says so on standard error and aborts the process; without, it
 * answers CUDA_ERROR_INVALID_HANDLE. NULL on success, else the reason, in storage that lives for ever. */
const char *simcuda_activate(const char *settings);

/* The value of a setting, its default where simcuda_activate was not given it; 0 for an unknown key and
 * before activation, so that "devices" says whether there is one. For the sibling libraries. */
unsigned long long simcuda_setting(const char *key);

/* How often it was asked for since activation: nothing hangs on a setting that nobody has asked for. */
uint64_t simcuda_setting_reads(const char *key);

/* 0, or -1 when there is no such device (or no activation yet). */
int simcuda_stats(int device, simcuda_counts *out);
int simcuda_reset_peak(int device);

/* Changes what the device claims to have; never below zero free, never above what it was activated with
 * (-1 there). Lets a test take memory away as another process would. */
int simcuda_set_memory(int device, size_t bytes);

/* Calls so far of an API function, by the name of its symbol ("cuMemMap", "cuMemAlloc_v2", "cudaMalloc").
 * "cuMemAlloc" is found as the newest version too. UINT64_MAX for a name that is not implemented. */
uint64_t simcuda_calls(const char *function);

/* Lets `after` more calls pass, then fails `count` calls with `code` before they do anything; code 0 is the
 * error natural to the function (out of memory for what takes memory). A new plan replaces the function's old
 * one. -1 for a name that is not implemented. */
int simcuda_fail(const char *function, uint64_t after, uint64_t count, int code);
void simcuda_fail_clear(void);

/* A sticky error (an illegal address) stays until the process ends; tests go on after it with this. */
void simcuda_forget_fault(void);

/* Turning lazy off runs everything that is pending. */
void simcuda_set_lazy(int on);

/* Runs up to `n` operations (all when n < 0) of one stream, or of every stream in turn when `stream` is NULL,
 * as far as their dependencies allow without running other streams. The legacy stream is named by
 * CU_STREAM_LEGACY and belongs to the calling thread's device. Returns how many ran. */
int simcuda_progress(void *stream, int n);

/* The virtual clock (clock.h), in nanoseconds: *host, of the process, and *of_device, when all that is queued on the device
 * so far is done. -1 when there is no such device (or no activation yet). */
int simcuda_clock(int device, uint64_t *host, uint64_t *of_device);

/* The price of `what` in nanoseconds, from now on `nanoseconds` unless that is negative: of a call of an API function, by
 * the name of its symbol; of a "kernel" on the device; of a "device GiB" or "link GiB" that is copied (prices.h). Returns
 * the price before; -1 for a name that is none, and before activation. */
int64_t simcuda_price(const char *what, int64_t nanoseconds);

/* Gives a kernel a host body, by its exact name in the image (mangled or extern "C"). `body` gets pointers to
 * the arguments, copied at launch; it runs in stream order, on some thread, with no lock of the device held.
 * A kernel without one does nothing. The latest registration of a name wins. -1 when out of host memory. */
int simcuda_emulate(const char *kernel_name,
                    void (*body)(void **args, const unsigned grid[3], const unsigned block[3]), int nargs,
                    const size_t *arg_sizes);

/* For a test or a tracer: the name the runtime registered for a kernel's host function, or NULL. */
const char *simcuda_kernel_name(const void *host_function);

#endif
