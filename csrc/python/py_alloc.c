#include "python/module.h"

#include "alloc/passthrough.h"
#include "alloc/torch_throw.h"

PyDoc_STRVAR(prepare_doc,
             "allocator_prepare($module, /)\n--\n\n"
             "Finds what memopt needs in the torch that is loaded, before torch is given the allocator.\n"
             "Raises memopt.Error naming what is missing.");

static PyObject *allocator_prepare(PyObject *module, PyObject *unused)
{
    mo_detail detail;
    mo_status status = mo_torch_throw_prepare(&detail);
    (void)unused;
    if (status)
        return mo_raise(module, status, &detail);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(stats_doc,
             "allocator_stats($module, device=0, /)\n--\n\n"
             "Counters of the pass-through allocator on a device, as a dict of ints: allocations, frees,\n"
             "out_of_memory, failed_frees, live_bytes, live_blocks, peak_bytes. 0 where it was never used.");

static PyObject *allocator_stats(PyObject *module, PyObject *args)
{
    int device = 0;
    mo_passthrough_stats s;

    if (!PyArg_ParseTuple(args, "|i:allocator_stats", &device))
        return NULL;
    if (device < 0 || device >= MO_MAX_DEVICES) {
        mo_detail detail;
        mo_status status = mo_fail(&detail, MO_INVALID, 0, "device %d: devices count from 0 to %d", device,
                                   MO_MAX_DEVICES - 1);
        return mo_raise(module, status, &detail);
    }
    mo_passthrough_read(device, &s);
    return Py_BuildValue(
        "{s:K,s:K,s:K,s:K,s:K,s:K,s:K}", "allocations", (unsigned long long)s.allocations, "frees",
        (unsigned long long)s.frees, "out_of_memory", (unsigned long long)s.out_of_memory, "failed_frees",
        (unsigned long long)s.failed_frees, "live_bytes", (unsigned long long)s.live_bytes, "live_blocks",
        (unsigned long long)s.live_blocks, "peak_bytes", (unsigned long long)s.peak_bytes);
}

static PyMethodDef methods[] = {
    {"allocator_prepare", allocator_prepare, METH_NOARGS, prepare_doc},
    {"allocator_stats", allocator_stats, METH_VARARGS, stats_doc},
    {NULL, NULL, 0, NULL},
};

int mo_py_alloc_init(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
