/* memopt._C, the module: its state, and the one place where a mo_status becomes an exception.
 *
 * Every Python object of ours lives in the module state (so sub-interpreters and a second import are safe);
 * what the engines know lives in C, process-wide, and is not here. Built against the limited API of
 * CPython 3.11. A binding file py_x.c offers `int mo_py_x_init(PyObject *module)`, which adds its functions
 * and types, and is one of MO_BINDINGS. */
#ifndef MO_MODULE_H
#define MO_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "base/status.h"

/* What py_tensor.c knows of torch; all NULL until the first tensor is looked at. */
typedef struct mo_torch {
    PyObject *tensor, *parameter; /* the types torch.Tensor, torch.nn.Parameter */
    PyObject *is_neg;             /* torch.Tensor.is_neg */
    PyCFunction is_neg_function;  /* what is behind it, to be called without an argument; or NULL */
    PyObject *grad;               /* "grad" */
    PyObject *dtypes[8];          /* of each mo_float, then torch.uint8, int8, uint16, int16 */
    const void *exchange;         /* DLPack's table; NULL where this torch has none */
} mo_torch;

/* The types of py_checkpoint.h, by their places in the state. */
enum {
    MO_ENGINE_TYPE,
    MO_SURROUNDINGS_TYPE,
    MO_REGION_TYPE,
    MO_REPLAY_TYPE,
    MO_HOLDER_TYPE,
    MO_CHECKPOINT_TYPES
};

typedef struct mo_module_state {
    PyObject *error;     /* memopt.Error, a RuntimeError with .status and .code */
    PyObject *gradients; /* the type memopt._C.Gradients */
    mo_torch torch;
    PyObject *checkpoint_types[MO_CHECKPOINT_TYPES];
    PyObject *shared_memory;   /* the type memopt._C.SharedMemory */
    PyObject *shared_iterator; /* of SharedItems */
} mo_module_state;

static inline mo_module_state *mo_state(PyObject *module)
{
    return (mo_module_state *)PyModule_GetState(module);
}

/* Sets the exception that a status stands for and returns NULL:
 *     MO_INVALID, MO_OVERFLOW     ValueError          MO_NO_HOST_MEMORY    MemoryError
 *     MO_IO                       OSError             all others           memopt.Error */
PyObject *mo_raise(PyObject *module, mo_status status, const mo_detail *detail);

/* Adds the type of a spec to the module, under the last part of its name. kept: where a reference of the module's state
 * goes; NULL: nowhere. 0, or -1 with an exception. */
int mo_py_add_type(PyObject *module, PyType_Spec *spec, PyObject **kept);

/* The binding files, in the order in which the exec slot calls them. */
/* clang-format off */
#define MO_BINDINGS(X)                                                                                       \
    X(units) X(driver) X(alloc) X(statistics) X(kernels) X(trace) X(pool) X(tensor) X(optim) X(adam_codes)        \
    X(scaler) X(chain) X(checkpoint) X(transfer) X(ring) X(disk) X(module_calls) X(shared) X(shared_items)   \
    X(shared_mapping) X(cpu_log) X(widen) X(mapped) X(confine) X(loss)
/* clang-format on */

#define MO_BINDING_INIT(name) int mo_py_##name##_init(PyObject *module);
MO_BINDINGS(MO_BINDING_INIT)
#undef MO_BINDING_INIT

#endif
