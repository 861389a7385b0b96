/* Which module's forward pass a thread runs, learned where torch runs them all: while it is noted, the vectorcall of the
 * function nn.Module._call_impl is ours, which costs a call some 0.1 us. (torch's own global hooks send every call the
 * long way, some 8 us, and torch.compile traces them.) The function is the same object with the same code and attributes: what
 * compares, keeps, replaces or traces it sees nothing. PEP 590 allows it, and CPython 3.12 has a call for it.
 *
 *     running of a thread = the index of the innermost module that it has entered and not left
 *
 * The running index goes back to what it was as the C stack does: also where an exception passes. */
#include "python/py_module_calls.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <string.h>
#include <time.h>

#include "base/hostmem.h"

/* The limited API has these from 3.12 on; 3.11 has them too, so they are looked up. */
#if Py_LIMITED_API + 0 < 0x030C0000
typedef PyObject *(*vectorcallfunc)(PyObject *callable, PyObject *const *args, size_t flagged_count,
                                    PyObject *names);
#endif
static vectorcallfunc vectorcall;                   /* PyObject_Vectorcall */
static vectorcallfunc (*vectorcall_of)(PyObject *); /* PyVectorcall_Function */
#define COUNT_OF(flagged_count) ((size_t)(flagged_count) & ~((size_t)1 << (8 * sizeof(size_t) - 1)))

typedef struct known_module {
    PyObject *module; /* borrowed: forget() comes before it is gone; NULL: empty */
    uint32_t index;
} known_module;

typedef struct moment {
    int64_t time; /* microseconds since 1970 */
    int64_t index;
} moment;

typedef struct module_calls {
    PyObject_HEAD PyObject *function; /* nn.Module._call_impl */
    PyObject *enter, *leave;          /* (module, outermost) -> index; (module, args, kwargs) */
    PyObject *set_eval_frame;         /* torch.compile's: a callback or None -> the one before */
    PyObject *told;                   /* hears which one runs, whenever it is another; or NULL */
    PyObject *arguments;              /* a list of what `told` is given, by index */
    known_module *known;              /* open addressing, at most half full */
    size_t capacity, count;
    moment *moments; /* a ring: when another one ran; NULL: not asked for */
    size_t most, noted;
} module_calls;

static module_calls *active; /* held; NULL: nothing is noted */
static vectorcallfunc plain; /* of every function written in Python */

/* One session follows another: an index that the last one has left is none. */
static uint32_t sessions;
static _Thread_local struct {
    uint32_t session, index;
} running;

uint32_t mo_py_module_running(void)
{
    return running.session == sessions ? running.index : 0;
}

/* ---- the table of modules --------------------------------------------------------------------------------- */

static size_t home(const module_calls *m, const PyObject *module)
{
    return (size_t)(((uint64_t)(uintptr_t)module * 0x9E3779B97F4A7C15u) >> 32) & (m->capacity - 1);
}

static known_module *place_of(const module_calls *m, const PyObject *module)
{
    size_t i = home(m, module);

    while (m->known[i].module && m->known[i].module != module)
        i = (i + 1) & (m->capacity - 1);
    return &m->known[i];
}

static int make_room(module_calls *m)
{
    module_calls larger = {.capacity = m->capacity ? 2 * m->capacity : 256};

    if (m->capacity && 2 * (m->count + 1) <= m->capacity)
        return 0;
    larger.known = mo_host_calloc(larger.capacity, sizeof *larger.known);
    if (!larger.known)
        return PyErr_NoMemory(), -1;
    for (size_t i = 0; i < m->capacity; i++)
        if (m->known[i].module)
            *place_of(&larger, m->known[i].module) = m->known[i];
    mo_host_free(m->known);
    m->known = larger.known;
    m->capacity = larger.capacity;
    return 0;
}

PyDoc_STRVAR(know_doc,
             "know($self, module, index, /)\n--\n\n"
             "The module's index from now on. It is not kept alive: forget() it before it is gone.");

static PyObject *know(PyObject *self, PyObject *args)
{
    module_calls *m = (module_calls *)self;
    PyObject *module;
    unsigned int index;
    known_module *place;

    if (!PyArg_ParseTuple(args, "OI:know", &module, &index) || make_room(m) < 0)
        return NULL;
    place = place_of(m, module);
    m->count += !place->module;
    *place = (known_module){module, index};
    Py_RETURN_NONE;
}

PyDoc_STRVAR(forget_doc, "forget($self, id, /)\n--\n\nThe object with this id() is known no longer.");

