#include "python/py_checkpoint.h"

enum { ENABLED, DTYPE, CPU_ENABLED, CPU_DTYPE, CACHE, AUTOCAST_COUNT };

typedef struct surroundings {
    PyObject_HEAD mo_engine *engine;
    PyObject *device;              /* NULL: the CPU alone, and the first two of autocast are NULL, too */
    PyObject *generators, *states; /* tuples, or NULL */
    PyObject *autocast[AUTOCAST_COUNT];
} surroundings;

/* ---- reading -------------------------------------------------------------------------------------------------------- */

static void drop_autocast(PyObject **autocast)
{
    for (size_t i = 0; i < AUTOCAST_COUNT; i++)
        Py_CLEAR(autocast[i]);
}

/* The answers are torch's constants (bools, dtypes): the same object is the same answer. */
static int read_autocast(mo_engine *e, PyObject *device, PyObject **out)
{
    bool whole = true;

    if (device) {
        out[ENABLED] = PyObject_CallFunctionObjArgs(e->autocast_enabled, device, NULL);
        out[DTYPE] = out[ENABLED] ? PyObject_CallFunctionObjArgs(e->autocast_dtype, device, NULL) : NULL;
        whole = out[DTYPE];
    }
    out[CPU_ENABLED] = whole ? PyObject_CallFunctionObjArgs(e->autocast_enabled, e->cpu, NULL) : NULL;
    out[CPU_DTYPE] = out[CPU_ENABLED] ? PyObject_CallFunctionObjArgs(e->autocast_dtype, e->cpu, NULL) : NULL;
    out[CACHE] = out[CPU_DTYPE] ? PyObject_CallNoArgs(e->autocast_cache) : NULL;
    if (out[CACHE])
        return 0;
    drop_autocast(out);
    return -1;
}

/* 1: autocast is off, was, and would come on as it would have. Else torch's contexts are entered, with all they do to the cache
 * of casts. */
static int plain_autocast(const surroundings *s)
{
    PyObject *now[AUTOCAST_COUNT] = {NULL};
    bool plain = s->autocast[CPU_ENABLED] == Py_False && (!s->device || s->autocast[ENABLED] == Py_False);

    if (!plain)
        return 0;
    if (read_autocast(s->engine, s->device, now) < 0)
        return -1;
    for (size_t i = 0; i < AUTOCAST_COUNT; i++)
        plain = plain && now[i] == s->autocast[i];
    drop_autocast(now);
    return plain;
}

static PyObject *take_states(mo_engine *e, PyObject *generators)
{
    const Py_ssize_t count = PyTuple_Size(generators);
    PyObject *states = PyTuple_New(count);

    for (Py_ssize_t i = 0; states && i < count; i++) {
        PyObject *state = PyObject_CallMethodObjArgs(PyTuple_GetItem(generators, i), e->get_state, NULL);

        if (!state || PyTuple_SetItem(states, i, state) < 0)
            Py_CLEAR(states);
    }
    return states;
}

/* Sets each, whatever happens to the others; -1 with the first exception. */
static int set_states(mo_engine *e, PyObject *generators, PyObject *states)
{
    const Py_ssize_t count = PyTuple_Size(generators);
    PyObject *type = NULL, *value = NULL, *trace = NULL;

    for (Py_ssize_t i = 0; i < count; i++)
        if (mo_called(PyObject_CallMethodObjArgs(PyTuple_GetItem(generators, i), e->set_state,
                                                 PyTuple_GetItem(states, i), NULL)) < 0) {
            if (type)
                PyErr_Clear();
            else
                PyErr_Fetch(&type, &value, &trace);
        }
    if (type)
        PyErr_Restore(type, value, trace);
    return type ? -1 : 0;
}

PyObject *mo_surroundings_new(mo_engine *engine, PyObject *generators, PyObject *device)
{
    surroundings *s = mo_checkpoint_object((PyObject *)engine, MO_SURROUNDINGS_TYPE);

    if (!s)
        return NULL;
    s->engine = (mo_engine *)Py_NewRef((PyObject *)engine);
    if (device != Py_None && PyUnicode_Compare(device, engine->cpu) != 0)
        s->device = Py_NewRef(device);
    if (generators != Py_None) {
        s->generators = Py_NewRef(generators);
        s->states = take_states(engine, generators);
    }
    if (PyErr_Occurred() || read_autocast(engine, s->device, s->autocast) < 0)
        Py_CLEAR(s);
    return (PyObject *)s;
}

/* ---- a call under them ---------------------------------------------------------------------------------------------- */

static PyObject *or_none(PyObject *object)
{
    return object ? object : Py_None;
}

