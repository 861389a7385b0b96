#include "python/py_checkpoint_region.h"

#include "base/hostmem.h"
#include "python/py_tensor.h"

/* ---- holders ---------------------------------------------------------------------------------------------------------- */

int mo_holder_keep(holder *h, const replay *by, PyObject *tensor)
{
    kept *k = mo_host_alloc(sizeof *k);

    if (!k)
        return PyErr_NoMemory(), -1;
    *k = (kept){h->kept, by, Py_NewRef(tensor)};
    h->kept = k;
    return 0;
}

PyObject *mo_holder_take(holder *h, const replay *by)
{
    for (kept **at = &h->kept; *at; at = &(*at)->next)
        if ((*at)->by == by) {
            kept *k = *at;
            PyObject *tensor = k->tensor;

            *at = k->next;
            mo_host_free(k);
            return tensor;
        }
    return NULL;
}

void mo_holder_take_all(region *r, const replay *by)
{
    for (size_t i = 0; i < r->saved.count; i++) {
        holder *h = r->saved.records[i].holder;
        PyObject *tensor = h ? mo_holder_take(h, by) : NULL;

        Py_XDECREF(tensor);
    }
}

static void holder_dealloc(PyObject *self)
{
    holder *h = (holder *)self;

    if (h->of)
        h->of->saved.records[h->index].holder = NULL;
    while (h->kept) {
        kept *k = h->kept;

        h->kept = k->next;
        Py_DECREF(k->tensor);
        mo_host_free(k);
    }
    Py_CLEAR(h->of);
    mo_checkpoint_free(self);
}

/* ---- what is saved ------------------------------------------------------------------------------------------------ */

/* 1: *out is the form. 0: it has none, *described (a new reference) says what is compared. -1: exception. */
static int look_at(region *r, PyObject *tensor, mo_form *out, PyObject **described)
{
    int known = mo_py_tensor_form(PyType_GetModule(Py_TYPE((PyObject *)r)), tensor, out);

    *described = NULL;
    if (known)
        return known;
    *out = (mo_form){.dimensions = -1};
    *described = PyObject_CallFunctionObjArgs(r->engine->describe, tensor, NULL);
    return *described ? 0 : -1;
}

PyObject *mo_region_pack(PyObject *self, PyObject *tensor)
{
    region *r = (region *)self;
    mo_form form = {.dimensions = -1};
    PyObject *described = NULL;
    holder *h;
    size_t index;

    if (r->check && look_at(r, tensor, &form, &described) < 0)
        return NULL;
    h = (holder *)PyType_GenericAlloc(mo_checkpoint_type(self, MO_HOLDER_TYPE), 0);
    if (!h || mo_saved_append(&r->saved, &form, &index)) {
        Py_XDECREF((PyObject *)h);
        Py_XDECREF(described);
        return h ? PyErr_NoMemory() : NULL;
    }
    h->of = (region *)Py_NewRef(self);
    h->index = index;
    r->saved.records[index].holder = h;
    r->saved.records[index].described = described;
    return (PyObject *)h;
}

PyObject *mo_region_saved(const region *r, size_t index)
{
    const mo_form form = mo_saved_form(&r->saved, index);
    PyObject *sizes;

    if (form.dimensions < 0)
        return Py_NewRef(r->saved.records[index].described);
    sizes = PyTuple_New(form.dimensions);
    for (int32_t d = 0; sizes && d < form.dimensions; d++)
        if (PyTuple_SetItem(sizes, d, PyLong_FromLongLong(form.sizes[d])) < 0)
            Py_CLEAR(sizes);
    return sizes
               ? Py_BuildValue("iikN", form.device_type, form.device_index, (unsigned long)form.dtype, sizes)
               : NULL;
}

int mo_region_compare(region *r, size_t index, PyObject *tensor)
{
    const mo_form before = mo_saved_form(&r->saved, index);
    PyObject *saved, *answer = NULL;
    mo_form now;
    int same = mo_py_tensor_form(PyType_GetModule(Py_TYPE((PyObject *)r)), tensor, &now);

    if (same < 0)
        return -1;
    if (same && before.dimensions >= 0)
        return mo_form_equal(&before, &now);
    saved = mo_region_saved(r, index);
    if (saved)
        answer = PyObject_CallFunctionObjArgs(r->engine->equal, saved, tensor, NULL);
    same = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(saved);
    Py_XDECREF(answer);
    return same;
}

/* ---- the type ------------------------------------------------------------------------------------------------------ */

static PyType_Slot slots[] = {{Py_tp_dealloc, holder_dealloc}, {0, NULL}};

/* The collector need not know of it: it is only ever held by the graph, of which the collector knows nothing. */
PyType_Spec mo_holder_spec = {
    .name = "memopt._C.Holder",
    .basicsize = sizeof(holder),
    .flags = MO_PRIVATE_TYPE,
    .slots = slots,
};
