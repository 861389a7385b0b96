#include "python/module.h"

#include <errno.h>

#include "base/assert.h"
#include "base/pin.h"

PyObject *mo_raise(PyObject *module, mo_status status, const mo_detail *detail)
{
    const char *text = detail && detail->status == status ? detail->text : mo_status_text(status);
    mo_module_state *state = mo_state(module);
    PyObject *error = NULL, *value = NULL;

    switch (status) {
    case MO_INVALID:
    case MO_OVERFLOW:
        PyErr_SetString(PyExc_ValueError, text);
        return NULL;
    case MO_NO_HOST_MEMORY:
        return PyErr_NoMemory();
    case MO_IO:
        error = PyObject_CallFunction(PyExc_OSError, "is", detail ? detail->code : EIO, text);
        if (error)
            PyErr_SetObject(PyExc_OSError, error);
        Py_XDECREF(error);
        return NULL;
    default:
        break;
    }
    error = PyObject_CallFunction(state->error, "s", text);
    if (!error)
        return NULL;
    value = PyUnicode_FromString(mo_status_name(status));
    if (!value || PyObject_SetAttrString(error, "status", value) < 0)
        goto fail;
    Py_DECREF(value);
    value = PyLong_FromLong(detail ? detail->code : 0);
    if (!value || PyObject_SetAttrString(error, "code", value) < 0)
        goto fail;
    PyErr_SetObject(state->error, error);
fail:
    Py_XDECREF(value);
    Py_DECREF(error);
    return NULL;
}

PyDoc_STRVAR(error_doc,
             "What the device, its driver or a library refused.\n\n"
             "status: the kind, such as 'MO_NO_LIBRARY'. code: the callee's own number, 0 if it has none.");

/* What this binary is: for the doctor, and for whoever asks whether the assertions are on. */
static int add_build(PyObject *module)
{
    PyObject *build = Py_BuildValue("{s:s,s:i}", "compiler",
#ifdef __clang__
                                    "clang " __clang_version__,
#else
                                    "gcc " __VERSION__,
#endif
                                    "level", MO_LEVEL);
    int failed = !build || PyModule_AddObjectRef(module, "build", build) < 0;
    Py_XDECREF(build);
    return failed || PyModule_AddStringConstant(module, "__version__", MEMOPT_VERSION) < 0 ? -1 : 0;
}

static int module_exec(PyObject *module)
{
    mo_module_state *state = mo_state(module);
    mo_detail detail;
    mo_status status = mo_pin_library(&detail);

    state->error = PyErr_NewExceptionWithDoc("memopt.Error", error_doc, PyExc_RuntimeError, NULL);
    if (!state->error || PyModule_AddObjectRef(module, "Error", state->error) < 0)
        return -1;
    if (status) {
        mo_raise(module, status, &detail);
        return -1;
    }
    if (add_build(module) < 0 || mo_py_units_init(module) < 0 || mo_py_driver_init(module) < 0 ||
        mo_py_alloc_init(module) < 0 || mo_py_kernels_init(module) < 0)
        return -1;
    return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    Py_VISIT(mo_state(module)->error);
    return 0;
}

static int module_clear(PyObject *module)
{
    Py_CLEAR(mo_state(module)->error);
    return 0;
}

static void module_free(void *module)
{
    module_clear(module);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "memopt._C",
    .m_doc = "memopt's engines. Private: use the functions of the package.",
    .m_size = sizeof(mo_module_state),
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__C(void);
PyMODINIT_FUNC PyInit__C(void)
{
    return PyModuleDef_Init(&definition);
}
