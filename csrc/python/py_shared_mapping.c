/* memopt._C.SharedMapping: a dict in shared memory. */
#include "python/py_shared.h"

typedef struct mapping {
    PyObject_HEAD PyObject *module; /* borrowed: the memory's type holds it */
    PyObject *memory;               /* NULL: closed */
    PyObject *leaf;                 /* decode */
    mo_shared_view view;
} mapping;

static PyTypeObject *defining_type(PyTypeObject *type);

static PyObject *mapping_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyTypeObject *base = defining_type(type);
    PyObject *memory, *leaf, *module = base ? PyType_GetModule(base) : NULL;
    mo_shared_view view;
    mapping *self;

    if (!module)
        return NULL;
    if (keywords && PyDict_Size(keywords))
        return PyErr_Format(PyExc_TypeError, "SharedMapping() takes no keyword arguments");
    if (!PyArg_ParseTuple(args, "OO:SharedMapping", &memory, &leaf) ||
        mo_shared_view_of(module, memory, &view) < 0)
        return NULL;
    if (view.kind != MO_SHARED_DICT)
        return PyErr_Format(PyExc_TypeError, "this shared container is no dict: it is a %s",
                            mo_shared_kind_name(view.kind));
    self = (mapping *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self)
        return NULL;
    self->module = module;
    self->memory = Py_NewRef(memory);
    self->leaf = Py_NewRef(leaf);
    self->view = view;
    return (PyObject *)self;
}

static void mapping_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    Py_XDECREF(((mapping *)self)->memory);
    Py_XDECREF(((mapping *)self)->leaf);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* False with an exception: it is closed. */
static bool is_open(const mapping *self)
{
    if (!self->memory)
        PyErr_SetString(PyExc_ValueError, "this shared container is closed");
    return self->memory != NULL;
}

static Py_ssize_t mapping_length(PyObject *self)
{
    return is_open((mapping *)self) ? (Py_ssize_t)((mapping *)self)->view.count : -1;
}

/* 1: *entry; 0: there is none; -1: an exception. */
static int find(mapping *self, PyObject *key, uint64_t *entry)
{
    mo_shared_encoder encoder = {.module = self->module, .name = "a key"};
    mo_shared_writer w;
    int form, result = -1;

    mo_shared_writer_local(&w);
    form = mo_shared_encode_key(&encoder, key, /* any */ true, &w);
    if (form == 2) {
        result = 0;
    } else if (form >= 0 && is_open(self)) { /* a key's __hash__ may close it */
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

static PyObject *decode_at(mapping *self, mo_shared_cursor *cursor)
{
    PyObject *memory = Py_NewRef(self->memory), *result; /* a leaf's function may close this */

    result = mo_shared_decode(self->module, memory, self->leaf, cursor);
    Py_DECREF(memory);
    return result;
}

static PyObject *value_of(mapping *self, uint64_t entry)
{
    mo_shared_span span;

    if (!mo_shared_entry(&self->view, entry, /* value */ true, &span))
        return mo_shared_damaged(self->module);
    return decode_at(self, &(mo_shared_cursor){self->view.base, span.begin, span.end});
}

static PyObject *key_of(mapping *self, uint64_t entry)
{
    mo_shared_cursor itself;
    mo_shared_key key;

    if (!mo_shared_read_key(&self->view, entry, &key, &itself))
        return mo_shared_damaged(self->module);
    return decode_at(self, &itself);
}

static PyObject *mapping_subscript(PyObject *self, PyObject *key)
{
    uint64_t entry;
    int found = is_open((mapping *)self) ? find((mapping *)self, key, &entry) : -1;

    if (found > 0)
        return value_of((mapping *)self, entry);
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

    return is_open((mapping *)self) ? find((mapping *)self, key, &entry) : -1;
}

PyDoc_STRVAR(get_doc, "get($self, key, default=None, /)\n--\n\nThe value of a key, else the default.");

static PyObject *mapping_get(PyObject *self, PyObject *args)
{
    PyObject *key, *otherwise = Py_None;
    uint64_t entry;
    int found;

    if (!PyArg_ParseTuple(args, "O|O:get", &key, &otherwise) || !is_open((mapping *)self))
        return NULL;
    found = find((mapping *)self, key, &entry);
    if (found < 0)
        return NULL;
    return found ? value_of((mapping *)self, entry) : Py_NewRef(otherwise);
}

/* The number of an entry that is there; false with an exception. */
static bool number_of(mapping *self, PyObject *number, uint64_t *entry)
{
    const Py_ssize_t i = PyNumber_AsSsize_t(number, PyExc_IndexError);

    if ((i == -1 && PyErr_Occurred()) || !is_open(self))
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

    return number_of((mapping *)self, number, &entry) ? key_of((mapping *)self, entry) : NULL;
}

PyDoc_STRVAR(value_at_doc, "_value_at($self, entry, /)\n--\n\nThe value of an entry.");

static PyObject *mapping_value_at(PyObject *self, PyObject *number)
{
    uint64_t entry;

    return number_of((mapping *)self, number, &entry) ? value_of((mapping *)self, entry) : NULL;
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

static PyObject *mapping_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    Py_CLEAR(((mapping *)self)->memory);
    Py_RETURN_NONE;
}

static PyObject *mapping_memory(PyObject *self, void *unused)
{
    (void)unused;
    return is_open((mapping *)self) ? Py_NewRef(((mapping *)self)->memory) : NULL;
}

PyDoc_STRVAR(mapping_doc,
             "SharedMapping(memory, decode, /)\n--\n\n"
             "A dict in a SharedMemory. decode(kind, description, memory, begin, length): a leaf.");

static PyMethodDef mapping_methods[] = {
    {"get", mapping_get, METH_VARARGS, get_doc},        {"close", mapping_close, METH_NOARGS, close_doc},
    {"_key_at", mapping_key_at, METH_O, key_at_doc},    {"_value_at", mapping_value_at, METH_O, value_at_doc},
    {"_item_at", mapping_item_at, METH_O, item_at_doc}, {NULL, NULL, 0, NULL},
};

static PyGetSetDef mapping_attributes[] = {
    {"_memory", mapping_memory, NULL, "The SharedMemory that it is in.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)mapping_doc},
    {Py_tp_new, mapping_new},
    {Py_tp_dealloc, mapping_dealloc},
    {Py_tp_methods, mapping_methods},
    {Py_tp_getset, mapping_attributes},
    {Py_mp_length, mapping_length},
    {Py_mp_subscript, mapping_subscript},
    {Py_sq_contains, mapping_contains},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "memopt._C.SharedMapping",
    .basicsize = sizeof(mapping),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

/* SharedMapping itself, of one of its subclasses: the module is known to it alone. */
static PyTypeObject *defining_type(PyTypeObject *type)
{
    PyTypeObject *found = NULL;

    for (; type; type = (PyTypeObject *)PyType_GetSlot(type, Py_tp_base))
        if (PyType_GetSlot(type, Py_tp_new) == (void *)mapping_new)
            found = type; /* a subclass without a __new__ of its own has it too: the last one is it */
    return found;
}

int mo_py_shared_mapping_init(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    const int failed = !type || PyModule_AddObjectRef(module, "SharedMapping", type) < 0;

    Py_XDECREF(type);
    return failed ? -1 : 0;
}
