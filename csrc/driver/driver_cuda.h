/* mo_driver over the CUDA driver API.
 *
 * Each call makes the device's primary context current for its own length, unless the caller's already is it
 * (torch's threads have it), and leaves the thread's context as it was. Calls that CUDA counts as unsafe while a
 * stream is captured in global mode run in relaxed mode, as torch's own allocator does: without that, an
 * allocation during a graph capture would end the capture.
 *
 * After fork() a child cannot use CUDA at all: there each call answers MO_DRIVER (and each releasing one MO_OK)
 * without entering the driver, and so takes no lock whose state the fork may have torn. */
#ifndef MO_DRIVER_CUDA_H
#define MO_DRIVER_CUDA_H

#include <stdatomic.h>

#include "driver/cuda_api.h"
#include "driver/driver.h"

typedef struct mo_driver_cuda {
    mo_driver table; /* first: a mo_driver * of this kind is a mo_driver_cuda * */
    const mo_cuda_api *api;
    CUdevice handle;
    CUcontext context; /* retained until mo_driver_cuda_close */
    /* What memory is asked for beside bytes, so that network cards and other processes can reach it as they reach
     * cuMemAlloc's (GPUDirect RDMA; NCCL's registered buffers): what the device offers, until it refuses it once. */
    bool rdma, exportable;
    atomic_bool plain; /* refused: neither is asked for any more */
} mo_driver_cuda;

/* Retains the primary context of device `ordinal`, as torch counts (so CUDA_VISIBLE_DEVICES is obeyed).
 * MO_NO_DEVICE names the ordinal and how many there are. table.granularity is 0 where the device or the driver
 * has no virtual memory management. */
mo_status mo_driver_cuda_open(const mo_cuda_api *api, int ordinal, mo_driver_cuda *out, mo_detail *detail);

/* Releases the context. Nothing made through the table may be in use. */
mo_status mo_driver_cuda_close(mo_driver_cuda *driver, mo_detail *detail);

/* The process's driver of a device: opened at first use, kept for ever (the engines' state outlives Python). */
mo_status mo_driver_cuda_get(int ordinal, mo_driver **out, mo_detail *detail);

#endif
