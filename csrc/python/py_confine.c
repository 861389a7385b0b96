#include "python/module.h"

#include "confine/confine.h"

/* Paths of a sequence as C texts; `held` keeps them. NULL with an exception set where one is no path. */
static const char **path_texts(PyObject *paths, PyObject **held)
{
    PyObject *list = PySequence_List(paths);
    const Py_ssize_t count = list ? PyList_Size(list) : 0;
    const char **texts = list ? PyMem_Calloc((size_t)count + 1, sizeof *texts) : NULL;

    if (list && !texts)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; texts && i < count; i++) {
        PyObject *bytes = NULL;
        if (!PyUnicode_FSConverter(PyList_GetItem(list, i), &bytes) || PyList_SetItem(list, i, bytes) < 0) {
            PyMem_Free(texts);
            texts = NULL;
        } else {
            texts[i] = PyBytes_AsString(bytes);
        }
    }
    if (texts)
        *held = list;
    else
        Py_XDECREF(list);
    return texts;
}

PyDoc_STRVAR(overlay_files_doc,
             "overlay_files($module, scratch, shared, /)\n--\n\n"
             "From now on what this process writes, and all that it starts, goes to the folder scratch.\n\n"
             "shared: folders that stay what they are. See csrc/confine/confine.h. Raises memopt.Error,\n"
             "MO_UNSUPPORTED, where that cannot be had here.");

static PyObject *overlay_files(PyObject *module, PyObject *args)
{
    PyObject *scratch, *shared, *held;
    mo_detail detail;

    if (!PyArg_ParseTuple(args, "O&O", PyUnicode_FSConverter, &scratch, &shared))
        return NULL;
    const char **texts = path_texts(shared, &held);
    if (!texts) {
        Py_DECREF(scratch);
        return NULL;
    }
    mo_status status = mo_overlay_files(PyBytes_AsString(scratch), texts, (size_t)PyList_Size(held), &detail);
    PyMem_Free(texts);
    Py_DECREF(held);
    Py_DECREF(scratch);
    return status ? mo_raise(module, status, &detail) : Py_NewRef(Py_None);
}

PyDoc_STRVAR(
    refuse_writes_doc,
    "refuse_writes($module, writable, /)\n--\n\n"
    "From now on this process, and all that it starts, can write to these files and folders alone.\n\n"
    "See csrc/confine/confine.h. Raises memopt.Error, MO_UNSUPPORTED, where that cannot be had here.");

static PyObject *refuse_writes(PyObject *module, PyObject *writable)
{
    PyObject *held;
    mo_detail detail;
    const char **texts = path_texts(writable, &held);

    if (!texts)
        return NULL;
    mo_status status = mo_refuse_writes(texts, (size_t)PyList_Size(held), &detail);
    PyMem_Free(texts);
    Py_DECREF(held);
    return status ? mo_raise(module, status, &detail) : Py_NewRef(Py_None);
}

PyDoc_STRVAR(adopt_orphans_doc,
             "adopt_orphans($module, /)\n--\n\n"
             "From now on descendants of this process whose parents have ended become its children.");

static PyObject *adopt_orphans(PyObject *module, PyObject *unused)
{
    mo_detail detail;
    mo_status status = mo_adopt_orphans(&detail);
    (void)unused;
    return status ? mo_raise(module, status, &detail) : Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"overlay_files", overlay_files, METH_VARARGS, overlay_files_doc},
    {"refuse_writes", refuse_writes, METH_O, refuse_writes_doc},
    {"adopt_orphans", adopt_orphans, METH_NOARGS, adopt_orphans_doc},
    {NULL, NULL, 0, NULL},
};

int mo_py_confine_init(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
