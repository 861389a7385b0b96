/* The type memopt._C.Gradients: a list of tensors read once, in C, and what is done to all of them in one pass
 * (scaler/gradients.h). It holds the tensors, and the addresses of their memory as it was when they were read: it is made,
 * used and let go within a step. Nothing in it changes after it was made; so its methods run without the GIL.
 *
 * A tensor that is not plain (py_tensor.h) is among the others, which are torch's to deal with. So is one whose memory begins
 * where another's does: torch works through its list in order and would treat that memory twice, one pass over all does not. */
#include "python/py_scaler.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/hostmem.h"
#include "scaler/gradients.h"

/* What lies on one device, in the order in which it was given. */
typedef struct group {
    int device;
    size_t count;
    mo_gradient *gradients;
    PyObject *tensors; /* a list, of count */
} group;

typedef struct gradients {
    PyObject_HEAD group *groups; /* in the order of their first tensors */
    size_t group_count;
    unsigned kinds;   /* a bit for each mo_float that occurs */
    PyObject *others; /* a list, of objects as they were given */
} gradients;

/* The addresses seen so far, by open addressing: a tensor costs some 5 ns. */
typedef struct seen {
    uintptr_t *slots; /* 0: empty */
    size_t mask;
} seen;

/* ---- reading ----------------------------------------------------------------------------------------------------- */

static bool seen_before(seen *s, uintptr_t address)
{
    size_t i = (size_t)((uint64_t)address * 0x9E3779B97F4A7C15u >> 20) & s->mask;

    while (s->slots[i] && s->slots[i] != address)
        i = (i + 1) & s->mask;
    if (s->slots[i])
        return true;
    s->slots[i] = address;
    return false;
}

/* The group of a device, with room for `room` tensors if it is a new one; NULL with an exception. */
static group *group_of(gradients *self, int device, size_t room)
{
    group *larger, *added;

    for (size_t i = 0; i < self->group_count; i++)
        if (self->groups[i].device == device)
            return &self->groups[i];
    larger = mo_host_realloc(self->groups, (self->group_count + 1) * sizeof *larger);
    if (!larger)
        return (group *)PyErr_NoMemory();
    self->groups = larger;
    added = &larger[self->group_count];
    *added = (group){.device = device};
    added->gradients = mo_host_alloc(room * sizeof *added->gradients); /* room is a list's length: it fits */
    if (!added->gradients)
        return (group *)PyErr_NoMemory();
    added->tensors = PyList_New(0);
    if (!added->tensors) {
        mo_host_free(added->gradients);
        return NULL;
    }
    self->group_count++;
    return added;
}

/* A plain tensor. left: this one and those that follow. */
static int put(gradients *self, const mo_read_gradient *one, size_t left, seen *s)
{
    group *g;

    if (one->at.count && seen_before(s, one->at.address))
        return PyList_Append(self->others, one->given);
    g = group_of(self, one->device, left);
    if (!g || PyList_Append(g->tensors, one->tensor) < 0)
        return -1;
    g->gradients[g->count++] = one->at;
    self->kinds |= 1u << one->at.kind;
    return 0;
}

static int add(PyObject *module, gradients *self, PyObject *given, PyObject *tensor, size_t left, seen *s)
{
    mo_tensor_view view;
    /* Signs cancel out: what is done to -x is what is done to x, and then negated. */
    int known = mo_py_tensor_unsigned(module, tensor, &view);

    if (known < 0)
        return -1;
    if (!known)
        return PyList_Append(self->others, given);
    return put(self,
               &(mo_read_gradient){.given = given,
                                   .tensor = tensor,
                                   .device = view.device,
                                   .at = {.address = view.address, .count = view.count, .kind = view.kind}},
               left, s);
}

static int add_gradient_of(PyObject *module, gradients *self, PyObject *parameter, size_t left, seen *s)
{
    const mo_torch *torch = mo_py_torch(module);
    PyObject *grad;
    int failed;

    if (!torch)
        return -1;
    if ((PyObject *)Py_TYPE(parameter) != torch->tensor && (PyObject *)Py_TYPE(parameter) != torch->parameter)
        return PyList_Append(self->others, parameter);
    grad = PyObject_GetAttr(parameter, torch->grad);
    if (!grad)
        return -1;
    failed = grad == Py_None ? 0 : add(module, self, parameter, grad, left, s);
    Py_DECREF(grad);
    return failed;
}

