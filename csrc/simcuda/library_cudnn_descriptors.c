#include "csrc/simcuda/library_cudnn.h"

#include <stdlib.h>
#include <string.h>

/* cudnnDataType_t values whose element is not 4 bytes; float, int32 and the vectorised int8 types are. */
enum {
    TYPE_DOUBLE = 1,
    TYPE_HALF = 2,
    TYPE_INT8 = 3,
    TYPE_UINT8 = 6,
    TYPE_BFLOAT16 = 9,
    TYPE_INT64 = 10,
    TYPE_BOOLEAN = 11,
    TYPE_FP8_E4M3 = 12,
    TYPE_FP8_E5M2 = 13
};

struct cudnn {
    void *stream;
};

size_t sim_cudnn_type_bytes(int type)
{
    switch (type) {
    case TYPE_DOUBLE:
    case TYPE_INT64:
        return 8;
    case TYPE_HALF:
    case TYPE_BFLOAT16:
        return 2;
    case TYPE_INT8:
    case TYPE_UINT8:
    case TYPE_BOOLEAN:
    case TYPE_FP8_E4M3:
    case TYPE_FP8_E5M2:
        return 1;
    default:
        return 4;
    }
}

int sim_cudnn_make(void **out, size_t bytes)
{
    if (out == NULL)
        return CUDNN_NULL_POINTER;
    *out = calloc(1, bytes);
    return *out == NULL ? CUDNN_ALLOCATION_FAILED : CUDNN_SUCCESS;
}

int sim_cudnn_drop(void *object)
{
    free(object);
    return CUDNN_SUCCESS;
}

int sim_cudnn_set(struct cudnn_tensor *tensor, int type, int dimensions, const int *size, const int *stride)
{
    if (tensor == NULL || size == NULL)
        return CUDNN_NULL_POINTER;
    if (dimensions < 0 || dimensions > CUDNN_DIM_MAX)
        return CUDNN_BAD_PARAM;
    *tensor = (struct cudnn_tensor){.type = type, .dimensions = dimensions};
    for (int d = 0; d < dimensions; d++) {
        tensor->size[d] = size[d];
        tensor->stride[d] = stride == NULL ? 0 : stride[d];
    }
    return CUDNN_SUCCESS;
}

/* Handle and versions. */

int cudnnCreate(struct cudnn **handle)
{
    return sim_library_device_present() ? sim_cudnn_make((void **)handle, sizeof **handle)
                                        : CUDNN_NOT_INITIALIZED;
}

int cudnnDestroy(struct cudnn *handle)
{
    return sim_cudnn_drop(handle);
}

int cudnnSetStream(struct cudnn *handle, void *stream)
{
    if (handle == NULL)
        return CUDNN_NULL_POINTER;
    handle->stream = stream;
    return CUDNN_SUCCESS;
}

int cudnnGetStream(struct cudnn *handle, void **stream)
{
    if (handle == NULL || stream == NULL)
        return CUDNN_NULL_POINTER;
    *stream = handle->stream;
    return CUDNN_SUCCESS;
}

size_t cudnnGetVersion(void)
{
    unsigned long long version = simcuda_setting("cudnn_version");
    return version != 0 ? (size_t)version : 92000;
}

size_t cudnnGetCudartVersion(void)
{
    return SIM_CUDA_MAJOR * 1000;
}

int cudnnGetProperty(int which, int *value)
{
    int version = (int)cudnnGetVersion();
    int done = sim_library_property(which, version / 10000, version / 100 % 100, version % 100, value);
    return done == 0 ? CUDNN_SUCCESS : CUDNN_BAD_PARAM;
}

const char *cudnnGetErrorString(int status)
{
    return status == CUDNN_SUCCESS ? "CUDNN_STATUS_SUCCESS" : "simulated cuDNN: error";
}

void cudnnGetLastErrorString(char *message, size_t size)
{
    if (message != NULL && size > 0)
        message[0] = '\0';
}

/* Tensor and filter descriptors answer what they were told. */

int cudnnCreateTensorDescriptor(void **out)
{
    return sim_cudnn_make(out, sizeof(struct cudnn_tensor));
}

