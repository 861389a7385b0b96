/* The type memopt._C.Gradients, made of gradients that were read for something else. */
#ifndef MO_PY_SCALER_H
#define MO_PY_SCALER_H

#include "python/py_tensor.h"
#include "scaler/gradients.h"

typedef struct mo_read_gradient {
    PyObject *given, *tensor; /* the parameter, its gradient: borrowed */
    int device;
    mo_gradient at;
} mo_read_gradient;

/* Number i of a list. */
typedef void mo_read_gradient_at(const void *user, size_t i, mo_read_gradient *out);

/* A new memopt._C.Gradients of `count` of them, with references to the tensors; NULL with an exception. */
PyObject *mo_py_gradients(PyObject *module, size_t count, mo_read_gradient_at *at, const void *user);

#endif
