/* The births and deaths of torch's CPU memory, for the recorder of a CPU: one log at a time. */
#include "python/module.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

#include "alloc/torch_cpu.h"
#include "base/hostmem.h"
#include "python/py_code_stacks.h"
#include "python/py_module_calls.h"

enum { DEPTH = 64 }; /* frames of a stack */

static mo_life_log *opened;    /* from start to stop; with the GIL, and the watch's lock for what is in it */
static mo_code_stacks *stacks; /* with the GIL */
static atomic_bool noting_stacks;

/* A thread that Python does not know has no stack, and must not wait for the GIL: who holds it may wait for the thread. */
static void where(int64_t *stack, int64_t *module)
{
    *module = mo_py_module_running();
    if (!atomic_load(&noting_stacks) || !PyGILState_GetThisThreadState())
        return;
    const PyGILState_STATE gil = PyGILState_Ensure();
    if (stacks)
        *stack = mo_code_stacks_here(stacks);
    PyGILState_Release(gil);
}

static pid_t
    owner; /* the process that opened the log: in its child another thread may have been at it for ever */
static long watch;  /* of the watch that goes on, or was the last */
static bool yields; /* to any other that begins */

static void drop(void)
{
    if (owner == getpid())
        mo_life_close(opened);
    opened = NULL;
    mo_code_stacks_close(stacks);
    stacks = NULL;
}

PyDoc_STRVAR(
    start_doc,
    "cpu_log_start($module, max_events, yielding=False, /)\n--\n\n"
    "From now on torch's CPU allocator is watched, and its last max_events births and deaths are kept.\n"
    "yielding: until another watch begins. Returns this watch's number.\n"
    "Raises memopt.Error where torch's allocator is not as it is known, RuntimeError where it is watched "
    "already.");

static PyObject *cpu_log_start(PyObject *module, PyObject *args)
{
    Py_ssize_t capacity;
    int yielding = 0;
    mo_torch_cpu torch;
    mo_detail detail;
    mo_status status;

    if (!PyArg_ParseTuple(args, "n|p:cpu_log_start", &capacity, &yielding))
        return NULL;
    if (capacity < 0)
        return PyErr_Format(PyExc_ValueError, "cpu_log_start: max_events is %zd, but cannot be negative",
                            capacity);
    if (mo_torch_cpu_watched()) {
        if (!yields || yielding)
            return PyErr_Format(PyExc_RuntimeError, "torch's CPU allocator is already being watched");
        mo_torch_cpu_stop();
    }
    drop(); /* also of the parent of a fork */
    owner = getpid();
    status = mo_torch_cpu_find(&torch, &detail);
    if (!status)
        status = mo_life_open((size_t)capacity, &detail, &opened);
    if (status)
        return mo_raise(module, status, &detail);
    stacks = mo_code_stacks_open(DEPTH);
    if (!stacks) {
        drop();
        return NULL;
    }
    atomic_store(&noting_stacks, true);
    status = mo_torch_cpu_watch(&torch, opened, where, &detail);
    if (status) {
        drop();
        return mo_raise(module, status, &detail);
    }
    yields = yielding;
    return PyLong_FromLong(++watch);
}

PyDoc_STRVAR(stop_doc,
             "cpu_log_stop($module, number, /)\n--\n\n"
             "If the watch of this number still goes on, it ends, and what was noted is gone. Returns\n"
             "whether it did.");

static PyObject *cpu_log_stop(PyObject *module, PyObject *which)
{
    const long asked = PyLong_AsLong(which);
    bool goes_on;

    (void)module;
    if (asked == -1 && PyErr_Occurred())
        return NULL;
    goes_on = asked == watch && mo_torch_cpu_watched();
    if (goes_on) {
        mo_torch_cpu_stop();
        drop();
    }
    return PyBool_FromLong(goes_on);
}

PyDoc_STRVAR(no_stacks_doc, "cpu_log_no_stacks($module, /)\n--\n\n"
                            "Stacks are no longer noted: the interpreter is about to finalise.");

