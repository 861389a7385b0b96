/* Whether a stream is being captured into a graph, and into which. */
#ifndef MO_CAPTURE_H
#define MO_CAPTURE_H

#include <stdint.h>

#include "driver/cuda_api.h"

/* *out: 0 where the stream is not captured, else the number of its capture, which no two captures share; where the
 * driver cannot tell them apart (before CUDA 11.3) it is 1 for each. The stream's context is current.
 *
 * The legacy stream (NULL or CU_STREAM_LEGACY) cannot be captured and is not asked about: while a blocking stream is
 * being captured the driver would answer CUDA_ERROR_STREAM_CAPTURE_IMPLICIT (the capture survives the question). */
CUresult mo_capture_id(const mo_cuda_api *api, CUstream stream, uint64_t *out);

#endif
