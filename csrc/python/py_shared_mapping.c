/* memopt._C.SharedMapping: a dict in shared memory. */
#include "python/py_shared.h"

static PyObject *mapping_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    mo_shared_reader *self =
        mo_shared_reader_new(type, &(mo_shared_making){"SharedMapping", mapping_new, args, keywords});

    if (self && self->view.kind != MO_SHARED_DICT) {
        PyErr_Format(PyExc_TypeError, "this shared container is not a dict: it is a %s",
                     mo_shared_kind_name(self->view.kind));
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static Py_ssize_t mapping_length(PyObject *self)
{
    return mo_shared_reader_is_open((mo_shared_reader *)self)
               ? (Py_ssize_t)((mo_shared_reader *)self)->view.count
               : -1;
}

/* 1: *entry; 0: there is none; -1: an exception. */
static int find(mo_shared_reader *self, PyObject *key, uint64_t *entry)
{
    mo_shared_encoder encoder = {.module = self->module, .name = "a key"};
    mo_shared_writer w;
    int form, result = -1;

    mo_shared_writer_local(&w);
    form = mo_shared_encode_key(&encoder, key, /* any */ true, &w);
    if (form == 2) {
        result = 0;
    } else if (form >= 0 && mo_shared_reader_is_open(self)) { /* a key's __hash__ may close it */
        const mo_shared_found found = mo_shared_find(&self->view, w.buffer, w.used, entry);
        result = found == MO_SHARED_FOUND ? 1 : 0;
        if (found == MO_SHARED_DAMAGED) {
            mo_shared_damaged(self->module);
            result = -1;
        }
    }
    mo_shared_writer_close(&w);
    return result;
}

static PyObject *value_of(mo_shared_reader *self, uint64_t entry)
{
    mo_shared_span span;

    if (!mo_shared_entry(&self->view, entry, /* value */ true, &span))
        return mo_shared_damaged(self->module);
    return mo_shared_reader_decode(self, &(mo_shared_cursor){self->view.base, span.begin, span.end});
}

static PyObject *key_of(mo_shared_reader *self, uint64_t entry)
{
    mo_shared_cursor itself;
    mo_shared_key key;

    if (!mo_shared_read_key(&self->view, entry, &key, &itself))
        return mo_shared_damaged(self->module);
    return mo_shared_reader_decode(self, &itself);
}

static PyObject *mapping_subscript(PyObject *self, PyObject *key)
{
    uint64_t entry;
    int found =
        mo_shared_reader_is_open((mo_shared_reader *)self) ? find((mo_shared_reader *)self, key, &entry) : -1;

    if (found > 0)
        return value_of((mo_shared_reader *)self, entry);
    if (!found) {
        PyObject *argument = PyTuple_Pack(1, key); /* a tuple would become the error's arguments */
        if (argument)
            PyErr_SetObject(PyExc_KeyError, argument);
        Py_XDECREF(argument);
    }
    return NULL;
}

static int mapping_contains(PyObject *self, PyObject *key)
{
    uint64_t entry;

    return mo_shared_reader_is_open((mo_shared_reader *)self) ? find((mo_shared_reader *)self, key, &entry)
                                                              : -1;
}

PyDoc_STRVAR(get_doc, "get($self, key, default=None, /)\n--\n\nThe value of a key, else the default.");

static PyObject *mapping_get(PyObject *self, PyObject *args)
{
    PyObject *key, *otherwise = Py_None;
    uint64_t entry;
    int found;

    if (!PyArg_ParseTuple(args, "O|O:get", &key, &otherwise) ||
        !mo_shared_reader_is_open((mo_shared_reader *)self))
        return NULL;
    found = find((mo_shared_reader *)self, key, &entry);
    if (found < 0)
        return NULL;
    return found ? value_of((mo_shared_reader *)self, entry) : Py_NewRef(otherwise);
}

/* The number of an entry that is there; false with an exception. */
static bool number_of(mo_shared_reader *self, PyObject *number, uint64_t *entry)
{
    const Py_ssize_t i = PyNumber_AsSsize_t(number, PyExc_IndexError);

    if ((i == -1 && PyErr_Occurred()) || !mo_shared_reader_is_open(self))
        return false;
    if (i < 0 || (uint64_t)i >= self->view.count) {
        PyErr_Format(PyExc_IndexError, "entry %zd of %llu", i, (unsigned long long)self->view.count);
        return false;
    }
    *entry = (uint64_t)i;
    return true;
}

PyDoc_STRVAR(key_at_doc, "_key_at($self, entry, /)\n--\n\nThe key of an entry, in the order of insertion.");

static PyObject *mapping_key_at(PyObject *self, PyObject *number)
{
    uint64_t entry;

    return number_of((mo_shared_reader *)self, number, &entry) ? key_of((mo_shared_reader *)self, entry)
                                                               : NULL;
}

PyDoc_STRVAR(value_at_doc, "_value_at($self, entry, /)\n--\n\nThe value of an entry.");

static PyObject *mapping_value_at(PyObject *self, PyObject *number)
{
    uint64_t entry;

    return number_of((mo_shared_reader *)self, number, &entry) ? value_of((mo_shared_reader *)self, entry)
                                                               : NULL;
}

PyDoc_STRVAR(item_at_doc, "_item_at($self, entry, /)\n--\n\n(key, value) of an entry.");

static PyObject *mapping_item_at(PyObject *self, PyObject *number)
{
    PyObject *key = mapping_key_at(self, number), *value = key ? mapping_value_at(self, number) : NULL;
    PyObject *pair = value ? PyTuple_Pack(2, key, value) : NULL;

    Py_XDECREF(key);
    Py_XDECREF(value);
    return pair;
}

PyDoc_STRVAR(
    close_doc,
    "close($self, /)\n--\n\n"
    "Lets go of the memory, which goes when its arrays and tensors are gone too. Using it afterwards\n"
    "raises ValueError.");

PyDoc_STRVAR(mapping_doc,
             "SharedMapping(memory, decode, /)\n--\n\n"
             "A dict in a SharedMemory. decode(kind, description, memory, begin, length): a leaf.");

static PyMethodDef mapping_methods[] = {
    {"get", mapping_get, METH_VARARGS, get_doc},
    {"close", mo_shared_reader_close, METH_NOARGS, close_doc},
    {"_key_at", mapping_key_at, METH_O, key_at_doc},
    {"_value_at", mapping_value_at, METH_O, value_at_doc},
    {"_item_at", mapping_item_at, METH_O, item_at_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef mapping_attributes[] = {
    {"_memory", mo_shared_reader_memory, NULL, "The SharedMemory that it is in.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)mapping_doc},
    {Py_tp_new, mapping_new},
    {Py_tp_dealloc, mo_shared_reader_dealloc},
    {Py_tp_methods, mapping_methods},
    {Py_tp_getset, mapping_attributes},
    {Py_mp_length, mapping_length},
    {Py_mp_subscript, mapping_subscript},
    {Py_sq_contains, mapping_contains},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "memopt._C.SharedMapping",
    .basicsize = sizeof(mo_shared_reader),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int mo_py_shared_mapping_init(PyObject *module)
{
    return mo_py_add_type(module, &spec, NULL);
}
