/* memopt._C.widen: numbers made floating point and normalised (data/widen.h), on the CPU or on a CUDA device. */
#include "data/widen.h"

#include "python/py_tensor.h"

static const float *channels_of(const mo_tensor_view *view)
{
    return view->count ? (const float *)view->address : NULL;
}

/* One number a channel, or None: *out has a count of 0. */
static int parse_channels(PyObject *module, PyObject *tensor, const char *name, mo_tensor_view *out)
{
    int known = 0;

    if (tensor == Py_None) {
        out->count = 0;
        return 0;
    }
    known = mo_py_tensor_view(module, tensor, out);
    if (known > 0 && out->device == MO_CPU && out->kind == MO_F32 && out->contiguous && out->count)
        return 0;
    if (known >= 0)
        PyErr_Format(PyExc_ValueError,
                     "%s: expected a contiguous float32 CPU tensor, one number for each "
                     "channel",
                     name);
    return -1;
}

static int parse_elements(PyObject *module, PyObject *source, PyObject *target, mo_widen_job *job,
                          int *device)
{
    mo_tensor_view from, to;
    int known = mo_py_tensor_numbers(module, source, &from, &job->source_kind);

    if (known > 0)
        known = mo_py_tensor_view(module, target, &to);
    if (known > 0 && from.count)
        known = mo_py_tensor_same_order(module, source, target);
    if (known < 0)
        return -1;
    if (!known || from.device != to.device || from.count != to.count || to.kind == MO_F64) {
        PyErr_SetString(
            PyExc_ValueError,
            "widen: expected dense tensors of the same shape, memory order and device, on the CPU or a "
            "CUDA device: the source of uint8, int8, uint16, int16, float16, bfloat16 or float32, the "
            "target of float32, float16 or bfloat16");
        return -1;
    }
    job->source = from.address;
    job->target = to.address;
    job->count = from.count;
    job->target_kind = to.kind;
    *device = from.device;
    return 0;
}

PyDoc_STRVAR(
    widen_doc,
    "widen($module, source, target, mean, deviation, inner, scale, divide, stream=None, /)\n--\n\n"
    "target = (source * scale - mean) / deviation, or source / scale where `divide` says so, with one\n"
    "rounding an operation. mean, deviation: one number a channel (float32, on the CPU), or None.\n"
    "inner: how many elements of memory lie from one channel to the next. On a CUDA device it is\n"
    "queued on torch's current stream, or on the stream of that address; the host does not wait.");

static PyObject *widen(PyObject *module, PyObject *args)
{
    PyObject *source, *target, *mean, *deviation, *address = Py_None;
    mo_tensor_view means, deviations;
    mo_widen_job job = {0};
    mo_detail detail;
    mo_status status;
    Py_ssize_t inner;
    void *stream = NULL;
    int divide, device;

    if (!PyArg_ParseTuple(args, "OOOOnfp|O:widen", &source, &target, &mean, &deviation, &inner, &job.scale,
                          &divide, &address))
        return NULL;
    if (parse_elements(module, source, target, &job, &device) < 0 ||
        parse_channels(module, mean, "mean", &means) < 0 ||
        parse_channels(module, deviation, "deviation", &deviations) < 0)
        return NULL;
    if (inner < 1 || (means.count && deviations.count && means.count != deviations.count))
        return PyErr_Format(PyExc_ValueError, "widen: %zu means, %zu deviations, channels %zd elements apart",
                            means.count, deviations.count, inner);
    job.mean = channels_of(&means);
    job.deviation = channels_of(&deviations);
    job.channels = means.count ? means.count : deviations.count ? deviations.count : 1;
    job.inner = job.mean || job.deviation ? (size_t)inner : 1;
    job.divide = divide;
    if (device == MO_CPU) {
        Py_BEGIN_ALLOW_THREADS;
        status = mo_widen_cpu(&job, &detail);
        Py_END_ALLOW_THREADS;
    } else {
        if (address != Py_None)
            stream = PyLong_AsVoidPtr(address);
        else if (mo_py_tensor_stream(module, device, &stream) < 0)
            return NULL;
        if (PyErr_Occurred())
            return NULL;
        Py_BEGIN_ALLOW_THREADS;
        status = mo_widen_cuda(device, stream, &job, &detail);
        Py_END_ALLOW_THREADS;
    }
    if (status)
        return mo_raise(module, status, &detail);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"widen", widen, METH_VARARGS, widen_doc},
    {NULL, NULL, 0, NULL},
};

int mo_py_widen_init(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
