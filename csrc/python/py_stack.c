#include "python/py_stack.h"

#include "alloc/trace_stacks.h"

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

static uint32_t frame_number(PyFrameObject *frame)
{
    PyObject *code = (PyObject *)PyFrame_GetCode(frame);
    const int line = PyFrame_GetLineNumber(frame);
    const uint32_t number = mo_trace_frame_number(
        text_number(code, "co_filename"), text_number(code, "co_name"), line > 0 ? (uint32_t)line : 0);

    Py_DECREF(code);
    return number;
}

/* The calling thread's stack, which may be in the midst of an exception. */
static uint32_t collect(void)
{
    uint32_t frames[MO_TRACE_MAX_FRAMES];
    size_t count = 0;
    PyObject *type, *value, *traceback;
    const PyGILState_STATE gil = PyGILState_Ensure();

    PyErr_Fetch(&type, &value, &traceback);
    PyObject *frame = (PyObject *)PyEval_GetFrame();
    Py_XINCREF(frame);
    while (frame && frame != Py_None && count < MO_TRACE_MAX_FRAMES) {
        frames[count++] = frame_number((PyFrameObject *)frame);
        PyObject *back = PyObject_GetAttrString(frame, "f_back");
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF(frame);
    PyErr_Restore(type, value, traceback);
    PyGILState_Release(gil);
    return mo_trace_stack_number(frames, count);
}

void mo_py_stack_stop(void)
{
    Py_BEGIN_ALLOW_THREADS;
    mo_trace_collect_by(NULL); /* waits for those that are collecting, who need the GIL */
    Py_END_ALLOW_THREADS;
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
    mo_trace_collect_by(collect);
    return 0;
}
