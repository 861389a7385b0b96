/* A launch of each kernel on a few numbers whose results are known: whether an image that came from a file, or from a
 * compiler that was found at run time, holds the kernels or only their names. An image can load, have every name, and
 * compute nothing. */
#ifndef MO_KERNEL_PROOF_H
#define MO_KERNEL_PROOF_H

#include "driver/kernel_module.h"

/* Runs the functions, in the order of mo_kernel, on a stream of its own and waits for that; the device's context is
 * current. MO_CORRUPT names the kernel whose results are wrong. The driver's errors are its own. Nothing stays allocated. */
mo_status mo_kernels_prove(const mo_cuda_api *api, const CUfunction functions[MO_KERNEL_COUNT],
                           mo_detail *detail);

#endif
