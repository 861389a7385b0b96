/* cuSOLVER, dense: handles, workspaces of size 0, and factorisations that compute nothing but report success.
 *
 * torch reads the info words of a factorisation on the host to raise LinAlgError. Nothing computes here, so
 * what the words hold would be whatever the memory held before; each operation therefore clears them on its
 * stream, as a successful one does. Results are undefined memory: use memopt.sim.Compute where they matter.
 */
#include "csrc/simcuda/library.h"

#include <stdlib.h>

/* cusolverStatus_t, as NVIDIA documents it. */
enum {
    CUSOLVER_SUCCESS = 0,
    CUSOLVER_NOT_INITIALIZED = 1,
    CUSOLVER_ALLOC_FAILED = 2,
    CUSOLVER_INVALID_VALUE = 3,
    CUSOLVER_EXECUTION_FAILED = 6
};

struct cusolver {
    void *stream;
};

/* sim_cuda.so; CUdeviceptr is an integer of pointer size. */
extern int cuMemsetD32Async(uintptr_t at, unsigned value, size_t count, void *stream);

int cusolverDnCreate(struct cusolver **handle)
{
    if (handle == NULL)
        return CUSOLVER_INVALID_VALUE;
    if (!sim_library_device_present())
        return CUSOLVER_NOT_INITIALIZED;
    *handle = calloc(1, sizeof **handle);
    return *handle == NULL ? CUSOLVER_ALLOC_FAILED : CUSOLVER_SUCCESS;
}

int cusolverDnDestroy(struct cusolver *handle)
{
    if (handle == NULL)
        return CUSOLVER_NOT_INITIALIZED;
    free(handle);
    return CUSOLVER_SUCCESS;
}

int cusolverDnSetStream(struct cusolver *handle, void *stream)
{
    if (handle == NULL)
        return CUSOLVER_NOT_INITIALIZED;
    handle->stream = stream;
    return CUSOLVER_SUCCESS;
}

int cusolverDnGetStream(struct cusolver *handle, void **stream)
{
    if (handle == NULL || stream == NULL)
        return CUSOLVER_NOT_INITIALIZED;
    *stream = handle->stream;
    return CUSOLVER_SUCCESS;
}

/* Parameter objects hold tuning that means nothing here. */
static int make_parameters(void **out)
{
    if (out == NULL)
        return CUSOLVER_INVALID_VALUE;
    *out = calloc(1, 64);
    return *out == NULL ? CUSOLVER_ALLOC_FAILED : CUSOLVER_SUCCESS;
}

static int drop_parameters(void *parameters)
{
    free(parameters);
    return CUSOLVER_SUCCESS;
}

#define PARAMETERS(what)                                                                                     \
    int cusolverDnCreate##what(void **out)                                                                   \
    {                                                                                                        \
        return make_parameters(out);                                                                         \
    }                                                                                                        \
    int cusolverDnDestroy##what(void *parameters)                                                            \
    {                                                                                                        \
        return drop_parameters(parameters);                                                                  \
    }

PARAMETERS(Params)
PARAMETERS(SyevjInfo)
PARAMETERS(GesvdjInfo)

/* Workspaces are counted in elements by the typed functions, in bytes by the generic (X) ones. */
static int no_elements(int *elements)
{
    if (elements == NULL)
        return CUSOLVER_INVALID_VALUE;
    *elements = 0;
    return CUSOLVER_SUCCESS;
}

static int no_bytes(size_t *device, size_t *host)
{
    if (device == NULL || host == NULL)
        return CUSOLVER_INVALID_VALUE;
    *device = *host = 0;
    return CUSOLVER_SUCCESS;
}

/* The operation is over and info[0..count) say so. */
static int succeed(const struct cusolver *handle, int *info, int64_t count)
{
    if (handle == NULL)
        return CUSOLVER_NOT_INITIALIZED;
    if (info == NULL || count <= 0)
        return CUSOLVER_SUCCESS;
    return cuMemsetD32Async((uintptr_t)info, 0, (size_t)count, handle->stream) == 0
               ? CUSOLVER_SUCCESS
               : CUSOLVER_EXECUTION_FAILED;
}

/* The handle comes first everywhere; the rest is NVIDIA's list with every data pointer as void *. */
#define SIZE(name, ...) int cusolverDn##name##_bufferSize(struct cusolver *handle, __VA_ARGS__)
#define CALL(name, ...) int cusolverDn##name(struct cusolver *handle, __VA_ARGS__)

