#include "python/py_shared.h"

#include <math.h>
#include <string.h>

/* ---- messages ---------------------------------------------------------------------------------------------------- */

/* "item 3['boxes'][2]": where the encoder is. NULL with an exception. */
static PyObject *place(const mo_shared_encoder *e)
{
    PyObject *text = e->item ? PyUnicode_FromFormat("the value of key %R", e->item)
                             : PyUnicode_FromFormat("item %llu", (unsigned long long)e->number);

    for (int i = 0; text && i < e->depth; i++) {
        PyObject *longer = e->path[i].key          ? PyUnicode_FromFormat("%U[%R]", text, e->path[i].key)
                           : e->path[i].index >= 0 ? PyUnicode_FromFormat("%U[%zd]", text, e->path[i].index)
                                                   : PyUnicode_FromFormat("%U{...}", text);
        Py_DECREF(text);
        text = longer;
    }
    return text;
}

/* An exception that says where; -1. complaint: NULL for an exception that is set already. */
static int complain(const mo_shared_encoder *e, PyObject *kind, PyObject *complaint)
{
    PyObject *where = complaint ? place(e) : NULL;

    if (where)
        PyErr_Format(kind, "%s: %U%U", e->name, where, complaint);
    Py_XDECREF(where);
    Py_XDECREF(complaint);
    return -1;
}

/* The same of a key as a whole. */
static int complain_of_key(const mo_shared_encoder *e, PyObject *kind, const char *complaint)
{
    PyErr_Format(kind, "%s: key %R: %s", e->name, e->item, complaint);
    return -1;
}

static int status_of(const mo_shared_encoder *e, mo_status status, const mo_detail *detail)
{
    if (!status)
        return 0;
    mo_raise(e->module, status, detail);
    return -1;
}

PyObject *mo_shared_damaged(PyObject *module)
{
    mo_detail detail;

    mo_tell(&detail, MO_CORRUPT, 0, "this shared container's memory is damaged");
    return mo_raise(module, MO_CORRUPT, &detail);
}

/* ---- scalars ----------------------------------------------------------------------------------------------------- */

static int encode_str(mo_shared_encoder *e, PyObject *value, mo_shared_writer *w)
{
    /* Not PyUnicode_AsUTF8AndSize, which keeps the bytes for as long as the str lives. */
    PyObject *bytes = PyUnicode_AsUTF8String(value);
    mo_detail detail;
    int result;

    if (!bytes && PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
        PyErr_Clear();
        bytes = PyUnicode_AsEncodedString(value, "utf-8", "surrogatepass");
    }
    if (!bytes)
        return -1;
    result = status_of(
        e,
        mo_shared_put_bytes(w, MO_SHARED_STR, PyBytes_AsString(bytes), (size_t)PyBytes_Size(bytes), &detail),
        &detail);
    Py_DECREF(bytes);
    return result;
}

static int encode_int(mo_shared_encoder *e, PyObject *value, mo_shared_writer *w)
{
    mo_detail detail;
    PyObject *digits;
    const char *text;
    Py_ssize_t length;
    int overflow, result = -1;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);

    if (!overflow)
        return number == -1 && PyErr_Occurred()
                   ? -1
                   : status_of(e, mo_shared_put_int(w, number, &detail), &detail);
    digits = PyNumber_ToBase(value, 16);
    text = digits ? PyUnicode_AsUTF8AndSize(digits, &length) : NULL;
    if (text)
        result =
            status_of(e, mo_shared_put_bytes(w, MO_SHARED_BIG_INT, text, (size_t)length, &detail), &detail);
    Py_XDECREF(digits);
    return result;
}

static int encode_bytes(mo_shared_encoder *e, PyObject *value, mo_shared_tag tag, mo_shared_writer *w)
{
    mo_detail detail;
    const bool array = tag == MO_SHARED_BYTEARRAY;
    const char *bytes = array ? PyByteArray_AsString(value) : PyBytes_AsString(value);
    const Py_ssize_t size = array ? PyByteArray_Size(value) : PyBytes_Size(value);

    if (!bytes)
        return -1;
    return status_of(e, mo_shared_put_bytes(w, tag, bytes, (size_t)size, &detail), &detail);
}

