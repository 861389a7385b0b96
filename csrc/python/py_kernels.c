/* The CUDA kernels: their settings, their state, and the calls that launch them. */
#include "python/module.h"

#include "base/hostmem.h"
#include "driver/launch.h"
#include "scaler/gradients.h"

PyDoc_STRVAR(
    configure_doc,
    "kernels_configure($module, nvrtc_paths, cache_directory, /)\n--\n\n"
    "Where to look for NVRTC (a tuple of paths or sonames, tried in order, at most 8) and where compiled\n"
    "kernels are kept (None: nowhere). Counts for devices whose kernels are not loaded yet.");

static PyObject *kernels_configure(PyObject *module, PyObject *args)
{
    mo_kernel_settings settings = {.version = MEMOPT_VERSION};
    PyObject *paths = NULL;
    mo_detail detail;
    mo_status status;

    if (!PyArg_ParseTuple(args, "O!z:kernels_configure", &PyTuple_Type, &paths, &settings.cache_directory))
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_Size(paths) && i < MO_NVRTC_PATHS_MAX; i++) {
        settings.nvrtc_paths[i] = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(paths, i), NULL);
        if (!settings.nvrtc_paths[i])
            return NULL;
    }
    settings.nvrtc_path_count = (size_t)PyTuple_Size(paths);
    /* The strings are the tuple's, which our caller holds, and the argument's. */
    Py_BEGIN_ALLOW_THREADS;
    status = mo_kernels_configure(&settings, &detail); /* refuses a count above the maximum */
    Py_END_ALLOW_THREADS;
    if (status)
        return mo_raise(module, status, &detail);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    status_doc,
    "kernel_status($module, device=0, load=False, /)\n--\n\n"
    "What became of the kernels on a device, as a dict: embedded_bytes (0: built without nvcc), "
    "compilations\n"
    "(NVRTC runs of this process), origin ('not loaded', 'embedded', 'cached' or 'compiled'), architecture,\n"
    "nvrtc, options, cache ('off', 'missing', 'hit', 'damaged', 'unreadable'), stored, note (what was tried\n"
    "and did not serve), and the counters of launches: launches, uploads, repeats, waits,\n"
    "captured, captured_bytes. load=True loads them first, and raises memopt.Error if that fails.");

static PyObject *kernel_status(PyObject *module, PyObject *args)
{
    static const mo_kernel_module none = {0};
    char options[MO_NVRTC_OPTIONS_SIZE] = "", nvrtc[32] = "";
    const mo_kernel_module *m = NULL;
    mo_launch_counts counts;
    mo_status status = MO_OK;
    mo_detail detail;
    int device = 0, load = 0;

    if (!PyArg_ParseTuple(args, "|ip:kernel_status", &device, &load))
        return NULL;
    if (load) {
        Py_BEGIN_ALLOW_THREADS;
        status = mo_kernels_get(device, &m, &detail);
        Py_END_ALLOW_THREADS;
        if (status)
            return mo_raise(module, status, &detail);
    } else {
        m = mo_kernels_peek(device);
    }
    if (!m)
        m = &none;
    if (m->target.architecture)
        mo_nvrtc_options(m->target, options);
    if (m->nvrtc_major)
        PyOS_snprintf(nvrtc, sizeof nvrtc, "%d.%d", m->nvrtc_major, m->nvrtc_minor);
    mo_launch_read(device, &counts);
    return Py_BuildValue(
        "{s:n,s:I,s:s,s:i,s:s,s:s,s:s,s:N,s:s,s:K,s:K,s:K,s:K,s:K,s:K}", "embedded_bytes",
        (Py_ssize_t)mo_kernel_image_get().fatbin_size, "compilations", mo_kernels_compilations(), "origin",
        mo_kernel_origin_name(m->origin), "architecture", m->architecture, "nvrtc", nvrtc, "options", options,
        "cache", mo_cache_finding_name(m->cache), "stored", PyBool_FromLong(m->stored), "note", m->note,
        "launches", (unsigned long long)counts.launches, "uploads", (unsigned long long)counts.uploads,
        "repeats", (unsigned long long)counts.repeats, "waits", (unsigned long long)counts.waits, "captured",
        (unsigned long long)counts.captured, "captured_bytes", (unsigned long long)counts.captured_bytes);
}

