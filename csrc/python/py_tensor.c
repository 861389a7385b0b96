#include "python/py_tensor.h"

#include <string.h>

/* ---- DLPack's C structures, as far as they are used ---------------------------------------------------------------- */

typedef struct dl_tensor {
    void *data;
    struct {
        int32_t type, number;
    } device;
    int32_t dimensions;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides; /* strides in elements; NULL: contiguous */
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_version {
    uint32_t major, minor;
} dl_version;

typedef struct dl_managed {
    dl_version version;
    void *context;
    void (*deleter)(struct dl_managed *self);
    uint64_t flags;
    dl_tensor tensor;
} dl_managed;

typedef struct dl_exchange {
    dl_version version;
    struct dl_exchange *previous;
    void (*allocate)(void); /* not used here */
    int (*managed_from_object)(void *object, dl_managed **out);
    void (*managed_to_object)(void); /* not used here */
    int (*tensor_from_object)(void *object, dl_tensor *out);
    int (*current_stream)(int32_t device_type, int32_t device, void **out);
} dl_exchange;

enum { DL_CPU = 1, DL_CUDA = 2 };
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_OPAQUE = 3, DL_BFLOAT = 4, DL_COMPLEX = 5 };
#define DL_MAJOR       1
#define DIMENSIONS_MAX 64 /* torch's own limit */

static const char *const dtype_names[] = {[MO_F32] = "float32",
                                          [MO_F16] = "float16",
                                          [MO_BF16] = "bfloat16",
                                          [MO_F64] = "float64",
                                          "uint8",
                                          "int8",
                                          "uint16",
                                          "int16"};

/* ---- torch ----------------------------------------------------------------------------------------------------------- */

static int find_exchange(mo_torch *torch)
{
    PyObject *capsule = PyObject_GetAttrString(torch->tensor, "__dlpack_c_exchange_api__");
    const dl_exchange *exchange;

    if (!capsule) {
        PyErr_Clear(); /* a torch without: methods serve, in more time */
        return 0;
    }
    exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api"); /* lives as long as the process */
    Py_DECREF(capsule);
    if (!exchange)
        return -1;
    if (exchange->version.major == DL_MAJOR && exchange->tensor_from_object && exchange->managed_from_object)
        torch->exchange = exchange;
    return 0;
}

/* value is stolen. */
static bool keep(PyObject **slot, PyObject *value)
{
    Py_XDECREF(*slot);
    *slot = value;
    return value;
}

/* The function behind torch.Tensor.is_neg: called as it is, it takes half of the time. A method tells its function only when it
 * is bound to a tensor. */
static int find_is_neg(PyObject *imported, mo_torch *torch)
{
    PyObject *tensor = PyObject_CallMethod(imported, "empty", "i", 0);
    PyObject *bound = tensor ? PyObject_GetAttrString(tensor, "is_neg") : NULL;

    if (bound && PyCFunction_CheckExact(bound) && PyCFunction_GetFlags(bound) == METH_NOARGS)
        torch->is_neg_function = PyCFunction_GetFunction(bound);
    Py_XDECREF(tensor);
    Py_XDECREF(bound);
    return bound ? 0 : -1;
}

static int find_torch(mo_torch *torch)
{
    PyObject *imported = PyImport_ImportModule("torch"), *nn;
    bool whole = imported;

    for (size_t i = 0; whole && i < sizeof torch->dtypes / sizeof torch->dtypes[0]; i++)
        whole = keep(&torch->dtypes[i], PyObject_GetAttrString(imported, dtype_names[i]));
    nn = whole ? PyObject_GetAttrString(imported, "nn") : NULL;
    whole = nn && keep(&torch->grad, PyUnicode_InternFromString("grad")) &&
            keep(&torch->parameter, PyObject_GetAttrString(nn, "Parameter")) &&
            keep(&torch->tensor, PyObject_GetAttrString(imported, "Tensor")) && !find_is_neg(imported, torch);
    Py_XDECREF(nn);
    Py_XDECREF(imported);
    if (!whole || find_exchange(torch) < 0)
        return -1;
    torch->is_neg = PyObject_GetAttrString(torch->tensor, "is_neg"); /* the last: says that all is there */
    return torch->is_neg ? 0 : -1;
}

