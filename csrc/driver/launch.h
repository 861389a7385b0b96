/* Launches of memopt's kernels that take a table: the kernels are loaded, the table is built in memory that is kept for
 * it and staged (staging.h), the context is current, and one launch reads it.
 *
 *     mo_launch launch;
 *     status = mo_launch_begin(device, "unscaling gradients", &launch, detail);
 *     if (status) return status;
 *     status = mo_launch_table(&launch, size, &table, detail);
 *     if (!status) { fill the table; status = mo_launch_run(&launch, …); }
 *     mo_launch_end(&launch);
 *
 * One lock a device is held from begin to end. The host does not wait for the device in between (but see staging.h on
 * being eight launches ahead), so that a stream's capture may go on. The first launch on a device loads the kernels and
 * may compile them: call without the GIL. */
#ifndef MO_LAUNCH_H
#define MO_LAUNCH_H

#include "driver/kernel_module.h"

typedef struct mo_launch {
    const mo_driver_cuda *device;
    const mo_kernel_module *kernels;
    struct mo_launch_state *state; /* the device's */
    int multiprocessors;
} mo_launch;

/* `what` is for the error in a forked child. MO_NO_DEVICE for a number that is no device's. On failure nothing is
 * held and mo_launch_end must not be called. */
mo_status mo_launch_begin(int device, const char *what, mo_launch *out, mo_detail *detail);

/* Memory for a table of size > 0 bytes, aligned to 16, valid until mo_launch_end. MO_NO_HOST_MEMORY. */
mo_status mo_launch_table(mo_launch *launch, size_t size, void **out, mo_detail *detail);

typedef struct mo_launch_shape {
    mo_kernel kernel;
    unsigned blocks, threads;
    size_t size;    /* the table's, as given to mo_launch_table */
    size_t room;    /* bytes behind the table that are the kernel's own while it runs */
    uint64_t bytes; /* of the caller's that it reads and that it writes: what bounds its time */
} mo_launch_shape;

/* Queues the table's upload, where it is not there yet, and the launch. *argument is the kernel's one parameter; its
 * first member is the table's address on the device (an unsigned long long), which is written here. */
mo_status mo_launch_run(mo_launch *launch, CUstream stream, mo_launch_shape shape, void *argument,
                        mo_detail *detail);

void mo_launch_end(mo_launch *launch);

/* What the launches on a device have cost so far; zeros where there were none. */
typedef struct mo_launch_counts {
    uint64_t launches, bytes; /* bytes: read and written, as each shape says */
    uint64_t uploads, repeats, waits, captured, captured_bytes; /* of tables: staging.h */
} mo_launch_counts;

void mo_launch_read(int device, mo_launch_counts *out);

#endif
