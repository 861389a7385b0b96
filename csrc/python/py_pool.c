/* The type memopt._C.Arena: an arena of a device's pool, as memopt.cuda.CudaPool uses it. The object owns one reference
 * of the arena, the routes it began and the segment source it opened, and gives them back with release() or at its end;
 * the arena's live blocks outlive it. Whatever may wait for the device is done without the GIL. */
#include "python/module.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "alloc/pool.h"
#include "alloc/segment_source.h"
#include "base/hostmem.h"

typedef struct arena {
    PyObject_HEAD mo_pool *pool; /* NULL: released, or never opened */
    mo_arena_id id;
    int device;
    int source;    /* of segments; -1: none */
    size_t routes; /* begun and not ended */
} arena;

/* The first half of a pool number says whose it is: torch counts up from 0 in both. */
#define CUDA_POOL 0x6d656d6f7074ull /* "memopt" */

static arena *open_arena(PyObject *self)
{
    if (((arena *)self)->pool)
        return (arena *)self;
    PyErr_SetString(PyExc_ValueError, "this arena was released");
    return NULL;
}

/* The exception of a status; the type was made from the module and has no subclasses. */
static PyObject *raise(PyObject *self, mo_status status, const mo_detail *detail)
{
    PyObject *module = PyType_GetModule(Py_TYPE(self));

    return module ? mo_raise(module, status, detail) : NULL;
}

/* ---- its life ------------------------------------------------------------------------------------------------ */

static mo_status open_with(arena *a, size_t budget, size_t bytes, mo_detail *detail)
{
    static atomic_ullong opened;
    mo_status status = mo_pool_of_device(a->device, &a->pool, detail);

    if (status)
        return status;
    a->id = (mo_arena_id){CUDA_POOL, atomic_fetch_add(&opened, 1) + 1};
    status = mo_pool_arena_retain(a->pool, a->id, false, budget, detail);
    if (status)
        goto fail;
    if (bytes) {
        status = mo_pool_preallocate(a->pool, a->id, bytes, detail);
        if (status) {
            size_t freed; /* what was created until it failed */

            mo_pool_arena_release(a->pool, a->id, NULL);
            mo_pool_trim(a->pool, 0, NULL, &freed);
            goto fail;
        }
    }
    return MO_OK;
fail:
    a->pool = NULL;
    return status;
}

static PyObject *arena_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"device", "budget", "preallocate", NULL};
    int device = 0;
    Py_ssize_t budget = 0, bytes = 0;
    mo_detail detail = {0};
    mo_status status;
    arena *a;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "i|nn:Arena", names, &device, &budget, &bytes))
        return NULL;
    if (budget < 0 || bytes < 0)
        return PyErr_Format(PyExc_ValueError, "budget %zd, preallocate %zd: sizes must not be negative",
                            budget, bytes);
    a = (arena *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!a)
        return NULL;
    a->device = device;
    a->source = -1;
    Py_BEGIN_ALLOW_THREADS;
    status = open_with(a, (size_t)budget, (size_t)bytes, &detail);
    Py_END_ALLOW_THREADS;
    if (status) {
        raise((PyObject *)a, status, &detail);
        Py_DECREF(a);
        return NULL;
    }
    return (PyObject *)a;
}

static mo_status give_back(arena *a, mo_detail *detail)
{
    mo_pool *pool = a->pool;

    if (!pool)
        return MO_OK;
    a->pool = NULL;
    if (a->source >= 0)
        mo_segment_source_close((unsigned)a->source);
    while (a->routes) {
        mo_pool_unroute(pool, a->id, NULL);
        a->routes--;
    }
    return mo_pool_arena_release(pool, a->id, detail);
}

PyDoc_STRVAR(release_doc,
             "release($self, trim=False, /)\n--\n\n"
             "Gives up the arena: its free memory is anyone's again, its live blocks stay until they\n"
             "are freed. trim: what is free in the device's whole pool goes back to the device. A\n"
             "second call does nothing.");