/* Found at the first tensor, since torch may be imported after memopt. */
const mo_torch *mo_py_torch(PyObject *module)
{
    mo_torch *torch = &mo_state(module)->torch;

    return torch->is_neg || find_torch(torch) == 0 ? torch : NULL;
}

/* ---- a tensor, by methods, where there is no table ---------------------------------------------------------------- */

static int method(PyObject *tensor, const char *name, long long *out)
{
    PyObject *value = PyObject_CallMethod(tensor, name, NULL);

    *out = value ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    return PyErr_Occurred() ? -1 : 0;
}

static int sizes(PyObject *tensor, const char *name, int64_t *out, int32_t *dimensions)
{
    PyObject *tuple = PyObject_CallMethod(tensor, name, NULL);
    Py_ssize_t count = tuple ? PyTuple_Size(tuple) : -1;

    for (Py_ssize_t i = 0; i < count && i < DIMENSIONS_MAX; i++)
        out[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    Py_XDECREF(tuple);
    *dimensions = (int32_t)count;
    return PyErr_Occurred() ? -1 : 0;
}

static int device_of(PyObject *tensor, dl_tensor *out)
{
    PyObject *device = PyObject_GetAttrString(tensor, "device");
    PyObject *type = device ? PyObject_GetAttrString(device, "type") : NULL;
    PyObject *index = type ? PyObject_GetAttrString(device, "index") : NULL;
    int known = -1;

    if (index) {
        known = 1;
        if (PyUnicode_CompareWithASCIIString(type, "cpu") == 0)
            out->device.type = DL_CPU;
        else if (PyUnicode_CompareWithASCIIString(type, "cuda") == 0)
            out->device.type = DL_CUDA;
        else
            known = 0;
        out->device.number = index == Py_None ? 0 : (int32_t)PyLong_AsLong(index);
    }
    Py_XDECREF(device);
    Py_XDECREF(type);
    Py_XDECREF(index);
    return known;
}

/* shape, strides: room for DIMENSIONS_MAX each. As DLPack's function, but 0 for what is no such tensor, and of other types
 * than those that are looked for no more than their size. */
static int read_by_methods(const mo_torch *torch, PyObject *tensor, int64_t *shape, int64_t *strides,
                           dl_tensor *out)
{
    static const struct {
        uint8_t code, bits;
    } types[] = {[MO_F32] = {DL_FLOAT, 32},
                 [MO_F16] = {DL_FLOAT, 16},
                 [MO_BF16] = {DL_BFLOAT, 16},
                 [MO_F64] = {DL_FLOAT, 64},
                 {DL_UINT, 8},
                 {DL_INT, 8},
                 {DL_UINT, 16},
                 {DL_INT, 16}};
    PyObject *dtype = PyObject_GetAttrString(tensor, "dtype");
    long long address = 0, size = 0;
    int known = dtype ? 0 : -1;

    *out = (dl_tensor){.shape = shape, .strides = strides, .dtype.lanes = 1};
    for (size_t i = 0; dtype && i < sizeof types / sizeof types[0]; i++)
        if (dtype == torch->dtypes[i]) {
            out->dtype.code = types[i].code;
            out->dtype.bits = types[i].bits;
            known = 1;
        }
    Py_XDECREF(dtype);
    if (!known) {
        known = method(tensor, "element_size", &size) < 0 ? -1 : 1;
        out->dtype.code = DL_OPAQUE;
        out->dtype.bits = (uint8_t)(8 * size); /* 16 bytes at most */
    }
    if (known > 0)
        known = device_of(tensor, out);
    if (known <= 0)
        return known;
    if (sizes(tensor, "size", shape, &out->dimensions) < 0 ||
        sizes(tensor, "stride", strides, &out->dimensions) < 0 || method(tensor, "data_ptr", &address) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError) && !PyErr_ExceptionMatches(PyExc_NotImplementedError))
            return -1;
        PyErr_Clear(); /* sparse, say: it has no memory of this kind */
        return 0;
    }
    out->data = (void *)(uintptr_t)address;
    return 1;
}

