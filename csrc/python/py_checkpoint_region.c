#include "python/py_checkpoint_region.h"

#include "python/py_tensor.h"

/* ---- errors --------------------------------------------------------------------------------------------------------- */

int mo_region_complain(const region *r, const char *kind, PyObject *first, PyObject *second)
{
    PyObject *error = PyObject_CallFunction(r->engine->complain, "sOOO", kind, r->function,
                                            first ? first : Py_None, second ? second : Py_None);

    if (error)
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(error);
    return -1;
}

int mo_region_complain_of_counts(const region *r, const char *kind, size_t first, size_t second)
{
    PyObject *one = PyLong_FromSize_t(first), *other = one ? PyLong_FromSize_t(second) : NULL;

    if (other)
        mo_region_complain(r, kind, one, other);
    Py_XDECREF(one);
    Py_XDECREF(other);
    return -1;
}

/* ---- hooks ---------------------------------------------------------------------------------------------------------- */

int mo_region_push(region *r, PyMethodDef *definition, PyObject *self, PyObject *unpack)
{
    PyObject *hook = PyCFunction_NewEx(definition, self, NULL);
    int failed;

    if (hook && r->wrap) {
        PyObject *wrapped = PyObject_CallFunctionObjArgs(r->wrap, hook, NULL);

        Py_DECREF(hook);
        hook = wrapped;
    }
    failed = !hook || mo_called(PyObject_CallFunctionObjArgs(r->engine->push_hooks, hook, unpack, NULL)) < 0;
    Py_XDECREF(hook);
    return failed ? -1 : 0;
}

PyObject *mo_region_popped(region *r, PyObject *result)
{
    PyObject *type, *value, *trace;

    PyErr_Fetch(&type, &value, &trace);
    if (mo_called(PyObject_CallNoArgs(r->engine->pop_hooks)) < 0 && !type)
        Py_CLEAR(result);
    else if (type)
        PyErr_Restore(type, value, trace);
    return result;
}

/* ---- unpacking ----------------------------------------------------------------------------------------------------- */

/* Whose backward pass this is; out->group is a new reference. */
static int find_purpose(mo_engine *e, purpose *out)
{
    PyObject *task;

    *out = (purpose){NULL, -1};
    if (e->exec_group != Py_None) {
        out->group = PyObject_CallNoArgs(e->exec_group);
        if (!out->group)
            return -1;
        if (out->group != Py_None)
            return 0;
        Py_CLEAR(out->group);
    }
    task = PyObject_CallNoArgs(e->graph_task);
    out->task = task ? PyLong_AsLongLong(task) : -1;
    Py_XDECREF(task);
    return PyErr_Occurred() ? -1 : 0;
}

/* What a finished replay of this purpose has made for a holder. NULL, without an exception: nothing; *seen: there was one. */
static PyObject *find_remade(const region *r, holder *h, const purpose *wanted, bool *seen)
{
    *seen = false;
    for (Py_ssize_t i = 0; r->replays && i < PyList_Size(r->replays); i++) {
        const replay *p = (replay *)PyList_GetItem(r->replays, i);

        if (p->done && p->purpose.group == wanted->group && p->purpose.task == wanted->task) {
            PyObject *tensor = mo_holder_take(h, p);

            *seen = true;
            if (tensor)
                return tensor;
        }
    }
    return NULL;
}

static PyObject *remade_for(region *r, holder *h)
{
    purpose wanted;
    PyObject *tensor;
    bool seen;

    if (find_purpose(r->engine, &wanted) < 0) {
        Py_XDECREF(wanted.group);
        return NULL;
    }
    tensor = find_remade(r, h, &wanted, &seen);
    if (!tensor && seen)
        mo_region_complain(r, "twice", wanted.group, NULL);
    else if (!tensor)
        tensor = mo_replay_for(r, h, &wanted);
    Py_XDECREF(wanted.group);
    return tensor;
}

/* An error of torch's checkpointing becomes what on_error makes of it. */
static void translate_error(const region *r)
{
    PyObject *type, *value, *trace;

    if (!r->on_error || !PyErr_ExceptionMatches(r->engine->error))
        return;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace)
        PyException_SetTraceback(value, trace);
    if (mo_called(PyObject_CallFunctionObjArgs(r->on_error, value, NULL)) == 0) {
        PyErr_Restore(type, value, trace);
        return;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
}

PyObject *mo_region_unpack(PyObject *self, PyObject *object)
{
    holder *h = (holder *)object;
    region *r;
    PyObject *tensor;

    if (Py_TYPE(object) != mo_checkpoint_type(self, MO_HOLDER_TYPE))
        return PyErr_Format(PyExc_TypeError, "unpack: expected what the pack hook returned");
    Py_INCREF((PyObject *)h);
    r = (region *)Py_NewRef((PyObject *)h->of);
    tensor = remade_for(r, h);
    if (!tensor)
        translate_error(r);
    Py_DECREF((PyObject *)h);
    Py_DECREF((PyObject *)r);
    return tensor;
}

