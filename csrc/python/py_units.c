#include "python/module.h"

#include "base/units.h"

PyDoc_STRVAR(
    parse_size_doc,
    "parse_size($module, size, /)\n--\n\n"
    "Bytes in a size, as an int.\n\n"
    "size: an int (bytes), or text: '8GiB', '1.5 GB', '512MiB', '80G'. KiB … EiB and the bare letters K … E\n"
    "are powers of 1024, KB … EB powers of 1000. What is left under one byte is dropped.\n"
    "Raises ValueError, which quotes the input, for a negative, nonsensical or too large (>= 2**63) one,\n"
    "TypeError for any other type.");

static PyObject *parse_size(PyObject *module, PyObject *size)
{
    mo_detail detail;
    uint64_t bytes = 0;

    if (PyLong_Check(size) && !PyBool_Check(size)) {
        int overflow = 0;
        long long value = PyLong_AsLongLongAndOverflow(size, &overflow);
        if (value == -1 && !overflow && PyErr_Occurred())
            return NULL;
        if (overflow || value < 0)
            return PyErr_Format(PyExc_ValueError, "%S is not a size: it must be %s", size,
                                overflow > 0 ? "below 2**63 bytes" : "0 or more bytes");
        return PyLong_FromLongLong(value);
    }
    if (PyUnicode_Check(size)) {
        Py_ssize_t length;
        const char *text = PyUnicode_AsUTF8AndSize(size, &length);
        if (!text)
            return NULL;
        mo_status status = mo_parse_size(text, (size_t)length, &bytes, &detail);
        return status ? mo_raise(module, status, &detail) : PyLong_FromUnsignedLongLong(bytes);
    }
    return PyErr_Format(PyExc_TypeError, "%R is not a size: give an int (bytes) or text such as '8GiB'",
                        size);
}

PyDoc_STRVAR(format_size_doc, "format_size($module, bytes, /)\n--\n\n"
                              "Bytes as text for people, in powers of 1024: '0 B', '1.50 KiB', '79.2 GiB'.");

static PyObject *format_size(PyObject *module, PyObject *bytes)
{
    char text[MO_SIZE_TEXT];
    unsigned long long value = PyLong_AsUnsignedLongLong(bytes);
    (void)module;
    if (value == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    return PyUnicode_FromString(mo_format_size(value, text));
}

static PyMethodDef methods[] = {
    {"parse_size", parse_size, METH_O, parse_size_doc},
    {"format_size", format_size, METH_O, format_size_doc},
    {NULL, NULL, 0, NULL},
};

int mo_py_units_init(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
