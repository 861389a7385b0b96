#include "python/py_optim.h"

#include "base/hostmem.h"

#define NAME_TEXT(name, text) text,
static const char *const name_texts[] = {NAME_LIST(NAME_TEXT)};

/* ---- its life ---------------------------------------------------------------------------------------------------------- */

void mo_plan_drop(plan *u)
{
    while (u->count) {
        PyObject *grad = u->grads[--u->count];

        u->grads[u->count] = NULL;
        Py_DECREF(grad);
    }
}

int mo_plan_traverse(plan *u, visitproc visit, void *arg)
{
    Py_VISIT(u->state);
    for (size_t i = 0; i < u->item_count; i++) {
        Py_VISIT(u->items[i].key);
        Py_VISIT(u->items[i].value);
    }
    for (size_t i = 0; i < u->group_count; i++)
        Py_VISIT(u->groups[i]);
    for (size_t i = 0; i < u->entry_count; i++) {
        Py_VISIT(u->entries[i].p);
        Py_VISIT(u->entries[i].states);
        for (size_t k = 0; k < KEPT; k++)
            Py_VISIT(u->entries[i].seen[k]);
    }
    for (size_t i = 0; i < u->count; i++)
        Py_VISIT(u->grads[i]);
    return 0;
}

void mo_plan_clear(plan *u)
{
    mo_plan_drop(u);
    Py_CLEAR(u->state);
    while (u->item_count) {
        u->item_count--;
        Py_CLEAR(u->items[u->item_count].key);
        Py_CLEAR(u->items[u->item_count].value);
    }
    while (u->group_count) {
        u->group_count--;
        Py_CLEAR(u->groups[u->group_count]);
    }
    while (u->entry_count) {
        entry *e = &u->entries[--u->entry_count];

        Py_CLEAR(e->p);
        Py_CLEAR(e->states);
        for (size_t k = 0; k < KEPT; k++) {
            mo_py_tensor_release(&e->holds[k]);
            Py_CLEAR(e->seen[k]);
        }
    }
}

void mo_plan_free(plan *u)
{
    for (size_t i = 0; i < NAME_COUNT; i++)
        Py_XDECREF(u->names[i]);
    mo_host_free(u->items);
    mo_host_free(u->groups);
    mo_host_free(u->hypers);
    mo_host_free(u->rate_devices);
    mo_host_free(u->entries);
    mo_host_free(u->parameters);
    mo_host_free(u->grads);
    mo_host_free(u->devices);
    mo_host_free(u->who);
}

/* ---- making one ------------------------------------------------------------------------------------------------------- */

/* The list behind group["params"], borrowed. */
static PyObject *params_of(const plan *u, PyObject *group)
{
    PyObject *params = PyDict_Check(group) ? PyDict_GetItemWithError(group, u->names[PARAMS]) : NULL;

    if (params && PyList_Check(params))
        return params;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError,
                        "each param group must be a dict whose 'params' is a list of tensors");
    return NULL;
}

static int note_items(plan *u)
{
    Py_ssize_t at = 0, size = PyDict_Size(u->state);
    PyObject *key, *value;

    u->items = mo_host_calloc((size_t)size, sizeof *u->items);
    if (!u->items)
        return PyErr_NoMemory(), -1;
    while (PyDict_Next(u->state, &at, &key, &value))
        u->items[u->item_count++] = (item){Py_NewRef(key), Py_NewRef(value)};
    return 0;
}

static int add_entry(plan *u, PyObject *p, size_t group)
{
    PyObject *states = PyDict_GetItemWithError(u->state, p);

    if (!states && PyErr_Occurred())
        return -1;
    if (states && !PyDict_Check(states))
        return PyErr_SetString(PyExc_TypeError, "each parameter's state must be a dict"), -1;
    u->entries[u->entry_count++] =
        (entry){.p = Py_NewRef(p), .states = Py_XNewRef(states), .group = (uint32_t)group};
    return 0;
}

