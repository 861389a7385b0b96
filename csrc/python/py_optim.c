/* The type memopt._C.UpdatePlan. A step is collect(), run() for each device, drop(): collect() takes references to the gradients,
 * drop() gives them back. What is not plain (py_tensor.h) is named to the caller and left alone. */
#include "python/py_optim.h"

#include "base/hostmem.h"
#include "python/py_scaler.h"

static PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *words[] = {"state", "param_groups", "sgd", "first", NULL};
    PyObject *state, *groups, *first = NULL;
    int sgd = 0;
    plan *u;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!O!|pO!:UpdatePlan", words, &PyDict_Type, &state,
                                     &PyList_Type, &groups, &sgd, &PyList_Type, &first))
        return NULL;
    u = (plan *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!u)
        return NULL;
    u->sgd = sgd;
    if (mo_plan_fill(u, state, groups, first) < 0) {
        Py_DECREF(u);
        return NULL;
    }
    return (PyObject *)u;
}

static int plan_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    return mo_plan_traverse((plan *)self, visit, arg);
}

static int plan_clear(PyObject *self)
{
    mo_plan_clear((plan *)self);
    return 0;
}

static void plan_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    PyObject_GC_UnTrack(self);
    mo_plan_clear((plan *)self);
    mo_plan_free((plan *)self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *module_of(PyObject *self)
{
    return PyType_GetModule(Py_TYPE(self));
}

static PyObject *busy(void)
{
    return PyErr_Format(PyExc_RuntimeError, "this optimizer's step() is already running: run one step at a "
                                            "time");
}

/* ---- methods ------------------------------------------------------------------------------------------------------------ */

PyDoc_STRVAR(collect_doc,
             "collect($self, state, param_groups, fresh=False, /)\n--\n\n"
             "Begins a step: takes every parameter that has a gradient. The list of those that are left to\n"
             "others, as numbers in the order of the groups; or None where the plan is not good any more\n"
             "or a parameter lacks a state, and then nothing was taken. fresh: not None but a list, always.");

static PyObject *collect(PyObject *self, PyObject *args)
{
    plan *u = (plan *)self;
    PyObject *module = module_of(self), *state, *groups, *left;
    int fresh = 0, same;

    if (!PyArg_ParseTuple(args, "O!O|p:collect", &PyDict_Type, &state, &groups, &fresh))
        return NULL;
    if (u->running)
        return busy();
    mo_plan_drop(u);
    same = mo_plan_is_good(u, state, groups);
    if (same < 0)
        return NULL;
    if (!same)
        Py_RETURN_NONE;
    if (mo_plan_read_hypers(u, module) < 0)
        return NULL;
    left = PyList_New(0);
    for (size_t i = 0; left && i < u->entry_count; i++) {
        PyObject *which;
        found known;

        u->running = true; /* asking a subclass of Tensor for its gradient may run Python code */
        known = mo_plan_look(u, module, &u->entries[i]);
        u->running = false;

        if (known == PLAIN || known == WITHOUT_GRADIENT)
            continue;
        if (known == FAILED) {
            Py_CLEAR(left);
            break;
        }
        if (known == LACKING && !fresh) {
            mo_plan_drop(u);
            Py_DECREF(left);
            Py_RETURN_NONE;
        }
        which = PyLong_FromSize_t(i);
        if (!which || PyList_Append(left, which) < 0)
            Py_CLEAR(left);
        Py_XDECREF(which);
    }
    if (!left)
        mo_plan_drop(u);
    return left;
}

PyDoc_STRVAR(add_doc,
             "add($self, which, grad, /)\n--\n\n"
             "Takes a parameter that collect() left, with this instead of its gradient; False where it\n"
             "is left still.");

static PyObject *add(PyObject *self, PyObject *args)
{
    plan *u = (plan *)self;
    Py_ssize_t which;
    PyObject *grad;
    found known;

    if (!PyArg_ParseTuple(args, "nO:add", &which, &grad))
        return NULL;
    if (u->running)
        return busy();
    if (which < 0 || (size_t)which >= u->entry_count || u->count == u->entry_count)
        return PyErr_Format(PyExc_IndexError, "parameter %zd of %zu", which, u->entry_count);
    known = mo_plan_take(u, module_of(self), &u->entries[which], grad);
    return known == FAILED ? NULL : PyBool_FromLong(known == PLAIN);
}

static void read_gradient(const void *user, size_t i, mo_read_gradient *out)
{
    const plan *u = user;
    const mo_parameter *a = &u->parameters[i];

    *out = (mo_read_gradient){.given = u->who[i]->p,
                              .tensor = u->grads[i],
                              .device = u->devices[i],
                              .at = {.address = a->g, .count = a->count, .kind = a->grad_kind}};
}

PyDoc_STRVAR(gradients_doc,
             "gradients($self, /)\n--\n\n"
             "The gradients of the parameters that were taken, as Gradients, which read nothing anew.");

static PyObject *gradients(PyObject *self, PyObject *unused)
{
    plan *u = (plan *)self;
    PyObject *read;

    (void)unused;
    if (u->running)
        return busy();
    u->running = true; /* a new object may have others collected, and their end may run Python code */
    read = mo_py_gradients(module_of(self), u->count, read_gradient, u);
    u->running = false;
    return read;
}

PyDoc_STRVAR(devices_doc,
             "devices($self, /)\n--\n\n"
             "The devices of the parameters that were taken: numbers of CUDA devices, -1 for the CPU.");

static PyObject *devices(PyObject *self, PyObject *unused)
{
    plan *u = (plan *)self;
    PyObject *list = PyList_New(0);

    (void)unused;
    for (size_t i = 0; list && i < u->count; i++) {
        size_t k = 0;
        PyObject *device;

        while (u->devices[k] != u->devices[i])
            k++;
        if (k < i)
            continue;
        device = PyLong_FromLong(u->devices[i]);
        if (!device || PyList_Append(list, device) < 0)
            Py_CLEAR(list);
        Py_XDECREF(device);
    }
    return list;
}

/* The address of a scalar that the step reads: one fp32 of that device, or None. */
static int scalar(PyObject *module, PyObject *tensor, const char *name, int device, uintptr_t *out)
{
    mo_tensor_view view;
    int known;

    *out = 0;
    if (tensor == Py_None)
        return 0;
    known = mo_py_tensor_view(module, tensor, &view);
    if (known < 0)
        return -1;
    if (!known || view.kind != MO_F32 || view.count != 1 || view.device != device) {
        PyErr_Format(PyExc_ValueError, "%s must be a single float32 on the parameters' device, not %R", name,
                     tensor);
        return -1;
    }
    *out = view.address;
    return 0;
}

/* Those of one device: all, mostly. *out_own: to be freed, or NULL. */
static bool of_device(const plan *u, int device, mo_update_job *out, mo_parameter **out_own)
{
    size_t count = 0;

    *out_own = NULL;
    for (size_t i = 0; i < u->count; i++)
        count += u->devices[i] == device;
    out->parameters = u->parameters;
    out->count = count;
    if (count == u->count)
        return true;
    *out_own = mo_host_calloc(count, sizeof **out_own);
    if (!*out_own)
        return false;
    count = 0;
    for (size_t i = 0; i < u->count; i++)
        if (u->devices[i] == device)
            (*out_own)[count++] = u->parameters[i];
    out->parameters = *out_own;
    return true;
}

PyDoc_STRVAR(scratch_doc, "scratch($self, device, /)\n--\n\n"
                          "The bytes that run() needs on that device beside all else.");

static PyObject *scratch(PyObject *self, PyObject *args)
{
    plan *u = (plan *)self;
    mo_update_job job = {0};
    mo_parameter *own;
    size_t bytes;
    int device;

    if (!PyArg_ParseTuple(args, "i:scratch", &device))
        return NULL;
    if (u->running)
        return busy();
    if (!of_device(u, device, &job, &own))
        return PyErr_NoMemory();
    bytes = mo_update_scratch(&job);
    mo_host_free(own);
    return PyLong_FromSize_t(bytes);
}

PyDoc_STRVAR(run_doc,
             "run($self, device, factor=None, found_inf=None, store_gradients=False, first_index=0,\n"
             "    scratch=None, /)\n--\n\n"
             "Does the step of what was taken on one device: gradients times factor, nothing where\n"
             "found_inf is not 0. store_gradients: they are kept as they were used. first_index: of the\n"
             "first element, where a parameter is a piece of another. scratch: uint8, of scratch() bytes.");

/* The address of the bytes that the job needs beside all else; 0 where it needs none. */
static int scratch_of(PyObject *module, PyObject *tensor, const mo_update_job *job, int device,
                      uintptr_t *out)
{
    const size_t needed = mo_update_scratch(job);
    mo_tensor_view view = {0};
    int known;

    *out = 0;
    if (!needed)
        return 0;
    known = tensor == Py_None ? 0 : mo_py_tensor_bytes(module, tensor, &view);
    if (known < 0)
        return -1;
    if (!known || view.device != device || view.count < needed) {
        PyErr_Format(PyExc_ValueError, "scratch must be %zu bytes of uint8 on device %d", needed, device);
        return -1;
    }
    *out = view.address;
    return 0;
}

static PyObject *run(PyObject *self, PyObject *args)
{
    plan *u = (plan *)self;
    PyObject *module = module_of(self), *factor = Py_None, *found_inf = Py_None, *bytes = Py_None;
    int device, store = 0;
    unsigned first_index = 0;
    mo_update_job job = {.groups = u->hypers, .group_count = u->group_count};
    mo_parameter *own;
    void *stream = NULL;
    mo_detail detail = {0};
    mo_status status;

    if (!PyArg_ParseTuple(args, "i|OOpIO:run", &device, &factor, &found_inf, &store, &first_index, &bytes))
        return NULL;
    if (u->running)
        return busy();
    if (scalar(module, factor, "factor", device, &job.factor) < 0 ||
        scalar(module, found_inf, "found_inf", device, &job.found_inf) < 0 ||
        (device != MO_CPU && mo_py_tensor_stream(module, device, &stream) < 0))
        return NULL;
    if (!of_device(u, device, &job, &own))
        return PyErr_NoMemory();
    if (scratch_of(module, bytes, &job, device, &job.scratch) < 0) {
        mo_host_free(own);
        return NULL;
    }
    job.store_gradients = store;
    job.first_index = first_index;
    u->running = true;
    Py_BEGIN_ALLOW_THREADS;
    status = device == MO_CPU ? mo_update_cpu(&job, &detail) : mo_update_cuda(device, stream, &job, &detail);
    Py_END_ALLOW_THREADS;
    u->running = false;
    mo_host_free(own);
    if (status)
        return mo_raise(module, status, &detail);
    for (size_t i = 0; i < u->count; i++)
        if (u->devices[i] == device)
            u->who[i]->first = false;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(drop_doc, "drop($self, /)\n--\n\nEnds the step that collect() began.");

static PyObject *drop_method(PyObject *self, PyObject *unused)
{
    (void)unused;
    if (!((plan *)self)->running)
        mo_plan_drop((plan *)self);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(plan_doc,
             "UpdatePlan(state, param_groups, sgd=False, first=[])\n--\n\n"
             "What one optimizer's step walks: state, param_groups as in torch.optim.Optimizer. first: the\n"
             "parameters whose momentum buffer has no value yet.");

static PyMethodDef plan_methods[] = {
    {"collect", collect, METH_VARARGS, collect_doc},      {"add", add, METH_VARARGS, add_doc},
    {"gradients", gradients, METH_NOARGS, gradients_doc}, {"devices", devices, METH_NOARGS, devices_doc},
    {"scratch", scratch, METH_VARARGS, scratch_doc},      {"run", run, METH_VARARGS, run_doc},
    {"drop", drop_method, METH_NOARGS, drop_doc},         {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)plan_doc},
    {Py_tp_new, plan_new},
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_traverse, plan_traverse},
    {Py_tp_clear, plan_clear},
    {Py_tp_methods, plan_methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "memopt._C.UpdatePlan",
    .basicsize = sizeof(plan),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int mo_py_optim_init(PyObject *module)
{
    return mo_py_add_type(module, &spec, NULL);
}
