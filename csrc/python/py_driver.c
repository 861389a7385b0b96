/* What the machine has: the driver, its devices, the processor. All of it is asked when called, none at import. */
#include "python/module.h"

#include "base/hostmem.h"
#include "base/isa.h"
#include "driver/cuda_api.h"

PyDoc_STRVAR(
    driver_doc,
    "cuda_driver($module, /)\n--\n\n"
    "The CUDA driver of this process: a dict of its version (such as '13.0'), the optional functions it\n"
    "lacks, and a dict for each device: name, compute_capability, total_bytes, virtual_memory (whether\n"
    "addresses and physical memory can be had apart). Creates no context, so it costs no device memory.\n"
    "Raises memopt.Error saying what is missing.");

static PyObject *describe_device(PyObject *module, const mo_cuda_api *api, int ordinal)
{
    enum { MAJOR, MINOR, VIRTUAL, ASKED };
    static const CUdevice_attribute attributes[ASKED] = {
        [MAJOR] = CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        [MINOR] = CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        [VIRTUAL] = CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    };
    int answers[ASKED] = {0};
    char name[128] = "";
    size_t total = 0;
    CUdevice handle = 0;
    mo_detail detail;
    mo_status status = mo_cuda_check(api, api->device_get(&handle, ordinal), "cuDeviceGet()", &detail);

    if (!status)
        status =
            mo_cuda_check(api, api->device_name(name, sizeof name, handle), "cuDeviceGetName()", &detail);
    if (!status)
        status = mo_cuda_check(api, api->device_total_memory(&total, handle), "cuDeviceTotalMem()", &detail);
    for (int i = 0; i < ASKED && !status; i++)
        status = mo_cuda_check(api, api->device_attribute(&answers[i], attributes[i], handle),
                               "cuDeviceGetAttribute()", &detail);
    if (status)
        return mo_raise(module, status, &detail);
    return Py_BuildValue("{s:s,s:N,s:n,s:N}", "name", name, "compute_capability",
                         PyUnicode_FromFormat("%d.%d", answers[MAJOR], answers[MINOR]), "total_bytes",
                         (Py_ssize_t)total, "virtual_memory", PyBool_FromLong(answers[VIRTUAL]));
}

static int append_and_release(PyObject *list, PyObject *item)
{
    int failed = !item || PyList_Append(list, item) < 0;
    Py_XDECREF(item);
    return failed ? -1 : 0;
}

static int lacks(const mo_cuda_api *api, PyObject *list)
{
#define LACKS(field, symbol, parameters)                                                                     \
    if (!api->field && append_and_release(list, PyUnicode_FromString(#symbol)) < 0)                          \
        return -1;
    MO_CUDA_OPTIONAL(LACKS)
#undef LACKS
    return 0;
}

static PyObject *cuda_driver(PyObject *module, PyObject *unused)
{
    const mo_cuda_api *api = NULL;
    PyObject *devices = NULL, *lacking = NULL, *result = NULL;
    mo_detail detail;
    int version = 0, count = 0;
    mo_status status;

    (void)unused;
    Py_BEGIN_ALLOW_THREADS; /* the first call initialises the driver, which takes a while */
    status = mo_cuda_api_get(&api, &detail);
    Py_END_ALLOW_THREADS;
    if (!status)
        status = mo_cuda_check(api, api->driver_version(&version), "cuDriverGetVersion()", &detail);
    if (!status)
        status = mo_cuda_check(api, api->device_count(&count), "cuDeviceGetCount()", &detail);
    if (status)
        return mo_raise(module, status, &detail);
    devices = PyList_New(0);
    lacking = PyList_New(0);
    if (!devices || !lacking || lacks(api, lacking) < 0)
        goto fail;
    for (int i = 0; i < count; i++)
        if (append_and_release(devices, describe_device(module, api, i)) < 0)
            goto fail;
    result = Py_BuildValue("{s:N,s:O,s:O}", "version",
                           PyUnicode_FromFormat("%d.%d", version / 1000, version % 1000 / 10), "lacking",
                           lacking, "devices", devices);
fail:
    Py_XDECREF(devices);
    Py_XDECREF(lacking);
    return result;
}

PyDoc_STRVAR(isa_doc,
             "cpu_isa($module, name=None, /)\n--\n\n"
             "The instruction set of the CPU kernels: 'generic', 'avx2' or 'avx512'. name is MEMOPT_ISA's\n"
             "value; None takes the best. Raises ValueError for an unknown name, memopt.Error for more than\n"
             "this processor has.");

static PyObject *cpu_isa(PyObject *module, PyObject *args)
{
    const char *name = NULL;
    mo_isa isa = MO_ISA_GENERIC;
    mo_detail detail;

    if (!PyArg_ParseTuple(args, "|z:cpu_isa", &name))
        return NULL;
    mo_status status = mo_isa_choose(name, &isa, &detail);
    return status ? mo_raise(module, status, &detail) : PyUnicode_FromString(mo_isa_name(isa));
}

PyDoc_STRVAR(live_doc, "host_blocks($module, /)\n--\n\nBlocks of host memory that the engines hold now.");

static PyObject *host_blocks(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyLong_FromSize_t(mo_host_live());
}

static PyMethodDef methods[] = {
    {"cuda_driver", cuda_driver, METH_NOARGS, driver_doc},
    {"cpu_isa", cpu_isa, METH_VARARGS, isa_doc},
    {"host_blocks", host_blocks, METH_NOARGS, live_doc},
    {NULL, NULL, 0, NULL},
};

int mo_py_driver_init(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
