/* The type memopt._C.CheckpointEngine. */
#include "python/py_checkpoint.h"

#include "python/py_tensor.h"

#define NAME_TEXT(name) #name,
static const char *const name_texts[] = {MO_ENGINE_NAMES(NAME_TEXT)};

enum { NAME_COUNT = sizeof name_texts / sizeof name_texts[0] };
_Static_assert(NAME_COUNT * sizeof(PyObject *) == sizeof(((mo_engine *)0)->names), "names: one for each");

static PyObject *same(PyObject *self, PyObject *object)
{
    (void)self;
    return Py_NewRef(object);
}

static PyMethodDef unpack_definition = {"unpack", mo_region_unpack, METH_O, NULL};
static PyMethodDef same_definition = {"same", same, METH_O, NULL};

/* ---- its life ----------------------------------------------------------------------------------------------------- */

static int intern(PyObject **slot, const char *text)
{
    *slot = PyUnicode_InternFromString(text);
    return *slot ? 0 : -1;
}

static int fill(mo_engine *e, PyObject *names)
{
    for (size_t i = 0; i < NAME_COUNT; i++) {
        PyObject *value = PyDict_GetItemString(names, name_texts[i]); /* borrowed */

        if (!value)
            return PyErr_Format(PyExc_TypeError, "CheckpointEngine needs %s", name_texts[i]), -1;
        e->names[i] = Py_NewRef(value);
    }
    e->unpack = PyCFunction_NewEx(&unpack_definition, (PyObject *)e, NULL);
    e->same = PyCFunction_NewEx(&same_definition, NULL, NULL);
    if (!e->unpack || !e->same || intern(&e->cpu, "cpu") < 0 || intern(&e->get_state, "get_state") < 0 ||
        intern(&e->set_state, "set_state") < 0 || intern(&e->unpack_name, "unpack") < 0 ||
        intern(&e->requires_grad, "requires_grad") < 0 || intern(&e->detach, "detach") < 0 ||
        intern(&e->data, "data") < 0 || intern(&e->is_cpu, "is_cpu") < 0)
        return -1;
    return 0;
}

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    mo_engine *e;

    if (PyTuple_Size(args) || !keywords)
        return PyErr_Format(PyExc_TypeError, "CheckpointEngine takes keyword arguments only");
    e = (mo_engine *)PyType_GenericAlloc(type, 0);
    if (e && fill(e, keywords) < 0)
        Py_CLEAR(e);
    return (PyObject *)e;
}

static int engine_traverse(PyObject *self, visitproc visit, void *arg)
{
    mo_engine *e = (mo_engine *)self;

    Py_VISIT(Py_TYPE(self));
    for (size_t i = 0; i < NAME_COUNT; i++)
        Py_VISIT(e->names[i]);
    Py_VISIT(e->unpack);
    Py_VISIT(e->same);
    return 0;
}

static int engine_clear(PyObject *self)
{
    mo_engine *e = (mo_engine *)self;

    for (size_t i = 0; i < NAME_COUNT; i++)
        Py_CLEAR(e->names[i]);
    Py_CLEAR(e->unpack);
    Py_CLEAR(e->same);
    return 0;
}

static void engine_dealloc(PyObject *self)
{
    mo_engine *e = (mo_engine *)self;

    PyObject_GC_UnTrack(self);
    engine_clear(self);
    Py_CLEAR(e->cpu);
    Py_CLEAR(e->get_state);
    Py_CLEAR(e->set_state);
    Py_CLEAR(e->unpack_name);
    Py_CLEAR(e->requires_grad);
    Py_CLEAR(e->detach);
    Py_CLEAR(e->data);
    Py_CLEAR(e->is_cpu);
    mo_checkpoint_free(self);
}

/* ---- methods ----------------------------------------------------------------------------------------------------- */

static bool is_kwargs(PyObject *kwargs)
{
    if (kwargs == Py_None || PyDict_Check(kwargs))
        return true;
    PyErr_SetString(PyExc_TypeError, "kwargs must be a dict or None");
    return false;
}

static bool is_generators(PyObject *generators)
{
    if (generators == Py_None || PyTuple_Check(generators))
        return true;
    PyErr_SetString(PyExc_TypeError, "generators must be a tuple or None");
    return false;
}

PyDoc_STRVAR(
    run_doc,
    "run($self, function, args, kwargs, generators, device, early_stop, check, extras, /)\n--\n\n"
    "function(*args, **kwargs), keeping none of the tensors that autograd saves: the function runs again "
    "when\n"
    "they are needed, with the random states of the generators (a tuple, or None) and the autocast of the\n"
    "device and the CPU as they are now. early_stop: only as far as needed. check: what is saved must have "
    "the\n"
    "same shapes, types and devices. extras: None or (forward, again, wrap, on_error), each may be None:\n"
    "what runs in the function's place now and later, what each pack hook is passed through, what is called\n"
    "with a CheckpointError and raises another. kwargs and device may be None.");