/* ---- what both have in common ---------------------------------------------------------------------------------- */

/* Whether the elements lie without gaps and overlaps, whatever the order of the dimensions. */
static bool dense(const dl_tensor *t, size_t *out_count, bool *out_contiguous)
{
    int64_t expected = 1, count = 1;
    bool contiguous = true;

    for (int32_t d = t->dimensions - 1; d >= 0; d--) {
        contiguous = contiguous && (!t->strides || t->shape[d] == 1 || t->strides[d] == count);
        count *= t->shape[d];
    }
    *out_count = (size_t)count;
    *out_contiguous = contiguous || count <= 1;
    if (*out_contiguous)
        return true;
    /* Dimensions in order of their strides: each begins where the ones before it end. */
    for (int32_t left = t->dimensions; left > 0; left--) {
        int32_t next = -1;

        for (int32_t d = 0; d < t->dimensions; d++)
            if (t->shape[d] != 1 && t->strides[d] == expected)
                next = d;
        if (next < 0)
            break;
        expected *= t->shape[next];
    }
    return expected == count;
}

static int kind_of(const dl_tensor *t, mo_float *out)
{
    if (t->dtype.lanes != 1)
        return 0;
    if (t->dtype.code == DL_FLOAT && t->dtype.bits == 32)
        *out = MO_F32;
    else if (t->dtype.code == DL_FLOAT && t->dtype.bits == 16)
        *out = MO_F16;
    else if (t->dtype.code == DL_BFLOAT && t->dtype.bits == 16)
        *out = MO_BF16;
    else if (t->dtype.code == DL_FLOAT && t->dtype.bits == 64)
        *out = MO_F64;
    else
        return 0;
    return 1;
}

static int number_of(const dl_tensor *t, mo_number *out)
{
    static const struct {
        uint8_t code, bits;
    } types[] = {
        [MO_NUMBER_U8] = {DL_UINT, 8},   [MO_NUMBER_I8] = {DL_INT, 8},     [MO_NUMBER_U16] = {DL_UINT, 16},
        [MO_NUMBER_I16] = {DL_INT, 16},  [MO_NUMBER_F16] = {DL_FLOAT, 16}, [MO_NUMBER_BF16] = {DL_BFLOAT, 16},
        [MO_NUMBER_F32] = {DL_FLOAT, 32}};

    for (int i = 0; i < MO_NUMBER_COUNT; i++)
        if (t->dtype.lanes == 1 && t->dtype.code == types[i].code && t->dtype.bits == types[i].bits) {
            *out = (mo_number)i;
            return 1;
        }
    return 0;
}

static int is_negative(const mo_torch *torch, PyObject *tensor)
{
    PyObject *answer = torch->is_neg_function ? torch->is_neg_function(tensor, NULL)
                                              : PyObject_CallFunctionObjArgs(torch->is_neg, tensor, NULL);
    int negative = answer ? answer == Py_True : -1;

    Py_XDECREF(answer);
    return negative;
}

/* Memory behind an object of the two types; shape, strides: room for DIMENSIONS_MAX each, where there is no table. 0: it is
 * none that DLPack can describe: sparse, on another device, without memory. */
static int read_tensor(const mo_torch *torch, PyObject *tensor, int64_t *shape, int64_t *strides,
                       dl_tensor *out)
{
    if ((PyObject *)Py_TYPE(tensor) != torch->tensor && (PyObject *)Py_TYPE(tensor) != torch->parameter)
        return 0;
    if (!torch->exchange)
        return read_by_methods(torch, tensor, shape, strides, out);
    if (((const dl_exchange *)torch->exchange)->tensor_from_object(tensor, out)) {
        PyErr_Clear();
        return 0;
    }
    return 1;
}