/* For so many addresses; 0, or -1 with an exception. */
static int make_seen(seen *s, size_t count)
{
    size_t slots = 16;

    while (slots < 2 * count)
        slots *= 2;
    s->mask = slots - 1;
    s->slots = mo_host_calloc(slots, sizeof *s->slots);
    return s->slots ? 0 : (PyErr_NoMemory(), -1);
}

static int read_all(PyObject *module, gradients *self, PyObject *list, bool of_parameters)
{
    seen s;
    int failed = 0;

    if (make_seen(&s, (size_t)PyList_Size(list)) < 0)
        return -1;
    /* The length is bounded by what the table was made for, whatever Python code does to the list meanwhile. */
    for (Py_ssize_t i = 0; !failed && i < PyList_Size(list) && 2 * (size_t)i <= s.mask; i++) {
        PyObject *one = PyList_GetItem(list, i); /* borrowed */
        size_t left = s.mask / 2 + 1 - (size_t)i;

        Py_INCREF(one);
        failed = of_parameters ? add_gradient_of(module, self, one, left, &s)
                               : add(module, self, one, one, left, &s);
        Py_DECREF(one);
    }
    mo_host_free(s.slots);
    return failed;
}

/* One with nothing in it; NULL with an exception. */
static gradients *empty(PyTypeObject *type)
{
    gradients *self = (gradients *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);

    if (self)
        self->others = PyList_New(0);
    if (self && !self->others)
        Py_CLEAR(self);
    return self;
}

PyObject *mo_py_gradients(PyObject *module, size_t count, mo_read_gradient_at *at, const void *user)
{
    gradients *self = empty((PyTypeObject *)mo_state(module)->gradients);
    mo_read_gradient one;
    seen s;
    int failed = 0;

    if (!self || make_seen(&s, count) < 0) {
        Py_CLEAR(self);
        return NULL;
    }
    for (size_t i = 0; !failed && i < count; i++) {
        at(user, i, &one);
        failed = put(self, &one, count - i, &s);
    }
    mo_host_free(s.slots);
    if (failed)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyObject *gradients_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"tensors", "of_parameters", NULL};
    PyObject *module = PyType_GetModule(type), *tensors, *list;
    int of_parameters = 0, failed;
    gradients *self;

    if (!module ||
        !PyArg_ParseTupleAndKeywords(args, keywords, "O|p:Gradients", names, &tensors, &of_parameters))
        return NULL;
    list = PyList_CheckExact(tensors) ? Py_NewRef(tensors) : PySequence_List(tensors);
    if (!list)
        return NULL;
    self = empty(type);
    failed = !self || read_all(module, self, list, of_parameters) < 0;
    Py_DECREF(list);
    if (failed)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int gradients_traverse(PyObject *object, visitproc visit, void *arg)
{
    const gradients *self = (const gradients *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->others);
    for (size_t i = 0; i < self->group_count; i++)
        Py_VISIT(self->groups[i].tensors);
    return 0;
}

static int gradients_clear(PyObject *object)
{
    gradients *self = (gradients *)object;

    Py_CLEAR(self->others);
    while (self->group_count) {
        group *last = &self->groups[--self->group_count];

        mo_host_free(last->gradients);
        Py_CLEAR(last->tensors);
    }
    mo_host_free(self->groups);
    self->groups = NULL;
    return 0;
}

