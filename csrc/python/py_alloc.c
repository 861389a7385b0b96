#include "python/module.h"

#include "alloc/torch_hooks.h"
#include "alloc/torch_throw.h"
#include "driver/forked.h"

PyDoc_STRVAR(prepare_doc,
             "allocator_prepare($module, /)\n--\n\n"
             "Finds what memopt needs in the torch that is loaded, before torch is given the allocator.\n"
             "Returns '', or what is missing: out-of-memory errors are plain RuntimeErrors then.\n"
             "Raises memopt.Error where torch is not loaded.");

static PyObject *allocator_prepare(PyObject *module, PyObject *unused)
{
    mo_detail detail;
    mo_status status = mo_torch_throw_prepare(&detail);

    (void)unused;
    if (status && status != MO_NO_SYMBOL)
        return mo_raise(module, status, &detail);
    return PyUnicode_FromString(status ? detail.text : "");
}

PyDoc_STRVAR(hooks_doc,
             "allocator_hooks($module, /)\n--\n\n"
             "The addresses of memopt's hooks, by the method of torch's CUDAAllocator that takes each.");

static PyObject *allocator_hooks(PyObject *module, PyObject *unused)
{
    PyObject *hooks = PyDict_New();

    (void)module, (void)unused;
    for (const mo_torch_hook *h = mo_torch_hooks(); hooks && h->setter; h++) {
        PyObject *address = PyLong_FromSize_t((size_t)h->hook);
        if (!address || PyDict_SetItemString(hooks, h->setter, address) < 0)
            Py_CLEAR(hooks);
        Py_XDECREF(address);
    }
    return hooks;
}

PyDoc_STRVAR(
    configure_doc,
    "allocator_configure($module, budget, slack, double_map, recall, preallocate, warn, /)\n--\n\n"
    "What each device's pool gets that is used from now on. budget, preallocate: bytes, 0 for none.\n"
    "slack: thousandths of the live peak. double_map: None has each device tested when its pool opens,\n"
    "and warn() called in the main thread soon after where that turned it off.");

static PyObject *warn_of_aliases; /* under the GIL */

