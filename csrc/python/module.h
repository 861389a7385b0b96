/* memopt._C, the module: its state, and the one place where a mo_status becomes an exception.
 *
 * Every Python object of ours lives in the module state (so sub-interpreters and a second import are safe);
 * what the engines know lives in C, process-wide, and is not here. Built against the limited API of
 * CPython 3.11. A binding file py_x.c offers `int mo_py_x_init(PyObject *module)`, which adds its functions
 * and types; the module's exec slot is the list of them. */
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

int mo_py_units_init(PyObject *module);
int mo_py_driver_init(PyObject *module);
int mo_py_alloc_init(PyObject *module);
int mo_py_statistics_init(PyObject *module);
int mo_py_kernels_init(PyObject *module);
int mo_py_trace_init(PyObject *module);
int mo_py_pool_init(PyObject *module);
int mo_py_tensor_init(PyObject *module);
int mo_py_optim_init(PyObject *module);
int mo_py_adam8_init(PyObject *module);
int mo_py_scaler_init(PyObject *module);
int mo_py_chain_init(PyObject *module);
int mo_py_checkpoint_init(PyObject *module);
int mo_py_transfer_init(PyObject *module);
int mo_py_module_calls_init(PyObject *module);
int mo_py_ring_init(PyObject *module);
int mo_py_disk_init(PyObject *module);
int mo_py_shared_init(PyObject *module);
int mo_py_cpu_log_init(PyObject *module);
int mo_py_widen_init(PyObject *module);
int mo_py_mapped_init(PyObject *module);
int mo_py_confine_init(PyObject *module);

#endif
