/* cuBLAS: handles that remember what they were told. Products are stubs that do nothing (build_libraries.py).
 */
#include "csrc/simcuda/library.h"

#include <stdlib.h>

/* cublasStatus_t, as NVIDIA documents it. */
enum {
    CUBLAS_SUCCESS = 0,
    CUBLAS_NOT_INITIALIZED = 1,
    CUBLAS_ALLOC_FAILED = 3,
    CUBLAS_INVALID_VALUE = 7,
    CUBLAS_EXECUTION_FAILED = 13
};

/* A version that every torch of this CUDA major accepts: its own is never newer. */
#define CUBLAS_MAJOR   SIM_CUDA_MAJOR
#define CUBLAS_MINOR   (SIM_CUDA_MAJOR == 12 ? 9 : 2)
#define CUBLAS_VERSION (CUBLAS_MAJOR * 10000 + CUBLAS_MINOR * 100)

struct cublas {
    void *stream;
    int pointer_mode, math_mode, atomics_mode, sm_count_target;
};

int cublasCreate_v2(struct cublas **handle)
{
    if (handle == NULL)
        return CUBLAS_INVALID_VALUE;
    if (!sim_library_device_present())
        return CUBLAS_NOT_INITIALIZED;
    *handle = calloc(1, sizeof **handle);
    return *handle == NULL ? CUBLAS_ALLOC_FAILED : CUBLAS_SUCCESS;
}

int cublasDestroy_v2(struct cublas *handle)
{
    if (handle == NULL)
        return CUBLAS_NOT_INITIALIZED;
    free(handle);
    return CUBLAS_SUCCESS;
}

/* Each property is a field with a setter and a getter of the same shape. */
#define CUBLAS_PROPERTY(setter, getter, type, field)                                                         \
    int setter(struct cublas *handle, type value)                                                            \
    {                                                                                                        \
        if (handle == NULL)                                                                                  \
            return CUBLAS_NOT_INITIALIZED;                                                                   \
        handle->field = value;                                                                               \
        return CUBLAS_SUCCESS;                                                                               \
    }                                                                                                        \
    int getter(struct cublas *handle, type *value)                                                           \
    {                                                                                                        \
        if (handle == NULL)                                                                                  \
            return CUBLAS_NOT_INITIALIZED;                                                                   \
        if (value == NULL)                                                                                   \
            return CUBLAS_INVALID_VALUE;                                                                     \
        *value = handle->field;                                                                              \
        return CUBLAS_SUCCESS;                                                                               \
    }

CUBLAS_PROPERTY(cublasSetStream_v2, cublasGetStream_v2, void *, stream)
CUBLAS_PROPERTY(cublasSetPointerMode_v2, cublasGetPointerMode_v2, int, pointer_mode)
CUBLAS_PROPERTY(cublasSetMathMode, cublasGetMathMode, int, math_mode)
CUBLAS_PROPERTY(cublasSetAtomicsMode, cublasGetAtomicsMode, int, atomics_mode)
CUBLAS_PROPERTY(cublasSetSmCountTarget, cublasGetSmCountTarget, int, sm_count_target)

/* The caller's workspace is its own allocation; nothing here writes to it. */
int cublasSetWorkspace_v2(struct cublas *handle, void *workspace, size_t bytes)
{
    if (handle == NULL)
        return CUBLAS_NOT_INITIALIZED;
    return workspace == NULL && bytes > 0 ? CUBLAS_INVALID_VALUE : CUBLAS_SUCCESS;
}

int cublasGetVersion_v2(struct cublas *handle, int *version)
{
    if (version == NULL)
        return CUBLAS_INVALID_VALUE;
    *version = CUBLAS_VERSION;
    return CUBLAS_SUCCESS;
}

int cublasGetProperty(int which, int *value)
{
    return sim_library_property(which, CUBLAS_MAJOR, CUBLAS_MINOR, 0, value) == 0 ? CUBLAS_SUCCESS
                                                                                  : CUBLAS_INVALID_VALUE;
}

/* The batched solvers report on each matrix in info words, on the device or, for a check of the arguments
 * alone, on the host. torch reads both, so both say success; see library_cusolver.c. */
extern int cuMemsetD32Async(uintptr_t at, unsigned value, size_t count, void *stream); /* sim_cuda.so */

static int succeed_on_device(const struct cublas *handle, int *info, int count)
{
    if (handle == NULL)
        return CUBLAS_NOT_INITIALIZED;
    if (info == NULL || count <= 0)
        return CUBLAS_SUCCESS;
    int result = cuMemsetD32Async((uintptr_t)info, 0, (size_t)count, handle->stream);
    return result == 0 ? CUBLAS_SUCCESS : CUBLAS_EXECUTION_FAILED;
}

static int succeed_on_host(const struct cublas *handle, int *info)
{
    if (handle == NULL)
        return CUBLAS_NOT_INITIALIZED;
    if (info == NULL)
        return CUBLAS_INVALID_VALUE;
    *info = 0;
    return CUBLAS_SUCCESS;
}

#define CUBLAS_BATCHED(T)                                                                                    \
    int cublas##T##getrfBatched(struct cublas *handle, int n, void *const a[], int lda, int *pivots,         \
                                int *info, int batch)                                                        \
    {                                                                                                        \
        return succeed_on_device(handle, info, batch);                                                       \
    }                                                                                                        \
    int cublas##T##getriBatched(struct cublas *handle, int n, const void *const a[], int lda,                \
                                const int *pivots, void *const c[], int ldc, int *info, int batch)           \
    {                                                                                                        \
        return succeed_on_device(handle, info, batch);                                                       \
    }                                                                                                        \
    int cublas##T##matinvBatched(struct cublas *handle, int n, const void *const a[], int lda,               \
                                 void *const inverse[], int ld_inverse, int *info, int batch)                \
    {                                                                                                        \
        return succeed_on_device(handle, info, batch);                                                       \
    }                                                                                                        \
    int cublas##T##getrsBatched(struct cublas *handle, int trans, int n, int nrhs, const void *const a[],    \
                                int lda, const int *pivots, void *const b[], int ldb, int *info, int batch)  \
    {                                                                                                        \
        return succeed_on_host(handle, info);                                                                \
    }                                                                                                        \
    int cublas##T##geqrfBatched(struct cublas *handle, int m, int n, void *const a[], int lda,               \
                                void *const tau[], int *info, int batch)                                     \
    {                                                                                                        \
        return succeed_on_host(handle, info);                                                                \
    }                                                                                                        \
    int cublas##T##gelsBatched(struct cublas *handle, int trans, int m, int n, int nrhs, void *const a[],    \
                               int lda, void *const c[], int ldc, int *info, int *device_info, int batch)    \
    {                                                                                                        \
        int status = succeed_on_host(handle, info);                                                          \
        return status != CUBLAS_SUCCESS ? status : succeed_on_device(handle, device_info, batch);            \
    }

CUBLAS_BATCHED(S)
CUBLAS_BATCHED(D)
CUBLAS_BATCHED(C)
CUBLAS_BATCHED(Z)

size_t cublasGetCudartVersion(void)
{
    return SIM_CUDA_MAJOR * 1000;
}
