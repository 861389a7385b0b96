#include "python/py_checkpoint_region.h"

#include "python/py_tensor.h"

/* ---- what is made again -------------------------------------------------------------------------------------------- */

static int note_difference(region *r, replay *p, size_t index, PyObject *tensor)
{
    PyObject *saved = mo_region_saved(r, index), *entry = NULL;
    int failed = !saved || (!p->notes && !(p->notes = PyList_New(0)));

    if (!failed)
        entry = Py_BuildValue(
            "nN", (Py_ssize_t)index,
            PyObject_CallFunction(r->engine->note, "OnOO", r->function, (Py_ssize_t)index, saved, tensor));
    failed = !entry || PyList_Append(p->notes, entry) < 0;
    Py_XDECREF(saved);
    Py_XDECREF(entry);
    return failed ? -1 : 0;
}

/* A tensor as it is kept: without the graph that it came out of, which would keep it alive, and it that. */
static PyObject *without_graph(mo_engine *e, const mo_torch *torch, PyObject *tensor)
{
    PyObject *requires_grad = PyObject_GetAttr(tensor, e->requires_grad);
    const bool plain =
        (PyObject *)Py_TYPE(tensor) == torch->tensor || (PyObject *)Py_TYPE(tensor) == torch->parameter;

    Py_XDECREF(requires_grad); /* a constant */
    if (!requires_grad)
        return NULL;
    if (requires_grad == Py_False)
        return Py_NewRef(tensor);
    /* The same for a plain one, past the dispatcher. */
    return plain ? PyObject_GetAttr(tensor, e->data) : PyObject_CallMethodObjArgs(tensor, e->detach, NULL);
}

static int remade(region *r, replay *p, size_t index, PyObject *tensor)
{
    holder *h = r->saved.records[index].holder;
    int same = 1, failed;

    if (!h) /* dead: a backward pass within the first run has used it */
        return 0;
    Py_INCREF((PyObject *)h); /* comparing may call Python */
    if (r->check)
        same = mo_region_compare(r, index, tensor);
    failed =
        same < 0 || (!same && note_difference(r, p, index, tensor) < 0) || mo_holder_keep(h, p, tensor) < 0;
    Py_DECREF((PyObject *)h);
    return failed ? -1 : 0;
}

/* The pack hook of a replay. self is the replay. What it returns is in the graph of this run, so that a backward pass may be
 * run through that, too. */
static PyObject *pack_again(PyObject *self, PyObject *tensor)
{
    replay *p = (replay *)self;
    region *r = p->of;
    const mo_torch *torch = mo_py_torch(PyType_GetModule(Py_TYPE(self)));
    PyObject *alone;
    size_t index;

    if (!r)
        return PyErr_Format(PyExc_AssertionError, "Internal error: target_frame reference is None");
    alone = torch ? without_graph(r->engine, torch, tensor) : NULL;
    if (!alone)
        return NULL;
    index = p->count++;
    if (index >= r->saved.count) {
        if (r->early_stop)
            PyErr_SetString(PyExc_AssertionError, "Unexpected state: target_frame.early_stop is set");
        else if (r->completed)
            mo_region_complain_of_counts(r, "more", r->saved.count, index);
        else
            r->uneven = true; /* a backward pass within the first run, which has not saved all yet */
    } else if (remade(r, p, index, alone) == 0 && r->early_stop && p->count == r->saved.count) {
        PyErr_SetNone(r->engine->stop);
    }
    if (PyErr_Occurred())
        Py_CLEAR(alone);
    return alone;
}

static PyMethodDef pack_again_definition = {"pack_again", pack_again, METH_O, NULL};

/* ---- running ------------------------------------------------------------------------------------------------------- */

/* The arguments, tensors unpacked: where a region is around this one, that makes them again. */
static PyObject *arguments(const region *r)
{
    const Py_ssize_t count = PyTuple_Size(r->args);
    PyObject *args = PyTuple_New(count);

    for (Py_ssize_t i = 0; args && i < count; i++) {
        PyObject *one = PyTuple_GetItem(r->args, i);

        one = (PyObject *)Py_TYPE(one) == r->engine->saved_input
                  ? PyObject_CallMethodObjArgs(one, r->engine->unpack_name, NULL)
                  : Py_NewRef(one);
        if (!one || PyTuple_SetItem(args, i, one) < 0)
            Py_CLEAR(args);
    }
    return args;
}

