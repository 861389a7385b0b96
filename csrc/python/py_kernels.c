/* The CUDA kernels: their settings, their state, and the calls that launch them. */
#include "python/module.h"

#include "driver/launch.h"

PyDoc_STRVAR(
    configure_doc,
    "kernels_configure($module, nvrtc_paths, cache_directory, embedded=True, /)\n--\n\n"
    "Where to look for NVRTC (a tuple of paths or sonames, tried in order, at most 8), where compiled\n"
    "kernels are kept (None: nowhere), and whether the embedded image may serve. Counts for devices whose\n"
    "kernels are not loaded yet.");

static PyObject *kernels_configure(PyObject *module, PyObject *args)
{
    mo_kernel_settings settings = {.version = MEMOPT_VERSION};
    PyObject *paths = NULL;
    mo_detail detail;
    mo_status status;
    int embedded = 1;

    if (!PyArg_ParseTuple(args, "O!z|p:kernels_configure", &PyTuple_Type, &paths, &settings.cache_directory,
                          &embedded))
        return NULL;
    settings.no_image = !embedded;
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
    "and did not serve), and the counters of launches: launches, bytes\n"
    "(that they read and write), uploads, repeats, waits,\n"
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
        "{s:n,s:I,s:s,s:i,s:s,s:s,s:s,s:N,s:s,s:K,s:K,s:K,s:K,s:K,s:K,s:K}", "embedded_bytes",
        (Py_ssize_t)mo_kernel_image_get().fatbin_size, "compilations", mo_kernels_compilations(), "origin",
        mo_kernel_origin_name(m->origin), "architecture", m->architecture, "nvrtc", nvrtc, "options", options,
        "cache", mo_cache_finding_name(m->cache), "stored", PyBool_FromLong(m->stored), "note", m->note,
        "launches", (unsigned long long)counts.launches, "bytes", (unsigned long long)counts.bytes, "uploads",
        (unsigned long long)counts.uploads, "repeats", (unsigned long long)counts.repeats, "waits",
        (unsigned long long)counts.waits, "captured", (unsigned long long)counts.captured, "captured_bytes",
        (unsigned long long)counts.captured_bytes);
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

static PyMethodDef methods[] = {
    {"kernels_configure", kernels_configure, METH_VARARGS, configure_doc},
    {"kernel_status", kernel_status, METH_VARARGS, status_doc},
    {"kernel_source", kernel_source, METH_NOARGS, source_doc},
    {NULL, NULL, 0, NULL},
};

int mo_py_kernels_init(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
