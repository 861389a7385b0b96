/* Adam's states of 8 or 4 bits, to and from fp32, as state_dict() and load_state_dict() need them: on the CPU. */
#include "python/module.h"

#include <stdbool.h>

#include "optim/update.h"
#include "python/py_tensor.h"

typedef struct triple {
    mo_tensor_view values, codes, scales;
} triple;

static bool is_on_cpu(const mo_tensor_view *view, mo_float kind)
{
    return view->device == MO_CPU && view->kind == kind;
}

/* values and codes of n elements in the same order (of 4 bits: in one row, and values contiguous), a scale each block of 256. */
static int parse(PyObject *module, PyObject *args, int *out_bits, int *out_second, triple *out)
{
    PyObject *values, *codes, *scales;
    size_t bytes;
    int known;

    if (!PyArg_ParseTuple(args, "ipOOO", out_bits, out_second, &values, &codes, &scales))
        return -1;
    if (*out_bits != 8 && *out_bits != 4) {
        PyErr_Format(PyExc_ValueError, "codes have 8 or 4 bits, not %d", *out_bits);
        return -1;
    }
    known = mo_py_tensor_view(module, values, &out->values);
    if (known > 0)
        known = mo_py_tensor_bytes(module, codes, &out->codes);
    if (known > 0)
        known = mo_py_tensor_view(module, scales, &out->scales);
    if (known > 0)
        known = *out_bits == 8 ? mo_py_tensor_same_order(module, values, codes)
                               : out->values.contiguous && out->codes.contiguous;
    if (known < 0)
        return -1;
    bytes = *out_bits == 8 ? out->values.count : out->values.count / 2 + out->values.count % 2;
    if (!known || !is_on_cpu(&out->values, MO_F32) || !is_on_cpu(&out->scales, MO_F32) ||
        out->codes.device != MO_CPU || out->codes.count != bytes ||
        out->scales.count != (out->values.count + MO_CODE_BLOCK - 1) / MO_CODE_BLOCK) {
        PyErr_SetString(
            PyExc_ValueError,
            "values (float32), codes (uint8, in the same order, or two of 4 bits in a byte) and scales "
            "(float32, one for each 256 values) must be dense CPU tensors");
        return -1;
    }
    return 0;
}

PyDoc_STRVAR(encode_doc, "adam_codes_encode($module, bits, second, values, codes, scales, /)\n--\n\n"
                         "Writes codes and scales; second: of the second moment.");

static PyObject *encode(PyObject *module, PyObject *args)
{
    int bits, second;
    triple t;

    if (parse(module, args, &bits, &second, &t) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    mo_code_encode((unsigned)bits, second, (const float *)t.values.address, t.values.count,
                   (uint8_t *)t.codes.address, (float *)t.scales.address);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(decode_doc,
             "adam_codes_decode($module, bits, second, values, codes, scales, /)\n--\n\nWrites values.");

static PyObject *decode(PyObject *module, PyObject *args)
{
    int bits, second;
    triple t;

    if (parse(module, args, &bits, &second, &t) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    mo_code_decode((unsigned)bits, second, (const uint8_t *)t.codes.address, (const float *)t.scales.address,
                   t.values.count, (float *)t.values.address);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"adam_codes_encode", encode, METH_VARARGS, encode_doc},
    {"adam_codes_decode", decode, METH_VARARGS, decode_doc},
    {NULL, NULL, 0, NULL},
};

int mo_py_adam_codes_init(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