static void gradients_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);

    PyObject_GC_UnTrack(object);
    gradients_clear(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* ---- what is done to them ------------------------------------------------------------------------------------------ */

static PyObject *module_of(PyObject *object)
{
    return PyType_GetModule(Py_TYPE(object));
}

static const group *find_group(const gradients *self, int device)
{
    for (size_t i = 0; i < self->group_count; i++)
        if (self->groups[i].device == device)
            return &self->groups[i];
    return NULL;
}

/* The address of one value of that kind on the device; 0 for None. False with an exception. */
static bool scalar_of(PyObject *module, PyObject *tensor, mo_float kind, int device, const char *name,
                      uintptr_t *out)
{
    const char *type = kind == MO_F64 ? "float64" : "float32";
    mo_tensor_view view;
    int known;

    *out = 0;
    if (tensor == Py_None)
        return true;
    known = mo_py_tensor_view(module, tensor, &view);
    if (known > 0 && view.kind == kind && view.count == 1 && view.device == device) {
        *out = view.address;
        return true;
    }
    if (known >= 0 && device == MO_CPU)
        PyErr_Format(PyExc_ValueError, "%s: expected a tensor of a single %s on the CPU", name, type);
    else if (known >= 0)
        PyErr_Format(PyExc_ValueError, "%s: expected a tensor of a single %s on CUDA device %d", name, type,
                     device);
    return false;
}

static bool scalar(PyObject *module, PyObject *tensor, int device, const char *name, uintptr_t *out)
{
    return scalar_of(module, tensor, MO_F32, device, name, out);
}

static PyObject *finish(PyObject *module, mo_status status, const mo_detail *detail)
{
    if (status)
        return mo_raise(module, status, detail);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    run_doc,
    "run($self, device, store=False, inv_scale=None, found_inf=None, norm=None, clip=None, factor=None,\n"
    "    max_norm=inf, maximum=False, norm64=None)\n--\n\n"
    "One pass over what lies on a device (-1: the CPU). store: gradients are multiplied by inv_scale.\n"
    "found_inf is set to 1 where an element was infinite or NaN before that. norm, clip, factor: where the\n"
    "norm of the unscaled gradients goes, the coefficient that max_norm asks for, and inv_scale * clip;\n"
    "maximum: it is the largest absolute value instead of the root of squares. Each a tensor of one float32\n"
    "there, or None; norm64 of one float64, for the norm before it is rounded. On a CUDA device the work is\n"
    "queued on torch's current stream, and nothing waits.");

static PyObject *gradients_run(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"device", "store",    "inv_scale", "found_inf", "norm", "clip",
                            "factor", "max_norm", "maximum",   "norm64",    NULL};
    PyObject *module = module_of(object);
    PyObject *inv_scale = Py_None, *found_inf = Py_None, *norm = Py_None, *clip = Py_None, *factor = Py_None,
             *norm64 = Py_None;
    mo_gradients_job job = {.max_norm = INFINITY};
    int device = 0, store = 0, maximum = 0;
    void *stream = NULL;
    const group *g;
    mo_detail detail;
    mo_status status;

    if (!module ||
        !PyArg_ParseTupleAndKeywords(args, keywords, "i|pOOOOOdpO:run", names, &device, &store, &inv_scale,
                                     &found_inf, &norm, &clip, &factor, &job.max_norm, &maximum, &norm64) ||
        !scalar(module, inv_scale, device, "inv_scale", &job.inv_scale) ||
        !scalar(module, found_inf, device, "found_inf", &job.found_inf) ||
        !scalar(module, norm, device, "norm", &job.norm) ||
        !scalar(module, clip, device, "clip", &job.clip) ||
        !scalar(module, factor, device, "factor", &job.factor) ||
        !scalar_of(module, norm64, MO_F64, device, "norm64", &job.norm64))
        return NULL;
    g = find_group((gradients *)object, device);
    if (g) {
        job.gradients = g->gradients;
        job.count = g->count;
    }
    job.passes = (job.found_inf ? MO_GRADIENTS_CHECK : 0) | (store ? MO_GRADIENTS_STORE : 0) |
                 (job.norm || job.norm64 || job.clip || job.factor ? MO_GRADIENTS_NORM : 0) |
                 (maximum ? MO_GRADIENTS_MAXIMUM : 0);
    if (device != MO_CPU && mo_py_tensor_stream(module, device, &stream) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status =
        device == MO_CPU ? mo_gradients_cpu(&job, &detail) : mo_gradients_cuda(device, stream, &job, &detail);
    Py_END_ALLOW_THREADS;
    return finish(module, status, &detail);
}

PyDoc_STRVAR(
    multiply_doc,
    "multiply($self, device, clip, /)\n--\n\n"
    "Multiplies what lies on a device (-1: the CPU) by the one float32 that clip holds there. Where\n"
    "that is 1, nothing is touched.");

static PyObject *gradients_multiply(PyObject *object, PyObject *args)
{
    PyObject *module = module_of(object), *clip;
    uintptr_t address;
    void *stream = NULL;
    int device;
    const group *g;
    mo_detail detail;
    mo_status status;

    if (!module || !PyArg_ParseTuple(args, "iO:multiply", &device, &clip) ||
        !scalar(module, clip, device, "clip", &address))
        return NULL;
    if (!address) {
        PyErr_SetString(PyExc_ValueError, "clip: expected a tensor of a single float32, not None");
        return NULL;
    }
    g = find_group((gradients *)object, device);
    if (!g)
        Py_RETURN_NONE;
    if (device != MO_CPU && mo_py_tensor_stream(module, device, &stream) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = device == MO_CPU
                 ? mo_gradients_clip_cpu(g->gradients, g->count, address, &detail)
                 : mo_gradients_clip_cuda(device, stream, g->gradients, g->count, address, &detail);
    Py_END_ALLOW_THREADS;
    return finish(module, status, &detail);
}

PyDoc_STRVAR(tensors_doc, "tensors($self, device, /)\n--\n\n"
                          "The gradients that lie on a device (-1: the CPU), in their order.");

static PyObject *gradients_tensors(PyObject *object, PyObject *args)
{
    const group *g;
    int device;

    if (!PyArg_ParseTuple(args, "i:tensors", &device))
        return NULL;
    g = find_group((gradients *)object, device);
    return g ? PyList_GetSlice(g->tensors, 0, PyList_Size(g->tensors)) : PyList_New(0);
}

/* ---- what they are ---------------------------------------------------------------------------------------------- */

static PyObject *get_others(PyObject *object, void *unused)
{
    PyObject *others = ((gradients *)object)->others;

    (void)unused;
    return PyList_GetSlice(others, 0, PyList_Size(others));
}

static PyObject *get_devices(PyObject *object, void *unused)
{
    const gradients *self = (const gradients *)object;
    PyObject *devices = PyTuple_New((Py_ssize_t)self->group_count);

    (void)unused;
    for (size_t i = 0; devices && i < self->group_count; i++)
        if (PyTuple_SetItem(devices, (Py_ssize_t)i, PyLong_FromLong(self->groups[i].device)) < 0)
            Py_CLEAR(devices);
    return devices && PyErr_Occurred() ? (Py_DECREF(devices), NULL) : devices;
}

static PyObject *get_dtypes(PyObject *object, void *unused)
{
    PyObject *module = module_of(object), *dtypes = module ? PySet_New(NULL) : NULL;

    (void)unused;
    for (unsigned kind = 0; dtypes && kind < MO_FLOAT_COUNT; kind++)
        if (((gradients *)object)->kinds >> kind & 1 &&
            PySet_Add(dtypes, mo_state(module)->torch.dtypes[kind]) < 0)
            Py_CLEAR(dtypes);
    return dtypes;
}

PyDoc_STRVAR(
    gradients_doc,
    "Gradients(tensors, of_parameters=False)\n--\n\n"
    "Tensors, or the gradients of parameters (those without one are passed over), read for one pass over\n"
    "their memory. Good for as long as nobody gives them other memory.");

static PyGetSetDef attributes[] = {
    {"others", get_others, NULL, "What of the list torch has to deal with: a new list, as it was given.",
     NULL},
    {"devices", get_devices, NULL, "The devices of the rest, -1 for the CPU, in the order of their first.",
     NULL},
    {"dtypes", get_dtypes, NULL, "The types of elements that the rest have: a new set.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))gradients_run, METH_VARARGS | METH_KEYWORDS, run_doc},
    {"multiply", gradients_multiply, METH_VARARGS, multiply_doc},
    {"tensors", gradients_tensors, METH_VARARGS, tensors_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)gradients_doc}, {Py_tp_new, gradients_new},
    {Py_tp_dealloc, gradients_dealloc}, {Py_tp_traverse, gradients_traverse},
    {Py_tp_clear, gradients_clear},     {Py_tp_methods, methods},
    {Py_tp_getset, attributes},         {0, NULL},
};

static PyType_Spec spec = {
    .name = "memopt._C.Gradients",
    .basicsize = sizeof(gradients),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int mo_py_scaler_init(PyObject *module)
{
    return mo_py_add_type(module, &spec, &mo_state(module)->gradients);
}