PyDoc_STRVAR(source_doc,
             "kernel_source($module, /)\n--\n\n"
             "The text of the kernels that NVRTC compiles where the embedded image does not serve.");

static PyObject *kernel_source(PyObject *module, PyObject *unused)
{
    const mo_kernel_image image = mo_kernel_image_get();
    (void)module;
    (void)unused;
    return PyUnicode_FromStringAndSize(image.source, (Py_ssize_t)image.source_size);
}

PyDoc_STRVAR(
    unscale_doc,
    "foreach_unscale_cuda($module, addresses, counts, kind, inv_scale, found_inf, device, stream, /)\n--\n\n"
    "Queues torch._amp_foreach_non_finite_check_and_unscale_'s work on dense tensors of one type.\n"
    "addresses, counts: buffers of 64-bit integers, equally long: first elements and numbers of elements.\n"
    "kind: 0 fp32, 1 fp16, 2 bf16, 3 fp64. inv_scale, found_inf: addresses of an fp32 on the device.\n"
    "stream: a cudaStream_t as int. Nothing checks that the addresses are of that device.");

static mo_status unscale(const Py_buffer *addresses, const Py_buffer *counts, int kind, int device,
                         uintptr_t stream, mo_gradients_job job, mo_detail *detail)
{
    const uint64_t *address = addresses->buf, *count = counts->buf;
    mo_gradient *gradients;
    mo_status status;

    if (addresses->len != counts->len || addresses->len % 8 || (uintptr_t)address % 8 || (uintptr_t)count % 8)
        return mo_fail(
            detail, MO_INVALID, 0,
            "addresses of %zd bytes, counts of %zd: expected aligned 64-bit integers, one a tensor in each",
            addresses->len, counts->len);
    if ((unsigned)kind >= MO_FLOAT_COUNT)
        return mo_fail(detail, MO_INVALID, 0,
                       "element type %d: expected 0 (fp32), 1 (fp16), 2 (bf16) or 3 (fp64)", kind);
    if (!job.inv_scale)
        return mo_fail(detail, MO_INVALID, 0, "inv_scale at 0: expected the address of an fp32");
    job.count = (size_t)addresses->len / 8;
    job.gradients = gradients = mo_host_calloc(job.count, sizeof *gradients);
    if (!gradients)
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "out of host memory for a list of %zu gradients",
                       job.count);
    for (size_t i = 0; i < job.count; i++)
        gradients[i] = (mo_gradient){address[i], count[i], (mo_float)kind};
    status = mo_gradients_cuda(device, (void *)stream, &job, detail);
    mo_host_free(gradients);
    return status;
}

static PyObject *foreach_unscale_cuda(PyObject *module, PyObject *args)
{
    Py_buffer addresses, counts;
    unsigned long long inv_scale = 0, found_inf = 0, stream = 0;
    int kind = 0, device = 0;
    mo_status status;
    mo_detail detail;

    if (!PyArg_ParseTuple(args, "y*y*iKKiK:foreach_unscale_cuda", &addresses, &counts, &kind, &inv_scale,
                          &found_inf, &device, &stream))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = unscale(&addresses, &counts, kind, device, (uintptr_t)stream,
                     (mo_gradients_job){.passes = MO_GRADIENTS_CHECK | MO_GRADIENTS_STORE,
                                        .inv_scale = (uintptr_t)inv_scale,
                                        .found_inf = (uintptr_t)found_inf},
                     &detail);
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&counts);
    if (status)
        return mo_raise(module, status, &detail);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"kernels_configure", kernels_configure, METH_VARARGS, configure_doc},
    {"kernel_status", kernel_status, METH_VARARGS, status_doc},
    {"kernel_source", kernel_source, METH_NOARGS, source_doc},
    {"foreach_unscale_cuda", foreach_unscale_cuda, METH_VARARGS, unscale_doc},
    {NULL, NULL, 0, NULL},
};

int mo_py_kernels_init(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
