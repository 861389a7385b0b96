#include "python/py_stack.h"

#include <stdbool.h>
#include <string.h>

#include "alloc/trace_stacks.h"
#include "base/hostmem.h"
#include "python/py_code_stacks.h"

/* A text's number by its UTF-8, 0 for what has none. */
static uint32_t text_number(PyObject *object, const char *attribute)
{
    PyObject *text = PyObject_GetAttrString(object, attribute);
    Py_ssize_t length;
    const char *bytes = text ? PyUnicode_AsUTF8AndSize(text, &length) : NULL;
    const uint32_t number = bytes ? mo_trace_text_number(bytes, (size_t)length) : 0;

    PyErr_Clear();
    Py_XDECREF(text);
    return number;
}

static uint32_t frame_number(PyObject *code, int line)
{
    return mo_trace_frame_number(text_number(code, "co_filename"), text_number(code, "co_name"),
                                 line > 0 ? (uint32_t)line : 0);
}

/* ---- stacks, as code and as text ------------------------------------------------------------------------------ */

/* With the GIL. The texts of a stack are asked for once: numbers[n] is the trace's number of stack n of `known`, 0 where
 * that was not asked for yet. */
static mo_code_stacks *known;
static uint32_t *numbers;
static size_t room;
static bool wanted; /* somebody has begun since who did not end */

static bool make_room(uint32_t stack)
{
    size_t larger = room ? room : 256;
    uint32_t *fresh;

    if (stack < room)
        return true;
    while (larger <= stack)
        larger *= 2;
    fresh = mo_host_realloc(numbers, larger * sizeof *fresh);
    if (!fresh)
        return false;
    memset(fresh + room, 0, (larger - room) * sizeof *fresh);
    numbers = fresh;
    room = larger;
    return true;
}

/* Of a stack that was not seen before; an exception that is under way stays. */
static uint32_t trace_number(uint32_t stack)
{
    uint32_t frames[MO_TRACE_MAX_FRAMES];
    PyObject *type, *value, *traceback, *code;
    size_t count = 0;
    int line;

    PyErr_Fetch(&type, &value, &traceback);
    while (count < MO_TRACE_MAX_FRAMES && mo_code_stacks_frame(known, stack, count, &code, &line))
        frames[count++] = frame_number(code, line);
    PyErr_Restore(type, value, traceback);
    return mo_trace_stack_number(frames, count);
}

/* The calling thread's stack. */
static uint32_t collect(void)
{
    const PyGILState_STATE gil = PyGILState_Ensure();
    const uint32_t stack = known ? mo_code_stacks_here(known) : 0;
    uint32_t number = 0;

    if (stack && make_room(stack)) {
        number = numbers[stack];
        if (!number)
            number = numbers[stack] = trace_number(stack);
    }
    PyGILState_Release(gil);
    return number;
}

static void forget(void)
{
    mo_code_stacks_close(known);
    mo_host_free(numbers);
    known = NULL;
    numbers = NULL;
    room = 0;
}

void mo_py_stack_stop(void)
{
    wanted = false;
    Py_BEGIN_ALLOW_THREADS;
    mo_trace_collect_by(NULL); /* waits for those that are collecting, who need the GIL */
    Py_END_ALLOW_THREADS;
    if (!wanted)
        forget();
}

static PyObject *stop_at_exit(PyObject *unused, PyObject *arguments)
{
    (void)unused;
    (void)arguments;
    mo_py_stack_stop();
    Py_RETURN_NONE;
}

static PyMethodDef at_exit = {"_trace_stop_stacks", stop_at_exit, METH_NOARGS,
                              "Stacks are no longer noted: the interpreter is about to finalise."};

/* Once, however often it is asked for: two functions of the same definition are equal, and atexit takes off the equal
 * ones. Bound to no module, which it would keep alive. */
static int stop_before_the_end(void)
{
    PyObject *atexit = PyImport_ImportModule("atexit");
    PyObject *call = atexit ? PyCFunction_New(&at_exit, NULL) : NULL;
    PyObject *off = call ? PyObject_CallMethod(atexit, "unregister", "O", call) : NULL;
    PyObject *on = off ? PyObject_CallMethod(atexit, "register", "O", call) : NULL;
    const int failed = !on;

    Py_XDECREF(atexit);
    Py_XDECREF(call);
    Py_XDECREF(off);
    Py_XDECREF(on);
    return failed ? -1 : 0;
}

int mo_py_stack_collect(void)
{
    if (stop_before_the_end() < 0)
        return -1;
    if (!known && !(known = mo_code_stacks_open(MO_TRACE_MAX_FRAMES)))
        return -1;
    wanted = true;
    mo_trace_collect_by(collect);
    return 0;
}
