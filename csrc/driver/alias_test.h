/* A test of whether memory that is mapped at two addresses is coherent on a device: what is written by one address must be
 * read by the other, once the write is over. The allocator's double_map needs no more than that.
 *
 * CUDA promises it (Programming Guide, "Virtual Aliasing Support"): a write by one mapping is undefined for the others
 * until the device operation that writes (a grid, a copy, a memset) is over; what stream order or an event puts behind that
 * reads the new bytes. Not covered by the promise, nor by this test:
 *
 *   - a grid that is resident already when the write is made: a persistent kernel that waits for work by a flag in memory
 *   - a grid that programmatic dependent launch has started before its predecessor's end, until it has passed
 *     griddepcontrol.wait (cudaGridDependencySynchronize())
 *
 * Such a kernel needs fence.proxy.alias between the two. It matters to memopt's user only where such a kernel's memory was
 * somebody else's a moment before: freed, and handed out again at another address, while the kernel runs. A program with
 * such kernels sets double_map=False, which memopt.doctor() names; each granule has one address at a time then. */
#ifndef MO_ALIAS_TEST_H
#define MO_ALIAS_TEST_H

#include "driver/driver_cuda.h"

#define MO_ALIAS_ROUNDS 198

/* Maps one handle twice and writes it by one address and reads it by the other, MO_ALIAS_ROUNDS times: by memset, by copy and
 * by a kernel, on one stream, on two with an event between them, and in a captured graph; the bytes change each time.
 *
 * MO_OK: each read had the bytes of the last write. MO_CORRUPT: one had not, *detail says which. Else the test could not
 * be run: the driver lacks a function, the kernels cannot be loaded, there is no memory.
 *
 * WAITS for its own work alone, which is on non-blocking streams of its own; no call waits for the device. So it may run
 * while another stream is being captured, in whatever mode: calls are in relaxed mode (context.h), and the graph that it
 * captures has no part in the other. About 600 calls of the driver. Loads memopt's kernels, which stay; all else that
 * it makes is released, whatever it comes to: a release that fails is tried a second time. */
mo_status mo_alias_test(mo_driver_cuda *device, mo_detail *detail);

#endif