static int note_params(plan *u, PyObject *groups)
{
    const Py_ssize_t group_count = PyList_Size(groups);
    size_t total = 0;

    for (Py_ssize_t i = 0; i < group_count; i++) {
        PyObject *params = params_of(u, PyList_GetItem(groups, i));

        if (!params)
            return -1;
        total += (size_t)PyList_Size(params);
    }
    u->groups = mo_host_calloc((size_t)group_count, sizeof *u->groups);
    u->hypers = mo_host_calloc((size_t)group_count, sizeof *u->hypers);
    u->rate_devices = mo_host_calloc((size_t)group_count, sizeof *u->rate_devices);
    u->entries = mo_host_calloc(total, sizeof *u->entries);
    u->parameters = mo_host_calloc(total, sizeof *u->parameters);
    u->grads = mo_host_calloc(total, sizeof *u->grads);
    u->devices = mo_host_calloc(total, sizeof *u->devices);
    u->who = mo_host_calloc(total, sizeof *u->who);
    if (!u->groups || !u->hypers || !u->rate_devices || !u->entries || !u->parameters || !u->grads ||
        !u->devices || !u->who)
        return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < group_count; i++) {
        PyObject *group = PyList_GetItem(groups, i), *params = params_of(u, group);

        u->groups[u->group_count++] = Py_NewRef(group);
        /* Looking a tensor up runs Python code: what it does to the list must not lead beyond the arrays. */
        for (Py_ssize_t k = 0; params && k < PyList_Size(params) && u->entry_count < total; k++)
            if (add_entry(u, PyList_GetItem(params, k), (size_t)i) < 0)
                return -1;
    }
    return 0;
}

static int note_first(plan *u, PyObject *first)
{
    const Py_ssize_t count = PyList_Size(first);

    for (Py_ssize_t i = 0; i < count; i++) {
        const Py_ssize_t which = PyLong_AsSsize_t(PyList_GetItem(first, i));

        if (which < 0 || (size_t)which >= u->entry_count) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_IndexError, "parameter %zd of %zu", which, u->entry_count);
            return -1;
        }
        u->entries[which].first = true;
    }
    return 0;
}

int mo_plan_fill(plan *u, PyObject *state, PyObject *groups, PyObject *first)
{
    u->state = Py_NewRef(state);
    for (size_t i = 0; i < NAME_COUNT; i++) {
        u->names[i] = PyUnicode_InternFromString(name_texts[i]);
        if (!u->names[i])
            return -1;
    }
    return note_items(u) < 0 || note_params(u, groups) < 0 || (first && note_first(u, first) < 0) ? -1 : 0;
}

/* ---- whether it is good still ------------------------------------------------------------------------------------------ */

static bool same_items(const plan *u, PyObject *state)
{
    Py_ssize_t at = 0;
    PyObject *key, *value;
    size_t i = 0;

    if (state != u->state || (size_t)PyDict_Size(state) != u->item_count)
        return false;
    for (; PyDict_Next(state, &at, &key, &value); i++)
        if (key != u->items[i].key || value != u->items[i].value)
            return false;
    return true;
}

/* 1, 0, or -1 with an exception. */
static int same_params(const plan *u, PyObject *groups)
{
    size_t next = 0;

    if (!PyList_Check(groups) || (size_t)PyList_Size(groups) != u->group_count)
        return 0;
    for (size_t i = 0; i < u->group_count; i++) {
        PyObject *group = PyList_GetItem(groups, (Py_ssize_t)i), *params;
        Py_ssize_t length;

        if (group != u->groups[i])
            return 0;
        params = params_of(u, group);
        if (!params)
            return -1;
        length = PyList_Size(params);
        for (Py_ssize_t k = 0; k < length; k++, next++)
            if (next == u->entry_count || u->entries[next].group != i ||
                PyList_GetItem(params, k) != u->entries[next].p)
                return 0;
    }
    return next == u->entry_count;
}

int mo_plan_is_good(const plan *u, PyObject *state, PyObject *groups)
{
    return same_items(u, state) ? same_params(u, groups) : 0;
}