static PyObject *forget(PyObject *self, PyObject *id)
{
    module_calls *m = (module_calls *)self;
    PyObject *module = PyLong_AsVoidPtr(id);
    known_module *place;
    size_t gap;

    if (!module && PyErr_Occurred())
        return NULL;
    if (!m->capacity || !module || !(place = place_of(m, module))->module)
        Py_RETURN_NONE;
    /* Whoever was pushed past the gap by it moves back into it. */
    gap = (size_t)(place - m->known);
    for (size_t i = (gap + 1) & (m->capacity - 1); m->known[i].module; i = (i + 1) & (m->capacity - 1)) {
        const size_t wanted = home(m, m->known[i].module);

        if (((i - wanted) & (m->capacity - 1)) >= ((i - gap) & (m->capacity - 1))) {
            m->known[gap] = m->known[i];
            gap = i;
        }
    }
    m->known[gap] = (known_module){0};
    m->count--;
    Py_RETURN_NONE;
}

/* ---- a call ------------------------------------------------------------------------------------------------- */

/* callable(*args) where torch.compile, which may be at work on what calls the module, does not trace it; NULL with an
 * exception. */
static PyObject *call_untraced(const module_calls *m, PyObject *callable, PyObject *const *args, size_t count)
{
    PyObject *none = Py_None, *type, *value, *traceback, *result, *back;
    PyObject *before = vectorcall(m->set_eval_frame, &none, 1, NULL);

    if (!before)
        return NULL;
    result = vectorcall(callable, args, count, NULL);
    PyErr_Fetch(&type, &value, &traceback);
    back = vectorcall(m->set_eval_frame, &before, 1, NULL);
    if (!back)
        PyErr_WriteUnraisable(m->set_eval_frame);
    PyErr_Restore(type, value, traceback);
    Py_XDECREF(back);
    Py_DECREF(before);
    return result;
}

static int64_t now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* Another one runs: it is noted, or the listener hears of it. 0, or -1 with an exception. */
static int tell(module_calls *m, uint32_t index)
{
    PyObject *argument, *answer;

    if (m->moments)
        m->moments[m->noted++ % m->most] = (moment){now(), index};
    if (!m->told)
        return 0;
    argument = PyList_GetItem(m->arguments, index); /* borrowed; the list only grows */
    if (!argument)
        return -1;
    answer = PyCFunction_Check(m->told) ? vectorcall(m->told, &argument, 1, NULL)
                                        : call_untraced(m, m->told, &argument, 1);
    Py_XDECREF(answer);
    return answer ? 0 : -1;
}

/* The index of a module that is called: 0 for one that is not to be noted. -1 with an exception. */
static int64_t index_of(module_calls *m, PyObject *module, bool outermost)
{
    const known_module *place = m->capacity ? place_of(m, module) : NULL;
    PyObject *const args[] = {module, outermost ? Py_True : Py_False};
    PyObject *answer;
    int64_t index;

    if (place && place->module && !outermost)
        return place->index;
    answer = call_untraced(m, m->enter, args, 2);
    index = answer ? PyLong_AsLongLong(answer) : -1;
    Py_XDECREF(answer);
    return index;
}

/* After an outermost module's pass; the error that the pass may have ended with stays. 0, or -1 with an exception. */
static int left(const module_calls *m, PyObject *const *args, size_t count, PyObject *names)
{
    const Py_ssize_t named = names ? PyTuple_Size(names) : 0;
    PyObject *type, *value, *traceback, *answer = NULL;
    PyObject *positional = PyTuple_New((Py_ssize_t)count - 1), *keywords = PyDict_New();
    bool fine = positional && keywords;

    PyErr_Fetch(&type, &value, &traceback);
    for (size_t i = 1; fine && i < count; i++)
        fine = PyTuple_SetItem(positional, (Py_ssize_t)i - 1, Py_NewRef(args[i])) == 0;
    for (Py_ssize_t i = 0; fine && i < named; i++)
        fine = PyDict_SetItem(keywords, PyTuple_GetItem(names, i), args[count + (size_t)i]) == 0;
    if (fine) {
        PyObject *const told[] = {args[0], positional, keywords};

        answer = call_untraced(m, m->leave, told, 3);
    }
    Py_XDECREF(positional);
    Py_XDECREF(keywords);
    Py_XDECREF(answer);
    if (!type)
        return answer ? 0 : -1;
    if (!answer)
        PyErr_WriteUnraisable(m->leave); /* the program's own error is the one to raise */
    PyErr_Restore(type, value, traceback);
    return 0;
}

/* 0, or -1 with an exception. */
static int entering(module_calls *m, PyObject *module, int64_t *index)
{
    const uint32_t before = mo_py_module_running();

    *index = index_of(m, module, before == 0);
    return *index < 0 || (*index && tell(m, (uint32_t)*index) < 0) ? -1 : 0;
}

/* The error that the pass may have ended with stays. 0, or -1 with an exception. */
static int leaving(module_calls *m, PyObject *const *args, size_t count, PyObject *names, uint32_t before)
{
    PyObject *type, *value, *traceback;

    if (m->told || m->moments) {
        PyErr_Fetch(&type, &value, &traceback);
        if (tell(m, before) < 0)
            PyErr_WriteUnraisable(m->function);
        PyErr_Restore(type, value, traceback);
    }
    return before ? 0 : left(m, args, count, names);
}