static int run_again(region *r, replay *p)
{
    PyObject *args = arguments(r), *result;

    if (!args)
        return -1;
    if (mo_region_push(r, &pack_again_definition, (PyObject *)p, r->engine->same) < 0) {
        Py_DECREF(args);
        return -1;
    }
    result = mo_surroundings_call(r->surroundings, r->again, args, r->kwargs);
    result = mo_region_popped(r, result);
    if (!result && PyErr_ExceptionMatches(r->engine->stop)) {
        PyErr_Clear();
        result = Py_NewRef(Py_None);
    }
    Py_DECREF(args);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* Holders may have died since the difference was seen; what is not needed need not be equal. */
static int check_forms(region *r, replay *p)
{
    PyObject *living;

    if (!p->notes)
        return 0;
    living = PyList_New(0);
    for (Py_ssize_t i = 0; living && i < PyList_Size(p->notes); i++) {
        PyObject *note = PyList_GetItem(p->notes, i);

        if (r->saved.records[PyLong_AsSsize_t(PyTuple_GetItem(note, 0))].holder &&
            PyList_Append(living, note) < 0)
            Py_CLEAR(living);
    }
    if (living && PyList_Size(living))
        mo_region_complain(r, "forms", living, NULL);
    Py_XDECREF(living);
    return PyErr_Occurred() ? -1 : 0;
}

static int check(region *r, replay *p)
{
    if (r->uneven)
        return 0;
    if (p->count != r->saved.count)
        return mo_region_complain_of_counts(r, "fewer", r->saved.count, p->count);
    return check_forms(r, p);
}

static int list_replay(region *r, replay *p)
{
    if (!r->replays && !(r->replays = PyList_New(0)))
        return -1;
    return PyList_Append(r->replays, (PyObject *)p);
}

PyObject *mo_replay_for(region *r, holder *h, const purpose *wanted)
{
    replay *p = mo_checkpoint_object((PyObject *)r, MO_REPLAY_TYPE);
    const bool once = !wanted->group && wanted->task < 0;
    PyObject *tensor = NULL;

    if (!p)
        return NULL;
    p->of = (region *)Py_NewRef((PyObject *)r);
    p->purpose = (purpose){Py_XNewRef(wanted->group), wanted->task};
    if (run_again(r, p) == 0 && check(r, p) == 0) {
        tensor = mo_holder_take(h, p);
        p->done = true;
        if (!tensor)
            PyErr_SetString(PyExc_AssertionError,
                            "Something went unexpectedly wrong in activation checkpoint. "
                            "Please report this bug by filing an issue to PyTorch.");
        else if (!once && list_replay(r, p) < 0)
            Py_CLEAR(tensor);
    }
    if (once || !tensor) {
        PyObject *type, *value, *trace;

        PyErr_Fetch(&type, &value, &trace);
        mo_holder_take_all(r, p);
        PyErr_Restore(type, value, trace);
    }
    Py_CLEAR(p->notes);
    Py_CLEAR(p->of);
    Py_DECREF((PyObject *)p);
    return tensor;
}

/* ---- the type ------------------------------------------------------------------------------------------------------ */

static int replay_traverse(PyObject *self, visitproc visit, void *arg)
{
    replay *p = (replay *)self;

    Py_VISIT(Py_TYPE(self));
    Py_VISIT(p->of);
    Py_VISIT(p->purpose.group);
    Py_VISIT(p->notes);
    return 0;
}

static int replay_clear(PyObject *self)
{
    replay *p = (replay *)self;

    Py_CLEAR(p->of);
    Py_CLEAR(p->purpose.group);
    Py_CLEAR(p->notes);
    return 0;
}

static void replay_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    replay_clear(self);
    mo_checkpoint_free(self);
}

static PyType_Slot slots[] = {
    {Py_tp_dealloc, replay_dealloc},
    {Py_tp_traverse, replay_traverse},
    {Py_tp_clear, replay_clear},
    {0, NULL},
};

PyType_Spec mo_replay_spec = {
    .name = "memopt._C.Replay",
    .basicsize = sizeof(replay),
    .flags = MO_PRIVATE_TYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
