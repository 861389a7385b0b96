/* The types memopt._C.Disk and memopt._C.DiskJob (transfer/disk.h). */
#include "python/py_tensor.h"

#include "transfer/disk.h"

typedef struct disk {
    PyObject_HEAD mo_disk disk;
    PyTypeObject *job_type; /* of this module */
    bool open;
} disk;

typedef struct disk_job {
    PyObject_HEAD disk *disk;
    PyObject *tensor; /* whose memory it moves */
    mo_disk_job job;
} disk_job;

static PyObject *raise_from(PyTypeObject *type, mo_status status, const mo_detail *detail)
{
    PyObject *module = PyType_GetModule(type);

    return module ? mo_raise(module, status, detail) : NULL;
}

/* ---- a job ------------------------------------------------------------------------------------------------------------ */

static void job_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    disk_job *j = (disk_job *)self;

    if (j->disk) {
        Py_BEGIN_ALLOW_THREADS;
        mo_disk_cancel(&j->disk->disk, &j->job);
        Py_END_ALLOW_THREADS;
    }
    Py_XDECREF(j->tensor);
    Py_XDECREF((PyObject *)j->disk);
    PyObject_Free(self);
    Py_DECREF(type);
}

PyDoc_STRVAR(finish_doc,
             "finish($self, /)\n--\n\n"
             "Waits until the job is over, and lets its tensor go. Raises OSError, naming the directory.");

