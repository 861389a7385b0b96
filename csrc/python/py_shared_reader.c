/* What memopt._C.SharedItems and SharedMapping have in common: a shared container's memory, open or closed. */
#include "python/py_shared.h"

/* The type whose tp_new this is, of one of its subclasses: the module is known to it alone. */
static PyTypeObject *defining_type(PyTypeObject *type, newfunc made_by)
{
    PyTypeObject *found = NULL;

    for (; type; type = (PyTypeObject *)PyType_GetSlot(type, Py_tp_base))
        if ((newfunc)PyType_GetSlot(type, Py_tp_new) == made_by)
            found = type; /* a subclass without a __new__ of its own has it too: the last one is it */
    return found;
}

/* Its references are new ones. */
static mo_shared_reader *reader_made(PyTypeObject *type, const mo_shared_reader *like)
{
    mo_shared_reader *made = (mo_shared_reader *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);

    if (!made)
        return NULL;
    made->module = like->module;
    made->memory = Py_NewRef(like->memory);
    made->leaf = Py_NewRef(like->leaf);
    made->view = like->view;
    return made;
}

mo_shared_reader *mo_shared_reader_new(PyTypeObject *type, const mo_shared_making *making)
{
    PyTypeObject *base = defining_type(type, making->made_by);
    mo_shared_reader like = {.module = base ? PyType_GetModule(base) : NULL};

    if (!like.module)
        return NULL;
    if (making->keywords && PyDict_Size(making->keywords)) {
        PyErr_Format(PyExc_TypeError, "%s() takes no keyword arguments", making->name);
        return NULL;
    }
    if (!PyArg_UnpackTuple(making->args, making->name, 2, 2, &like.memory, &like.leaf) ||
        mo_shared_view_of(like.module, like.memory, &like.view) < 0)
        return NULL;
    return reader_made(type, &like);
}

mo_shared_reader *mo_shared_reader_again(const mo_shared_reader *reader)
{
    return reader_made(Py_TYPE((PyObject *)reader), reader);
}

void mo_shared_reader_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    Py_XDECREF(((mo_shared_reader *)self)->memory);
    Py_XDECREF(((mo_shared_reader *)self)->leaf);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

bool mo_shared_reader_is_open(const mo_shared_reader *reader)
{
    if (!reader->memory)
        PyErr_SetString(PyExc_ValueError, "this shared container is closed");
    return reader->memory != NULL;
}

PyObject *mo_shared_reader_decode(const mo_shared_reader *reader, mo_shared_cursor *cursor)
{
    PyObject *memory = Py_NewRef(reader->memory);
    PyObject *value = mo_shared_decode(reader->module, memory, reader->leaf, cursor);

    Py_DECREF(memory);
    return value;
}

PyObject *mo_shared_reader_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    Py_CLEAR(((mo_shared_reader *)self)->memory);
    Py_RETURN_NONE;
}

PyObject *mo_shared_reader_memory(PyObject *self, void *unused)
{
    mo_shared_reader *reader = (mo_shared_reader *)self;

    (void)unused;
    return mo_shared_reader_is_open(reader) ? Py_NewRef(reader->memory) : NULL;
}