static PyObject *engine_run(PyObject *self, PyObject *args)
{
    PyObject *function, *arguments, *kwargs, *generators, *device, *extras, *surroundings, *result;
    int early_stop, check;

    if (!PyArg_ParseTuple(args, "OO!OOOppO:run", &function, &PyTuple_Type, &arguments, &kwargs, &generators,
                          &device, &early_stop, &check, &extras) ||
        !is_kwargs(kwargs) || !is_generators(generators))
        return NULL;
    if (extras != Py_None && (!PyTuple_Check(extras) || PyTuple_Size(extras) != 4))
        return PyErr_Format(PyExc_TypeError, "extras must be a tuple of four or None");
    surroundings = mo_surroundings_new((mo_engine *)self, generators, device);
    if (!surroundings)
        return NULL;
    result = mo_region_run((mo_engine *)self, function, arguments, kwargs == Py_None ? NULL : kwargs,
                           surroundings, early_stop, check, extras);
    Py_DECREF(surroundings);
    return result;
}

PyDoc_STRVAR(
    surroundings_doc,
    "surroundings($self, generators, device, /)\n--\n\n"
    "The random states of the generators (a tuple, or None) and autocast of the device and the CPU as\n"
    "they are now. device may be None.");

static PyObject *engine_surroundings(PyObject *self, PyObject *args)
{
    PyObject *generators, *device;

    if (!PyArg_ParseTuple(args, "OO:surroundings", &generators, &device) || !is_generators(generators))
        return NULL;
    return mo_surroundings_new((mo_engine *)self, generators, device);
}

/* 1: no tensor in it but of the CPU. 0: there is one, or it is of a kind that is not looked into. -1: exception. */
static int on_cpu(mo_engine *e, const mo_torch *torch, PyObject *object, int depth)
{
    PyObject *answer;

    if (object == Py_None || PyBool_Check(object) || PyLong_Check(object) || PyFloat_Check(object) ||
        PyUnicode_Check(object))
        return 1;
    if (PyTuple_CheckExact(object) || PyList_CheckExact(object)) {
        int all = depth < 8;

        for (Py_ssize_t i = 0; all > 0 && i < PySequence_Size(object); i++) {
            PyObject *one = PySequence_GetItem(object, i);

            all = one ? on_cpu(e, torch, one, depth + 1) : -1;
            Py_XDECREF(one);
        }
        return all;
    }
    if (!PyType_IsSubtype(Py_TYPE(object), (PyTypeObject *)torch->tensor))
        return 0;
    answer = PyObject_GetAttr(object, e->is_cpu);
    Py_XDECREF(answer); /* a constant */
    return answer ? answer == Py_True : -1;
}

PyDoc_STRVAR(only_cpu_doc,
             "only_cpu($self, args, /)\n--\n\n"
             "Whether all tensors in a tuple are on the CPU, as far as lists and tuples of tensors and\n"
             "numbers go: False, too, where there is something else in it.");

static PyObject *engine_only_cpu(PyObject *self, PyObject *args)
{
    const mo_torch *torch = mo_py_torch(PyType_GetModule(Py_TYPE(self)));
    int all = torch ? on_cpu((mo_engine *)self, torch, args, 0) : -1;

    return all < 0 ? NULL : PyBool_FromLong(all);
}

PyDoc_STRVAR(is_hook_doc, "is_hook($self, pack, /)\n--\n\n"
                          "Whether this is a pack hook of a region.");

static PyObject *engine_is_hook(PyObject *self, PyObject *pack)
{
    PyObject *of = PyCFunction_CheckExact(pack) ? PyCFunction_GetSelf(pack) : NULL;

    return PyBool_FromLong(of && (Py_TYPE(of) == mo_checkpoint_type(self, MO_REGION_TYPE) ||
                                  Py_TYPE(of) == mo_checkpoint_type(self, MO_REPLAY_TYPE)));
}

/* ---- the type ------------------------------------------------------------------------------------------------------ */

PyDoc_STRVAR(engine_doc,
             "CheckpointEngine(**names)\n--\n\n"
             "Activation checkpointing, over torch's functions by their names here: push_hooks, pop_hooks,\n"
             "save_input, …. See memopt/_checkpoint/drop_in/engine.py.");

static PyMethodDef methods[] = {
    {"run", engine_run, METH_VARARGS, run_doc},
    {"surroundings", engine_surroundings, METH_VARARGS, surroundings_doc},
    {"only_cpu", engine_only_cpu, METH_O, only_cpu_doc},
    {"is_hook", engine_is_hook, METH_O, is_hook_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)engine_doc},
    {Py_tp_new, engine_new},
    {Py_tp_dealloc, engine_dealloc},
    {Py_tp_traverse, engine_traverse},
    {Py_tp_clear, engine_clear},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "memopt._C.CheckpointEngine",
    .basicsize = sizeof(mo_engine),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int mo_py_checkpoint_init(PyObject *module)
{
    PyType_Spec *const specs[] = {[MO_ENGINE_TYPE] = &spec,
                                  [MO_SURROUNDINGS_TYPE] = &mo_surroundings_spec,
                                  [MO_REGION_TYPE] = &mo_region_spec,
                                  [MO_REPLAY_TYPE] = &mo_replay_spec,
                                  [MO_HOLDER_TYPE] = &mo_holder_spec};
    PyObject **types = mo_state(module)->checkpoint_types;

    for (size_t i = 0; i < MO_CHECKPOINT_TYPES; i++) {
        types[i] = PyType_FromModuleAndSpec(module, specs[i], NULL);
        if (!types[i])
            return -1;
    }
    if (PyModule_AddType(module, (PyTypeObject *)types[MO_SURROUNDINGS_TYPE]) < 0)
        return -1;
    return PyModule_AddType(module, (PyTypeObject *)types[MO_ENGINE_TYPE]);
}