static PyObject *finish(PyObject *self, PyObject *unused)
{
    disk_job *j = (disk_job *)self;
    mo_detail detail;
    mo_status status;

    (void)unused;
    Py_BEGIN_ALLOW_THREADS;
    status = mo_disk_finish(&j->disk->disk, &j->job, &detail);
    Py_END_ALLOW_THREADS;
    if (status)
        return raise_from(Py_TYPE(self), status, &detail);
    Py_CLEAR(j->tensor);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(over_doc, "over($self, /)\n--\n\nWhether the job is over, well or not.");

static PyObject *over(PyObject *self, PyObject *unused)
{
    disk_job *j = (disk_job *)self;

    (void)unused;
    return PyBool_FromLong(mo_disk_over(&j->disk->disk, &j->job));
}

static PyMethodDef job_methods[] = {
    {"finish", finish, METH_NOARGS, finish_doc},
    {"over", over, METH_NOARGS, over_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot job_slots[] = {
    {Py_tp_doc, (void *)"What Disk.write() and Disk.read() began."},
    {Py_tp_dealloc, job_dealloc},
    {Py_tp_methods, job_methods},
    {0, NULL},
};

static PyType_Spec job_spec = {
    .name = "memopt._C.DiskJob",
    .basicsize = sizeof(disk_job),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = job_slots,
};

/* ---- a disk ------------------------------------------------------------------------------------------------------------ */

PyDoc_STRVAR(disk_doc,
             "Disk(directory, /)\n--\n\n"
             "A file without a name in the directory, and a thread that writes it and reads it back.");

static PyObject *disk_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *path = NULL, *module;
    disk *d;
    mo_detail detail;
    mo_status status;

    if (keywords && PyDict_Size(keywords))
        return PyErr_Format(PyExc_TypeError, "Disk takes no keyword arguments");
    if (!PyArg_ParseTuple(args, "O&:Disk", PyUnicode_FSConverter, &path))
        return NULL;
    d = (disk *)PyType_GenericAlloc(type, 0);
    module = d ? PyType_GetModule(type) : NULL;
    if (!module || !(d->job_type = (PyTypeObject *)PyObject_GetAttrString(module, "DiskJob"))) {
        Py_DECREF(path);
        Py_XDECREF((PyObject *)d);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS;
    status = mo_disk_open(PyBytes_AsString(path), &mo_system_files, &d->disk, &detail);
    Py_END_ALLOW_THREADS;
    Py_DECREF(path);
    d->open = !status;
    if (status) {
        Py_DECREF((PyObject *)d);
        return mo_raise(module, status, &detail);
    }
    return (PyObject *)d;
}

static void disk_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    disk *d = (disk *)self;

    if (d->open) {
        Py_BEGIN_ALLOW_THREADS;
        mo_disk_close(&d->disk);
        Py_END_ALLOW_THREADS;
    }
    Py_XDECREF((PyObject *)d->job_type);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *begin(disk *d, PyObject *tensor, mo_disk_job job, int device, unsigned long long behind)
{
    PyTypeObject *type = Py_TYPE((PyObject *)d);
    PyObject *module = PyType_GetModule(type);
    mo_tensor_view view;
    mo_detail detail;
    mo_status status = MO_OK;
    disk_job *j;
    int known = module ? mo_py_tensor_bytes(module, tensor, &view) : -1;

    if (known < 0)
        return NULL;
    if (!known || view.device != MO_CPU || !view.count || job.at % MO_FILE_ALIGNMENT)
        return PyErr_Format(
            PyExc_ValueError,
            "expected a dense, non-empty CPU tensor of torch.uint8, at a multiple of %d bytes",
            MO_FILE_ALIGNMENT);
    j = (disk_job *)PyType_GenericAlloc(d->job_type, 0);
    if (!j)
        return NULL;
    j->disk = (disk *)Py_NewRef((PyObject *)d);
    j->tensor = Py_NewRef(tensor);
    j->job = job;
    j->job.memory = (char *)view.address;
    j->job.size = view.count;
    j->job.behind = behind;
    Py_BEGIN_ALLOW_THREADS;
    if (behind)
        status = mo_copies_get(device, &j->job.copies, &detail);
    if (!status)
        status = mo_disk_begin(&d->disk, &j->job, &detail);
    Py_END_ALLOW_THREADS;
    if (status) {
        Py_DECREF((PyObject *)j);
        return mo_raise(module, status, &detail);
    }
    return (PyObject *)j;
}

PyDoc_STRVAR(reserve_doc,
             "reserve($self, at, nbytes, /)\n--\n\n"
             "Takes the disk's room for a range of the file now, so that no write into it finds the disk\n"
             "full, where the file system can. Raises OSError, naming the directory.");

static PyObject *reserve(PyObject *self, PyObject *args)
{
    unsigned long long at;
    Py_ssize_t size;
    mo_detail detail;
    mo_status status;

    if (!PyArg_ParseTuple(args, "Kn:reserve", &at, &size))
        return NULL;
    if (size <= 0)
        return PyErr_Format(PyExc_ValueError, "a range of %zd bytes: expected 1 or more", size);
    Py_BEGIN_ALLOW_THREADS;
    status = mo_disk_reserve(&((disk *)self)->disk, at, (size_t)size, &detail);
    Py_END_ALLOW_THREADS;
    if (status)
        return raise_from(Py_TYPE(self), status, &detail);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    write_doc,
    "write($self, tensor, at, device=0, behind=0, /)\n--\n\n"
    "Begins to write the tensor (torch.uint8, on the CPU) at a multiple of 4096, up to the next of which\n"
    "the file is its own; behind the copy of that ticket of the device. Waits where too much is queued.\n"
    "Raises OSError, naming the directory, if a write has failed before. Returns a DiskJob.");

static PyObject *write_tensor(PyObject *self, PyObject *args)
{
    PyObject *tensor;
    unsigned long long at, behind = 0;
    int device = 0;

    if (!PyArg_ParseTuple(args, "OK|iK:write", &tensor, &at, &device, &behind))
        return NULL;
    return begin((disk *)self, tensor, (mo_disk_job){.writes = true, .at = at}, device, behind);
}

PyDoc_STRVAR(read_doc,
             "read($self, tensor, written, device=0, behind=0, /)\n--\n\n"
             "Begins to read what that DiskJob wrote into the tensor, of as many bytes; its finish() raises\n"
             "OSError where it is not what was written. Returns a DiskJob.");

static PyObject *read_tensor(PyObject *self, PyObject *args)
{
    PyObject *tensor, *written;
    unsigned long long behind = 0;
    disk *d = (disk *)self;
    int device = 0;
    mo_detail detail;
    mo_status status;

    if (!PyArg_ParseTuple(args, "OO!|iK:read", &tensor, d->job_type, &written, &device, &behind))
        return NULL;
    disk_job *w = (disk_job *)written;
    if (w->disk != d || !w->job.writes)
        return PyErr_Format(PyExc_ValueError, "only what was written to the same disk can be read");
    Py_BEGIN_ALLOW_THREADS;
    status = mo_disk_finish(&d->disk, &w->job, &detail);
    Py_END_ALLOW_THREADS;
    if (status)
        return raise_from(Py_TYPE(self), status, &detail);
    return begin(d, tensor, (mo_disk_job){.at = w->job.at, .sum = w->job.sum}, device, behind);
}

PyDoc_STRVAR(counts_doc, "counts($self, /)\n--\n\n"
                         "(bytes written, bytes read, waits for a full queue, whether past the page cache).");

static PyObject *counts(PyObject *self, PyObject *unused)
{
    const mo_disk_counts c = mo_disk_counted(&((disk *)self)->disk);

    (void)unused;
    return Py_BuildValue("KKKO", (unsigned long long)c.bytes_written, (unsigned long long)c.bytes_read,
                         (unsigned long long)c.waits, c.direct ? Py_True : Py_False);
}

static PyMethodDef methods[] = {
    {"reserve", reserve, METH_VARARGS, reserve_doc},
    {"write", write_tensor, METH_VARARGS, write_doc},
    {"read", read_tensor, METH_VARARGS, read_doc},
    {"counts", counts, METH_NOARGS, counts_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)disk_doc},
    {Py_tp_new, disk_new},
    {Py_tp_dealloc, disk_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "memopt._C.Disk",
    .basicsize = sizeof(disk),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int mo_py_disk_init(PyObject *module)
{
    return mo_py_add_type(module, &job_spec, NULL) < 0 ? -1 : mo_py_add_type(module, &spec, NULL);
}
