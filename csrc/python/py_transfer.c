/* Copies between a device and pinned host memory (transfer/copies.h), and that memory. Tensors stay torch's: what is
 * passed here must be kept, and left as it is, until the copy is over. */
#include "python/py_tensor.h"

#include "base/size.h"
#include "driver/driver_cuda.h"
#include "transfer/copies.h"
#include "transfer/packing.h"

/* ---- arguments ---------------------------------------------------------------------------------------------------- */

typedef struct both_ends {
    mo_tensor_view device, host;
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
    int known;

    if (!PyArg_ParseTuple(args, "OO|KO", &from, &to, &after, &address))
        return -1;
    known = mo_py_tensor_memory(module, way == MO_OUT ? from : to, &out->device);
    if (known > 0)
        known = mo_py_tensor_memory(module, way == MO_OUT ? to : from, &out->host);
    if (known < 0)
        return -1;
    if (!known || out->device.device == MO_CPU || out->host.device != MO_CPU ||
        out->device.nbytes != out->host.nbytes || !out->host.nbytes) {
        PyErr_SetString(PyExc_ValueError,
                        "expected a tensor on a CUDA device and one in pinned host memory, both dense, of "
                        "the same number of bytes, more than 0");
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
                         ends.host.nbytes, ends.after, &detail, &ticket);
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

/* ---- a batch -------------------------------------------------------------------------------------------------------- */

#define APART 64 /* bytes: tensors begin at multiples of it in the room */

typedef struct batch {
    PyObject *hosts, *tensors; /* tuples: nobody else can change them meanwhile */
    const char *pinned;        /* a flag a tensor */
    char *room;
    size_t room_size, used;
    mo_piece *pieces;
    mo_packed *packed; /* what comes into the room */
    size_t count, packed_count;
    int device;
    void *stream;
} batch;

static void batch_fini(batch *b)
{
    Py_XDECREF(b->hosts);
    Py_XDECREF(b->tensors);
    PyMem_Free(b->pieces);
    PyMem_Free(b->packed);
}

/* Where the bytes of a tensor that is not pinned come to lie. */
static int place(batch *b, const mo_tensor_view *host, size_t index, void **out)
{
    size_t offset, end;

    if (!mo_align_up_ok(b->used, APART, &offset) || !mo_add_ok(offset, host->nbytes, &end) ||
        end > b->room_size) {
        PyErr_Format(PyExc_ValueError,
                     "copy_batch: number %zu, which is not pinned, does not fit in room= of %zu bytes: "
                     "each tensor begins at the next multiple of %d",
                     index, b->room_size, APART);
        return -1;
    }
    b->packed[b->packed_count++] = (mo_packed){(const void *)host->address, offset, host->nbytes};
    b->used = end;
    *out = b->room + offset;
    return 0;
}

static int batch_add(PyObject *module, batch *b, size_t index)
{
    mo_tensor_view host, tensor;
    void *pinned;
    int known = mo_py_tensor_memory(module, PyTuple_GetItem(b->hosts, (Py_ssize_t)index), &host);

    if (known > 0)
        known = mo_py_tensor_memory(module, PyTuple_GetItem(b->tensors, (Py_ssize_t)index), &tensor);
    if (known < 0)
        return -1;
    if (!known || host.device != MO_CPU || tensor.device == MO_CPU || host.nbytes != tensor.nbytes ||
        !host.nbytes || (index && tensor.device != b->device)) {
        PyErr_Format(PyExc_ValueError,
                     "copy_batch: number %zu: expected a tensor on the host and one on the same CUDA "
                     "device for all, both dense, of the same number of bytes, more than 0",
                     index);
        return -1;
    }
    b->device = tensor.device;
    pinned = (void *)host.address;
    if (!b->pinned[index] && place(b, &host, index, &pinned) < 0)
        return -1;
    b->pieces[index] = (mo_piece){tensor.address, pinned, host.nbytes};
    return 0;
}

static int batch_room(PyObject *module, PyObject *room, batch *b)
{
    mo_tensor_view view;
    PyObject *memory;
    Py_ssize_t begin, end;
    int known = 0;

    if (room == Py_None)
        return 0;
    if (PyTuple_Check(room) && PyTuple_Size(room) == 3) {
        if (!PyArg_ParseTuple(room, "Onn:copy_batch", &memory, &begin, &end))
            return -1;
        known = mo_py_tensor_bytes(module, memory, &view);
    }
    if (known < 0)
        return -1;
    if (!known || view.device != MO_CPU || begin < 0 || begin > end || (size_t)end > view.count) {
        PyErr_SetString(
            PyExc_ValueError,
            "copy_batch: room: expected a dense tensor of torch.uint8 in pinned memory with the begin and "
            "end of the room in it, or None");
        return -1;
    }
    b->room = (char *)view.address + begin;
    b->room_size = (size_t)(end - begin);
    return 0;
}

/* *b is to be given back, also after an error. */
static int batch_parse(PyObject *module, PyObject *args, batch *b)
{
    PyObject *hosts, *tensors, *pinned, *room, *address = Py_None;

    if (!PyArg_ParseTuple(args, "OOSO|O:copy_batch", &hosts, &tensors, &pinned, &room, &address))
        return -1;
    b->hosts = PySequence_Tuple(hosts);
    b->tensors = b->hosts ? PySequence_Tuple(tensors) : NULL;
    if (!b->tensors)
        return -1;
    b->count = (size_t)PyTuple_Size(b->hosts);
    b->pinned = PyBytes_AsString(pinned);
    if ((size_t)PyTuple_Size(b->tensors) != b->count || (size_t)PyBytes_Size(pinned) != b->count) {
        PyErr_Format(PyExc_ValueError, "copy_batch: %zu tensors on the host, %zd on the device, %zd flags",
                     b->count, PyTuple_Size(b->tensors), PyBytes_Size(pinned));
        return -1;
    }
    b->pieces = PyMem_Calloc(b->count, sizeof *b->pieces);
    b->packed = PyMem_Calloc(b->count, sizeof *b->packed);
    if (!b->pieces || !b->packed) {
        PyErr_NoMemory();
        return -1;
    }
    if (batch_room(module, room, b) < 0)
        return -1;
    for (size_t i = 0; i < b->count; i++)
        if (batch_add(module, b, i) < 0)
            return -1;
    return b->count ? stream_of(module, b->device, address, &b->stream) : 0;
}

PyDoc_STRVAR(
    batch_doc,
    "copy_batch($module, hosts, tensors, pinned, room, stream=None, /)\n--\n\n"
    "Copies each tensor of hosts to the one of tensors in its place, of equal bytes, on one device; they\n"
    "may be of any type that DLPack has. pinned: bytes, a flag a tensor: one that is copied from where it\n"
    "lies. The others' bytes are put into room first, (memory, begin, end): of torch.uint8 in pinned\n"
    "memory, each from a multiple of 64 behind begin on; None where all are pinned. As copy_in in all else:\n"
    "one ticket, 0 where there is nothing to copy. Until the copy is over room, tensors and what is pinned\n"
    "must be kept and left as they are; the rest is free at once. After an error nothing is on its way.");

static PyObject *copy_batch(PyObject *module, PyObject *args)
{
    batch b = {0};
    mo_copies *copies;
    mo_ticket ticket = 0;
    mo_detail detail;
    mo_status status = MO_OK;

    if (batch_parse(module, args, &b) < 0) {
        batch_fini(&b);
        return NULL;
    }
    if (b.count) {
        Py_BEGIN_ALLOW_THREADS;
        status = mo_copies_get(b.device, &copies, &detail);
        if (!status) {
            mo_pack(b.room, b.packed, b.packed_count);
            status = mo_copy_pieces(copies, MO_IN, b.stream, b.pieces, b.count, 0, &detail, &ticket);
        }
        Py_END_ALLOW_THREADS;
    }
    batch_fini(&b);
    return status ? mo_raise(module, status, &detail) : PyLong_FromUnsignedLongLong(ticket);
}

PyDoc_STRVAR(plain_doc,
             "plain_bytes($module, tensor, /)\n--\n\n"
             "The bytes of a dense tensor on the CPU that is nothing but these: a torch.Tensor or\n"
             "Parameter of a type that DLPack has, with nothing pending. 0 for any other object, and\n"
             "for complex numbers. What copy_batch takes as it is, in a quarter of the time of asking\n"
             "by methods.");

static PyObject *plain_bytes(PyObject *module, PyObject *tensor)
{
    mo_tensor_view view;
    const int known = mo_py_tensor_real(module, tensor, &view);

    if (known < 0)
        return NULL;
    return PyLong_FromSize_t(known && view.device == MO_CPU ? view.nbytes : 0);
}

/* ---- tickets -------------------------------------------------------------------------------------------------------- */

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
        return PyErr_Format(PyExc_ValueError, "PinnedMemory of %zd bytes: expected 1 or more", size);
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
    {"copy_batch", copy_batch, METH_VARARGS, batch_doc},
    {"plain_bytes", plain_bytes, METH_O, plain_doc},
    {"copy_await", copy_await, METH_VARARGS, await_doc},
    {"copy_over", copy_over, METH_VARARGS, over_doc},
    {"copy_counts", copy_counts, METH_VARARGS, counts_doc},
    {"copy_wait", copy_wait, METH_VARARGS, wait_doc},
    {NULL, NULL, 0, NULL},
};

int mo_py_transfer_init(PyObject *module)
{
    return mo_py_add_type(module, &spec, NULL) < 0 ? -1 : PyModule_AddFunctions(module, methods);
}