static PyObject *call(PyObject *function, PyObject *const *args, size_t flagged_count, PyObject *names)
{
    const size_t count = COUNT_OF(flagged_count);
    const uint32_t before = mo_py_module_running(), session = sessions;
    module_calls *m = active;
    int64_t index = 0;
    PyObject *result;

    if (!m || !count)
        return plain(function, args, flagged_count, names);
    Py_INCREF((PyObject *)m);
    if (entering(m, args[0], &index) < 0)
        result = NULL;
    else if (!index || session != sessions)
        result = plain(function, args, flagged_count, names);
    else {
        running.session = session;
        running.index = (uint32_t)index;
        result = plain(function, args, flagged_count, names);
        running.session = session;
        running.index = before;
        if (m == active && leaving(m, args, count, names, before) < 0)
            Py_CLEAR(result);
    }
    Py_DECREF((PyObject *)m);
    return result;
}

/* ---- the function's vectorcall ------------------------------------------------------------------------------- */

static void find(const char *name, void *function, size_t size)
{
    void *known = dlsym(RTLD_DEFAULT, name);

    memcpy(function, &known, size);
}

/* 0, or -1 with an exception. */
static int find_all(void)
{
    find("PyObject_Vectorcall", &vectorcall, sizeof vectorcall);
    find("PyVectorcall_Function", &vectorcall_of, sizeof vectorcall_of);
    if (vectorcall && vectorcall_of)
        return 0;
    PyErr_SetString(PyExc_RuntimeError, "this Python has no vectorcall: calls of modules cannot be recorded");
    return -1;
}

/* The word of the function in which its vectorcall is: where CPython has no call to set it. NULL: not known. */
static void *word_of(PyObject *function, vectorcallfunc holds)
{
    PyObject *size = PyObject_GetAttrString((PyObject *)Py_TYPE(function), "__basicsize__");
    const size_t words = size ? PyLong_AsSize_t(size) / sizeof(void *) : 0;
    char *found = NULL;
    size_t times = 0;

    Py_XDECREF(size);
    for (size_t i = 0; i < words; i++) {
        char *word = (char *)function + i * sizeof(void *);

        if (!memcmp(word, &holds, sizeof holds)) {
            found = word;
            times++;
        }
    }
    return times == 1 ? found : NULL;
}

static int set_vectorcall(PyObject *function, vectorcallfunc from, vectorcallfunc to)
{
    void (*set)(PyObject *, vectorcallfunc);
    void *word;

    find("PyFunction_SetVectorcall", &set, sizeof set);
    if (set) { /* CPython 3.12 and later */
        set(function, to);
        return 0;
    }
    word = word_of(function, from);
    if (!word)
        return -1;
    memcpy(word, &to, sizeof to);
    return 0;
}

PyDoc_STRVAR(start_doc, "start($self, /)\n--\n\nFrom now on calls are noted. One at a time.");

