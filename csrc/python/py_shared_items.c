/* memopt._C.SharedItems: strings or a list, or a slice of one, in shared memory. Each read makes the value anew. */
#include "python/py_shared.h"

#include <string.h>

/* Item i is the memory's item start + i * step. */
typedef struct items {
    mo_shared_reader reader;
    Py_ssize_t start, step, length;
} items;

static PyObject *items_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    items *self =
        (items *)mo_shared_reader_new(type, &(mo_shared_making){"SharedItems", items_new, args, keywords});

    if (!self)
        return NULL;
    if (self->reader.view.kind == MO_SHARED_DICT) {
        Py_DECREF((PyObject *)self);
        return PyErr_Format(PyExc_TypeError, "this shared container is a dict, not a list");
    }
    self->step = 1;
    self->length = (Py_ssize_t)self->reader.view.count;
    return (PyObject *)self;
}

static bool is_open(const items *self)
{
    return mo_shared_reader_is_open(&self->reader);
}

static Py_ssize_t items_length(PyObject *self)
{
    return is_open((items *)self) ? ((items *)self)->length : -1;
}

/* 0 <= i < length. */
static PyObject *value_at(items *self, Py_ssize_t i)
{
    const mo_shared_view *v = &self->reader.view;
    mo_shared_span span;

    if (!mo_shared_item(v, (uint64_t)(self->start + i * self->step), &span))
        return mo_shared_damaged(self->reader.module);
    if (v->kind == MO_SHARED_STRINGS)
        return mo_shared_decode_str(self->reader.module, v->base + span.begin, span.end - span.begin);
    return mo_shared_reader_decode(&self->reader, &(mo_shared_cursor){v->base, span.begin, span.end});
}

static PyObject *items_item(PyObject *self, Py_ssize_t i)
{
    if (!is_open((items *)self))
        return NULL;
    if (i < 0 || i >= ((items *)self)->length) {
        PyErr_SetString(PyExc_IndexError, "index out of range");
        return NULL;
    }
    return value_at((items *)self, i);
}

static PyObject *slice_of(items *self, PyObject *slice)
{
    Py_ssize_t start, stop, step, length;
    items *part;

    if (PySlice_Unpack(slice, &start, &stop, &step) < 0 || !is_open(self)) /* an __index__ may close it */
        return NULL;
    length = PySlice_AdjustIndices(self->length, &start, &stop, step);
    part = (items *)mo_shared_reader_again(&self->reader);
    if (!part)
        return NULL;
    part->length = length;
    /* Of none or one the step means nothing, and its product need not fit. */
    part->start = length ? self->start + start * self->step : 0;
    part->step = length > 1 ? self->step * step : 1;
    return (PyObject *)part;
}

static PyObject *items_subscript(PyObject *self, PyObject *key)
{
    items *it = (items *)self;
    Py_ssize_t i;

    if (!is_open(it))
        return NULL;
    if (PyLong_CheckExact(key) || PyIndex_Check(key)) {
        i = PyNumber_AsSsize_t(key, PyExc_IndexError);
        if (i == -1 && PyErr_Occurred())
            return NULL;
        return items_item(self, i < 0 ? i + it->length : i);
    }
    if (PySlice_Check(key))
        return slice_of(it, key);
    return PyErr_Format(PyExc_TypeError, "indices must be integers or slices, not %R", Py_TYPE(key));
}

/* The place of the first item in [from, to) that is this str, -1 if there is none, -2 with an exception; to <= length.
 * By its bytes: nothing is decoded. */
static Py_ssize_t find_str(const items *self, PyObject *wanted, Py_ssize_t from, Py_ssize_t to)
{
    PyObject *bytes = PyUnicode_AsEncodedString(wanted, "utf-8", "surrogatepass");
    const char *text = bytes ? PyBytes_AsString(bytes) : NULL;
    const uint64_t size = bytes ? (uint64_t)PyBytes_Size(bytes) : 0;
    Py_ssize_t found = text ? -1 : -2;
    mo_shared_span span;

    for (Py_ssize_t i = from; found == -1 && i < to; i++) {
        if (!mo_shared_item(&self->reader.view, (uint64_t)(self->start + i * self->step), &span)) {
            mo_shared_damaged(self->reader.module);
            found = -2;
        } else if (span.end - span.begin == size &&
                   memcmp(self->reader.view.base + span.begin, text, size) == 0) {
            found = i;
        }
    }
    Py_XDECREF(bytes);
    return found;
}

/* As find_str, for any value, by ==. */
static Py_ssize_t find(items *self, PyObject *wanted, Py_ssize_t from, Py_ssize_t to)
{
    if (self->reader.view.kind == MO_SHARED_STRINGS && PyUnicode_CheckExact(wanted))
        return find_str(self, wanted, from, to);
    for (Py_ssize_t i = from; i < to; i++) {
        PyObject *value = value_at(self, i);
        int equal = value ? PyObject_RichCompareBool(value, wanted, Py_EQ) : -1;
        Py_XDECREF(value);
        if (equal)
            return equal < 0 ? -2 : i;
        if (!is_open(self))
            return -2;
    }
    return -1;
}

static int items_contains(PyObject *self, PyObject *wanted)
{
    items *it = (items *)self;
    const Py_ssize_t found = is_open(it) ? find(it, wanted, 0, it->length) : -2;

    return found == -2 ? -1 : found >= 0;
}

PyDoc_STRVAR(index_doc, "index($self, value, start=0, stop=9223372036854775807, /)\n--\n\n"
                        "The first place of a value in [start, stop). Raises ValueError if it is not there.");