int cudnnDestroyTensorDescriptor(void *descriptor)
{
    return sim_cudnn_drop(descriptor);
}

int cudnnSetTensorNdDescriptor(struct cudnn_tensor *tensor, int type, int dimensions, const int *size,
                               const int *stride)
{
    return sim_cudnn_set(tensor, type, dimensions, size, stride);
}

int cudnnGetTensorNdDescriptor(const struct cudnn_tensor *tensor, int requested, int *type, int *dimensions,
                               int *size, int *stride)
{
    if (tensor == NULL || type == NULL || dimensions == NULL)
        return CUDNN_NULL_POINTER;
    *type = tensor->type;
    *dimensions = tensor->dimensions;
    for (int d = 0; d < requested && d < tensor->dimensions; d++) {
        if (size != NULL)
            size[d] = tensor->size[d];
        if (stride != NULL)
            stride[d] = tensor->stride[d];
    }
    return CUDNN_SUCCESS;
}

int cudnnCreateFilterDescriptor(void **out)
{
    return sim_cudnn_make(out, sizeof(struct cudnn_tensor));
}

int cudnnDestroyFilterDescriptor(void *descriptor)
{
    return sim_cudnn_drop(descriptor);
}

int cudnnSetFilterNdDescriptor(struct cudnn_tensor *filter, int type, int format, int dimensions,
                               const int *size)
{
    int status = sim_cudnn_set(filter, type, dimensions, size, NULL);
    if (status == CUDNN_SUCCESS)
        filter->format = format;
    return status;
}

int cudnnGetFilterNdDescriptor(const struct cudnn_tensor *filter, int requested, int *type, int *format,
                               int *dimensions, int *size)
{
    if (filter == NULL || format == NULL)
        return CUDNN_NULL_POINTER;
    *format = filter->format;
    return cudnnGetTensorNdDescriptor(filter, requested, type, dimensions, size, NULL);
}

/* Descriptors whose contents nothing here reads. Their setters are stubs that do nothing. */
#define OPAQUE(what)                                                                                         \
    int cudnnCreate##what(void **out)                                                                        \
    {                                                                                                        \
        return sim_cudnn_make(out, 64);                                                                      \
    }                                                                                                        \
    int cudnnDestroy##what(void *descriptor)                                                                 \
    {                                                                                                        \
        return sim_cudnn_drop(descriptor);                                                                   \
    }

OPAQUE(ActivationDescriptor)
OPAQUE(CTCLossDescriptor)
OPAQUE(ConvolutionDescriptor)
OPAQUE(DropoutDescriptor)
OPAQUE(PoolingDescriptor)
OPAQUE(SpatialTransformerDescriptor)

/* Sizes. */

static int answer(size_t *out, size_t bytes)
{
    if (out == NULL)
        return CUDNN_NULL_POINTER;
    *out = bytes;
    return CUDNN_SUCCESS;
}

/* One random generator state a thread of the largest launch: about 1 MiB on the GPUs this was seen on. */
int cudnnDropoutGetStatesSize(void *handle, size_t *bytes)
{
    return answer(bytes, 1 << 20);
}

int cudnnGetCTCLossWorkspaceSize(void *handle, void *probabilities, void *gradients, const int *labels,
                                 const int *label_lengths, const int *input_lengths, int algorithm,
                                 void *descriptor, size_t *bytes)
{
    return answer(bytes, cudnn_workspace());
}

int cudnnGetCTCLossWorkspaceSize_v8(void *handle, int algorithm, void *descriptor, void *probabilities,
                                    void *gradients, size_t *bytes)
{
    return answer(bytes, cudnn_workspace());
}

/* The persistent NHWC batch norm keeps a small reserve whose size is not documented: none here. */
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int ops, void *x,
                                                             void *z, void *y, void *parameters,
                                                             void *activation, size_t *bytes)
{
    return answer(bytes, 0);
}

int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int ops, void *x, void *y,
                                                      void *dy, void *dz, void *dx, void *parameters,
                                                      void *activation, size_t *bytes)
{
    return answer(bytes, 0);
}

int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int ops, void *activation,
                                                         void *x, size_t *bytes)
{
    return answer(bytes, 0);
}
