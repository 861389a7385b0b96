/* Shared containers for Python: objects to values and back (py_shared_values.c), the memory (py_shared.c), and what reads
 * it (py_shared_reader.c, py_shared_items.c, py_shared_mapping.c).
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

/* ---- what reads it ----------------------------------------------------------------------------------------------- */

/* What objects of both types begin with. */
typedef struct mo_shared_reader {
    PyObject_HEAD PyObject *module; /* borrowed: the memory's type holds it */
    PyObject *memory;               /* NULL: closed */
    PyObject *leaf;                 /* decode */
    mo_shared_view view;
} mo_shared_reader;

/* What tp_new has: `made_by`, which tells the type that is ours from its subclasses, and its arguments. */
typedef struct mo_shared_making {
    const char *name; /* for messages */
    newfunc made_by;
    PyObject *args, *keywords;
} mo_shared_making;

/* Reads (memory, decode). The reader's view says what is in the memory; NULL with an exception. */
mo_shared_reader *mo_shared_reader_new(PyTypeObject *type, const mo_shared_making *making);

/* Another on the same memory, of the same type. */
mo_shared_reader *mo_shared_reader_again(const mo_shared_reader *reader);

void mo_shared_reader_dealloc(PyObject *self);

/* False with an exception: it is closed. */
bool mo_shared_reader_is_open(const mo_shared_reader *reader);

/* The value that begins there. It stays readable whatever a leaf's function does, closing the reader included. */
PyObject *mo_shared_reader_decode(const mo_shared_reader *reader, mo_shared_cursor *cursor);

/* Methods and attributes of both: close(), _memory. */
PyObject *mo_shared_reader_close(PyObject *self, PyObject *unused);
PyObject *mo_shared_reader_memory(PyObject *self, void *unused);

#endif