/* ---- containers -------------------------------------------------------------------------------------------------- */

/* Into a container: false for one that is in itself, or too deep, with an exception. */
static bool enter(mo_shared_encoder *e, PyObject *container)
{
    for (int i = 0; i < e->depth; i++)
        if (e->path[i].container == container) {
            complain(e, PyExc_ValueError,
                     PyUnicode_FromString(": a container that contains itself cannot be shared"));
            return false;
        }
    if (e->depth == MO_SHARED_MOST_DEPTH) {
        complain(e, PyExc_ValueError,
                 PyUnicode_FromFormat(": more than %d nested containers", MO_SHARED_MOST_DEPTH));
        return false;
    }
    e->path[e->depth].container = container;
    e->path[e->depth].key = NULL;
    e->path[e->depth].index = -1;
    e->depth++;
    return true;
}

static int changed(mo_shared_encoder *e)
{
    e->depth--;
    return complain(e, PyExc_RuntimeError, PyUnicode_FromString(" was changed while it was being shared"));
}

static int encode_sequence(mo_shared_encoder *e, PyObject *value, mo_shared_tag tag, mo_shared_writer *w)
{
    const bool tuple = tag == MO_SHARED_TUPLE;
    const Py_ssize_t count = tuple ? PyTuple_Size(value) : PyList_Size(value);
    mo_detail detail;

    if (!enter(e, value))
        return -1;
    if (status_of(e, mo_shared_put_container(w, tag, (uint64_t)count, &detail), &detail) < 0)
        return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item;
        int result;
        if (!tuple && PyList_Size(value) != count) /* a leaf's function may run any code */
            return changed(e);
        item = tuple ? PyTuple_GetItem(value, i) : PyList_GetItem(value, i);
        if (!item)
            return -1;
        Py_INCREF(item);
        e->path[e->depth - 1].index = i;
        result = mo_shared_encode(e, item, w);
        Py_DECREF(item);
        if (result < 0)
            return -1;
    }
    e->depth--;
    return !tuple && PyList_Size(value) != count ? changed(e) : 0;
}

static int encode_set(mo_shared_encoder *e, PyObject *value, mo_shared_tag tag, mo_shared_writer *w)
{
    PyObject *items = PySequence_List(value), *item;
    mo_detail detail;
    int result = -1;

    if (!items || !enter(e, value))
        goto done;
    if (status_of(e, mo_shared_put_container(w, tag, (uint64_t)PyList_Size(items), &detail), &detail) < 0)
        goto done;
    for (Py_ssize_t i = 0; i < PyList_Size(items); i++) {
        item = PyList_GetItem(items, i);
        if (mo_shared_encode(e, item, w) < 0)
            goto done;
    }
    e->depth--;
    result = 0;
done:
    Py_XDECREF(items);
    return result;
}

static int encode_dict(mo_shared_encoder *e, PyObject *value, mo_shared_writer *w)
{
    PyObject *items = PyDict_Items(value);
    mo_detail detail;
    int result = -1;

    if (!items || !enter(e, value))
        goto done;
    if (status_of(e, mo_shared_put_container(w, MO_SHARED_DICT_VALUE, (uint64_t)PyList_Size(items), &detail),
                  &detail) < 0)
        goto done;
    for (Py_ssize_t i = 0; i < PyList_Size(items); i++) {
        PyObject *pair = PyList_GetItem(items, i);
        PyObject *key = PyTuple_GetItem(pair, 0);
        e->path[e->depth - 1].key = key;
        if (mo_shared_encode(e, key, w) < 0 || mo_shared_encode(e, PyTuple_GetItem(pair, 1), w) < 0)
            goto done;
    }
    e->depth--;
    result = 0;
done:
    Py_XDECREF(items);
    return result;
}

/* ---- leaves ------------------------------------------------------------------------------------------------------ */