/* A bound of index(), brought into [0, length] as a list does; false with an exception. */
static bool read_bound(PyObject *given, Py_ssize_t length, Py_ssize_t *bound)
{
    if (given) {
        *bound = PyNumber_AsSsize_t(given, NULL);
        if (*bound == -1 && PyErr_Occurred())
            return false;
    }
    if (*bound < 0)
        *bound = *bound < -length ? 0 : *bound + length;
    if (*bound > length)
        *bound = length;
    return true;
}

static PyObject *items_index(PyObject *self, PyObject *args)
{
    items *it = (items *)self;
    Py_ssize_t start = 0, stop = PY_SSIZE_T_MAX, found;
    PyObject *wanted, *first = NULL, *end = NULL;

    if (!PyArg_ParseTuple(args, "O|OO:index", &wanted, &first, &end) ||
        !read_bound(first, it->length, &start) || !read_bound(end, it->length, &stop) ||
        !is_open(it)) /* an __index__ may close it */
        return NULL;
    found = find(it, wanted, start, stop);
    if (found == -2)
        return NULL;
    if (found < 0)
        return PyErr_Format(PyExc_ValueError, "%R is not in it", wanted);
    return PyLong_FromSsize_t(found);
}

PyDoc_STRVAR(count_doc, "count($self, value, /)\n--\n\nHow many items equal a value.");

static PyObject *items_count(PyObject *self, PyObject *wanted)
{
    items *it = (items *)self;
    Py_ssize_t count = 0, at;

    if (!is_open(it))
        return NULL;
    for (at = find(it, wanted, 0, it->length); at >= 0; at = find(it, wanted, at + 1, it->length))
        count++;
    return at == -2 ? NULL : PyLong_FromSsize_t(count);
}

PyDoc_STRVAR(
    close_doc,
    "close($self, /)\n--\n\n"
    "Lets go of the memory, which goes when its other slices, arrays and tensors are gone too. Using it\n"
    "afterwards raises ValueError.");

/* ---- front to back: one's own iterator, since a sequence's asks by index, of a subclass through Python -------------- */

typedef struct iterator {
    PyObject_HEAD PyObject *of; /* NULL: it is at its end */
    Py_ssize_t next;
} iterator;

static PyObject *items_iter(PyObject *self)
{
    PyTypeObject *type = (PyTypeObject *)mo_state(((items *)self)->reader.module)->shared_iterator;
    iterator *it = is_open((items *)self) ? (iterator *)PyType_GenericAlloc(type, 0) : NULL;

    if (it)
        it->of = Py_NewRef(self);
    return (PyObject *)it;
}

static void iterator_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    Py_XDECREF(((iterator *)self)->of);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *iterator_next(PyObject *self)
{
    iterator *it = (iterator *)self;
    items *of = (items *)it->of;

    if (!of || !is_open(of))
        return NULL;
    if (it->next < of->length)
        return value_at(of, it->next++);
    Py_CLEAR(it->of);
    return NULL;
}

PyDoc_STRVAR(length_hint_doc, "__length_hint__($self, /)\n--\n\nHow many are still to come.");

static PyObject *iterator_length_hint(PyObject *self, PyObject *unused)
{
    const iterator *it = (iterator *)self;

    (void)unused;
    return PyLong_FromSsize_t(it->of ? ((items *)it->of)->length - it->next : 0);
}

static PyMethodDef iterator_methods[] = {
    {"__length_hint__", iterator_length_hint, METH_NOARGS, length_hint_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot iterator_slots[] = {
    {Py_tp_dealloc, iterator_dealloc},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, iterator_next},
    {Py_tp_methods, iterator_methods},
    {0, NULL},
};

static PyType_Spec iterator_spec = {
    .name = "memopt._C.SharedIterator",
    .basicsize = sizeof(iterator),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = iterator_slots,
};

/* ---- the type --------------------------------------------------------------------------------------------------- */

static PyObject *items_range(PyObject *self, void *unused)
{
    const items *it = (items *)self;

    (void)unused;
    return is_open(it) ? Py_BuildValue("(nnn)", it->start, it->step, it->length) : NULL;
}

PyDoc_STRVAR(
    items_doc,
    "SharedItems(memory, decode, /)\n--\n\n"
    "Strings or a list in a SharedMemory. decode(kind, description, memory, begin, length): a leaf.");

static PyMethodDef items_methods[] = {
    {"index", items_index, METH_VARARGS, index_doc},
    {"count", items_count, METH_O, count_doc},
    {"close", mo_shared_reader_close, METH_NOARGS, close_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef items_attributes[] = {
    {"_memory", mo_shared_reader_memory, NULL, "The SharedMemory that it is in.", NULL},
    {"_range", items_range, NULL, "(start, step, length) of it in the memory.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)items_doc},
    {Py_tp_new, items_new},
    {Py_tp_dealloc, mo_shared_reader_dealloc},
    {Py_tp_iter, items_iter},
    {Py_tp_methods, items_methods},
    {Py_tp_getset, items_attributes},
    {Py_mp_length, items_length},
    {Py_mp_subscript, items_subscript},
    {Py_sq_length, items_length},
    {Py_sq_item, items_item},
    {Py_sq_contains, items_contains},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "memopt._C.SharedItems",
    .basicsize = sizeof(items),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int mo_py_shared_items_init(PyObject *module)
{
    mo_state(module)->shared_iterator = PyType_FromModuleAndSpec(module, &iterator_spec, NULL);
    return mo_state(module)->shared_iterator ? mo_py_add_type(module, &spec, NULL) : -1;
}
