/* Copies and sets: what the driver's and the runtime's many names for them share. */
#ifndef SIM_MEMORY_H
#define SIM_MEMORY_H

#include "streams.h"

/* A copy of rows as in work.h. The stream's device must have the rights, or `to_device` and `from_device`
 * where they are not -1. Pageable host memory (unknown to the device) makes any copy synchronous, as it may
 * in CUDA. */
typedef struct sim_copy {
    const void *from;
    void *to;
    size_t width, rows, to_pitch, from_pitch;
    int to_device, from_device;
    bool synchronous;
} sim_copy;
CUresult sim_copy_submit(const sim_copy *copy, sim_stream *stream);
CUresult sim_copy_plain(void *to, const void *from, size_t size, CUstream stream, bool synchronous);

/* `width` elements a row of 1, 2, 4 or 8 bytes each. */
CUresult sim_set_submit(void *to, size_t pitch, uint64_t value, unsigned element, size_t width, size_t rows,
                        sim_stream *stream);

/* cuPointerGetAttribute: INVALID_VALUE where the address is not known to the device. */
CUresult sim_pointer_attribute(void *out, CUpointer_attribute attribute, const void *address);

#endif
