/* torch's tensors from C: what is needed of one to run a kernel over its memory, in some 50 ns.
 *
 * Read by the DLPack C exchange table (torch.Tensor.__dlpack_c_exchange_api__); a torch without it is asked by methods. A
 * tensor is *plain*, and its memory may be given to a kernel, only if
 *
 *     its type is exactly torch.Tensor or torch.nn.Parameter     (a subclass may hold no memory, or mean another thing)
 *     its layout is strided, its device cpu or cuda, its type fp32, fp16, bf16 or fp64
 *     its elements are numel() different ones without gaps       (in whatever order of dimensions)
 *     nothing is lazy about it: no negation pending
 *
 * Whatever is not plain is torch's to deal with. */
#ifndef MO_PY_TENSOR_H
#define MO_PY_TENSOR_H

#include "python/module.h"

#include <stdbool.h>

#include "../kernels/widen.cuh"
#include "checkpoint/saved_list.h"

#define MO_CPU (-1)

typedef struct mo_tensor_view {
    uintptr_t address; /* of the first element; 0 where there is none */
    size_t count;      /* elements */
    size_t nbytes;     /* of all of them */
    mo_float kind;
    int device;      /* MO_CPU, or the number of a CUDA device */
    bool contiguous; /* in the order of its dimensions, the last the fastest */
} mo_tensor_view;

/* What is known of torch, found at the first call; NULL with an exception. */
const mo_torch *mo_py_torch(PyObject *module);

/* 1: *out is filled; 0: the object is no plain tensor; -1: exception. The view is good for as long as the tensor is left
 * alone; nothing is held. */
int mo_py_tensor_view(PyObject *module, PyObject *tensor, mo_tensor_view *out);

/* The same, but a negation may be pending: for work in which signs cancel out, and for a tensor that was asked before. It
 * saves half of the time. */
int mo_py_tensor_unsigned(PyObject *module, PyObject *tensor, mo_tensor_view *out);

/* A reference to a tensor of the kind that C++ has. A tensor that only Python refers to is looked at in 110 ns; torch takes the GIL
 * and counts the object each time that C++ takes its first reference. With one more it is 40 ns.
 *
 * Such a reference is nothing that the garbage collector sees: not for a tensor that may refer, by its hooks or its graph, to whoever
 * holds it. address: where the tensor's memory is. When that changes it must be held anew: what is held may be its former memory. */
typedef struct mo_tensor_hold {
    void *managed; /* NULL: nothing */
    uintptr_t address;
} mo_tensor_hold;

/* Instead of what *hold was; without an effect where torch has no table. */
void mo_py_tensor_hold(PyObject *module, PyObject *tensor, uintptr_t address, mo_tensor_hold *hold);
void mo_py_tensor_release(mo_tensor_hold *hold);

/* Whether the elements of two plain tensors of equal shape lie in memory in the same order. Only of interest where one of them
 * is not contiguous. -1: exception. */
int mo_py_tensor_same_order(PyObject *module, PyObject *one, PyObject *other);

/* The same for memory of one byte an element (torch.uint8); kind is not set. */
int mo_py_tensor_bytes(PyObject *module, PyObject *tensor, mo_tensor_view *out);

/* The same for numbers that can be widened; the view's kind is not set. */
int mo_py_tensor_numbers(PyObject *module, PyObject *tensor, mo_tensor_view *out, mo_number *number);

/* The same for elements of any type, of which only the bytes matter: a negation or a conjugation may be pending, the view's
 * kind is not set. 0 for a type that DLPack has no word for. */
int mo_py_tensor_memory(PyObject *module, PyObject *tensor, mo_tensor_view *out);

/* The same where nothing is pending, so that the bytes are all there is to the values; 0 for complex numbers, too. */
int mo_py_tensor_real(PyObject *module, PyObject *tensor, mo_tensor_view *out);

/* Shape, type and device of any tensor of the two types that DLPack's table can describe, gaps and negations or not; the sizes are
 * the tensor's own. 0, too, where there is no table. */
int mo_py_tensor_form(PyObject *module, PyObject *tensor, mo_form *out);

/* torch's current stream of a CUDA device; -1 with an exception. */
int mo_py_tensor_stream(PyObject *module, int device, void **out);

#endif
