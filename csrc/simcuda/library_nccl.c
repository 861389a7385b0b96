/* NCCL with one rank: a communicator of size 1, in which every collective is a copy, in stream order. More
 * ranks are refused when the communicator is made: they would be processes on other simulated devices.
 */
#include "csrc/simcuda/library.h"

#include <stdlib.h>
#include <string.h>

/* ncclResult_t, as NVIDIA documents it. */
enum {
    NCCL_SUCCESS = 0,
    NCCL_CUDA_ERROR = 1,
    NCCL_SYSTEM_ERROR = 2,
    NCCL_INVALID_ARGUMENT = 4,
    NCCL_INVALID_USAGE = 5
};

/* As old as the oldest torch's own (2.27): newer functions are then not asked for. */
#define NCCL_VERSION 22700

struct unique_id {
    char bytes[128];
};

struct communicator {
    int device;
};

/* sim_cuda.so. */
extern int cuCtxGetDevice(int *device);
extern int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t bytes, void *stream);
extern int cuMemAlloc_v2(uintptr_t *out, size_t bytes);
extern int cuMemFree_v2(uintptr_t at);

static const char *last_error = "";

int ncclGetVersion(int *version)
{
    if (version == NULL)
        return NCCL_INVALID_ARGUMENT;
    *version = NCCL_VERSION;
    return NCCL_SUCCESS;
}

const char *ncclGetErrorString(int result)
{
    return result == NCCL_SUCCESS ? "no error" : "simulated NCCL: see ncclGetLastError";
}

const char *ncclGetLastError(struct communicator *communicator)
{
    return last_error;
}

int ncclGetUniqueId(struct unique_id *id)
{
    if (id == NULL)
        return NCCL_INVALID_ARGUMENT;
    memset(id, 0x5a, sizeof *id);
    return NCCL_SUCCESS;
}

static int make(struct communicator **out, int ranks, int rank)
{
    if (out == NULL)
        return NCCL_INVALID_ARGUMENT;
    if (ranks != 1 || rank != 0) {
        last_error = "the simulated NCCL has one rank: use a world size of 1, or a fake process group";
        return NCCL_INVALID_USAGE;
    }
    int device;
    if (cuCtxGetDevice(&device) != 0) {
        last_error = "no current device: call torch.cuda.set_device() before the communicator is created";
        return NCCL_CUDA_ERROR;
    }
    *out = malloc(sizeof **out);
    if (*out == NULL)
        return NCCL_SYSTEM_ERROR;
    (*out)->device = device;
    return NCCL_SUCCESS;
}

int ncclCommInitRank(struct communicator **out, int ranks, struct unique_id id, int rank)
{
    return make(out, ranks, rank);
}

int ncclCommInitRankConfig(struct communicator **out, int ranks, struct unique_id id, int rank, void *config)
{
    return make(out, ranks, rank);
}

int ncclCommInitRankScalable(struct communicator **out, int ranks, int rank, int ids, struct unique_id *id,
                             void *config)
{
    return make(out, ranks, rank);
}

int ncclCommInitAll(struct communicator **out, int devices, const int *list)
{
    return make(out, devices, 0);
}

int ncclCommSplit(struct communicator *communicator, int color, int key, struct communicator **out,
                  void *config)
{
    if (communicator == NULL || out == NULL)
        return NCCL_INVALID_ARGUMENT;
    *out = NULL;
    return color < 0 ? NCCL_SUCCESS : make(out, 1, 0); /* a negative colour takes no part */
}

int ncclCommFinalize(struct communicator *communicator)
{
    return communicator == NULL ? NCCL_INVALID_ARGUMENT : NCCL_SUCCESS;
}

int ncclCommDestroy(struct communicator *communicator)
{
    free(communicator);
    return NCCL_SUCCESS;
}

int ncclCommAbort(struct communicator *communicator)
{
    free(communicator);
    return NCCL_SUCCESS;
}

static int answer(const struct communicator *communicator, int value, int *out)
{
    if (communicator == NULL || out == NULL)
        return NCCL_INVALID_ARGUMENT;
    *out = value;
    return NCCL_SUCCESS;
}