/* Which types are asked for: those of mo_float; torch.uint8; those of mo_number, written to *number; all; all of
 * which nothing can be pending but a negation (a complex tensor may be a conjugate). */
typedef enum wanted { FLOATS, BYTES, NUMBERS, ANY, REAL } wanted;

static bool is_wanted(const dl_tensor *t, wanted types, mo_tensor_view *out, mo_number *number)
{
    if (types == ANY)
        return true;
    if (types == REAL)
        return t->dtype.code != DL_COMPLEX && t->dtype.code != DL_OPAQUE;
    if (types == NUMBERS)
        return number_of(t, number);
    if (types == BYTES)
        return t->dtype.code == DL_UINT && t->dtype.bits == 8 && t->dtype.lanes == 1;
    return kind_of(t, &out->kind);
}

/* negated: a negation may be pending. */
static int view(PyObject *module, PyObject *tensor, wanted types, bool negated, mo_tensor_view *out,
                mo_number *number)
{
    const mo_torch *torch = mo_py_torch(module);
    int64_t shape[DIMENSIONS_MAX], strides[DIMENSIONS_MAX];
    dl_tensor t;
    int known = torch ? read_tensor(torch, tensor, shape, strides, &t) : -1;

    if (known <= 0)
        return known;
    if (t.device.type != DL_CPU && t.device.type != DL_CUDA)
        return 0;
    if (!is_wanted(&t, types, out, number))
        return 0;
    if (!dense(&t, &out->count, &out->contiguous))
        return 0;
    known = negated ? 0 : is_negative(torch, tensor);
    if (known)
        return known < 0 ? -1 : 0;
    out->address = out->count ? (uintptr_t)t.data + t.byte_offset : 0;
    out->nbytes = out->count * (((size_t)t.dtype.bits * t.dtype.lanes + 7) / 8);
    out->device = t.device.type == DL_CPU ? MO_CPU : t.device.number;
    return 1;
}

int mo_py_tensor_view(PyObject *module, PyObject *tensor, mo_tensor_view *out)
{
    return view(module, tensor, FLOATS, false, out, NULL);
}

int mo_py_tensor_unsigned(PyObject *module, PyObject *tensor, mo_tensor_view *out)
{
    return view(module, tensor, FLOATS, true, out, NULL);
}

int mo_py_tensor_bytes(PyObject *module, PyObject *tensor, mo_tensor_view *out)
{
    return view(module, tensor, BYTES, false, out, NULL);
}

int mo_py_tensor_memory(PyObject *module, PyObject *tensor, mo_tensor_view *out)
{
    return view(module, tensor, ANY, true, out, NULL);
}

int mo_py_tensor_real(PyObject *module, PyObject *tensor, mo_tensor_view *out)
{
    return view(module, tensor, REAL, false, out, NULL);
}

int mo_py_tensor_numbers(PyObject *module, PyObject *tensor, mo_tensor_view *out, mo_number *number)
{
    return view(module, tensor, NUMBERS, false, out, number);
}

void mo_py_tensor_hold(PyObject *module, PyObject *tensor, uintptr_t address, mo_tensor_hold *hold)
{
    const mo_torch *torch = mo_py_torch(module);
    dl_managed *managed = NULL;

    mo_py_tensor_release(hold);
    if (torch && torch->exchange &&
        ((const dl_exchange *)torch->exchange)->managed_from_object(tensor, &managed) == 0)
        hold->managed = managed;
    else
        PyErr_Clear();
    hold->address = address;
}

void mo_py_tensor_release(mo_tensor_hold *hold)
{
    dl_managed *managed = hold->managed;

    *hold = (mo_tensor_hold){0};
    if (managed && managed->deleter)
        managed->deleter(managed);
}