static int encode_leaf(mo_shared_encoder *e, PyObject *value, mo_shared_writer *w)
{
    PyObject *answer = PyObject_CallFunctionObjArgs(e->leaf, value, NULL), *description, *bytes;
    mo_detail detail;
    Py_buffer buffer;
    int kind, result = -1;

    if (!answer)
        return -1;
    if (PyUnicode_Check(answer)) {
        complain(e, PyExc_TypeError, PyUnicode_FromFormat(" is %U", answer));
        goto done;
    }
    if (!PyArg_ParseTuple(answer, "iOO", &kind, &description, &bytes))
        goto done;
    if (status_of(e, mo_shared_put_leaf(w, (uint8_t)kind, &detail), &detail) < 0 || !enter(e, value))
        goto done;
    if (mo_shared_encode(e, description, w) < 0 || PyObject_GetBuffer(bytes, &buffer, PyBUF_SIMPLE) < 0)
        goto done;
    e->depth--;
    result = status_of(e, mo_shared_put_block(w, buffer.buf, (size_t)buffer.len, &detail), &detail);
    PyBuffer_Release(&buffer);
done:
    Py_DECREF(answer);
    return result;
}

int mo_shared_encode(mo_shared_encoder *e, PyObject *value, mo_shared_writer *w)
{
    mo_detail detail;
    double real, imaginary;

    if (PyUnicode_CheckExact(value))
        return encode_str(e, value, w);
    if (PyLong_CheckExact(value))
        return encode_int(e, value, w);
    if (PyFloat_CheckExact(value))
        return status_of(e, mo_shared_put_float(w, PyFloat_AsDouble(value), &detail), &detail);
    if (value == Py_None || PyBool_Check(value))
        return status_of(e,
                         mo_shared_put_tag(w,
                                           value == Py_None   ? MO_SHARED_NONE
                                           : value == Py_True ? MO_SHARED_TRUE
                                                              : MO_SHARED_FALSE,
                                           &detail),
                         &detail);
    if (PyTuple_CheckExact(value))
        return encode_sequence(e, value, MO_SHARED_TUPLE, w);
    if (PyList_CheckExact(value))
        return encode_sequence(e, value, MO_SHARED_LIST_VALUE, w);
    if (PyDict_CheckExact(value))
        return encode_dict(e, value, w);
    if (PyBytes_CheckExact(value))
        return encode_bytes(e, value, MO_SHARED_BYTES, w);
    if (PyByteArray_CheckExact(value))
        return encode_bytes(e, value, MO_SHARED_BYTEARRAY, w);
    if (Py_IS_TYPE(value, &PySet_Type))
        return encode_set(e, value, MO_SHARED_SET, w);
    if (PyFrozenSet_CheckExact(value))
        return encode_set(e, value, MO_SHARED_FROZENSET, w);
    if (PyComplex_CheckExact(value)) {
        real = PyComplex_RealAsDouble(value);
        imaginary = PyComplex_ImagAsDouble(value);
        return status_of(e, mo_shared_put_complex(w, real, imaginary, &detail), &detail);
    }
    return encode_leaf(e, value, w);
}

/* ---- keys -------------------------------------------------------------------------------------------------------- */

static int encode_key(mo_shared_encoder *e, PyObject *key, bool any, int depth, mo_shared_writer *w);

static int encode_key_float(mo_shared_encoder *e, PyObject *key, mo_shared_writer *w)
{
    const double number = PyFloat_AsDouble(key);
    mo_detail detail;
    PyObject *whole;
    int result;

    if (isnan(number))
        return 2;
    if (isinf(number) || number != floor(number))
        return status_of(e, mo_shared_put_float(w, number, &detail), &detail);
    whole = PyLong_FromDouble(number);
    result = whole ? encode_int(e, whole, w) : -1;
    Py_XDECREF(whole);
    return result < 0 ? result : 1;
}

static int encode_key_tuple(mo_shared_encoder *e, PyObject *key, bool any, int depth, mo_shared_writer *w)
{
    const Py_ssize_t count = PyTuple_Size(key);
    mo_detail detail;
    int result = status_of(e, mo_shared_put_container(w, MO_SHARED_TUPLE, (uint64_t)count, &detail), &detail);

    for (Py_ssize_t i = 0; i < count && result >= 0; i++) {
        const int inner = encode_key(e, PyTuple_GetItem(key, i), any, depth + 1, w);
        result = inner < 0 ? inner : inner > result ? inner : result;
    }
    return result;
}

