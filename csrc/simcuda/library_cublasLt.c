/* cuBLASLt: layouts and preferences are made, one algorithm without workspace is found for every product. */
#include "csrc/simcuda/library.h"

#include <stdlib.h>
#include <string.h>

/* cublasStatus_t, as NVIDIA documents it. */
enum { CUBLAS_SUCCESS = 0, CUBLAS_NOT_INITIALIZED = 1, CUBLAS_ALLOC_FAILED = 3, CUBLAS_INVALID_VALUE = 7 };

#define CUBLASLT_VERSION (SIM_CUDA_MAJOR * 10000 + (SIM_CUDA_MAJOR == 12 ? 900 : 200))

struct algorithm {
    uint64_t data[8];
};

/* cublasLtMatmulHeuristicResult_t. */
struct heuristic {
    struct algorithm algorithm;
    size_t workspace_bytes;
    int status;
    float waves;
    int reserved[4];
};

/* The largest descriptor body that NVIDIA's inline *Init functions declare is 256 bytes. */
static int make(void **out)
{
    if (out == NULL)
        return CUBLAS_INVALID_VALUE;
    *out = calloc(1, 256);
    return *out == NULL ? CUBLAS_ALLOC_FAILED : CUBLAS_SUCCESS;
}

static int drop(void *object)
{
    free(object);
    return CUBLAS_SUCCESS;
}

int cublasLtCreate(void **handle)
{
    return sim_library_device_present() ? make(handle) : CUBLAS_NOT_INITIALIZED;
}

int cublasLtDestroy(void *handle)
{
    return drop(handle);
}

int cublasLtMatmulDescCreate(void **out, int compute, int scale)
{
    return make(out);
}

int cublasLtMatmulDescDestroy(void *descriptor)
{
    return drop(descriptor);
}

int cublasLtMatrixLayoutCreate(void **out, int type, uint64_t rows, uint64_t columns, int64_t leading)
{
    return make(out);
}

int cublasLtMatrixLayoutDestroy(void *layout)
{
    return drop(layout);
}

int cublasLtMatmulPreferenceCreate(void **out)
{
    return make(out);
}

int cublasLtMatmulPreferenceDestroy(void *preference)
{
    return drop(preference);
}

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                   void *preference, int requested, struct heuristic *results, int *found)
{
    if (found == NULL || (requested > 0 && results == NULL))
        return CUBLAS_INVALID_VALUE;
    *found = requested > 0 ? 1 : 0;
    if (*found)
        memset(results, 0, sizeof *results);
    return CUBLAS_SUCCESS;
}

int cublasLtMatmulAlgoInit(void *handle, int compute, int scale, int a, int b, int c, int d, int id,
                           struct algorithm *algorithm)
{
    if (algorithm == NULL)
        return CUBLAS_INVALID_VALUE;
    memset(algorithm, 0, sizeof *algorithm);
    return CUBLAS_SUCCESS;
}

int cublasLtMatmulAlgoCheck(void *handle, void *operation, void *a, void *b, void *c, void *d,
                            const struct algorithm *algorithm, struct heuristic *result)
{
    if (algorithm == NULL || result == NULL)
        return CUBLAS_INVALID_VALUE;
    memmove(&result->algorithm, algorithm, sizeof *algorithm); /* algorithm may lie in result */
    result->workspace_bytes = 0;
    result->status = CUBLAS_SUCCESS;
    result->waves = 1.0f;
    return CUBLAS_SUCCESS;
}

/* Attributes that were never chosen read as 0: tile, stages and the like have a value 0 for "undefined". */
int cublasLtMatmulAlgoConfigGetAttribute(const void *algorithm, int attribute, void *out, size_t size,
                                         size_t *written)
{
    if (out == NULL)
        return CUBLAS_INVALID_VALUE;
    memset(out, 0, size);
    if (written != NULL)
        *written = size;
    return CUBLAS_SUCCESS;
}

size_t cublasLtGetVersion(void)
{
    return CUBLASLT_VERSION;
}

size_t cublasLtGetCudartVersion(void)
{
    return SIM_CUDA_MAJOR * 1000;
}

int cublasLtGetProperty(int which, int *value)
{
    int minor = CUBLASLT_VERSION / 100 % 100;
    return sim_library_property(which, SIM_CUDA_MAJOR, minor, 0, value) == 0 ? CUBLAS_SUCCESS
                                                                             : CUBLAS_INVALID_VALUE;
}