static PyObject *call_autocast(surroundings *s, PyObject *function, PyObject *args, PyObject *kwargs)
{
    const int plain = plain_autocast(s);

    if (plain)
        return plain < 0 ? NULL : PyObject_Call(function, args, kwargs);
    return PyObject_CallFunctionObjArgs(s->engine->under_autocast, function, args, or_none(kwargs),
                                        or_none(s->device), or_none(s->autocast[ENABLED]),
                                        or_none(s->autocast[DTYPE]), s->autocast[CPU_ENABLED],
                                        s->autocast[CPU_DTYPE], s->autocast[CACHE], NULL);
}

/* Whether grad mode is on; -1 with an exception. */
static int grad_mode(mo_engine *e)
{
    PyObject *on = PyObject_CallNoArgs(e->is_grad_enabled);

    Py_XDECREF(on); /* a constant */
    return on ? on == Py_True : -1;
}

static int set_grad_mode(mo_engine *e, int wanted)
{
    const int now = grad_mode(e);

    if (now < 0 || now == wanted)
        return now < 0 ? -1 : 0;
    return mo_called(PyObject_CallFunctionObjArgs(e->set_grad_enabled, wanted ? Py_True : Py_False, NULL));
}

static PyObject *call_in_grad_mode(surroundings *s, PyObject *function, PyObject *args, PyObject *kwargs)
{
    const int before = grad_mode(s->engine);
    PyObject *result, *type, *value, *trace;

    if (before < 0 || set_grad_mode(s->engine, 1) < 0)
        return NULL;
    result = call_autocast(s, function, args, kwargs);
    PyErr_Fetch(&type, &value, &trace);
    if (set_grad_mode(s->engine, before) < 0 && !type)
        Py_CLEAR(result);
    else if (type)
        PyErr_Restore(type, value, trace);
    return result;
}

PyObject *mo_surroundings_call(PyObject *self, PyObject *function, PyObject *args, PyObject *kwargs)
{
    surroundings *s = (surroundings *)self;
    PyObject *before, *result = NULL, *type, *value, *trace;

    if (!s->generators)
        return call_in_grad_mode(s, function, args, kwargs);
    before = take_states(s->engine, s->generators);
    if (!before)
        return NULL;
    if (set_states(s->engine, s->generators, s->states) == 0)
        result = call_in_grad_mode(s, function, args, kwargs);
    PyErr_Fetch(&type, &value, &trace);
    if (set_states(s->engine, s->generators, before) < 0 && !type)
        Py_CLEAR(result);
    else if (type)
        PyErr_Restore(type, value, trace);
    Py_DECREF(before);
    return result;
}

/* ---- the type --------------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(call_doc,
             "call($self, function, args, kwargs, /)\n--\n\n"
             "function(*args, **kwargs) in grad mode, with the random states and autocast of the time when\n"
             "these surroundings were taken; what was there before comes back. kwargs may be None.");

static PyObject *call(PyObject *self, PyObject *args)
{
    PyObject *function, *arguments, *keywords;

    if (!PyArg_ParseTuple(args, "OO!O:call", &function, &PyTuple_Type, &arguments, &keywords))
        return NULL;
    if (keywords != Py_None && !PyDict_Check(keywords))
        return PyErr_Format(PyExc_TypeError, "kwargs must be a dict or None");
    return mo_surroundings_call(self, function, arguments, keywords == Py_None ? NULL : keywords);
}

static int traverse(PyObject *self, visitproc visit, void *arg)
{
    surroundings *s = (surroundings *)self;

    Py_VISIT(Py_TYPE(self));
    Py_VISIT(s->engine);
    Py_VISIT(s->device);
    Py_VISIT(s->generators);
    Py_VISIT(s->states);
    for (size_t i = 0; i < AUTOCAST_COUNT; i++)
        Py_VISIT(s->autocast[i]);
    return 0;
}

static int clear(PyObject *self)
{
    surroundings *s = (surroundings *)self;

    Py_CLEAR(s->engine);
    Py_CLEAR(s->device);
    Py_CLEAR(s->generators);
    Py_CLEAR(s->states);
    drop_autocast(s->autocast);
    return 0;
}

static void dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    clear(self);
    mo_checkpoint_free(self);
}

PyDoc_STRVAR(type_doc, "Random states and autocast, as CheckpointEngine.surroundings() took them.");

static PyMethodDef methods[] = {
    {"call", call, METH_VARARGS, call_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)type_doc}, {Py_tp_dealloc, dealloc}, {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},          {Py_tp_methods, methods}, {0, NULL},
};

PyType_Spec mo_surroundings_spec = {
    .name = "memopt._C.Surroundings",
    .basicsize = sizeof(surroundings),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};