int ncclCommGetAsyncError(struct communicator *communicator, int *error)
{
    return answer(communicator, NCCL_SUCCESS, error);
}

int ncclCommCount(const struct communicator *communicator, int *count)
{
    return answer(communicator, 1, count);
}

int ncclCommUserRank(const struct communicator *communicator, int *rank)
{
    return answer(communicator, 0, rank);
}

int ncclCommCuDevice(const struct communicator *communicator, int *device)
{
    return communicator == NULL ? NCCL_INVALID_ARGUMENT : answer(communicator, communicator->device, device);
}

/* Registration speeds transfers up; there are none to speed up. */
int ncclCommRegister(const struct communicator *communicator, void *buffer, size_t bytes, void **handle)
{
    if (communicator == NULL || handle == NULL)
        return NCCL_INVALID_ARGUMENT;
    *handle = buffer;
    return NCCL_SUCCESS;
}

int ncclCommDeregister(const struct communicator *communicator, void *handle)
{
    return communicator == NULL ? NCCL_INVALID_ARGUMENT : NCCL_SUCCESS;
}

int ncclMemAlloc(void **out, size_t bytes)
{
    uintptr_t at;
    if (out == NULL)
        return NCCL_INVALID_ARGUMENT;
    if (cuMemAlloc_v2(&at, bytes) != 0)
        return NCCL_CUDA_ERROR;
    *out = (void *)at;
    return NCCL_SUCCESS;
}

int ncclMemFree(void *at)
{
    return at == NULL || cuMemFree_v2((uintptr_t)at) == 0 ? NCCL_SUCCESS : NCCL_CUDA_ERROR;
}

/* Bytes of an ncclDataType_t; 0 for one that is not known. */
static size_t type_bytes(int type)
{
    static const unsigned char bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && (size_t)type < sizeof bytes ? bytes[type] : 0;
}

static int copy(const void *from, void *to, size_t count, int type, const struct communicator *communicator,
                void *stream)
{
    size_t each = type_bytes(type);
    if (communicator == NULL || each == 0 || count > SIZE_MAX / each)
        return NCCL_INVALID_ARGUMENT;
    if (from == to || count == 0)
        return NCCL_SUCCESS;
    int result = cuMemcpyDtoDAsync_v2((uintptr_t)to, (uintptr_t)from, count * each, stream);
    return result == 0 ? NCCL_SUCCESS : NCCL_CUDA_ERROR;
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int op,
                  struct communicator *communicator, void *stream)
{
    return copy(from, to, count, type, communicator, stream);
}

int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root,
               struct communicator *communicator, void *stream)
{
    return copy(from, to, count, type, communicator, stream);
}

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root,
                  struct communicator *communicator, void *stream)
{
    return copy(from, to, count, type, communicator, stream);
}

int ncclBcast(void *buffer, size_t count, int type, int root, struct communicator *communicator, void *stream)
{
    return copy(buffer, buffer, count, type, communicator, stream);
}

int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op,
                      struct communicator *communicator, void *stream)
{
    return copy(from, to, count, type, communicator, stream);
}

int ncclAllGather(const void *from, void *to, size_t count, int type, struct communicator *communicator,
                  void *stream)
{
    return copy(from, to, count, type, communicator, stream);
}

int ncclAlltoAll(const void *from, void *to, size_t count, int type, struct communicator *communicator,
                 void *stream)
{
    return copy(from, to, count, type, communicator, stream);
}

int ncclGather(const void *from, void *to, size_t count, int type, int root,
               struct communicator *communicator, void *stream)
{
    return copy(from, to, count, type, communicator, stream);
}

int ncclScatter(const void *from, void *to, size_t count, int type, int root,
                struct communicator *communicator, void *stream)
{
    return copy(from, to, count, type, communicator, stream);
}

int ncclGroupStart(void)
{
    return NCCL_SUCCESS;
}

int ncclGroupEnd(void)
{
    return NCCL_SUCCESS;
}