static PyObject *start(PyObject *self, PyObject *unused)
{
    module_calls *m = (module_calls *)self;

    (void)unused;
    if (active)
        return PyErr_Format(PyExc_RuntimeError, "calls of modules are already being recorded");
    plain = vectorcall_of(m->function);
    if (!plain || set_vectorcall(m->function, plain, call) < 0)
        return PyErr_Format(PyExc_RuntimeError,
                            "where this CPython keeps a function's vectorcall is not known");
    active = (module_calls *)Py_NewRef(self);
    sessions++;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(stop_doc, "stop($self, /)\n--\n\nThe function is as it was. Once is enough.");

static PyObject *stop(PyObject *self, PyObject *unused)
{
    (void)unused;
    if (active != (module_calls *)self)
        Py_RETURN_NONE;
    set_vectorcall(((module_calls *)self)->function, call, plain);
    active = NULL;
    sessions++;
    Py_DECREF(self);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(tell_doc,
             "tell($self, told, arguments, /)\n--\n\n"
             "From now on told(arguments[index]) is called whenever another module runs; index 0 is none.");

static PyObject *tell_to(PyObject *self, PyObject *args)
{
    module_calls *m = (module_calls *)self;
    PyObject *told, *arguments, *told_before = m->told, *arguments_before = m->arguments;

    if (!PyArg_ParseTuple(args, "OO!:tell", &told, &PyList_Type, &arguments))
        return NULL;
    m->told = Py_NewRef(told);
    m->arguments = Py_NewRef(arguments);
    Py_XDECREF(told_before);
    Py_XDECREF(arguments_before);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(note_doc, "note($self, most, /)\n--\n\n"
                       "From now on it is noted when another module runs; the last `most` times are kept.");

static PyObject *note(PyObject *self, PyObject *count)
{
    module_calls *m = (module_calls *)self;
    const size_t most = PyLong_AsSize_t(count);
    moment *moments;

    if (most == (size_t)-1 && PyErr_Occurred())
        return NULL;
    moments = mo_host_calloc(most ? most : 1, sizeof *moments);
    if (!moments)
        return PyErr_NoMemory();
    mo_host_free(m->moments);
    m->moments = moments;
    m->most = most ? most : 1;
    m->noted = 0;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(moments_doc, "moments($self, /)\n--\n\n"
                          "What was noted, the oldest first: int64 pairs of microseconds since 1970 and the "
                          "index of\nthe module that runs from then on.");

static PyObject *moments(PyObject *self, PyObject *unused)
{
    const module_calls *m = (module_calls *)self;
    const size_t count = m->noted < m->most ? m->noted : m->most;
    const size_t first = m->noted > m->most ? m->noted % m->most : 0;
    PyObject *result = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(count * sizeof(moment)));
    char *out = result ? PyByteArray_AsString(result) : NULL;

    (void)unused;
    if (out && count) {
        memcpy(out, m->moments + first, (count - first) * sizeof(moment));
        memcpy(out + (count - first) * sizeof(moment), m->moments, first * sizeof(moment));
    }
    return result;
}

/* ---- the type ------------------------------------------------------------------------------------------------- */

static int clear(PyObject *self)
{
    module_calls *m = (module_calls *)self;

    Py_CLEAR(m->function);
    Py_CLEAR(m->enter);
    Py_CLEAR(m->leave);
    Py_CLEAR(m->set_eval_frame);
    Py_CLEAR(m->told);
    Py_CLEAR(m->arguments);
    return 0;
}

static int traverse(PyObject *self, visitproc visit, void *arg)
{
    const module_calls *m = (module_calls *)self;

    Py_VISIT(Py_TYPE(self));
    Py_VISIT(m->function);
    Py_VISIT(m->enter);
    Py_VISIT(m->leave);
    Py_VISIT(m->set_eval_frame);
    Py_VISIT(m->told);
    Py_VISIT(m->arguments);
    return 0;
}

static void dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    PyObject_GC_UnTrack(self);
    clear(self);
    mo_host_free(((module_calls *)self)->known);
    mo_host_free(((module_calls *)self)->moments);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *function, *enter, *leave, *set_eval_frame;
    module_calls *m;

    if (kwargs && PyDict_Size(kwargs))
        return PyErr_Format(PyExc_TypeError, "ModuleCalls takes no keyword arguments");
    if (!PyArg_ParseTuple(args, "OOOO:ModuleCalls", &function, &enter, &leave, &set_eval_frame) ||
        find_all() < 0)
        return NULL;
    m = (module_calls *)PyType_GenericAlloc(type, 0);
    if (!m)
        return NULL;
    m->function = Py_NewRef(function);
    m->enter = Py_NewRef(enter);
    m->leave = Py_NewRef(leave);
    m->set_eval_frame = Py_NewRef(set_eval_frame);
    return (PyObject *)m;
}

PyDoc_STRVAR(
    type_doc,
    "ModuleCalls(function, enter, leave, set_eval_frame)\n--\n\n"
    "Notes which module's forward pass a thread runs, at the calls of `function`: nn.Module._call_impl.\n\n"
    "enter(module, outermost) -> index: of a module that is not known yet, and of each that is called where "
    "none\n"
    "runs; 0: it is not noted. leave(module, args, kwargs): after such an outermost call, failed or not.\n"
    "set_eval_frame: torch.compile's, which leaves what is called here alone.");

static PyMethodDef methods[] = {
    {"start", start, METH_NOARGS, start_doc},       {"stop", stop, METH_NOARGS, stop_doc},
    {"know", know, METH_VARARGS, know_doc},         {"forget", forget, METH_O, forget_doc},
    {"tell", tell_to, METH_VARARGS, tell_doc},      {"note", note, METH_O, note_doc},
    {"moments", moments, METH_NOARGS, moments_doc}, {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)type_doc},
    {Py_tp_new, make},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "memopt._C.ModuleCalls",
    .basicsize = sizeof(module_calls),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

PyDoc_STRVAR(running_doc, "module_running($module, /)\n--\n\n"
                          "The index of the module whose forward pass this thread runs, 0 for none.");

static PyObject *module_running(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyLong_FromUnsignedLong(mo_py_module_running());
}

static PyMethodDef functions[] = {
    {"module_running", module_running, METH_NOARGS, running_doc},
    {NULL, NULL, 0, NULL},
};

int mo_py_module_calls_init(PyObject *module)
{
    return mo_py_add_type(module, &spec, NULL) < 0 ? -1 : PyModule_AddFunctions(module, functions);
}
