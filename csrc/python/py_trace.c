#include "python/module.h"

#include <stdbool.h>
#include <string.h>

#include "alloc/pool.h"
#include "alloc/replay.h"
#include "alloc/trace_export.h"
#include "alloc/trace_ring.h"
#include "alloc/trace_stacks.h"
#include "base/hostmem.h"
#include "base/lock.h"
#include "python/py_stack.h"

/* ---- replay ---------------------------------------------------------------------------------------------------- */

/* A list of one counter of every step; NULL with an exception. */
static PyObject *steps_of(const mo_replay_result *result, size_t offset)
{
    PyObject *list = PyList_New(result->step_count);

    for (uint32_t i = 0; list && i < result->step_count; i++) {
        uint64_t value;
        memcpy(&value, (const char *)&result->steps[i] + offset, sizeof value);
        PyObject *number = PyLong_FromUnsignedLongLong(value);
        if (!number || PyList_SetItem(list, i, number) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *result_as_dict(const mo_replay_result *r)
{
    const uint64_t operations = r->operations ? r->operations : 1;
    const uint64_t last_calls = r->step_count ? r->steps[r->step_count - 1].driver_calls : 0;

    return Py_BuildValue(
        "{s:O,s:I,s:s,s:n,s:n,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:d,s:K,s:K,s:K,s:N,s:N,s:N,s:N,s:N}", /* */
        "completed", r->completed ? Py_True : Py_False,                                          /* */
        "failed_line", r->failed_line,                                                           /* */
        "failure", r->failure,                                                                   /* */
        "live_peak", (Py_ssize_t)r->live_peak,                                                   /* */
        "peak_reserved", (Py_ssize_t)r->peak_reserved,                                           /* */
        "stitches", (unsigned long long)r->total.stitches,                                       /* */
        "granules_moved", (unsigned long long)r->total.granules_moved,                           /* */
        "granules_switched", (unsigned long long)r->total.granules_switched,                     /* */
        "driver_calls", (unsigned long long)r->total.driver_calls,                               /* */
        "driver_calls_last_step", (unsigned long long)last_calls,                                /* */
        "host_waits", (unsigned long long)r->total.host_waits,                                   /* */
        "operations", (unsigned long long)r->operations,                                         /* */
        "ns_per_op", (double)r->nanoseconds / (double)operations,                                /* */
        "request_ns_p50", (unsigned long long)r->request.p50,                                    /* */
        "request_ns_p99", (unsigned long long)r->request.p99,                                    /* */
        "request_ns_max", (unsigned long long)r->request.max,                                    /* */
        "driver_calls_per_step", steps_of(r, offsetof(mo_replay_step, driver_calls)),            /* */
        "granules_moved_per_step", steps_of(r, offsetof(mo_replay_step, granules_moved)),        /* */
        "granules_switched_per_step", steps_of(r, offsetof(mo_replay_step, granules_switched)),  /* */
        "host_waits_per_step", steps_of(r, offsetof(mo_replay_step, host_waits)),                /* */
        "held_per_step", steps_of(r, offsetof(mo_replay_step, held)));
}

PyDoc_STRVAR(
    replay_doc,
    "replay($module, trace, memory, slack, small_limit, double_map, recall, lazy, check, device, frontier, "
    "/)\n--\n\n"
    "Runs a trace (bytes, in the plain form) through the allocator on a device of numbers.\n\n"
    "memory: bytes of the device, 0 for no limit; slack: thousandths; device: -1 for the only one.\n"
    "frontier: search the smallest memory that completes, instead of one run with `memory`.\n"
    "Returns a dict of the run (with frontier: the run there, and 'frontier'); 'completed' is False where\n"
    "the memory was not enough. Raises ValueError for what is no trace, naming the line.");

typedef struct replay_call {
    const char *text;
    size_t length;
    mo_replay_options options;
    int device;
    bool search;
    size_t frontier;
    mo_replay_result result;
    mo_detail detail;
} replay_call;

/* Without the GIL. */
static mo_status run_replay(replay_call *call)
{
    mo_trace_text trace;
    mo_status status = mo_trace_text_parse(call->text, call->length, &call->detail, &trace);

    if (status)
        return status;
    if (call->device < 0)
        status = mo_replay_device(&trace, &call->detail, &call->options.device);
    else
        call->options.device = (uint32_t)call->device;
    if (!status && call->search)
        status = mo_replay_frontier(&trace, &call->options, &call->detail, &call->frontier, &call->result);
    else if (!status)
        status = mo_replay_run(&trace, &call->options, &call->detail, &call->result);
    mo_trace_text_clear(&trace);
    return status;
}

static PyObject *replay(PyObject *module, PyObject *args)
{
    replay_call call = {.options = mo_replay_defaults()};
    Py_ssize_t length, memory, slack, small_limit;
    int double_map, recall, lazy, check, search;
    PyObject *dict, *frontier;
    mo_status status;

    if (!PyArg_ParseTuple(args, "y#nnnppppip:replay", &call.text, &length, &memory, &slack, &small_limit,
                          &double_map, &recall, &lazy, &check, &call.device, &search))
        return NULL;
    if (memory < 0 || slack < 0 || small_limit < 0)
        return PyErr_Format(PyExc_ValueError, "replay: memory, slack and small_limit must be 0 or more");
    call.length = (size_t)length;
    call.options.memory = (size_t)memory;
    call.options.slack = (size_t)slack;
    call.options.small_limit = (size_t)small_limit;
    call.options.double_map = double_map;
    call.options.recall = recall;
    call.options.lazy = lazy;
    call.options.check = check;
    call.search = search;
    Py_BEGIN_ALLOW_THREADS;
    status = run_replay(&call);
    Py_END_ALLOW_THREADS;
    if (status)
        return mo_raise(module, status, &call.detail);
    dict = result_as_dict(&call.result);
    mo_replay_clear(&call.result);
    if (dict && search) {
        frontier = PyLong_FromSize_t(call.frontier);
        if (!frontier || PyDict_SetItemString(dict, "frontier", frontier) < 0)
            Py_CLEAR(dict);
        Py_XDECREF(frontier);
    }
    return dict;
}

/* ---- the rings of the process's pools ---------------------------------------------------------------------------- */

/* A device's ring, once it has one: written by its pool, read here. The lock is above the pools' and is held by whoever
 * reads a ring or replaces one, never with the GIL. */
static mo_lock rings_lock = MO_LOCK_INIT;
static struct {
    mo_trace *ring;
    bool on;
} rings[MO_MAX_DEVICES];

static bool is_device(int device)
{
    if (device >= 0 && device < MO_MAX_DEVICES)
        return true;
    PyErr_Format(PyExc_ValueError, "device %d: expected a device number from 0 to %d", device,
                 MO_MAX_DEVICES - 1);
    return false;
}

#define ALL (-1)                 /* every device in use, and each that will be */
static size_t capacity_of_later; /* 0: those are not traced; under rings_lock */

/* With rings_lock. A ring of another capacity than before takes the old one's place, whose events are gone. */
static mo_status begin(int device, mo_pool *pool, size_t capacity, bool clear, mo_detail *detail)
{
    mo_trace *fresh = NULL;
    mo_status status = MO_OK;

    mo_trace *old = rings[device].ring;
    if (!old || mo_trace_capacity(old) != capacity)
        status = mo_trace_open(capacity, detail, &fresh);
    if (!status) {
        if (clear && !fresh)
            mo_trace_clear(old);
        rings[device].ring = fresh ? fresh : old;
        rings[device].on = true;
        mo_pool_trace(pool, rings[device].ring);
        if (fresh)
            mo_trace_close(old); /* the pool has let go of it, under its lock */
    }
    return status;
}

/* A pool that is being opened; where there is no host memory for a ring it is not traced. */
static void begin_later(int device, mo_pool *pool)
{
    mo_lock_take(&rings_lock);
    if (capacity_of_later)
        begin(device, pool, capacity_of_later, false, NULL);
    mo_lock_give(&rings_lock);
}

/* Without the GIL. */
static mo_status start(int device, size_t capacity, bool clear, mo_detail *detail)
{
    mo_pool *pool = NULL;
    mo_status status = MO_OK;

    if (device != ALL)
        status = mo_pool_of_device(device, &pool, detail);
    else if (!capacity || capacity > MO_TRACE_MAX_CAPACITY)
        status = mo_fail(detail, MO_INVALID, 0, "a trace of %zu events: expected 1 to %zu", capacity,
                         MO_TRACE_MAX_CAPACITY);
    else
        mo_pool_on_open(begin_later);
    if (status)
        return status;
    mo_lock_take(&rings_lock);
    for (int i = 0; device == ALL && i < MO_MAX_DEVICES && !status; i++) {
        pool = mo_pool_if_open(i);
        if (pool)
            status = begin(i, pool, capacity, clear, detail);
    }
    if (device == ALL && !status)
        capacity_of_later = capacity;
    if (device != ALL)
        status = begin(device, pool, capacity, clear, detail);
    mo_lock_give(&rings_lock);
    return status;
}

/* Without the GIL. Whether a device is still traced. */
static bool stop(int device)
{
    bool any = false;

    mo_lock_take(&rings_lock);
    if (device == ALL)
        capacity_of_later = 0;
    for (int i = 0; i < MO_MAX_DEVICES; i++) {
        if (rings[i].on && (device == ALL || i == device)) {
            mo_pool_trace(mo_pool_if_open(i), NULL);
            rings[i].on = false;
        }
        any |= rings[i].on;
    }
    any |= capacity_of_later > 0;
    mo_lock_give(&rings_lock);
    return any;
}

PyDoc_STRVAR(
    trace_start_doc,
    "trace_start($module, device, capacity, stacks, clear, /)\n--\n\n"
    "From now on the last `capacity` events of the device's allocator are kept. device -1: of each device\n"
    "that is in use, and will be.\n\n"
    "stacks: requests note the Python stack they come from (for all devices; takes the GIL at every one).\n"
    "clear: forget what was kept so far.\n"
    "Raises memopt.Error without that device, ValueError for a capacity that makes no sense.");

static PyObject *trace_start(PyObject *module, PyObject *args)
{
    int device, stacks, clear;
    Py_ssize_t capacity;
    mo_detail detail;
    mo_status status;

    if (!PyArg_ParseTuple(args, "inpp:trace_start", &device, &capacity, &stacks, &clear) ||
        (device != ALL && !is_device(device)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = start(device, capacity < 0 ? 0 : (size_t)capacity, clear, &detail);
    Py_END_ALLOW_THREADS;
    if (status)
        return mo_raise(module, status, &detail);
    if (!stacks)
        mo_py_stack_stop();
    else if (mo_py_stack_collect() < 0)
        return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(trace_stop_doc, "trace_stop($module, device, /)\n--\n\n"
                             "Ends what trace_start began, on all devices with -1; what was kept can still "
                             "be read. No error where nothing\n"
                             "was begun. Stacks are no longer noted once no device is traced.");

static PyObject *trace_stop(PyObject *module, PyObject *args)
{
    bool any;
    int device;

    (void)module;
    if (!PyArg_ParseTuple(args, "i:trace_stop", &device) || (device != ALL && !is_device(device)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    any = stop(device);
    Py_END_ALLOW_THREADS;
    if (!any)
        mo_py_stack_stop();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    trace_state_doc,
    "trace_state($module, device, /)\n--\n\n"
    "(on, capacity, written, lost): whether the device is traced, how many events are kept at most, how\n"
    "many there were, and how many of them found no host memory.");

static PyObject *trace_state(PyObject *module, PyObject *args)
{
    unsigned long long capacity = 0, written = 0, lost = 0;
    bool on;
    int device;

    (void)module;
    if (!PyArg_ParseTuple(args, "i:trace_state", &device) || !is_device(device))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    mo_lock_take(&rings_lock);
    const mo_trace *ring = rings[device].ring;
    on = rings[device].on;
    if (ring) {
        capacity = mo_trace_capacity(ring);
        written = mo_trace_written(ring);
        lost = mo_trace_lost(ring);
    }
    mo_lock_give(&rings_lock);
    Py_END_ALLOW_THREADS;
    return Py_BuildValue("OKKK", on ? Py_True : Py_False, capacity, written, lost);
}

/* All that a device's ring keeps, for mo_host_free(). Without the GIL. */
static mo_status read_ring(int device, mo_detail *detail, mo_trace_record **out, size_t *count)
{
    mo_status status = MO_OK;
    uint64_t first;

    *out = NULL;
    *count = 0;
    mo_lock_take(&rings_lock);
    const mo_trace *ring = rings[device].ring;
    const uint64_t written = ring ? mo_trace_written(ring) : 0;
    const size_t capacity = ring ? mo_trace_capacity(ring) : 0,
                 room = written < capacity ? written : capacity;
    if (room) {
        *out = mo_host_calloc(room, sizeof **out);
        if (*out)
            *count = mo_trace_read(ring, written - room, *out, room, &first);
        else
            status = mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory to read %zu events", room);
    }
    mo_lock_give(&rings_lock);
    return status;
}

static PyObject *record_as_tuple(const mo_trace_record *r)
{
    static const char *const names[] = {
        [MO_TRACE_ALLOC] = "alloc", [MO_TRACE_FREE] = "free", [MO_TRACE_RECORD_STREAM] = "record_stream",
        [MO_TRACE_WAIT] = "wait",   [MO_TRACE_STEP] = "step", [MO_TRACE_MAP] = "map",
        [MO_TRACE_UNMAP] = "unmap", [MO_TRACE_OOM] = "oom",
    };

    return Py_BuildValue("(sKKKKK(KK)I)", names[r->op], (unsigned long long)r->time,
                         (unsigned long long)r->serial, (unsigned long long)r->address,
                         (unsigned long long)r->size, (unsigned long long)(uintptr_t)r->stream,
                         r->arena.first, r->arena.second, r->stack);
}

PyDoc_STRVAR(
    trace_read_doc,
    "trace_read($module, device, /)\n--\n\n"
    "The events that are kept of a device, in order, each a tuple (what, nanoseconds since 1970, serial,\n"
    "address, bytes, stream, (arena, arena), stack). what: 'alloc', 'free', 'record_stream', 'wait' (stream\n"
    "waits for the stream in `address`), 'step', 'map', 'unmap', 'oom'. stack: for trace_stack, or 0.");

static PyObject *trace_read(PyObject *module, PyObject *args)
{
    mo_trace_record *records;
    PyObject *list;
    size_t count;
    mo_detail detail;
    mo_status status;
    int device;

    if (!PyArg_ParseTuple(args, "i:trace_read", &device) || !is_device(device))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = read_ring(device, &detail, &records, &count);
    Py_END_ALLOW_THREADS;
    if (status)
        return mo_raise(module, status, &detail);
    list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *tuple = record_as_tuple(&records[i]);
        if (!tuple || PyList_SetItem(list, (Py_ssize_t)i, tuple) < 0)
            Py_CLEAR(list);
    }
    mo_host_free(records);
    return list;
}

PyDoc_STRVAR(trace_stack_doc,
             "trace_stack($module, stack, /)\n--\n\n"
             "The frames of a stack of trace_read, innermost first, as tuples (file, function, line).");

static PyObject *trace_stack(PyObject *module, PyObject *args)
{
    mo_trace_frame frames[MO_TRACE_MAX_FRAMES];
    unsigned int stack;

    (void)module;
    if (!PyArg_ParseTuple(args, "I:trace_stack", &stack))
        return NULL;
    const size_t count = mo_trace_stack_frames(stack, frames);
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *file = PyUnicode_DecodeUTF8(frames[i].file, (Py_ssize_t)strlen(frames[i].file), "replace");
        PyObject *name =
            PyUnicode_DecodeUTF8(frames[i].function, (Py_ssize_t)strlen(frames[i].function), "replace");
        PyObject *tuple = file && name ? Py_BuildValue("OOI", file, name, frames[i].line) : NULL;
        Py_XDECREF(file);
        Py_XDECREF(name);
        if (!tuple || PyList_SetItem(list, (Py_ssize_t)i, tuple) < 0)
            Py_CLEAR(list);
    }
    return list;
}

PyDoc_STRVAR(
    trace_text_doc,
    "trace_text($module, device, /)\n--\n\n"
    "What is kept of a device's requests, frees, record_streams and steps, in the plain form that replay\n"
    "reads, as bytes. Blocks that were there before begin it.");

/* The blocks first, then the records: see trace_export.h. Without the GIL. */
static mo_status write_trace(int device, mo_detail *detail, char **text, size_t *length)
{
    mo_trace_record *records = NULL;
    mo_block_view *live = NULL;
    size_t count = 0, live_count = 0;
    mo_trace_text trace = {0};
    mo_pool *pool;
    mo_status status = mo_pool_of_device(device, &pool, detail);

    if (!status)
        status = mo_pool_blocks(pool, detail, &live, &live_count);
    if (!status)
        status = read_ring(device, detail, &records, &count);
    if (!status)
        status = mo_trace_export(records, count, live, live_count, detail, &trace);
    if (!status)
        status = mo_trace_text_write(&trace, detail, text, length);
    mo_trace_text_clear(&trace);
    mo_host_free(records);
    mo_host_free(live);
    return status;
}

static PyObject *trace_text(PyObject *module, PyObject *args)
{
    char *text;
    size_t length;
    mo_detail detail;
    mo_status status;
    int device;

    if (!PyArg_ParseTuple(args, "i:trace_text", &device) || !is_device(device))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = write_trace(device, &detail, &text, &length);
    Py_END_ALLOW_THREADS;
    if (status)
        return mo_raise(module, status, &detail);
    PyObject *bytes = PyBytes_FromStringAndSize(text, (Py_ssize_t)length);
    mo_host_free(text);
    return bytes;
}

PyDoc_STRVAR(trace_step_doc, "trace_step($module, /)\n--\n\n"
                             "Notes the end of a step in the trace of every device that is traced.");

static PyObject *trace_step(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    Py_BEGIN_ALLOW_THREADS;
    mo_lock_take(&rings_lock);
    for (int device = 0; device < MO_MAX_DEVICES; device++) {
        mo_pool *pool;
        if (rings[device].on && mo_pool_of_device(device, &pool, NULL) == MO_OK)
            mo_pool_step(pool);
    }
    mo_lock_give(&rings_lock);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"replay", replay, METH_VARARGS, replay_doc},
    {"trace_start", trace_start, METH_VARARGS, trace_start_doc},
    {"trace_stop", trace_stop, METH_VARARGS, trace_stop_doc},
    {"trace_state", trace_state, METH_VARARGS, trace_state_doc},
    {"trace_read", trace_read, METH_VARARGS, trace_read_doc},
    {"trace_stack", trace_stack, METH_VARARGS, trace_stack_doc},
    {"trace_text", trace_text, METH_VARARGS, trace_text_doc},
    {"trace_step", trace_step, METH_NOARGS, trace_step_doc},
    {NULL, NULL, 0, NULL},
};

int mo_py_trace_init(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
