/* cuDNN's recurrent networks: where each weight lies, and how large the spaces are.
 *
 * torch copies its weights to where cudnnGetRNNWeightParams says, so the layout must be consistent but need
 * not be NVIDIA's: for every pseudo layer (layer x direction) the matrices of its gates, input ones first,
 * then all biases. Work and reserve spaces follow a formula of one value per gate and unit; the real sizes
 * are not documented. Projections (LSTM with proj_size) are counted in the sizes, but not laid out.
 */
#include "csrc/simcuda/library_cudnn.h"

#include <stdbool.h>

enum { MODE_LSTM = 2, MODE_GRU = 3 }; /* 0 and 1 are the plain networks, with one gate */

struct rnn {
    int mode, directions, type, input, hidden, projection, layers;
    bool bias;
};

struct sequence {
    int steps, batch, width;
};

int cudnnCreateRNNDescriptor(void **out)
{
    return sim_cudnn_make(out, sizeof(struct rnn));
}

int cudnnDestroyRNNDescriptor(void *descriptor)
{
    return sim_cudnn_drop(descriptor);
}

int cudnnCreateRNNDataDescriptor(void **out)
{
    return sim_cudnn_make(out, sizeof(struct sequence));
}

int cudnnDestroyRNNDataDescriptor(void *descriptor)
{
    return sim_cudnn_drop(descriptor);
}

int cudnnSetRNNDescriptor_v8(struct rnn *rnn, int algorithm, int mode, int bias_mode, int direction,
                             int input_mode, int type, int math_type, int math, int32_t input, int32_t hidden,
                             int32_t projection, int32_t layers, void *dropout, uint32_t flags)
{
    if (rnn == NULL)
        return CUDNN_NULL_POINTER;
    if (input < 0 || hidden <= 0 || layers <= 0)
        return CUDNN_BAD_PARAM;
    *rnn = (struct rnn){
        .mode = mode,
        .directions = direction + 1,
        .type = type,
        .input = input,
        .hidden = hidden,
        .projection = projection,
        .layers = layers,
        .bias = bias_mode != 0,
    };
    return CUDNN_SUCCESS;
}

int cudnnSetRNNDataDescriptor(struct sequence *sequence, int type, int layout, int steps, int batch,
                              int width, const int *lengths, void *padding)
{
    if (sequence == NULL)
        return CUDNN_NULL_POINTER;
    *sequence = (struct sequence){steps, batch, width};
    return CUDNN_SUCCESS;
}

static int gates(const struct rnn *rnn)
{
    return rnn->mode == MODE_LSTM ? 4 : rnn->mode == MODE_GRU ? 3 : 1;
}

/* Linear layers of a pseudo layer: one a gate on the input, one a gate on the hidden state. */
static int linears(const struct rnn *rnn)
{
    return 2 * gates(rnn);
}

static int64_t columns(const struct rnn *rnn, int pseudo, int linear)
{
    int64_t output = rnn->projection > 0 ? rnn->projection : rnn->hidden;
    if (linear >= gates(rnn))
        return output;
    return pseudo < rnn->directions ? rnn->input : output * rnn->directions;
}

/* Elements before the matrix of (pseudo, linear). */
static int64_t matrix_offset(const struct rnn *rnn, int pseudo, int linear)
{
    int64_t offset = 0;
    for (int p = 0; p <= pseudo; p++)
        for (int l = 0; l < (p < pseudo ? linears(rnn) : linear); l++)
            offset += rnn->hidden * columns(rnn, p, l);
    return offset;
}

static int64_t matrices_end(const struct rnn *rnn)
{
    return matrix_offset(rnn, rnn->layers * rnn->directions, 0);
}

int cudnnGetRNNWeightSpaceSize(void *handle, const struct rnn *rnn, size_t *bytes)
{
    if (rnn == NULL || bytes == NULL)
        return CUDNN_NULL_POINTER;
    int64_t biases = rnn->bias ? (int64_t)rnn->layers * rnn->directions * linears(rnn) * rnn->hidden : 0;
    *bytes = (size_t)(matrices_end(rnn) + biases) * sim_cudnn_type_bytes(rnn->type);
    return CUDNN_SUCCESS;
}

/* torch asks with base NULL and takes the differences of what comes back. Descriptors and addresses may be
 * NULL. */
int cudnnGetRNNWeightParams(void *handle, const struct rnn *rnn, int32_t pseudo, size_t space_bytes,
                            char *base, int32_t linear, struct cudnn_tensor *matrix, void **matrix_at,
                            struct cudnn_tensor *bias, void **bias_at)
{
    if (rnn == NULL)
        return CUDNN_NULL_POINTER;
    if (pseudo < 0 || pseudo >= rnn->layers * rnn->directions || linear < 0)
        return CUDNN_BAD_PARAM;
    if (matrix_at != NULL)
        *matrix_at = NULL;
    if (bias_at != NULL)
        *bias_at = NULL;
    if (linear >= linears(rnn)) { /* the projection: "not there" is a NULL address and an empty descriptor */
        const int none[1] = {0};
        return matrix == NULL ? CUDNN_SUCCESS : sim_cudnn_set(matrix, rnn->type, 0, none, NULL);
    }
    size_t each = sim_cudnn_type_bytes(rnn->type);
    int rows = rnn->hidden, width = (int)columns(rnn, pseudo, linear);
    int64_t bias_offset = matrices_end(rnn) + ((int64_t)pseudo * linears(rnn) + linear) * rnn->hidden;
    if (matrix != NULL)
        sim_cudnn_set(matrix, rnn->type, 3, (int[]){1, rows, width}, (int[]){rows * width, width, 1});
    if (bias != NULL)
        sim_cudnn_set(bias, rnn->type, 3, (int[]){1, rows, 1}, (int[]){rows, 1, 1});
    if (matrix_at != NULL)
        *matrix_at = base + matrix_offset(rnn, pseudo, linear) * (int64_t)each;
    if (bias_at != NULL && rnn->bias)
        *bias_at = base + bias_offset * (int64_t)each;
    return CUDNN_SUCCESS;
}

int cudnnGetRNNTempSpaceSizes(void *handle, const struct rnn *rnn, int training, const struct sequence *x,
                              size_t *work_bytes, size_t *reserve_bytes)
{
    if (rnn == NULL || x == NULL)
        return CUDNN_NULL_POINTER;
    size_t units = (size_t)x->steps * (size_t)x->batch * (size_t)rnn->hidden * (size_t)rnn->directions;
    size_t unit_bytes = units * sim_cudnn_type_bytes(rnn->type);
    if (work_bytes != NULL)
        *work_bytes = unit_bytes * (size_t)gates(rnn);
    if (reserve_bytes != NULL) /* per layer: each gate, the cell and the output, kept for the backward pass */
        *reserve_bytes = training ? unit_bytes * (size_t)rnn->layers * (size_t)(gates(rnn) + 2) : 0;
    return CUDNN_SUCCESS;
}
