/* The memory of shared containers as memopt._C.SharedMemory, and how one is filled from Python objects. */
#include "python/py_shared.h"

#include <unistd.h>

#include "base/size.h"

typedef struct memory {
    PyObject_HEAD PyObject *privately; /* the same, writable; or NULL */
    mo_shared_mapping mapping;
    int fd; /* -1: of a writable one */
} memory;

static void memory_dealloc(PyObject *self)
{
    memory *m = (memory *)self;
    PyTypeObject *type = Py_TYPE(self);

    Py_XDECREF(m->privately);
    mo_shared_unmap(&m->mapping);
    if (m->fd >= 0)
        close(m->fd);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* A new one; fd is its own from then on. fd stays the caller's where this fails, and where it is writable. */
static PyObject *memory_made(PyTypeObject *type, int fd, bool privately)
{
    memory *m = (memory *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    PyObject *module = PyType_GetModule(type);
    mo_detail detail;
    mo_status status;

    if (m)
        m->fd = -1; /* before it may be deallocated: 0 is somebody's */
    if (!m || !module) {
        Py_XDECREF((PyObject *)m);
        return NULL;
    }
    status = mo_shared_map(fd, privately, &detail, &m->mapping);
    if (status) {
        Py_DECREF((PyObject *)m);
        return mo_raise(module, status, &detail);
    }
    m->fd = privately ? -1 : fd;
    return (PyObject *)m;
}

static PyObject *memory_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    int fd;

    if (keywords && PyDict_Size(keywords))
        return PyErr_Format(PyExc_TypeError, "SharedMemory() takes no keyword arguments");
    return PyArg_ParseTuple(args, "i:SharedMemory", &fd) ? memory_made(type, fd, false) : NULL;
}

static int memory_get_buffer(PyObject *self, Py_buffer *view, int flags)
{
    memory *m = (memory *)self;

    return PyBuffer_FillInfo(view, self, m->mapping.bytes, (Py_ssize_t)m->mapping.size,
                             /* readonly */ m->fd >= 0, flags);
}

PyDoc_STRVAR(memory_fileno_doc, "fileno($self, /)\n--\n\nThe descriptor of the memory, which stays its own.");

static PyObject *memory_fileno(PyObject *self, PyObject *unused)
{
    (void)unused;
    return PyLong_FromLong(((memory *)self)->fd);
}

PyDoc_STRVAR(
    privately_doc,
    "privately($self, /)\n--\n\n"
    "The same memory, writable: pages that are written to become this process's own. One for all calls.");

static PyObject *memory_privately(PyObject *self, PyObject *unused)
{
    memory *m = (memory *)self;

    (void)unused;
    if (m->fd < 0)
        return Py_NewRef(self);
    if (!m->privately)
        m->privately = memory_made(Py_TYPE(self), m->fd, /* privately */ true);
    return Py_XNewRef(m->privately);
}

static Py_ssize_t memory_length(PyObject *self)
{
    return (Py_ssize_t)((memory *)self)->mapping.size;
}

int mo_shared_view_of(PyObject *module, PyObject *object, mo_shared_view *out)
{
    memory *m = (memory *)object;
    mo_detail detail;
    mo_status status;

    if (!Py_IS_TYPE(object, (PyTypeObject *)mo_state(module)->shared_memory)) {
        PyErr_Format(PyExc_TypeError, "%R is not a SharedMemory", object);
        return -1;
    }
    status = mo_shared_attach(m->mapping.bytes, m->mapping.size, &detail, out);
    if (!status)
        return 0;
    mo_raise(module, status, &detail);
    return -1;
}

/* ---- filling ----------------------------------------------------------------------------------------------------- */

typedef struct filling {
    mo_shared_encoder encoder;
    mo_shared_builder builder;
    mo_shared_writer key, other; /* of a dict's entry, in private memory */
} filling;

static int raised(filling *f, mo_status status, const mo_detail *detail)
{
    if (!status)
        return 0;
    mo_raise(f->encoder.module, status, detail);
    return -1;
}

static int add_string(filling *f, PyObject *item)
{
    PyObject *bytes;
    mo_detail detail;
    mo_status status;

    if (!PyUnicode_Check(item)) {
        PyErr_Format(PyExc_TypeError,
                     "%s: item %llu is %R: it holds only str; use SharedList for other "
                     "values",
                     f->encoder.name, (unsigned long long)f->encoder.number, item);
        return -1;
    }
    bytes = PyUnicode_AsUTF8String(item);
    if (!bytes && PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
        PyErr_Clear();
        bytes = PyUnicode_AsEncodedString(item, "utf-8", "surrogatepass");
    }
    if (!bytes)
        return -1;
    status = mo_shared_builder_item(&f->builder, &detail);
    if (!status)
        status =
            mo_shared_write(&f->builder.data, PyBytes_AsString(bytes), (size_t)PyBytes_Size(bytes), &detail);
    Py_DECREF(bytes);
    return raised(f, status, &detail);
}

static int add_value(filling *f, PyObject *item)
{
    mo_detail detail;

    if (raised(f, mo_shared_builder_item(&f->builder, &detail), &detail) < 0)
        return -1;
    return mo_shared_encode(&f->encoder, item, &f->builder.data);
}

static int add_pair(filling *f, PyObject *key, PyObject *value)
{
    mo_shared_key bytes = {0};
    mo_detail detail;
    int form;

    f->encoder.item = key;
    f->key.used = f->other.used = 0;
    form = mo_shared_encode_key(&f->encoder, key, /* any */ false, &f->key);
    if (form < 0 || (form && mo_shared_encode(&f->encoder, key, &f->other) < 0))
        return -1;
    bytes = (mo_shared_key){f->key.buffer, f->key.used, form ? f->other.buffer : NULL, f->other.used};
    if (raised(f, mo_shared_builder_key(&f->builder, &bytes, &detail), &detail) < 0)
        return -1;
    return mo_shared_encode(&f->encoder, value, &f->builder.data);
}

static int add_entry(filling *f, PyObject *item)
{
    PyObject *pair = PySequence_List(item);
    int result = -1;

    if (!pair && !PyErr_ExceptionMatches(PyExc_TypeError))
        return -1; /* the element's own, or Ctrl-C */
    if (!pair || PyList_Size(pair) != 2)
        PyErr_Format(PyExc_TypeError, "%s: element %llu of its input is not a pair (key, value): %R",
                     f->encoder.name, (unsigned long long)f->encoder.number, item);
    else
        result = add_pair(f, PyList_GetItem(pair, 0), PyList_GetItem(pair, 1));
    f->encoder.item = NULL;
    Py_XDECREF(pair);
    return result;
}

/* Signals are looked at now and then: an iterator in C would not let Ctrl-C through. */
static int add_all(filling *f, PyObject *iterator)
{
    int (*const add)(filling *, PyObject *) = f->builder.kind == MO_SHARED_STRINGS ? add_string
                                              : f->builder.kind == MO_SHARED_LIST  ? add_value
                                                                                   : add_entry;
    PyObject *item;

    while ((item = PyIter_Next(iterator))) {
        const int result = add(f, item);
        Py_DECREF(item);
        if (result < 0 || (++f->encoder.number % 4096 == 0 && PyErr_CheckSignals() < 0))
            return -1;
    }
    return PyErr_Occurred() ? -1 : 0;
}

PyDoc_STRVAR(
    build_doc,
    "shared_build($module, kind, name, items, encode, limit, /)\n--\n\n"
    "A SharedMemory with the items of an iterable, taken one by one.\n\n"
    "kind: 1 str, 2 values, 3 pairs of a dict. name: what it is called in messages. encode(value): what is "
    "no\n"
    "plain value as (kind, description, buffer), or what is wrong with it. limit: bytes, 0 for none.\n"
    "Raises TypeError or ValueError, naming the place and the type, for what cannot be shared; OSError\n"
    "where there is no room.");

static PyObject *shared_build(PyObject *module, PyObject *args)
{
    int kind, fd = -1;
    unsigned long long limit;
    filling f = {.encoder = {.module = module}};
    PyObject *items, *iterator, *result = NULL;
    mo_detail detail;
    mo_status status;

    if (!PyArg_ParseTuple(args, "isOOK:shared_build", &kind, &f.encoder.name, &items, &f.encoder.leaf,
                          &limit))
        return NULL;
    if (kind < MO_SHARED_STRINGS || kind > MO_SHARED_DICT)
        return PyErr_Format(PyExc_ValueError, "kind %d: expected 1, 2 or 3", kind);
    iterator = PyObject_GetIter(items);
    if (!iterator)
        return NULL;
    mo_shared_writer_local(&f.key);
    mo_shared_writer_local(&f.other);
    status = mo_shared_builder_open((mo_shared_kind)kind, limit, &detail, &f.builder);
    if (raised(&f, status, &detail) < 0 || add_all(&f, iterator) < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS;
    status = mo_shared_builder_finish(&f.builder, &detail, &fd);
    Py_END_ALLOW_THREADS;
    if (raised(&f, status, &detail) < 0)
        goto done;
    result = memory_made((PyTypeObject *)mo_state(module)->shared_memory, fd, false);
    if (!result)
        close(fd);
done:
    mo_shared_builder_close(&f.builder);
    mo_shared_writer_close(&f.key);
    mo_shared_writer_close(&f.other);
    Py_DECREF(iterator);
    return result;
}

PyDoc_STRVAR(copy_doc, "shared_copy($module, content, /)\n--\n\n"
                       "A SharedMemory with the bytes of another, from any buffer.");

static PyObject *shared_copy(PyObject *module, PyObject *content)
{
    mo_shared_writer w = {.fd = -1};
    mo_shared_view view;
    PyObject *result = NULL;
    mo_detail detail;
    mo_status status;
    Py_buffer buffer;
    int fd = -1;

    if (PyObject_GetBuffer(content, &buffer, PyBUF_SIMPLE) < 0)
        return NULL;
    status = mo_shared_writer_open(NULL, &detail, &w);
    if (!status)
        status = mo_shared_write(&w, buffer.buf, (size_t)buffer.len, &detail);
    if (!status)
        status = mo_shared_seal(&w, &detail, &fd);
    PyBuffer_Release(&buffer);
    mo_shared_writer_close(&w);
    if (status)
        return mo_raise(module, status, &detail);
    result = memory_made((PyTypeObject *)mo_state(module)->shared_memory, fd, false);
    if (!result)
        close(fd);
    else if (mo_shared_view_of(module, result, &view) < 0)
        Py_CLEAR(result);
    return result;
}

/* ---- the module -------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(
    memory_doc,
    "SharedMemory(fd, /)\n--\n\n"
    "A shared container's memory, mapped. The descriptor is its own from then on. It is unmapped when the\n"
    "last that refers to it is gone. A buffer, read-only.");

static PyMethodDef memory_methods[] = {
    {"fileno", memory_fileno, METH_NOARGS, memory_fileno_doc},
    {"privately", memory_privately, METH_NOARGS, privately_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)memory_doc},
    {Py_tp_new, memory_new},
    {Py_tp_dealloc, memory_dealloc},
    {Py_tp_methods, memory_methods},
    {Py_sq_length, memory_length},
    {Py_bf_getbuffer, memory_get_buffer},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "memopt._C.SharedMemory",
    .basicsize = sizeof(memory),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

static PyMethodDef methods[] = {
    {"shared_build", shared_build, METH_VARARGS, build_doc},
    {"shared_copy", shared_copy, METH_O, copy_doc},
    {NULL, NULL, 0, NULL},
};

int mo_py_shared_init(PyObject *module)
{
    return mo_py_add_type(module, &spec, &mo_state(module)->shared_memory) < 0
               ? -1
               : PyModule_AddFunctions(module, methods);
}
