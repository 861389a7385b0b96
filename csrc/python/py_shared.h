/* Shared containers for Python: objects to values and back (py_shared_values.c), the memory (py_shared.c), and what reads
 * it (py_shared_items.c, py_shared_mapping.c).
 *
 * What is no plain value is a leaf, of which C knows nothing. Python's side of it are two functions:
 *
 *     encode(value) -> (kind, description, buffer), or what is wrong with it, as a str
 *     decode(kind, description, memory, begin, length) -> value
 *
 * with a plain value for a description, and a kind below 256. */
#ifndef MO_PY_SHARED_H
#define MO_PY_SHARED_H

#include "python/module.h"

#include <stdbool.h>

#include "data/shared_builder.h"
#include "data/shared_values.h"

/* ---- values ------------------------------------------------------------------------------------------------------ */

typedef struct mo_shared_encoder {
    PyObject *module, *leaf; /* borrowed; leaf: encode */
    const char *name;        /* of the container, for messages */
    PyObject *item;          /* borrowed: the key it is under; NULL: its number is `number` */
    uint64_t number;
    int depth;
    struct {
        PyObject *container, *key; /* borrowed; key: NULL where `index` is the step */
        Py_ssize_t index;          /* < 0: no step, as in a set */
    } path[MO_SHARED_MOST_DEPTH + 1];
} mo_shared_encoder;

/* 0, or -1 with an exception that names the place in the item and the type. */
int mo_shared_encode(mo_shared_encoder *e, PyObject *value, mo_shared_writer *w);

/* A key's canonical form. 0: it is the key itself; 1: the key is another value; -1: an exception. With `any`, for
 * looking up, any hashable object will do, and 2 says that no key of ours equals it. */
int mo_shared_encode_key(mo_shared_encoder *e, PyObject *key, bool any, mo_shared_writer *w);

/* memory: the exporter of the bytes that the cursor is in. NULL with an exception. */
PyObject *mo_shared_decode(PyObject *module, PyObject *memory, PyObject *leaf, mo_shared_cursor *c);

/* A str of these bytes. */
PyObject *mo_shared_decode_str(PyObject *module, const uint8_t *bytes, uint64_t length);

/* memopt.Error: this place of the memory is damaged; NULL. */
PyObject *mo_shared_damaged(PyObject *module);

/* ---- the memory -------------------------------------------------------------------------------------------------- */

/* The view of a memopt._C.SharedMemory; -1 with an exception for another object, or for memory that is none. */
int mo_shared_view_of(PyObject *module, PyObject *memory, mo_shared_view *out);

int mo_py_shared_items_init(PyObject *module);
int mo_py_shared_mapping_init(PyObject *module);

#endif
