#include "python/module.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

#include "base/assert.h"
#include "base/pin.h"

/* attribute = value (stolen, may be NULL); 0 on success. */
static int give_attribute(PyObject *object, const char *attribute, PyObject *value)
{
    int failed = !value || PyObject_SetAttrString(object, attribute, value) < 0;
    Py_XDECREF(value);
    return failed;
}

PyObject *mo_raise(PyObject *module, mo_status status, const mo_detail *detail)
{
    const bool told =
        detail && detail->status == status; /* else *detail is of something else, or of nothing */
    const char *words = told ? detail->text : mo_status_text(status);
    PyObject *kind = mo_state(module)->error, *error = NULL;
    /* Paths in it may be in any encoding. */
    PyObject *text = PyUnicode_DecodeUTF8(words, (Py_ssize_t)strlen(words), "replace");
    int code = told ? detail->code : 0;

    if (!text)
        return NULL;
    switch (status) {
    case MO_INVALID:
    case MO_OVERFLOW:
        PyErr_SetObject(PyExc_ValueError, text);
        break;
    case MO_NO_HOST_MEMORY:
        PyErr_NoMemory();
        break;
    case MO_IO:
        error = PyObject_CallFunction(PyExc_OSError, "iO", code ? code : EIO, text);
        if (error)
            PyErr_SetObject(PyExc_OSError, error);
        break;
    default:
        error = PyObject_CallFunction(kind, "O", text);
        if (error && !give_attribute(error, "status", PyUnicode_FromString(mo_status_name(status))) &&
            !give_attribute(error, "code", PyLong_FromLong(code)))
            PyErr_SetObject(kind, error);
    }
    Py_XDECREF(error);
    Py_DECREF(text);
    return NULL;
}

PyDoc_STRVAR(error_doc,
             "The device, its driver or a library refused an operation.\n\n"
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

int mo_py_add_type(PyObject *module, PyType_Spec *spec, PyObject **kept)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    int failed = !type || PyModule_AddType(module, (PyTypeObject *)type) < 0;

    if (kept)
        *kept = type; /* even where it was not added: the state's end sees to it */
    else
        Py_XDECREF(type);
    return failed ? -1 : 0;
}

static int module_exec(PyObject *module)
{
    static int (*const inits[])(PyObject *) = {
#define INIT(name) mo_py_##name##_init,
        MO_BINDINGS(INIT)
#undef INIT
    };
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
    if (add_build(module) < 0)
        return -1;
    for (size_t i = 0; i < sizeof inits / sizeof *inits; i++)
        if (inits[i](module) < 0)
            return -1;
    return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    const mo_torch *torch = &mo_state(module)->torch;

    Py_VISIT(mo_state(module)->error);
    Py_VISIT(mo_state(module)->gradients);
    Py_VISIT(mo_state(module)->shared_memory);
    Py_VISIT(mo_state(module)->shared_iterator);
    Py_VISIT(torch->tensor);
    Py_VISIT(torch->parameter);
    Py_VISIT(torch->is_neg);
    Py_VISIT(torch->grad);
    for (size_t i = 0; i < sizeof torch->dtypes / sizeof torch->dtypes[0]; i++)
        Py_VISIT(torch->dtypes[i]);
    for (size_t i = 0; i < MO_CHECKPOINT_TYPES; i++)
        Py_VISIT(mo_state(module)->checkpoint_types[i]);
    return 0;
}

static int module_clear(PyObject *module)
{
    mo_torch *torch = &mo_state(module)->torch;

    Py_CLEAR(mo_state(module)->error);
    Py_CLEAR(mo_state(module)->gradients);
    Py_CLEAR(mo_state(module)->shared_memory);
    Py_CLEAR(mo_state(module)->shared_iterator);
    Py_CLEAR(torch->tensor);
    Py_CLEAR(torch->parameter);
    Py_CLEAR(torch->is_neg);
    Py_CLEAR(torch->grad);
    for (size_t i = 0; i < sizeof torch->dtypes / sizeof torch->dtypes[0]; i++)
        Py_CLEAR(torch->dtypes[i]);
    for (size_t i = 0; i < MO_CHECKPOINT_TYPES; i++)
        Py_CLEAR(mo_state(module)->checkpoint_types[i]);
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
