/* cuDNN's v7 convolution functions (torch takes them with TORCH_CUDNN_V8_API_DISABLED=1): one algorithm,
 * found at once, whose workspace is the setting's. */
#include "csrc/simcuda/library_cudnn.h"

/* cudnnConvolution{Fwd,BwdData,BwdFilter}AlgoPerf_t: one layout for the three. */
struct performance {
    int algorithm, status;
    float time;
    size_t workspace_bytes;
    int deterministic, math;
    int reserved[3];
};

/* Implicit precomputed GEMM forward, ALGO_1 backward: the ones real heuristics take most often;
 * deterministic. */
static int one_algorithm(int requested, int *found, struct performance *results)
{
    if (found == NULL || (requested > 0 && results == NULL))
        return CUDNN_NULL_POINTER;
    *found = requested > 0 ? 1 : 0;
    if (*found)
        *results =
            (struct performance){.algorithm = 1, .workspace_bytes = cudnn_workspace(), .deterministic = 1};
    return CUDNN_SUCCESS;
}

static int workspace(size_t *bytes)
{
    if (bytes == NULL)
        return CUDNN_NULL_POINTER;
    *bytes = cudnn_workspace();
    return CUDNN_SUCCESS;
}

#define CONVOLUTION(direction)                                                                               \
    int cudnnGetConvolution##direction##Algorithm_v7(void *handle, void *first, void *second,                \
                                                     void *convolution, void *result, int requested,         \
                                                     int *found, struct performance *results)                \
    {                                                                                                        \
        return one_algorithm(requested, found, results);                                                     \
    }                                                                                                        \
    int cudnnFindConvolution##direction##AlgorithmEx(                                                        \
        void *handle, void *first, const void *first_data, void *second, const void *second_data,            \
        void *convolution, void *result, void *result_data, int requested, int *found,                       \
        struct performance *results, void *space, size_t space_bytes)                                        \
    {                                                                                                        \
        return one_algorithm(requested, found, results);                                                     \
    }                                                                                                        \
    int cudnnGetConvolution##direction##WorkspaceSize(void *handle, void *first, void *second,               \
                                                      void *convolution, void *result, int algorithm,        \
                                                      size_t *bytes)                                         \
    {                                                                                                        \
        return workspace(bytes);                                                                             \
    }

CONVOLUTION(Forward)
CONVOLUTION(BackwardData)
CONVOLUTION(BackwardFilter)
