/* memopt._C.cross_entropy: rows of logits become their loss and their gradient (loss/cross_entropy.h). */
#include "loss/cross_entropy.h"

#include "python/py_tensor.h"

/* A number a row, or None where that is allowed. NULL with an exception set, or without one for None. */
static float *parse_numbers(PyObject *module, PyObject *tensor, const char *name, size_t rows, int device,
                            bool needed)
{
    mo_tensor_view view;
    int known = 0;

    if (tensor == Py_None && !needed)
        return NULL;
    known = mo_py_tensor_view(module, tensor, &view);
    if (known > 0 && view.device == device && view.kind == MO_F32 && view.contiguous && view.count == rows)
        return (float *)view.address;
    if (known >= 0)
        PyErr_Format(PyExc_ValueError,
                     "%s: expected a contiguous float32 tensor of %zu elements, where logits are", name,
                     rows);
    return NULL;
}

static int parse_logits(PyObject *module, PyObject *logits, PyObject *target, mo_cross_entropy_job *job,
                        int *device)
{
    mo_tensor_view from, to;
    int known = mo_py_tensor_view(module, logits, &from);

    if (known > 0)
        known = mo_py_tensor_real(module, target, &to);
    if (known < 0)
        return -1;
    if (!known || from.device != to.device || !from.contiguous || !to.contiguous || from.kind == MO_F64 ||
        to.nbytes != to.count * sizeof(int64_t) || (to.count && (!from.count || from.count % to.count))) {
        PyErr_SetString(PyExc_ValueError,
                        "cross_entropy: expected contiguous tensors on the CPU or a CUDA device, logits of "
                        "float32, float16 or bfloat16 and an int64 target for each of their rows");
        return -1;
    }
    *device = from.device;
    job->logits = from.address;
    job->kind = from.kind;
    job->rows = to.count;
    job->columns = to.count ? from.count / to.count : job->classes;
    job->target = (const int64_t *)to.address;
    return 0;
}

PyDoc_STRVAR(
    cross_entropy_doc,
    "cross_entropy($module, logits, target, lse, loss, scale, first, classes, smoothing, softcap, /)\n--\n\n"
    "Loss and gradient of rows of logits. Where loss is no None: lse and loss, a number a row,\n"
    "are written from rows of all classes. Where scale is no None: logits become their gradient times\n"
    "scale, by lse, for the classes from `first` on. softcap: 0 for none. On a CUDA device it is queued on\n"
    "torch's current stream; the host does not wait.");

static PyObject *cross_entropy(PyObject *module, PyObject *args)
{
    PyObject *logits, *target, *lse, *loss, *scale;
    mo_cross_entropy_job job = {0};
    mo_detail detail;
    mo_status status;
    Py_ssize_t first, classes;
    void *stream = NULL;
    int device;

    if (!PyArg_ParseTuple(args, "OOOOOnnff:cross_entropy", &logits, &target, &lse, &loss, &scale, &first,
                          &classes, &job.smoothing, &job.softcap))
        return NULL;
    if (first < 0 || classes < 1)
        return PyErr_Format(PyExc_ValueError, "cross_entropy: first %zd of %zd classes", first, classes);
    job.first = (size_t)first;
    job.classes = (size_t)classes;
    job.passes = (loss != Py_None ? MO_LOSS_FIND : 0) | (scale != Py_None ? MO_LOSS_SUBTRACT : 0);
    if (parse_logits(module, logits, target, &job, &device) < 0)
        return NULL;
    job.lse = parse_numbers(module, lse, "lse", job.rows, device, true);
    if (!PyErr_Occurred())
        job.loss = parse_numbers(module, loss, "loss", job.rows, device, false);
    if (!PyErr_Occurred())
        job.scale = parse_numbers(module, scale, "scale", job.rows, device, false);
    if (PyErr_Occurred() || (device != MO_CPU && mo_py_tensor_stream(module, device, &stream) < 0))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = device == MO_CPU ? mo_cross_entropy_cpu(&job, &detail)
                              : mo_cross_entropy_cuda(device, stream, &job, &detail);
    Py_END_ALLOW_THREADS;
    if (status)
        return mo_raise(module, status, &detail);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"cross_entropy", cross_entropy, METH_VARARGS, cross_entropy_doc},
    {NULL, NULL, 0, NULL},
};

int mo_py_loss_init(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