#define TYPED(T)                                                                                             \
    SIZE(T##getrf, int m, int n, void *a, int lda, int *lwork)                                               \
    {                                                                                                        \
        return no_elements(lwork);                                                                           \
    }                                                                                                        \
    CALL(T##getrf, int m, int n, void *a, int lda, void *work, int *pivots, int *info)                       \
    {                                                                                                        \
        return succeed(handle, info, 1);                                                                     \
    }                                                                                                        \
    CALL(T##getrs, int trans, int n, int nrhs, void *a, int lda, int *pivots, void *b, int ldb, int *info)   \
    {                                                                                                        \
        return succeed(handle, info, 1);                                                                     \
    }                                                                                                        \
    SIZE(T##potrf, int uplo, int n, void *a, int lda, int *lwork)                                            \
    {                                                                                                        \
        return no_elements(lwork);                                                                           \
    }                                                                                                        \
    CALL(T##potrf, int uplo, int n, void *a, int lda, void *work, int lwork, int *info)                      \
    {                                                                                                        \
        return succeed(handle, info, 1);                                                                     \
    }                                                                                                        \
    CALL(T##potrs, int uplo, int n, int nrhs, void *a, int lda, void *b, int ldb, int *info)                 \
    {                                                                                                        \
        return succeed(handle, info, 1);                                                                     \
    }                                                                                                        \
    CALL(T##potrfBatched, int uplo, int n, void *a[], int lda, int *info, int batch)                         \
    {                                                                                                        \
        return succeed(handle, info, batch);                                                                 \
    }                                                                                                        \
    CALL(T##potrsBatched, int uplo, int n, int nrhs, void *a[], int lda, void *b[], int ldb, int *info,      \
         int batch)                                                                                          \
    {                                                                                                        \
        return succeed(handle, info, 1);                                                                     \
    }                                                                                                        \
    SIZE(T##geqrf, int m, int n, void *a, int lda, int *lwork)                                               \
    {                                                                                                        \
        return no_elements(lwork);                                                                           \
    }                                                                                                        \
    CALL(T##geqrf, int m, int n, void *a, int lda, void *tau, void *work, int lwork, int *info)              \
    {                                                                                                        \
        return succeed(handle, info, 1);                                                                     \
    }                                                                                                        \
    SIZE(T##sytrf, int n, void *a, int lda, int *lwork)                                                      \
    {                                                                                                        \
        return no_elements(lwork);                                                                           \
    }                                                                                                        \
    CALL(T##sytrf, int uplo, int n, void *a, int lda, int *pivots, void *work, int lwork, int *info)         \
    {                                                                                                        \
        return succeed(handle, info, 1);                                                                     \
    }                                                                                                        \
    SIZE(T##gesvd, int m, int n, int *lwork)                                                                 \
    {                                                                                                        \
        return no_elements(lwork);                                                                           \
    }                                                                                                        \
    CALL(T##gesvd, signed char job_u, signed char job_vt, int m, int n, void *a, int lda, void *s, void *u,  \
         int ldu, void *vt, int ldvt, void *work, int lwork, void *rwork, int *info)                         \
    {                                                                                                        \
        return succeed(handle, info, 1);                                                                     \
    }                                                                                                        \
    SIZE(T##gesvdj, int job, int econ, int m, int n, void *a, int lda, void *s, void *u, int ldu, void *v,   \
         int ldv, int *lwork, void *parameters)                                                              \
    {                                                                                                        \
        return no_elements(lwork);                                                                           \
    }                                                                                                        \
    CALL(T##gesvdj, int job, int econ, int m, int n, void *a, int lda, void *s, void *u, int ldu, void *v,   \
         int ldv, void *work, int lwork, int *info, void *parameters)                                        \
    {                                                                                                        \
        return succeed(handle, info, 1);                                                                     \
    }                                                                                                        \
    SIZE(T##gesvdjBatched, int job, int m, int n, void *a, int lda, void *s, void *u, int ldu, void *v,      \
         int ldv, int *lwork, void *parameters, int batch)                                                   \
    {                                                                                                        \
        return no_elements(lwork);                                                                           \
    }                                                                                                        \
    CALL(T##gesvdjBatched, int job, int m, int n, void *a, int lda, void *s, void *u, int ldu, void *v,      \
         int ldv, void *work, int lwork, int *info, void *parameters, int batch)                             \
    {                                                                                                        \
        return succeed(handle, info, batch);                                                                 \
    }                                                                                                        \
    SIZE(T##gesvdaStridedBatched, int job, int rank, int m, int n, void *a, int lda, long long stride_a,     \
         void *s, long long stride_s, void *u, int ldu, long long stride_u, void *v, int ldv,                \
         long long stride_v, int *lwork, int batch)                                                          \
    {                                                                                                        \
        return no_elements(lwork);                                                                           \
    }                                                                                                        \
    CALL(T##gesvdaStridedBatched, int job, int rank, int m, int n, void *a, int lda, long long stride_a,     \
         void *s, long long stride_s, void *u, int ldu, long long stride_u, void *v, int ldv,                \
         long long stride_v, void *work, int lwork, int *info, double *residuals, int batch)                 \
    {                                                                                                        \
        return succeed(handle, info, batch);                                                                 \
    }

TYPED(S)
TYPED(D)
TYPED(C)
TYPED(Z)

/* Operations whose name differs between real and complex types. */
#define APPLY_Q(name)                                                                                        \
    SIZE(name, int side, int trans, int m, int n, int k, void *a, int lda, void *tau, void *c, int ldc,      \
         int *lwork)                                                                                         \
    {                                                                                                        \
        return no_elements(lwork);                                                                           \
    }                                                                                                        \
    CALL(name, int side, int trans, int m, int n, int k, void *a, int lda, void *tau, void *c, int ldc,      \
         void *work, int lwork, int *info)                                                                   \
    {                                                                                                        \
        return succeed(handle, info, 1);                                                                     \
    }

#define FORM_Q(name)                                                                                         \
    SIZE(name, int m, int n, int k, void *a, int lda, void *tau, int *lwork)                                 \
    {                                                                                                        \
        return no_elements(lwork);                                                                           \
    }                                                                                                        \
    CALL(name, int m, int n, int k, void *a, int lda, void *tau, void *work, int lwork, int *info)           \
    {                                                                                                        \
        return succeed(handle, info, 1);                                                                     \
    }

#define EIGEN(name)                                                                                          \
    SIZE(name##evd, int job, int uplo, int n, void *a, int lda, void *w, int *lwork)                         \
    {                                                                                                        \
        return no_elements(lwork);                                                                           \
    }                                                                                                        \
    CALL(name##evd, int job, int uplo, int n, void *a, int lda, void *w, void *work, int lwork, int *info)   \
    {                                                                                                        \
        return succeed(handle, info, 1);                                                                     \
    }                                                                                                        \
    SIZE(name##evj, int job, int uplo, int n, void *a, int lda, void *w, int *lwork, void *parameters)       \
    {                                                                                                        \
        return no_elements(lwork);                                                                           \
    }                                                                                                        \
    CALL(name##evj, int job, int uplo, int n, void *a, int lda, void *w, void *work, int lwork, int *info,   \
         void *parameters)                                                                                   \
    {                                                                                                        \
        return succeed(handle, info, 1);                                                                     \
    }                                                                                                        \
    SIZE(name##evjBatched, int job, int uplo, int n, void *a, int lda, void *w, int *lwork,                  \
         void *parameters, int batch)                                                                        \
    {                                                                                                        \
        return no_elements(lwork);                                                                           \
    }                                                                                                        \
    CALL(name##evjBatched, int job, int uplo, int n, void *a, int lda, void *w, void *work, int lwork,       \
         int *info, void *parameters, int batch)                                                             \
    {                                                                                                        \
        return succeed(handle, info, batch);                                                                 \
    }

APPLY_Q(Sormqr)
APPLY_Q(Dormqr)
APPLY_Q(Cunmqr)
APPLY_Q(Zunmqr)
FORM_Q(Sorgqr)
FORM_Q(Dorgqr)
FORM_Q(Cungqr)
FORM_Q(Zungqr)
EIGEN(Ssy)
EIGEN(Dsy)
EIGEN(Che)
EIGEN(Zhe)

/* The generic 64-bit interface: one function for all types. */
SIZE(Xgetrf, void *parameters, int64_t m, int64_t n, int type_a, void *a, int64_t lda, int compute,
     size_t *device, size_t *host)
{
    return no_bytes(device, host);
}

CALL(Xgetrf, void *parameters, int64_t m, int64_t n, int type_a, void *a, int64_t lda, int64_t *pivots,
     int compute, void *device, size_t device_bytes, void *host, size_t host_bytes, int *info)
{
    return succeed(handle, info, 1);
}

CALL(Xgetrs, void *parameters, int trans, int64_t n, int64_t nrhs, int type_a, void *a, int64_t lda,
     int64_t *pivots, int type_b, void *b, int64_t ldb, int *info)
{
    return succeed(handle, info, 1);
}

SIZE(Xgeqrf, void *parameters, int64_t m, int64_t n, int type_a, void *a, int64_t lda, int type_tau,
     void *tau, int compute, size_t *device, size_t *host)
{
    return no_bytes(device, host);
}

CALL(Xgeqrf, void *parameters, int64_t m, int64_t n, int type_a, void *a, int64_t lda, int type_tau,
     void *tau, int compute, void *device, size_t device_bytes, void *host, size_t host_bytes, int *info)
{
    return succeed(handle, info, 1);
}

SIZE(Xpotrf, void *parameters, int uplo, int64_t n, int type_a, void *a, int64_t lda, int compute,
     size_t *device, size_t *host)
{
    return no_bytes(device, host);
}

CALL(Xpotrf, void *parameters, int uplo, int64_t n, int type_a, void *a, int64_t lda, int compute,
     void *device, size_t device_bytes, void *host, size_t host_bytes, int *info)
{
    return succeed(handle, info, 1);
}

CALL(Xpotrs, void *parameters, int uplo, int64_t n, int64_t nrhs, int type_a, void *a, int64_t lda,
     int type_b, void *b, int64_t ldb, int *info)
{
    return succeed(handle, info, 1);
}

SIZE(Xsytrs, int uplo, int64_t n, int64_t nrhs, int type_a, void *a, int64_t lda, int64_t *pivots, int type_b,
     void *b, int64_t ldb, size_t *device, size_t *host)
{
    return no_bytes(device, host);
}

CALL(Xsytrs, int uplo, int64_t n, int64_t nrhs, int type_a, void *a, int64_t lda, int64_t *pivots, int type_b,
     void *b, int64_t ldb, void *device, size_t device_bytes, void *host, size_t host_bytes, int *info)
{
    return succeed(handle, info, 1);
}

SIZE(Xsyevd, void *parameters, int job, int uplo, int64_t n, int type_a, void *a, int64_t lda, int type_w,
     void *w, int compute, size_t *device, size_t *host)
{
    return no_bytes(device, host);
}

CALL(Xsyevd, void *parameters, int job, int uplo, int64_t n, int type_a, void *a, int64_t lda, int type_w,
     void *w, int compute, void *device, size_t device_bytes, void *host, size_t host_bytes, int *info)
{
    return succeed(handle, info, 1);
}

SIZE(XsyevBatched, void *parameters, int job, int uplo, int64_t n, int type_a, void *a, int64_t lda,
     int type_w, void *w, int compute, size_t *device, size_t *host, int64_t batch)
{
    return no_bytes(device, host);
}

CALL(XsyevBatched, void *parameters, int job, int uplo, int64_t n, int type_a, void *a, int64_t lda,
     int type_w, void *w, int compute, void *device, size_t device_bytes, void *host, size_t host_bytes,
     int *info, int64_t batch)
{
    return succeed(handle, info, batch);
}

SIZE(Xgeev, void *parameters, int job_vl, int job_vr, int64_t n, int type_a, void *a, int64_t lda, int type_w,
     void *w, int type_vl, void *vl, int64_t ldvl, int type_vr, void *vr, int64_t ldvr, int compute,
     size_t *device, size_t *host)
{
    return no_bytes(device, host);
}

CALL(Xgeev, void *parameters, int job_vl, int job_vr, int64_t n, int type_a, void *a, int64_t lda, int type_w,
     void *w, int type_vl, void *vl, int64_t ldvl, int type_vr, void *vr, int64_t ldvr, int compute,
     void *device, size_t device_bytes, void *host, size_t host_bytes, int *info)
{
    return succeed(handle, info, 1);
}
