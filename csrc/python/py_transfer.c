/* Copies between a device and pinned host memory (transfer/copies.h), and that memory. Tensors stay torch's: what is
 * passed here must be kept, and left as it is, until the copy is over. */
#include "python/py_tensor.h"

#include "base/size.h"
#include "driver/driver_cuda.h"
#include "transfer/copies.h"

/* ---- arguments ---------------------------------------------------------------------------------------------------- */

/* Bytes of a dense tensor, of torch.uint8 or of a type that a kernel may be given. */
static int memory_of(PyObject *module, PyObject *tensor, mo_tensor_view *out, size_t *nbytes)
{
    static const size_t sizes[] = {[MO_F32] = 4, [MO_F16] = 2, [MO_BF16] = 2, [MO_F64] = 8};
    int known = mo_py_tensor_bytes(module, tensor, out);

    *nbytes = known > 0 ? out->count : 0;
    if (known)
        return known;
    known = mo_py_tensor_unsigned(module, tensor, out);
    if (known > 0)
        *nbytes = out->count * sizes[out->kind];
    return known;
}

typedef struct both_ends {
    mo_tensor_view device, host;
    size_t nbytes;
    mo_ticket after;
    void *stream;
} both_ends;

/* torch's current stream of the device where `address` is None. */
static int stream_of(PyObject *module, int device, PyObject *address, void **out)
{
    if (address == Py_None)
        return mo_py_tensor_stream(module, device, out);
    *out = PyLong_AsVoidPtr(address);
    return PyErr_Occurred() ? -1 : 0;
}

static int parse(PyObject *module, PyObject *args, mo_way way, both_ends *out)
{
    PyObject *from, *to, *address = Py_None;
    unsigned long long after = 0;
    size_t other = 0;
    int known;

    if (!PyArg_ParseTuple(args, "OO|KO", &from, &to, &after, &address))
        return -1;
    known = memory_of(module, way == MO_OUT ? from : to, &out->device, &out->nbytes);
    if (known > 0)
        known = memory_of(module, way == MO_OUT ? to : from, &out->host, &other);
    if (known < 0)
        return -1;
    if (!known || out->device.device == MO_CPU || out->host.device != MO_CPU || out->nbytes != other ||
        !other) {
        PyErr_SetString(PyExc_ValueError,
                        "a copy is between a tensor of a CUDA device and one of pinned host "
                        "memory, both dense, of equal and more than 0 bytes");
        return -1;
    }
    out->after = after;
    return stream_of(module, out->device.device, address, &out->stream);
}

static mo_status get(int device, mo_copies **out, mo_detail *detail)
{
    mo_status status;

    Py_BEGIN_ALLOW_THREADS;
    status = mo_copies_get(device, out, detail);
    Py_END_ALLOW_THREADS;
    return status;
}

/* ---- copies --------------------------------------------------------------------------------------------------------- */

static PyObject *copy(PyObject *module, PyObject *args, mo_way way)
{
    both_ends ends;
    mo_copies *copies;
    mo_ticket ticket = 0;
    mo_detail detail;
    mo_status status;

    if (parse(module, args, way, &ends) < 0)
        return NULL;
    status = get(ends.device.device, &copies, &detail);
    if (!status) {
        Py_BEGIN_ALLOW_THREADS;
        status = mo_copy(copies, way, ends.stream, ends.device.address, (void *)ends.host.address,
                         ends.nbytes, ends.after, &detail, &ticket);
        Py_END_ALLOW_THREADS;
    }
    return status ? mo_raise(module, status, &detail) : PyLong_FromUnsignedLongLong(ticket);
}

PyDoc_STRVAR(out_doc,
             "copy_out($module, tensor, host, after=0, stream=None, /)\n--\n\n"
             "Queues a copy to pinned host memory, behind all that torch's current stream of the tensor's\n"
             "device (or the CUDA stream of that address) was given so far, and behind the copy `after`.\n"
             "Returns its ticket. The host does not wait; both tensors must be kept, and left as they are,\n"
             "until the copy is over.");

static PyObject *copy_out(PyObject *module, PyObject *args)
{
    return copy(module, args, MO_OUT);
}

PyDoc_STRVAR(
    in_doc, "copy_in($module, host, tensor, after=0, stream=None, /)\n--\n\n"
            "The same from pinned host memory to a tensor of a device: what had the tensor's memory last on\n"
            "the current stream is over before the copy begins.");

static PyObject *copy_in(PyObject *module, PyObject *args)
{
    return copy(module, args, MO_IN);
}

PyDoc_STRVAR(await_doc,
             "copy_await($module, device, ticket, stream=None, /)\n--\n\n"
             "What torch's current stream of the device (or the CUDA stream of that address) is given from\n"
             "now on comes after the copy. The host does not wait.");

