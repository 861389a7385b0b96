/* A list of tensors cut into chunks for a multi-tensor kernel (kernels/chunk.cuh has the entry's layout).
 * Plain arithmetic on addresses: nothing is dereferenced, no CUDA.
 *
 *     the chunks of tensor t, in order, are [address(t), address(t) + count(t) * size): no gap, no overlap
 *     1 <= chunk.count, at most chunk_bytes; chunk.kind is the tensor's
 *     every chunk but the first of its tensor starts on a MO_CHUNK_ALIGNMENT boundary
 *     chunks are in the order of their tensors; a tensor of 0 elements has none
 *
 * So a misaligned tensor costs one ragged chunk, not a ragged start in every chunk. */
#ifndef MO_CHUNK_TABLE_H
#define MO_CHUNK_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../kernels/chunk.cuh"
#include "base/status.h"

#define MO_CHUNK_ALIGNMENT 128        /* bytes: a cache line, so that no two blocks write to one */
#define MO_CHUNKS_MAX      0x7FFFFFFF /* the largest gridDim.x */

/* Dense memory: an address of the first element, and how many follow. */
typedef struct mo_tensor {
    uintptr_t address; /* ignored where count is 0; else a multiple of the element's size */
    size_t count;      /* elements */
    mo_float kind;     /* may differ from tensor to tensor */
} mo_tensor;

/* Checks the list and counts its chunks. chunk_bytes: a power of two from MO_CHUNK_ALIGNMENT to 2 GiB. MO_INVALID names
 * the tensor that is of no kind, has no address, one that is not a multiple of its element's size, or one that runs past
 * the end of the address space; MO_OVERFLOW: more bytes than fit, or more chunks than a grid holds. */
mo_status mo_chunks_count(const mo_tensor *tensors, size_t count, size_t chunk_bytes, size_t *out_chunks,
                          mo_detail *detail);

/* Writes exactly the chunks that mo_chunks_count has counted for the same arguments. */
void mo_chunks_fill(const mo_tensor *tensors, size_t count, size_t chunk_bytes, mo_chunk *out);

/* The bytes of all tensors (of an unknown kind: any number). False where they do not fit a size_t. */
bool mo_tensors_bytes(const mo_tensor *tensors, size_t count, size_t *out);

#endif