static PyObject *cpu_log_no_stacks(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    atomic_store(&noting_stacks, false);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(pause_doc, "cpu_log_pause($module, /)\n--\n\nWhat this thread asks for is not noted, until\n"
                        "cpu_log_resume(). They nest.");

static PyObject *cpu_log_pause(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    mo_torch_cpu_pause();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(resume_doc, "cpu_log_resume($module, /)\n--\n\nEnds the last cpu_log_pause() of this thread.");

static PyObject *cpu_log_resume(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    mo_torch_cpu_resume();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    born_doc,
    "cpu_log_born($module, address, size, before, /)\n--\n\n"
    "Notes memory that torch's allocator has not given; before: that was there before the log began, which\n"
    "has no events yet. The serial number of the block, 0 where it is not noted.");

static PyObject *cpu_log_born(PyObject *module, PyObject *args)
{
    long long address, size, serial = 0;
    int before;
    mo_life_log *log;

    (void)module;
    if (!PyArg_ParseTuple(args, "LLp:cpu_log_born", &address, &size, &before))
        return NULL;
    log = mo_torch_cpu_lock_log();
    if (log) {
        serial = before ? mo_life_adopt(log, address, size) : mo_life_born(log, address, size, 0, 0);
        mo_torch_cpu_unlock_log();
    }
    return PyLong_FromLongLong(serial);
}

PyDoc_STRVAR(died_doc, "cpu_log_died($module, address, serial, reference=None, /)\n--\n\n"
                       "The block with this serial number is dead, unless it is already.\n"
                       "reference: not looked at: a weak reference calls with itself.");

static PyObject *cpu_log_died(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    long long address, serial;
    mo_life_log *log;

    (void)module;
    if (count < 2)
        return PyErr_Format(PyExc_TypeError, "cpu_log_died: an address and a serial number are needed");
    address = PyLong_AsLongLong(args[0]);
    serial = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    log = serial ? mo_torch_cpu_lock_log() : NULL;
    if (log) {
        mo_life_died(log, address, serial);
        mo_torch_cpu_unlock_log();
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(size_doc, "cpu_log_size($module, address, /)\n--\n\n"
                       "Bytes of the block that lives at an address, 0 for none that is known.");

static PyObject *cpu_log_size(PyObject *module, PyObject *number)
{
    const long long address = PyLong_AsLongLong(number);
    mo_life_log *log;
    int64_t size = 0;

    (void)module;
    if (address == -1 && PyErr_Occurred())
        return NULL;
    log = mo_torch_cpu_lock_log();
    if (log) {
        size = mo_life_size(log, address);
        mo_torch_cpu_unlock_log();
    }
    return PyLong_FromLongLong(size);
}

PyDoc_STRVAR(position_doc, "cpu_log_position($module, /)\n--\n\nBirths and deaths so far.");

static PyObject *cpu_log_position(PyObject *module, PyObject *unused)
{
    mo_life_log *log = mo_torch_cpu_lock_log();
    int64_t written = 0;

    (void)module;
    (void)unused;
    if (log) {
        written = mo_life_written(log);
        mo_torch_cpu_unlock_log();
    }
    return PyLong_FromLongLong(written);
}

PyDoc_STRVAR(live_doc,
             "cpu_log_live($module, reset_peak, /)\n--\n\n"
             "(bytes that live, the most that did since the peak was last reset); then, if asked to, resets\n"
             "it. Zeros where nobody watches.");

static PyObject *cpu_log_live(PyObject *module, PyObject *reset_peak)
{
    const int reset = PyObject_IsTrue(reset_peak);
    int64_t live = 0, peak = 0;
    mo_life_log *log;

    (void)module;
    if (reset < 0)
        return NULL;
    log = mo_torch_cpu_lock_log();
    if (log) {
        live = mo_life_live(log);
        peak = mo_life_peak(log);
        if (reset)
            mo_life_reset_peak(log);
        mo_torch_cpu_unlock_log();
    }
    return Py_BuildValue("LL", (long long)live, (long long)peak);
}

PyDoc_STRVAR(
    read_doc,
    "cpu_log_read($module, /)\n--\n\n"
    "(the position of the first event that is kept, those events, the blocks from before it): as bytearrays\n"
    "of int64, of an event (birth, address, size, time in us, stack, module), of a block (address, size,\n"
    "stack, module, serial).");

static PyObject *cpu_log_read(PyObject *module, PyObject *unused)
{
    mo_life_log *log = mo_torch_cpu_lock_log();
    mo_life_event *events = NULL;
    mo_life_block *before = NULL;
    size_t kept = 0, blocks = 0;
    int64_t first = 0;
    PyObject *answer = NULL;

    (void)module;
    (void)unused;
    if (!log)
        return PyErr_Format(PyExc_RuntimeError, "torch's CPU allocator is not being watched");
    kept = mo_life_kept(log);
    blocks = mo_life_before_count(log);
    first = mo_life_written(log) - (int64_t)kept;
    events = mo_host_alloc(kept * sizeof *events);
    before = mo_host_alloc(blocks * sizeof *before);
    if (events && before) {
        mo_life_events(log, events);
        mo_life_before(log, before);
    }
    mo_torch_cpu_unlock_log();
    if (events && before)
        answer = Py_BuildValue(
            "LNN", (long long)first,
            PyByteArray_FromStringAndSize((const char *)events, (Py_ssize_t)(kept * sizeof *events)),
            PyByteArray_FromStringAndSize((const char *)before, (Py_ssize_t)(blocks * sizeof *before)));
    else
        PyErr_NoMemory();
    mo_host_free(events);
    mo_host_free(before);
    return answer;
}

PyDoc_STRVAR(stacks_doc,
             "cpu_log_stacks($module, first, /)\n--\n\n"
             "The stacks from that number on, 1 being the first: each a tuple (code, line, code, line,\n"
             "...), the innermost first.");

static PyObject *cpu_log_stacks(PyObject *module, PyObject *first)
{
    const size_t from = PyLong_AsSize_t(first);

    (void)module;
    if (from == (size_t)-1 && PyErr_Occurred())
        return NULL;
    return stacks && from ? mo_code_stacks_list(stacks, from) : PyList_New(0);
}

static PyMethodDef methods[] = {
    {"cpu_log_start", cpu_log_start, METH_VARARGS, start_doc},
    {"cpu_log_stop", cpu_log_stop, METH_O, stop_doc},
    {"cpu_log_no_stacks", cpu_log_no_stacks, METH_NOARGS, no_stacks_doc},
    {"cpu_log_pause", cpu_log_pause, METH_NOARGS, pause_doc},
    {"cpu_log_resume", cpu_log_resume, METH_NOARGS, resume_doc},
    {"cpu_log_born", cpu_log_born, METH_VARARGS, born_doc},
    {"cpu_log_died", (PyCFunction)(void (*)(void))cpu_log_died, METH_FASTCALL, died_doc},
    {"cpu_log_size", cpu_log_size, METH_O, size_doc},
    {"cpu_log_position", cpu_log_position, METH_NOARGS, position_doc},
    {"cpu_log_live", cpu_log_live, METH_O, live_doc},
    {"cpu_log_read", cpu_log_read, METH_NOARGS, read_doc},
    {"cpu_log_stacks", cpu_log_stacks, METH_O, stacks_doc},
    {NULL, NULL, 0, NULL},
};

int mo_py_cpu_log_init(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