/* The stride of a dimension; those of a table may be left out where they would say "contiguous". */
static int64_t stride_of(const dl_tensor *t, int32_t dimension)
{
    int64_t stride = 1;

    if (t->strides)
        return t->strides[dimension];
    for (int32_t d = dimension + 1; d < t->dimensions; d++)
        stride *= t->shape[d];
    return stride;
}

int mo_py_tensor_same_order(PyObject *module, PyObject *one, PyObject *other)
{
    const mo_torch *torch = mo_py_torch(module);
    int64_t shape[2][DIMENSIONS_MAX], strides[2][DIMENSIONS_MAX];
    dl_tensor a, b;
    int known = torch ? read_tensor(torch, one, shape[0], strides[0], &a) : -1;

    if (known > 0)
        known = read_tensor(torch, other, shape[1], strides[1], &b);
    if (known <= 0)
        return known;
    if (a.dimensions != b.dimensions)
        return 0;
    for (int32_t d = 0; d < a.dimensions; d++)
        if (a.shape[d] != b.shape[d] || (a.shape[d] != 1 && stride_of(&a, d) != stride_of(&b, d)))
            return 0;
    return 1;
}

int mo_py_tensor_form(PyObject *module, PyObject *tensor, mo_form *out)
{
    const mo_torch *torch = mo_py_torch(module);
    dl_tensor t;
    int known = !torch ? -1 : torch->exchange ? read_tensor(torch, tensor, NULL, NULL, &t) : 0;

    if (known > 0)
        *out = (mo_form){t.device.type, t.device.number,
                         (uint32_t)t.dtype.code << 24 | (uint32_t)t.dtype.bits << 16 | t.dtype.lanes,
                         t.dimensions, t.shape};
    return known;
}

int mo_py_tensor_stream(PyObject *module, int device, void **out)
{
    const mo_torch *torch = mo_py_torch(module);
    PyObject *raw, *number;

    if (!torch)
        return -1;
    if (torch->exchange)
        return ((const dl_exchange *)torch->exchange)->current_stream(DL_CUDA, device, out);
    raw = PyImport_ImportModule("torch._C");
    number = raw ? PyObject_CallMethod(raw, "_cuda_getCurrentRawStream", "i", device) : NULL;
    *out = number ? PyLong_AsVoidPtr(number) : NULL;
    Py_XDECREF(raw);
    Py_XDECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

/* ---- for tests ------------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(
    view_doc,
    "_tensor_view($module, tensor, by_methods=False, any_type=False, /)\n--\n\n"
    "(address, elements, bytes, device) of a plain tensor, or of one of any type, or None. by_methods:\n"
    "as with a torch that has no DLPack exchange table.");

static PyObject *tensor_view(PyObject *module, PyObject *args)
{
    const mo_torch *torch = mo_py_torch(module);
    const void *exchange;
    PyObject *tensor;
    int by_methods = 0, any_type = 0, known;
    mo_tensor_view v;

    if (!torch || !PyArg_ParseTuple(args, "O|pp:_tensor_view", &tensor, &by_methods, &any_type))
        return NULL;
    exchange = torch->exchange;
    if (by_methods)
        mo_state(module)->torch.exchange = NULL;
    known = any_type ? mo_py_tensor_memory(module, tensor, &v) : mo_py_tensor_view(module, tensor, &v);
    mo_state(module)->torch.exchange = exchange;
    if (known < 0)
        return NULL;
    if (!known)
        Py_RETURN_NONE;
    return Py_BuildValue("Knni", (unsigned long long)v.address, (Py_ssize_t)v.count, (Py_ssize_t)v.nbytes,
                         v.device);
}

static PyMethodDef methods[] = {
    {"_tensor_view", tensor_view, METH_VARARGS, view_doc},
    {NULL, NULL, 0, NULL},
};

int mo_py_tensor_init(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
