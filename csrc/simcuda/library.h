/* The simulated maths libraries: what they share.
 *
 * A library here keeps handles, descriptors and plans as NVIDIA's does, answers every size question, and
 * computes nothing: a product, a convolution or a factorisation succeeds and leaves its output as it was.
 * Real numbers, where a test wants them, come from running each ATen op on the CPU over the same memory
 * (memopt/sim/_compute.py).
 *
 * Workspace sizes are not NVIDIA's: where the size is a secret of the library it is 0, a lower bound, or what
 * the setting `cudnn_workspace` says. Before activation there is no device, so no handle can be made.
 *
 * A function listed in symbols/ that no source defines is a stub (library_stub.S): it answers the library's
 * own "not supported" status and is remembered by name, see missing.h.
 */
#ifndef SIM_LIBRARY_H
#define SIM_LIBRARY_H

#include "csrc/simcuda/control.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Callers have NVIDIA's headers; ours declare nothing of these libraries. The parameter lists are NVIDIA's,
 * and most parameters mean nothing to a library that does not compute. */
#pragma GCC diagnostic ignored "-Wmissing-prototypes"
#pragma GCC diagnostic ignored "-Wunused-parameter"

#if SIM_CUDA_MAJOR != 12 && SIM_CUDA_MAJOR != 13
#error "build with -DSIM_CUDA_MAJOR=12 or 13"
#endif

static inline bool sim_library_device_present(void)
{
    return simcuda_setting("devices") > 0;
}

/* libraryPropertyType, the same for all of NVIDIA's libraries: 0 major, 1 minor, 2 patch level. */
static inline int sim_library_property(int which, int major, int minor, int patch, int *value)
{
    if (which < 0 || which > 2 || value == NULL)
        return -1;
    *value = which == 0 ? major : which == 1 ? minor : patch;
    return 0;
}

#endif
