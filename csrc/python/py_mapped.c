/* memopt._C.PrivateMapping (data/private_mapping.h). */
#include "python/module.h"

#include "data/private_mapping.h"

typedef struct mapped {
    PyObject_HEAD mo_private_mapping mapping;
} mapped;

static PyObject *mapped_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *module = PyType_GetModule(type);
    mo_detail detail;
    mo_status status;
    Py_ssize_t size;
    mapped *self;
    int fd;

    if (keywords && PyDict_Size(keywords))
        return PyErr_Format(PyExc_TypeError, "PrivateMapping() takes no keyword arguments");
    if (!module || !PyArg_ParseTuple(args, "in:PrivateMapping", &fd, &size))
        return NULL;
    if (size <= 0)
        return PyErr_Format(PyExc_ValueError, "PrivateMapping: size=%zd: expected 1 or more bytes", size);
    self = (mapped *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self)
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = mo_private_map(fd, (size_t)size, &detail, &self->mapping);
    Py_END_ALLOW_THREADS;
    if (!status)
        return (PyObject *)self;
    Py_DECREF((PyObject *)self);
    return mo_raise(module, status, &detail);
}

static void mapped_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    mo_private_unmap(&((mapped *)self)->mapping);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static int mapped_get_buffer(PyObject *self, Py_buffer *view, int flags)
{
    const mo_private_mapping *mapping = &((mapped *)self)->mapping;

    return PyBuffer_FillInfo(view, self, mapping->bytes, (Py_ssize_t)mapping->size, /* readonly */ 0, flags);
}

static Py_ssize_t mapped_length(PyObject *self)
{
    return (Py_ssize_t)((mapped *)self)->mapping.size;
}

PyDoc_STRVAR(
    mapped_doc,
    "PrivateMapping(fd, size, /)\n--\n\n"
    "The first `size` bytes of a file in memory, copy-on-write, as a writable buffer: what is written to\n"
    "it never reaches the file. It keeps no file descriptor. Raises OSError where it cannot be mapped.");

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)mapped_doc},      {Py_tp_new, mapped_new},
    {Py_tp_dealloc, mapped_dealloc},      {Py_sq_length, mapped_length},
    {Py_bf_getbuffer, mapped_get_buffer}, {0, NULL},
};

static PyType_Spec spec = {
    .name = "memopt._C.PrivateMapping",
    .basicsize = sizeof(mapped),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int mo_py_mapped_init(PyObject *module)
{
    return mo_py_add_type(module, &spec, NULL);
}
