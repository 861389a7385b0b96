/* Devices of this process that reach each other's memory, and what cuMemSetAccess is told of them.
 *
 * Memory that is mapped is for nobody but who was granted access, other devices of the process among them: a copy from
 * one to another, and NCCL where one process drives several, read and write their peer's tensors directly. So each
 * mapping is granted to the devices that have joined, which are those whose driver is open, as far as the hardware lets
 * them; a process with one device, as torchrun starts them, grants to that one alone. */
#ifndef MO_PEERS_H
#define MO_PEERS_H

#include "driver/driver_cuda.h"

/* From now on device `ordinal` (< MO_MAX_DEVICES) is granted what others map. Joining again changes nothing. */
void mo_peers_join(int ordinal, CUdevice handle);

/* Who is to read and write what `driver` maps: itself first, then the devices that have joined and can. Returns how
 * many, in out[0 …]. A pair of which the driver does not say whether it can, cannot. */
size_t mo_peers_access(const mo_driver_cuda *driver, CUmemAccessDesc out[MO_MAX_DEVICES]);

#endif
