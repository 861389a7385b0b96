/* The type memopt._C.Ring (transfer/ring.h). */
#include "python/module.h"

#include "base/size.h"
#include "transfer/ring.h"

typedef struct ring {
    PyObject_HEAD mo_ring ring; /* the GIL is its lock */
} ring;

PyDoc_STRVAR(ring_doc,
             "Ring(capacity, alignment, /)\n--\n\n"
             "Slots in a row of bytes, given in order, given back in any; those at either end are free at\n"
             "once. The bytes themselves are the caller's.");

static PyObject *ring_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    Py_ssize_t capacity, alignment;
    ring *r;

    if (keywords && PyDict_Size(keywords))
        return PyErr_Format(PyExc_TypeError, "Ring takes no keyword arguments");
    if (!PyArg_ParseTuple(args, "nn:Ring", &capacity, &alignment))
        return NULL;
    if (capacity <= 0 || alignment <= 0 || !mo_is_power_of_two((size_t)alignment))
        return PyErr_Format(PyExc_ValueError,
                            "Ring(%zd, %zd): expected a number of bytes, and a power of "
                            "two",
                            capacity, alignment);
    r = (ring *)PyType_GenericAlloc(type, 0);
    if (r)
        mo_ring_init(&r->ring, (size_t)capacity, (size_t)alignment);
    return (PyObject *)r;
}

static void ring_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    mo_ring_fini(&((ring *)self)->ring);
    PyObject_Free(self);
    Py_DECREF(type);
}

PyDoc_STRVAR(
    take_doc,
    "take($self, nbytes, /)\n--\n\n"
    "(slot, offset, the mark that its first user must come behind), or None where there is no room.");

static PyObject *take(PyObject *self, PyObject *args)
{
    Py_ssize_t size;
    uint64_t slot, after;
    size_t offset;

    if (!PyArg_ParseTuple(args, "n:take", &size))
        return NULL;
    if (size <= 0)
        return PyErr_Format(PyExc_ValueError, "a slot of %zd bytes: expected 1 or more", size);
    if (mo_ring_take(&((ring *)self)->ring, (size_t)size, &slot, &offset, &after))
        Py_RETURN_NONE;
    return Py_BuildValue("KnK", (unsigned long long)slot, (Py_ssize_t)offset, (unsigned long long)after);
}

PyDoc_STRVAR(give_doc,
             "give($self, slot, mark=0, /)\n--\n\nGives the slot back. mark: the last copy that used it.");

static PyObject *give(PyObject *self, PyObject *args)
{
    unsigned long long slot, mark = 0;

    if (!PyArg_ParseTuple(args, "K|K:give", &slot, &mark))
        return NULL;
    if (mo_ring_give(&((ring *)self)->ring, slot, mark))
        return PyErr_Format(PyExc_ValueError, "slot %llu is not in use", slot);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(held_doc,
             "held($self, /)\n--\n\n(bytes of the slots that are there, their peak, the capacity).");

static PyObject *held(PyObject *self, PyObject *unused)
{
    const mo_ring *r = &((ring *)self)->ring;

    (void)unused;
    return Py_BuildValue("nnn", (Py_ssize_t)r->held, (Py_ssize_t)r->peak, (Py_ssize_t)r->capacity);
}

static PyMethodDef methods[] = {
    {"take", take, METH_VARARGS, take_doc},
    {"give", give, METH_VARARGS, give_doc},
    {"held", held, METH_NOARGS, held_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)ring_doc},
    {Py_tp_new, ring_new},
    {Py_tp_dealloc, ring_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "memopt._C.Ring",
    .basicsize = sizeof(ring),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int mo_py_ring_init(PyObject *module)
{
    return mo_py_add_type(module, &spec, NULL);
}
