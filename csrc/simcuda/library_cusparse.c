/* cuSPARSE: descriptors that know their shape, buffers of size 0. Products and solves are stubs that do
 * nothing.
 *
 * Two counts depend on values that nothing here computes: a sparse sum is given its upper bound (no entry
 * shared), a sparse product its matrix as the caller made it.
 */
#include "csrc/simcuda/library.h"

#include <stdlib.h>

/* cusparseStatus_t, as NVIDIA documents it. */
enum {
    CUSPARSE_SUCCESS = 0,
    CUSPARSE_NOT_INITIALIZED = 1,
    CUSPARSE_ALLOC_FAILED = 2,
    CUSPARSE_INVALID_VALUE = 3
};

struct cusparse {
    void *stream;
    int pointer_mode;
};

struct descriptor {
    int64_t rows, columns, entries;
};

int cusparseCreate(struct cusparse **handle)
{
    if (handle == NULL)
        return CUSPARSE_INVALID_VALUE;
    if (!sim_library_device_present())
        return CUSPARSE_NOT_INITIALIZED;
    *handle = calloc(1, sizeof **handle);
    return *handle == NULL ? CUSPARSE_ALLOC_FAILED : CUSPARSE_SUCCESS;
}

int cusparseDestroy(struct cusparse *handle)
{
    if (handle == NULL)
        return CUSPARSE_NOT_INITIALIZED;
    free(handle);
    return CUSPARSE_SUCCESS;
}

int cusparseSetStream(struct cusparse *handle, void *stream)
{
    if (handle == NULL)
        return CUSPARSE_NOT_INITIALIZED;
    handle->stream = stream;
    return CUSPARSE_SUCCESS;
}

int cusparseGetStream(struct cusparse *handle, void **stream)
{
    if (handle == NULL || stream == NULL)
        return CUSPARSE_NOT_INITIALIZED;
    *stream = handle->stream;
    return CUSPARSE_SUCCESS;
}

int cusparseSetPointerMode(struct cusparse *handle, int mode)
{
    if (handle == NULL)
        return CUSPARSE_NOT_INITIALIZED;
    handle->pointer_mode = mode;
    return CUSPARSE_SUCCESS;
}

int cusparseGetPointerMode(struct cusparse *handle, int *mode)
{
    if (handle == NULL || mode == NULL)
        return CUSPARSE_NOT_INITIALIZED;
    *mode = handle->pointer_mode;
    return CUSPARSE_SUCCESS;
}

static int make(struct descriptor **out, int64_t rows, int64_t columns, int64_t entries)
{
    if (out == NULL || rows < 0 || columns < 0 || entries < 0)
        return CUSPARSE_INVALID_VALUE;
    *out = malloc(sizeof **out);
    if (*out == NULL)
        return CUSPARSE_ALLOC_FAILED;
    **out = (struct descriptor){rows, columns, entries};
    return CUSPARSE_SUCCESS;
}

/* Objects with no shape: what they hold is tuning or the result of an analysis. */
#define OBJECT(create, destroy)                                                                              \
    int cusparse##create(struct descriptor **out)                                                            \
    {                                                                                                        \
        return make(out, 0, 0, 0);                                                                           \
    }                                                                                                        \
    int cusparse##destroy(struct descriptor *object)                                                         \
    {                                                                                                        \
        free(object);                                                                                        \
        return CUSPARSE_SUCCESS;                                                                             \
    }

OBJECT(CreateMatDescr, DestroyMatDescr)
OBJECT(CreateBsrsm2Info, DestroyBsrsm2Info)
OBJECT(CreateBsrsv2Info, DestroyBsrsv2Info)
OBJECT(SpGEMM_createDescr, SpGEMM_destroyDescr)
OBJECT(SpSM_createDescr, SpSM_destroyDescr)
OBJECT(SpSV_createDescr, SpSV_destroyDescr)

int cusparseCreateCsr(struct descriptor **out, int64_t rows, int64_t columns, int64_t entries,
                      void *row_offsets, void *column_indices, void *values, int offset_type, int index_type,
                      int base, int type)
{
    return make(out, rows, columns, entries);
}

int cusparseCreateCoo(struct descriptor **out, int64_t rows, int64_t columns, int64_t entries,
                      void *row_indices, void *column_indices, void *values, int index_type, int base,
                      int type)
{
    return make(out, rows, columns, entries);
}

int cusparseCreateDnMat(struct descriptor **out, int64_t rows, int64_t columns, int64_t leading, void *values,
                        int type, int order)
{
    return make(out, rows, columns, 0);
}

int cusparseCreateDnVec(struct descriptor **out, int64_t size, void *values, int type)
{
    return make(out, size, 1, 0);
}

static int drop(struct descriptor *object)
{
    free(object);
    return CUSPARSE_SUCCESS;
}

int cusparseDestroySpMat(struct descriptor *matrix)
{
    return drop(matrix);
}

int cusparseDestroyDnMat(struct descriptor *matrix)
{
    return drop(matrix);
}

int cusparseDestroyDnVec(struct descriptor *vector)
{
    return drop(vector);
}