/* An object of another type: for looking up, what it equals. */
static int encode_key_like(mo_shared_encoder *e, PyObject *key, mo_shared_writer *w)
{
    PyObject *number;
    int equal;

    if (PyObject_Hash(key) == -1)
        return -1;
    if (!PyIndex_Check(key))
        return 2;
    number = PyNumber_Index(key);
    if (!number) {
        PyErr_Clear(); /* an array of several, say: it equals no int */
        return 2;
    }
    equal = PyObject_RichCompareBool(key, number, Py_EQ);
    if (equal > 0)
        equal = encode_int(e, number, w) < 0 ? -1 : 1;
    else if (!equal)
        equal = 2;
    Py_DECREF(number);
    return equal;
}

static int encode_key(mo_shared_encoder *e, PyObject *key, bool any, int depth, mo_shared_writer *w)
{
    mo_detail detail;

    if (depth > MO_SHARED_MOST_DEPTH)
        return any ? 2 : complain_of_key(e, PyExc_ValueError, "more than 200 nested tuples");
    if (any ? PyUnicode_Check(key) : PyUnicode_CheckExact(key))
        return encode_str(e, key, w);
    if (PyBool_Check(key)) {
        const int result = encode_int(e, key, w);
        return result < 0 ? result : 1;
    }
    if (any ? PyLong_Check(key) : PyLong_CheckExact(key))
        return encode_int(e, key, w);
    if (any ? PyBytes_Check(key) : PyBytes_CheckExact(key))
        return encode_bytes(e, key, MO_SHARED_BYTES, w);
    if (key == Py_None)
        return status_of(e, mo_shared_put_tag(w, MO_SHARED_NONE, &detail), &detail);
    if (any ? PyFloat_Check(key) : PyFloat_CheckExact(key))
        return encode_key_float(e, key, w);
    if (any ? PyTuple_Check(key) : PyTuple_CheckExact(key))
        return encode_key_tuple(e, key, any, depth, w);
    if (any)
        return encode_key_like(e, key, w);
    return PyObject_Hash(key) == -1
               ? -1
               : complain_of_key(e, PyExc_TypeError,
                                 "keys must be str, int, float, bytes, bool, None or tuples of these");
}

int mo_shared_encode_key(mo_shared_encoder *e, PyObject *key, bool any, mo_shared_writer *w)
{
    const int result = encode_key(e, key, any, 0, w);

    if (result == 2 && !any)
        return complain_of_key(e, PyExc_ValueError, "nan equals nothing, so it could never be looked up");
    return result;
}

/* ---- back -------------------------------------------------------------------------------------------------------- */

PyObject *mo_shared_decode_str(PyObject *module, const uint8_t *bytes, uint64_t length)
{
    PyObject *text = PyUnicode_DecodeUTF8((const char *)bytes, (Py_ssize_t)length, "surrogatepass");

    if (!text && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) {
        PyErr_Clear();
        return mo_shared_damaged(module);
    }
    return text;
}

static PyObject *decode_big_int(PyObject *module, const mo_shared_value *v)
{
    PyObject *digits = PyBytes_FromStringAndSize((const char *)v->bytes, (Py_ssize_t)v->length), *number;
    char *text, *end = NULL;

    if (!digits)
        return NULL;
    text = PyBytes_AsString(digits);
    number = PyLong_FromString(text, &end, 16);
    if (!number && PyErr_ExceptionMatches(PyExc_ValueError)) {
        PyErr_Clear();
        mo_shared_damaged(module);
    } else if (number && end != text + v->length) {
        Py_CLEAR(number);
        mo_shared_damaged(module);
    }
    Py_DECREF(digits);
    return number;
}

typedef struct decoder {
    PyObject *module, *memory, *leaf;
    mo_shared_cursor *c;
} decoder;

static PyObject *decode(const decoder *d, int depth);