static int warn_now(void *unused)
{
    PyObject *result;

    (void)unused;
    result = PyObject_CallFunctionObjArgs(warn_of_aliases, NULL);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* In the midst of a request, with locks held, by a thread that has the GIL or not. */
static void look_at_aliases(int device, mo_pool *pool)
{
    mo_pool_double_map found;

    (void)device;
    mo_pool_read_double_map(pool, &found);
    if (found.tested && !found.on &&
        Py_IsInitialized())                      /* torch allocates after the interpreter's end, too */
        (void)Py_AddPendingCall(warn_now, NULL); /* where the queue is full, memopt.doctor() still tells */
}

static PyObject *allocator_configure(PyObject *module, PyObject *args)
{
    Py_ssize_t budget, slack, preallocate;
    PyObject *wanted, *warn, *before = warn_of_aliases;
    int double_map, recall;
    mo_pool_settings settings = mo_pool_defaults();

    if (!PyArg_ParseTuple(args, "nnOpnO:allocator_configure", &budget, &slack, &wanted, &recall, &preallocate,
                          &warn))
        return NULL;
    double_map = PyObject_IsTrue(wanted);
    if (double_map < 0)
        return NULL;
    if (budget < 0 || slack < 0 || preallocate < 0) {
        mo_detail detail;
        mo_status status = mo_fail(&detail, MO_INVALID, 0,
                                   "budget, slack and preallocate must not be "
                                   "negative");
        return mo_raise(module, status, &detail);
    }
    settings.budget = (size_t)budget;
    settings.slack = (size_t)slack;
    settings.double_map = double_map;
    settings.test_aliases = wanted == Py_None;
    settings.recall = recall;
    settings.preallocate = (size_t)preallocate;
    warn_of_aliases = Py_NewRef(warn);
    Py_XDECREF(before);
    mo_pool_on_open(look_at_aliases);
    mo_pool_set_defaults(settings);
    Py_RETURN_NONE;
}

static int parse_device(PyObject *module, int device)
{
    mo_detail detail;
    mo_status status;

    if (device >= 0 && device < MO_MAX_DEVICES)
        return 0;
    status = mo_fail(&detail, MO_INVALID, 0, "device %d: expected a device number from 0 to %d", device,
                     MO_MAX_DEVICES - 1);
    mo_raise(module, status, &detail);
    return -1;
}

PyDoc_STRVAR(
    trim_doc,
    "allocator_trim($module, device, keep, /)\n--\n\n"
    "Gives free memory back to a device until `keep` bytes are held. Waits for the work that used it.\n"
    "Returns the bytes given back; 0 for a device that was never used.");

static PyObject *allocator_trim(PyObject *module, PyObject *args)
{
    int device;
    Py_ssize_t keep;
    mo_pool *pool;
    size_t freed = 0;
    mo_status status = MO_OK;
    mo_detail detail;

    if (!PyArg_ParseTuple(args, "in:allocator_trim", &device, &keep) || parse_device(module, device) < 0)
        return NULL;
    pool = mo_pool_if_open(device);
    if (pool && mo_forked())
        status = mo_forked_refuse("memopt.cuda.trim", &detail);
    else if (pool) {
        Py_BEGIN_ALLOW_THREADS status = mo_pool_trim(pool, keep < 0 ? 0 : (size_t)keep, &detail, &freed);
        Py_END_ALLOW_THREADS
    }
    return status ? mo_raise(module, status, &detail) : PyLong_FromSize_t(freed);
}

PyDoc_STRVAR(
    fraction_doc,
    "allocator_fraction($module, device, /)\n--\n\n"
    "The part of a device's memory that torch was told to use at most; 1.0 where it was told nothing.");

static PyObject *allocator_fraction(PyObject *module, PyObject *args)
{
    int device;

    if (!PyArg_ParseTuple(args, "i:allocator_fraction", &device) || parse_device(module, device) < 0)
        return NULL;
    return PyFloat_FromDouble(mo_torch_hooks_fraction(device));
}

PyDoc_STRVAR(current_doc,
             "allocator_is_current($module, /)\n--\n\n"
             "Whether torch allocates through memopt: it has initialised CUDA with memopt's allocator.");

static PyObject *allocator_is_current(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyBool_FromLong(mo_torch_hooks_current());
}

static PyObject *observer; /* under the GIL; NULL: nobody */

/* In the midst of a request, by a thread that has the GIL or not. */
static void tell_observer(int device, size_t wanted, size_t total, size_t free_bytes)
{
    PyObject *type, *value, *traceback, *result;
    const PyGILState_STATE gil = PyGILState_Ensure();

    PyErr_Fetch(&type, &value, &traceback);
    PyObject *called = observer;
    Py_XINCREF(called);
    if (called) {
        result = PyObject_CallFunction(called, "innn", device, (Py_ssize_t)wanted, (Py_ssize_t)total,
                                       (Py_ssize_t)free_bytes);
        if (!result)
            PyErr_WriteUnraisable(called);
        Py_XDECREF(result);
        Py_DECREF(called);
    }
    PyErr_Restore(type, value, traceback);
    PyGILState_Release(gil);
}

PyDoc_STRVAR(
    observe_doc,
    "allocator_observe($module, observer, /)\n--\n\n"
    "Has observer(device, bytes asked for, device's bytes, free bytes) called instead of the one before\n"
    "when an out-of-memory error is about to be raised; None: nobody, as before the interpreter ends.");

static PyObject *allocator_observe(PyObject *module, PyObject *wanted)
{
    PyObject *before = observer;

    (void)module;
    if (wanted != Py_None && !PyCallable_Check(wanted))
        return PyErr_Format(PyExc_TypeError, "allocator_observe: %R cannot be called", wanted);
    observer = wanted == Py_None ? NULL : Py_NewRef(wanted);
    mo_torch_hooks_observe(observer ? tell_observer : NULL);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    double_map_doc,
    "allocator_double_map($module, device, /)\n--\n\n"
    "Of a device's pool: whether double_map is on; whether a test of the device decided that; and why it\n"
    "is off if it did, else ''. None for a device that was never used.");

static PyObject *allocator_double_map(PyObject *module, PyObject *args)
{
    int device;
    mo_pool *pool;
    mo_pool_double_map found;

    if (!PyArg_ParseTuple(args, "i:allocator_double_map", &device) || parse_device(module, device) < 0)
        return NULL;
    pool = mo_pool_if_open(device);
    if (!pool)
        Py_RETURN_NONE;
    mo_pool_read_double_map(pool, &found);
    return Py_BuildValue("(NNs)", PyBool_FromLong(found.on), PyBool_FromLong(found.tested),
                         found.tested && !found.on ? found.why.text : "");
}

PyDoc_STRVAR(
    misuse_doc,
    "allocator_misuse($module, /)\n--\n\n"
    "What was refused where nothing could be raised, on all devices, as a dict of ints: double_frees,\n"
    "foreign_frees, foreign_streams, unbalanced_pools, failed_releases; and in_child, the calls that a\n"
    "forked child made, which do nothing.");

static PyObject *allocator_misuse(PyObject *module, PyObject *unused)
{
    const mo_torch_hook_counts counts = mo_torch_hooks_read();
    uint64_t twice = 0, foreign = counts.foreign_frees, streams = counts.foreign_streams,
             failed = counts.failed;

    (void)module, (void)unused;
    for (int device = 0; device < MO_MAX_DEVICES && !mo_forked(); device++) {
        mo_pool *pool = mo_pool_if_open(device);
        mo_stats s;
        if (!pool)
            continue;
        mo_pool_read_stats(pool, &s);
        twice += s.double_frees;
        foreign += s.foreign_frees;
        streams += s.foreign_streams;
        failed += s.failed_releases;
    }
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K}", "double_frees", (unsigned long long)twice,
                         "foreign_frees", (unsigned long long)foreign, "foreign_streams",
                         (unsigned long long)streams, "unbalanced_pools",
                         (unsigned long long)counts.unbalanced, "failed_releases", (unsigned long long)failed,
                         "in_child", (unsigned long long)counts.in_child);
}

static PyMethodDef methods[] = {
    {"allocator_prepare", allocator_prepare, METH_NOARGS, prepare_doc},
    {"allocator_hooks", allocator_hooks, METH_NOARGS, hooks_doc},
    {"allocator_configure", allocator_configure, METH_VARARGS, configure_doc},
    {"allocator_trim", allocator_trim, METH_VARARGS, trim_doc},
    {"allocator_fraction", allocator_fraction, METH_VARARGS, fraction_doc},
    {"allocator_is_current", allocator_is_current, METH_NOARGS, current_doc},
    {"allocator_observe", allocator_observe, METH_O, observe_doc},
    {"allocator_double_map", allocator_double_map, METH_VARARGS, double_map_doc},
    {"allocator_misuse", allocator_misuse, METH_NOARGS, misuse_doc},
    {NULL, NULL, 0, NULL},
};

int mo_py_alloc_init(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