static PyObject *arena_release(PyObject *self, PyObject *args)
{
    mo_pool *pool = ((arena *)self)->pool;
    int trim = 0;
    size_t freed;
    mo_detail detail = {0};
    mo_status status;

    if (!PyArg_ParseTuple(args, "|p:release", &trim))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = give_back((arena *)self, &detail);
    if (!status && pool && trim)
        status = mo_pool_trim(pool, 0, &detail, &freed);
    Py_END_ALLOW_THREADS;
    if (status)
        return raise(self, status, &detail);
    Py_RETURN_NONE;
}

static void arena_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    give_back((arena *)self, NULL); /* nobody could be told */
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* ---- routes ---------------------------------------------------------------------------------------------------- */

/* Its address tells threads apart. */
static _Thread_local char this_thread;

static bool is_this_thread(void *user, mo_stream stream)
{
    (void)stream;
    return user == &this_thread;
}

PyDoc_STRVAR(route_doc, "route($self, this_thread=False, /)\n--\n\n"
                        "From now on the device's requests, of all threads or of this one, go to the arena.");

static PyObject *arena_route(PyObject *self, PyObject *args)
{
    int only_this = 0;
    arena *a = open_arena(self);
    mo_route route = {NULL, NULL, NULL};
    mo_detail detail = {0};
    mo_status status;

    if (!a || !PyArg_ParseTuple(args, "|p:route", &only_this))
        return NULL;
    if (only_this)
        route = (mo_route){is_this_thread, NULL, &this_thread};
    Py_BEGIN_ALLOW_THREADS;
    status = mo_pool_route(a->pool, a->id, route, &detail);
    Py_END_ALLOW_THREADS;
    if (status)
        return raise(self, status, &detail);
    a->routes++;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(unroute_doc, "unroute($self, /)\n--\n\nEnds the newest route of this arena.");

static PyObject *arena_unroute(PyObject *self, PyObject *unused)
{
    arena *a = open_arena(self);
    mo_detail detail = {0};
    mo_status status;

    (void)unused;
    if (!a)
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = mo_pool_unroute(a->pool, a->id, &detail);
    Py_END_ALLOW_THREADS;
    if (status)
        return raise(self, status, &detail);
    a->routes--;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    segment_functions_doc,
    "segment_functions($self, /)\n--\n\n"
    "The addresses of the functions by which torch.cuda.MemPool takes segments of the arena and gives\n"
    "them back, for torch._C._cuda_customAllocator. The same each time.");

static PyObject *arena_segment_functions(PyObject *self, PyObject *unused)
{
    arena *a = open_arena(self);

    (void)unused;
    if (!a)
        return NULL;
    if (a->source < 0) {
        mo_detail detail = {0};
        unsigned source;
        mo_status status = mo_segment_source_open(a->pool, a->device, a->id, &detail, &source);

        if (status)
            return raise(self, status, &detail);
        a->source = (int)source;
    }
    return Py_BuildValue("KK", (unsigned long long)(uintptr_t)mo_segment_source_function((unsigned)a->source),
                         (unsigned long long)(uintptr_t)mo_segment_free);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

typedef mo_status (*arena_call)(mo_pool *, mo_arena_id, mo_detail *);

static PyObject *call(PyObject *self, arena_call function)
{
    arena *a = open_arena(self);
    mo_detail detail = {0};
    mo_status status;

    if (!a)
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = function(a->pool, a->id, &detail);
    Py_END_ALLOW_THREADS;
    if (status)
        return raise(self, status, &detail);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(pause_doc,
             "pause($self, /)\n--\n\n"
             "Takes the physical memory away, live blocks' too, and keeps the addresses. Waits for the\n"
             "device. The content is lost.");

static PyObject *arena_pause(PyObject *self, PyObject *unused)
{
    (void)unused;
    return call(self, mo_pool_pause);
}

PyDoc_STRVAR(resume_doc,
             "resume($self, /)\n--\n\nPuts memory of undefined content behind the same addresses.");

static PyObject *arena_resume(PyObject *self, PyObject *unused)
{
    (void)unused;
    return call(self, mo_pool_resume);
}

PyDoc_STRVAR(info_doc,
             "info($self, /)\n--\n\n"
             "held_bytes, free_bytes, live_bytes, live_blocks, requested_bytes, peak_bytes (of live_bytes)\n"
             "and paused, as a dict.");

static PyObject *arena_info(PyObject *self, PyObject *unused)
{
    arena *a = open_arena(self);
    mo_arena_info info;
    mo_detail detail = {0};
    mo_status status;

    (void)unused;
    if (!a)
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = mo_pool_arena_info(a->pool, a->id, &detail, &info);
    Py_END_ALLOW_THREADS;
    if (status)
        return raise(self, status, &detail);
    return Py_BuildValue("{s:n,s:n,s:n,s:n,s:n,s:n,s:N}", "held_bytes", (Py_ssize_t)info.held_bytes,
                         "free_bytes", (Py_ssize_t)info.free_bytes, "live_bytes", (Py_ssize_t)info.live_bytes,
                         "live_blocks", (Py_ssize_t)info.live_blocks, "requested_bytes",
                         (Py_ssize_t)info.requested_bytes, "peak_bytes", (Py_ssize_t)info.peak_bytes,
                         "paused", PyBool_FromLong(info.paused));
}

PyDoc_STRVAR(blocks_doc,
             "blocks($self, /)\n--\n\n"
             "The live blocks: (address, bytes asked for, serial), by ascending address in each zone.");

static bool is_mine(const arena *a, const mo_block_view *block)
{
    return block->state == MO_BLOCK_LIVE && block->arena.first == a->id.first &&
           block->arena.second == a->id.second;
}

static PyObject *arena_blocks(PyObject *self, PyObject *unused)
{
    arena *a = open_arena(self);
    mo_block_view *blocks = NULL;
    size_t count = 0;
    mo_detail detail = {0};
    mo_status status;
    PyObject *list;

    (void)unused;
    if (!a)
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = mo_pool_blocks(a->pool, &detail, &blocks, &count);
    Py_END_ALLOW_THREADS;
    if (status)
        return raise(self, status, &detail);
    list = PyList_New(0);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *one;

        if (!is_mine(a, &blocks[i]))
            continue;
        one = Py_BuildValue("KnK", (unsigned long long)blocks[i].address, (Py_ssize_t)blocks[i].requested,
                            (unsigned long long)blocks[i].serial);
        if (!one || PyList_Append(list, one) < 0)
            Py_CLEAR(list);
        Py_XDECREF(one);
    }
    mo_host_free(blocks);
    return list;
}

PyDoc_STRVAR(
    arena_doc,
    "Arena(device, budget=0, preallocate=0)\n--\n\n"
    "Memory of a device's pool that is kept apart: at most budget physical bytes (0: no limit), of which\n"
    "preallocate are held from the start. Raises memopt.Error.");

static PyMethodDef methods[] = {
    {"release", arena_release, METH_VARARGS, release_doc},
    {"route", arena_route, METH_VARARGS, route_doc},
    {"unroute", arena_unroute, METH_NOARGS, unroute_doc},
    {"segment_functions", arena_segment_functions, METH_NOARGS, segment_functions_doc},
    {"pause", arena_pause, METH_NOARGS, pause_doc},
    {"resume", arena_resume, METH_NOARGS, resume_doc},
    {"info", arena_info, METH_NOARGS, info_doc},
    {"blocks", arena_blocks, METH_NOARGS, blocks_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)arena_doc},
    {Py_tp_new, arena_new},
    {Py_tp_dealloc, arena_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "memopt._C.Arena",
    .basicsize = sizeof(arena),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int mo_py_pool_init(PyObject *module)
{
    return mo_py_add_type(module, &spec, NULL);
}