/* A list or, of a tuple's values, a tuple. */
static PyObject *decode_sequence(const decoder *d, bool tuple, uint64_t count, int depth)
{
    PyObject *result = tuple ? PyTuple_New((Py_ssize_t)count) : PyList_New((Py_ssize_t)count);

    for (Py_ssize_t i = 0; result && i < (Py_ssize_t)count; i++) {
        PyObject *item = decode(d, depth + 1);
        if (!item || (tuple ? PyTuple_SetItem(result, i, item) : PyList_SetItem(result, i, item)) < 0)
            Py_CLEAR(result);
    }
    return result;
}

static PyObject *decode_set(const decoder *d, bool frozen, uint64_t count, int depth)
{
    PyObject *result = frozen ? PyFrozenSet_New(NULL) : PySet_New(NULL);

    for (uint64_t i = 0; result && i < count; i++) {
        PyObject *item = decode(d, depth + 1);
        if (!item || PySet_Add(result, item) < 0) /* of a frozenset too, as nobody else has it yet */
            Py_CLEAR(result);
        Py_XDECREF(item);
    }
    return result;
}

static PyObject *decode_dict(const decoder *d, uint64_t count, int depth)
{
    PyObject *result = PyDict_New();

    for (uint64_t i = 0; result && i < count; i++) {
        PyObject *key = decode(d, depth + 1), *value = key ? decode(d, depth + 1) : NULL;
        if (!value || PyDict_SetItem(result, key, value) < 0)
            Py_CLEAR(result);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return result;
}

static PyObject *decode_leaf(const decoder *d, uint8_t kind, int depth)
{
    PyObject *description = decode(d, depth + 1), *result;
    mo_shared_span block;

    if (!description)
        return NULL;
    if (!mo_shared_read_block(d->c, &block)) {
        Py_DECREF(description);
        return mo_shared_damaged(d->module);
    }
    result =
        PyObject_CallFunction(d->leaf, "iOOKK", kind, description, d->memory, (unsigned long long)block.begin,
                              (unsigned long long)(block.end - block.begin));
    Py_DECREF(description);
    return result;
}

static PyObject *decode(const decoder *d, int depth)
{
    mo_shared_value v;

    if (depth > MO_SHARED_MOST_DEPTH + 2 || !mo_shared_read(d->c, &v))
        return mo_shared_damaged(d->module);
    switch (v.tag) {
    case MO_SHARED_NONE:
        Py_RETURN_NONE;
    case MO_SHARED_FALSE:
        Py_RETURN_FALSE;
    case MO_SHARED_TRUE:
        Py_RETURN_TRUE;
    case MO_SHARED_INT:
        return PyLong_FromLongLong(v.integer);
    case MO_SHARED_BIG_INT:
        return decode_big_int(d->module, &v);
    case MO_SHARED_FLOAT:
        return PyFloat_FromDouble(v.real);
    case MO_SHARED_COMPLEX:
        return PyComplex_FromDoubles(v.real, v.imaginary);
    case MO_SHARED_STR:
        return mo_shared_decode_str(d->module, v.bytes, v.length);
    case MO_SHARED_BYTES:
        return PyBytes_FromStringAndSize((const char *)v.bytes, (Py_ssize_t)v.length);
    case MO_SHARED_BYTEARRAY:
        return PyByteArray_FromStringAndSize((const char *)v.bytes, (Py_ssize_t)v.length);
    case MO_SHARED_TUPLE:
    case MO_SHARED_LIST_VALUE:
        return decode_sequence(d, v.tag == MO_SHARED_TUPLE, v.length, depth);
    case MO_SHARED_SET:
    case MO_SHARED_FROZENSET:
        return decode_set(d, v.tag == MO_SHARED_FROZENSET, v.length, depth);
    case MO_SHARED_DICT_VALUE:
        return decode_dict(d, v.length, depth);
    case MO_SHARED_LEAF:
        return decode_leaf(d, v.leaf, depth);
    case MO_SHARED_TAGS:
        break;
    }
    return mo_shared_damaged(d->module);
}

PyObject *mo_shared_decode(PyObject *module, PyObject *memory, PyObject *leaf, mo_shared_cursor *c)
{
    const decoder d = {module, memory, leaf, c};

    return decode(&d, 0);
}
