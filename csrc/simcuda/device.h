/* The device table: what the machine was activated with, and its state as a whole.
 *
 * Everything here is guarded by the device's lock (calls.h) but the settings, which never change after
 * activation. The state lives as long as the process: threads of other libraries may call CUDA while the
 * process exits, and must find it whole. */
#ifndef SIM_DEVICE_H
#define SIM_DEVICE_H

#include "calls.h"
#include "frames.h"

typedef struct sim_device {
    sim_store store;       /* its physical memory */
    simcuda_counts counts; /* live.bytes, bytes_peak and pool_* are filled in when they are asked for */
    struct sim_context *primary;
    unsigned primary_retained; /* cuDevicePrimaryCtxRetain minus Release */
    bool primary_bound;        /* the runtime has initialised it */
    unsigned primary_flags;
    struct sim_stream *legacy; /* stream 0 */
    struct sim_pool *pool;     /* current pool of cudaMallocAsync; default_pool at first */
    struct sim_pool *default_pool;
    bool peers[SIM_MAX_DEVICES];      /* peer access enabled from this device's context to another */
    uint64_t finish, blocking_finish; /* the latest of its streams', of its blocking streams' (clock.h) */
} sim_device;

extern sim_device sim_devices[SIM_MAX_DEVICES];
extern int sim_device_count; /* 0 before activation */
extern bool sim_initialised; /* cuInit, or any runtime call */
extern bool sim_lazy, sim_blank, sim_stale_aliases, sim_dead_handles;
extern int sim_cc, sim_sms; /* compute capability times ten; multiprocessors */
extern CUresult sim_fault;  /* sticky error; CUDA_SUCCESS while the device is healthy */

/* What belongs to the process rather than to one device. */
extern uint64_t sim_reservations, sim_reserved_bytes, sim_host_allocations, sim_modules;
extern uint64_t sim_host_bytes, sim_host_bytes_peak;

bool sim_activated(void);

static inline bool sim_device_exists(int device)
{
    return device >= 0 && device < sim_device_count;
}

/* Device work on `device` met an address it may not touch: sticky, as on a GPU. */
void sim_device_fault(int device);

/* What cuDeviceGetAttribute and cudaDeviceGetAttribute answer: their numbers agree. */
CUresult sim_device_attribute(int *out, int attribute, int device);
void sim_device_uuid(int device, char out[16]);

/* What this driver says of itself: an interface that every torch of the CUDA major accepts. */
#define SIM_DRIVER_VERSION (SIM_CUDA_MAJOR == 12 ? 12090 : 13020)

#define SIM_DEVICE_NAME "Simulated CUDA device (host memory)"

/* "CUDA_ERROR_…", NULL for a code that is none; and a phrase, NULL where we have no words for it. */
const char *sim_error_name(int code);
const char *sim_error_text(int code);

#endif
