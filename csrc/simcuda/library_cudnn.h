/* cuDNN, simulated: what its files share.
 *
 *   library_cudnn_descriptors.c  handles, versions, tensor and filter descriptors, dropout, CTC, batch norm
 * sizes library_cudnn_convolution.c  the v7 convolution functions: algorithms and workspaces
 *   library_cudnn_rnn.c          recurrent networks: weight layout and space sizes
 *   library_cudnn_graph.c        the v8 graph API, which torch takes for convolutions and attention
 *
 * Descriptors remember what they were given, every plan is found, execution does nothing. Workspaces have the
 * size of the setting `cudnn_workspace` (bytes, 0 unless told: a lower bound), because the real ones come out
 * of NVIDIA's heuristics. The version is the setting `cudnn_version`: which backend torch's attention takes
 * depends on it.
 */
#ifndef SIM_LIBRARY_CUDNN_H
#define SIM_LIBRARY_CUDNN_H

#include "csrc/simcuda/library.h"

/* cudnnStatus_t (cuDNN 9). */
enum {
    CUDNN_SUCCESS = 0,
    CUDNN_NOT_INITIALIZED = 1001,
    CUDNN_BAD_PARAM = 2000,
    CUDNN_NULL_POINTER = 2002,
    CUDNN_ALLOCATION_FAILED = 4003
};

#define CUDNN_DIM_MAX 8

/* A tensor or filter descriptor. Unused dimensions and strides are 0. */
struct cudnn_tensor {
    int type, format, dimensions;
    int size[CUDNN_DIM_MAX], stride[CUDNN_DIM_MAX];
};

static inline size_t cudnn_workspace(void)
{
    return (size_t)simcuda_setting("cudnn_workspace");
}

/* Bytes of a cudnnDataType_t element. */
size_t sim_cudnn_type_bytes(int type);

/* Fills tensor; strides may be NULL (a filter). Dimensions above the maximum are an error, as in cuDNN. */
int sim_cudnn_set(struct cudnn_tensor *tensor, int type, int dimensions, const int *size, const int *stride);

/* calloc and free with cuDNN's statuses: the shape of every Create and Destroy function. */
int sim_cudnn_make(void **out, size_t bytes);
int sim_cudnn_drop(void *object);

#endif