static PyObject *copy_await(PyObject *module, PyObject *args)
{
    unsigned long long ticket;
    PyObject *address = Py_None;
    mo_copies *copies;
    mo_detail detail;
    mo_status status;
    void *stream;
    int device;

    if (!PyArg_ParseTuple(args, "iK|O", &device, &ticket, &address))
        return NULL;
    if (stream_of(module, device, address, &stream) < 0)
        return NULL;
    status = get(device, &copies, &detail);
    if (!status) {
        Py_BEGIN_ALLOW_THREADS;
        status = mo_copies_await(copies, stream, ticket, &detail);
        Py_END_ALLOW_THREADS;
    }
    if (status)
        return mo_raise(module, status, &detail);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(over_doc, "copy_over($module, device, ticket, /)\n--\n\n"
                       "Whether the copy is over, so that the host may use what it filled.");

static PyObject *copy_over(PyObject *module, PyObject *args)
{
    unsigned long long ticket;
    mo_copies *copies;
    mo_detail detail;
    mo_status status;
    bool over = false;
    int device;

    if (!PyArg_ParseTuple(args, "iK", &device, &ticket))
        return NULL;
    status = get(device, &copies, &detail);
    if (!status)
        status = mo_copies_over(copies, ticket, &detail, &over);
    return status ? mo_raise(module, status, &detail) : PyBool_FromLong(over);
}

PyDoc_STRVAR(wait_doc,
             "copy_wait($module, device, ticket, seconds, /)\n--\n\n"
             "Waits until the copy is over, for about so many seconds at most; whether it is. Other\n"
             "threads run meanwhile.");

static PyObject *copy_wait(PyObject *module, PyObject *args)
{
    unsigned long long ticket;
    mo_copies *copies;
    mo_detail detail;
    mo_status status;
    bool over = false;
    double seconds;
    int device;

    if (!PyArg_ParseTuple(args, "iKd", &device, &ticket, &seconds))
        return NULL;
    if (!(seconds >= 0 && seconds < 1e9)) /* NaN is not */
        return PyErr_Format(PyExc_ValueError, "seconds: expected at least 0, and less than 1e9");
    status = get(device, &copies, &detail);
    if (!status) {
        Py_BEGIN_ALLOW_THREADS;
        status = mo_copies_wait(copies, ticket, (uint64_t)(seconds * 1e9), &detail, &over);
        Py_END_ALLOW_THREADS;
    }
    return status ? mo_raise(module, status, &detail) : PyBool_FromLong(over);
}

PyDoc_STRVAR(counts_doc, "copy_counts($module, device, /)\n--\n\n"
                         "What was copied so far, the addresses of the two streams.");

static PyObject *copy_counts(PyObject *module, PyObject *args)
{
    mo_copies *copies;
    mo_line out, in;
    mo_detail detail;
    mo_status status;
    int device;

    if (!PyArg_ParseTuple(args, "i", &device))
        return NULL;
    status = get(device, &copies, &detail);
    if (status)
        return mo_raise(module, status, &detail);
    mo_lock_take(&copies->lock);
    out = copies->lines[MO_OUT];
    in = copies->lines[MO_IN];
    mo_lock_give(&copies->lock);
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K}", "copies_out", (unsigned long long)out.begun,
                         "bytes_out", (unsigned long long)out.bytes, "stream_out",
                         (unsigned long long)(uintptr_t)out.stream, "copies_in", (unsigned long long)in.begun,
                         "bytes_in", (unsigned long long)in.bytes, "stream_in",
                         (unsigned long long)(uintptr_t)in.stream);
}

/* ---- pinned memory --------------------------------------------------------------------------------------------------- */

typedef struct pinned {
    PyObject_HEAD mo_driver *driver;
    void *block;
    Py_ssize_t size;
} pinned;

PyDoc_STRVAR(pinned_doc,
             "PinnedMemory(device, nbytes, /)\n--\n\n"
             "Page-locked host memory, exactly nbytes, that torch.frombuffer makes a tensor of. It is given\n"
             "back when nothing refers to it any more; the driver then waits for all devices, so keep it.");

static PyObject *pinned_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    pinned *p;
    mo_detail detail;
    mo_status status;
    Py_ssize_t size;
    int device;

    if (keywords && PyDict_Size(keywords))
        return PyErr_Format(PyExc_TypeError, "PinnedMemory takes no keyword arguments");
    if (!PyArg_ParseTuple(args, "in:PinnedMemory", &device, &size))
        return NULL;
    if (size <= 0)
        return PyErr_Format(PyExc_ValueError, "PinnedMemory of %zd bytes: there must be some", size);
    p = (pinned *)PyType_GenericAlloc(type, 0);
    if (!p)
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = mo_driver_cuda_get(device, &p->driver, &detail);
    if (!status)
        status = p->driver->pinned_alloc(p->driver, (size_t)size, &detail, &p->block);
    Py_END_ALLOW_THREADS;
    p->size = size;
    if (status) {
        PyObject *module = PyType_GetModule(type);
        if (module)
            mo_raise(module, status, &detail);
        Py_CLEAR(p);
    }
    return (PyObject *)p;
}

static void pinned_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    pinned *p = (pinned *)self;

    if (p->block) {
        Py_BEGIN_ALLOW_THREADS;
        p->driver->pinned_free(p->driver, p->block, NULL); /* what a driver refuses here, nobody could mend */
        Py_END_ALLOW_THREADS;
    }
    PyObject_Free(self);
    Py_DECREF(type);
}

static int pinned_buffer(PyObject *self, Py_buffer *view, int flags)
{
    const pinned *p = (const pinned *)self;

    return PyBuffer_FillInfo(view, self, p->block, p->size, /* readonly */ 0, flags);
}

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)pinned_doc},
    {Py_tp_new, pinned_new},
    {Py_tp_dealloc, pinned_dealloc},
    {Py_bf_getbuffer, pinned_buffer},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "memopt._C.PinnedMemory",
    .basicsize = sizeof(pinned),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

static PyMethodDef methods[] = {
    {"copy_out", copy_out, METH_VARARGS, out_doc},
    {"copy_in", copy_in, METH_VARARGS, in_doc},
    {"copy_await", copy_await, METH_VARARGS, await_doc},
    {"copy_over", copy_over, METH_VARARGS, over_doc},
    {"copy_counts", copy_counts, METH_VARARGS, counts_doc},
    {"copy_wait", copy_wait, METH_VARARGS, wait_doc},
    {NULL, NULL, 0, NULL},
};

int mo_py_transfer_init(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    int failed = !type || PyModule_AddObjectRef(module, "PinnedMemory", type) < 0;

    Py_XDECREF(type);
    return failed ? -1 : PyModule_AddFunctions(module, methods);
}