/* ---- the first run -------------------------------------------------------------------------------------------------- */

/* Tensors as torch keeps those of a graph. */
static PyObject *save_arguments(mo_engine *e, PyObject *module, PyObject *args)
{
    const mo_torch *torch = mo_py_torch(module);
    const Py_ssize_t count = PyTuple_Size(args);
    PyObject *saved = torch ? PyTuple_New(count) : NULL;

    for (Py_ssize_t i = 0; saved && i < count; i++) {
        PyObject *one = PyTuple_GetItem(args, i);

        if (PyType_IsSubtype(Py_TYPE(one), (PyTypeObject *)torch->tensor))
            one = PyObject_CallFunctionObjArgs(e->save_input, one, Py_False, NULL);
        else
            Py_INCREF(one);
        if (!one || PyTuple_SetItem(saved, i, one) < 0)
            Py_CLEAR(saved);
    }
    return saved;
}

/* The i-th of a tuple, or NULL where that is None or there is none: a new reference. */
static PyObject *optional(PyObject *tuple, Py_ssize_t i)
{
    PyObject *one = tuple == Py_None ? Py_None : PyTuple_GetItem(tuple, i);

    return one && one != Py_None ? Py_NewRef(one) : NULL;
}

static PyMethodDef pack_definition = {"pack", mo_region_pack, METH_O, NULL};

PyObject *mo_region_run(mo_engine *engine, PyObject *function, PyObject *args, PyObject *kwargs,
                        PyObject *surroundings, bool early_stop, bool checked, PyObject *extras)
{
    region *r = mo_checkpoint_object((PyObject *)engine, MO_REGION_TYPE);
    PyObject *first = optional(extras, 0), *result = NULL;

    if (r) {
        r->engine = (mo_engine *)Py_NewRef((PyObject *)engine);
        r->function = Py_NewRef(function);
        r->again = optional(extras, 1);
        if (!r->again)
            r->again = Py_NewRef(function);
        r->wrap = optional(extras, 2);
        r->on_error = optional(extras, 3);
        r->kwargs = Py_XNewRef(kwargs);
        r->surroundings = Py_NewRef(surroundings);
        r->early_stop = early_stop;
        r->check = checked;
        r->args = save_arguments(engine, PyType_GetModule(Py_TYPE((PyObject *)engine)), args);
    }
    if (r && r->args && mo_region_push(r, &pack_definition, (PyObject *)r, engine->unpack) == 0) {
        result = PyObject_Call(first ? first : function, args, kwargs);
        result = mo_region_popped(r, result);
        r->completed = result;
    }
    Py_XDECREF(first);
    Py_XDECREF((PyObject *)r);
    return result;
}

/* ---- the type ----------------------------------------------------------------------------------------------------- */

static int region_traverse(PyObject *self, visitproc visit, void *arg)
{
    region *r = (region *)self;

    Py_VISIT(Py_TYPE(self));
    Py_VISIT(r->engine);
    Py_VISIT(r->function);
    Py_VISIT(r->again);
    Py_VISIT(r->args);
    Py_VISIT(r->kwargs);
    Py_VISIT(r->surroundings);
    Py_VISIT(r->wrap);
    Py_VISIT(r->on_error);
    Py_VISIT(r->replays);
    return 0;
}

/* Only what can be part of a cycle, and is not needed while a holder lives. A holder keeps its region from being cleared by
 * the collector: what the graph holds is reachable. */
static int region_clear(PyObject *self)
{
    region *r = (region *)self;

    Py_CLEAR(r->engine);
    Py_CLEAR(r->function);
    Py_CLEAR(r->again);
    Py_CLEAR(r->args);
    Py_CLEAR(r->kwargs);
    Py_CLEAR(r->surroundings);
    Py_CLEAR(r->wrap);
    Py_CLEAR(r->on_error);
    Py_CLEAR(r->replays);
    return 0;
}

static void region_dealloc(PyObject *self)
{
    region *r = (region *)self;

    PyObject_GC_UnTrack(self);
    region_clear(self);
    for (size_t i = 0; i < r->saved.count; i++)
        Py_XDECREF((PyObject *)r->saved.records[i].described);
    mo_saved_free(&r->saved);
    mo_checkpoint_free(self);
}

static PyType_Slot slots[] = {
    {Py_tp_dealloc, region_dealloc},
    {Py_tp_traverse, region_traverse},
    {Py_tp_clear, region_clear},
    {0, NULL},
};

PyType_Spec mo_region_spec = {
    .name = "memopt._C.Region",
    .basicsize = sizeof(region),
    .flags = MO_PRIVATE_TYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