int cusparseSpMatGetSize(const struct descriptor *matrix, int64_t *rows, int64_t *columns, int64_t *entries)
{
    if (matrix == NULL || rows == NULL || columns == NULL || entries == NULL)
        return CUSPARSE_INVALID_VALUE;
    *rows = matrix->rows;
    *columns = matrix->columns;
    *entries = matrix->entries;
    return CUSPARSE_SUCCESS;
}

static int no_buffer(size_t *bytes)
{
    if (bytes == NULL)
        return CUSPARSE_INVALID_VALUE;
    *bytes = 0;
    return CUSPARSE_SUCCESS;
}

static int no_buffer_int(int *bytes)
{
    if (bytes == NULL)
        return CUSPARSE_INVALID_VALUE;
    *bytes = 0;
    return CUSPARSE_SUCCESS;
}

int cusparseSpMV_bufferSize(void *handle, int op, void *alpha, void *a, void *x, void *beta, void *y,
                            int compute, int algorithm, size_t *bytes)
{
    return no_buffer(bytes);
}

int cusparseSpMM_bufferSize(void *handle, int op_a, int op_b, void *alpha, void *a, void *b, void *beta,
                            void *c, int compute, int algorithm, size_t *bytes)
{
    return no_buffer(bytes);
}

int cusparseSDDMM_bufferSize(void *handle, int op_a, int op_b, void *alpha, void *a, void *b, void *beta,
                             void *c, int compute, int algorithm, size_t *bytes)
{
    return no_buffer(bytes);
}

int cusparseSpSV_bufferSize(void *handle, int op, void *alpha, void *a, void *x, void *y, int compute,
                            int algorithm, void *descriptor, size_t *bytes)
{
    return no_buffer(bytes);
}

int cusparseSpSM_bufferSize(void *handle, int op_a, int op_b, void *alpha, void *a, void *b, void *c,
                            int compute, int algorithm, void *descriptor, size_t *bytes)
{
    return no_buffer(bytes);
}

int cusparseSpGEMM_workEstimation(void *handle, int op_a, int op_b, void *alpha, void *a, void *b, void *beta,
                                  void *c, int compute, int algorithm, void *descriptor, size_t *bytes,
                                  void *buffer)
{
    return no_buffer(bytes);
}

int cusparseSpGEMM_compute(void *handle, int op_a, int op_b, void *alpha, void *a, void *b, void *beta,
                           void *c, int compute, int algorithm, void *descriptor, size_t *bytes, void *buffer)
{
    return no_buffer(bytes);
}

int cusparseXcoosort_bufferSizeExt(void *handle, int m, int n, int entries, const int *rows,
                                   const int *columns, size_t *bytes)
{
    return no_buffer(bytes);
}

int cusparseXcsrsort_bufferSizeExt(void *handle, int m, int n, int entries, const int *offsets,
                                   const int *columns, size_t *bytes)
{
    return no_buffer(bytes);
}

int cusparseXcsrgeam2Nnz(void *handle, int m, int n, void *descriptor_a, int entries_a, const int *offsets_a,
                         const int *columns_a, void *descriptor_b, int entries_b, const int *offsets_b,
                         const int *columns_b, void *descriptor_c, int *offsets_c, int *entries,
                         void *workspace)
{
    if (entries == NULL || entries_a < 0 || entries_b < 0)
        return CUSPARSE_INVALID_VALUE;
    *entries = entries_a + entries_b; /* torch asks in host pointer mode */
    return CUSPARSE_SUCCESS;
}

/* A position of -1 says that no pivot is zero. */
static int no_zero_pivot(int *position)
{
    if (position == NULL)
        return CUSPARSE_INVALID_VALUE;
    *position = -1;
    return CUSPARSE_SUCCESS;
}

int cusparseXbsrsv2_zeroPivot(void *handle, void *info, int *position)
{
    return no_zero_pivot(position);
}

int cusparseXbsrsm2_zeroPivot(void *handle, void *info, int *position)
{
    return no_zero_pivot(position);
}

#define TYPED(T)                                                                                             \
    int cusparse##T##bsrsv2_bufferSize(void *handle, int direction, int op, int rows, int blocks,            \
                                       void *descriptor, void *values, const int *offsets,                   \
                                       const int *columns, int block, void *info, int *bytes)                \
    {                                                                                                        \
        return no_buffer_int(bytes);                                                                         \
    }                                                                                                        \
    int cusparse##T##bsrsm2_bufferSize(void *handle, int direction, int op_a, int op_x, int rows, int n,     \
                                       int blocks, void *descriptor, void *values, const int *offsets,       \
                                       const int *columns, int block, void *info, int *bytes)                \
    {                                                                                                        \
        return no_buffer_int(bytes);                                                                         \
    }                                                                                                        \
    int cusparse##T##csrgeam2_bufferSizeExt(void *handle, int m, int n, void *alpha, void *descriptor_a,     \
                                            int entries_a, void *values_a, int *offsets_a, int *columns_a,   \
                                            void *beta, void *descriptor_b, int entries_b, void *values_b,   \
                                            int *offsets_b, int *columns_b, void *descriptor_c,              \
                                            void *values_c, int *offsets_c, int *columns_c, size_t *bytes)   \
    {                                                                                                        \
        return no_buffer(bytes);                                                                             \
    }

TYPED(S)
TYPED(D)
TYPED(C)
TYPED(Z)
