#include "python/py_code_stacks.h"

#include <dlfcn.h>
#include <string.h>

#include "base/hostmem.h"

enum { FIRST_PLACES = 1024 };

/* Where a frame stands: the code, held once it is kept, and the instruction. */
typedef struct where {
    PyObject *code;
    long instruction;
} where;

typedef struct stack {
    uint64_t hash;
    where *frames;
    int *lines;
    size_t count;
} stack;

struct mo_code_stacks {
    stack *stacks; /* number n is stacks[n - 1] */
    size_t count, room;
    uint32_t *places; /* numbers by hash: open addressing, at most half full; 0: empty */
    size_t capacity;  /* a power of two */
    size_t depth;
    PyObject *back, *instruction;
};

/* CPython's own, which the limited API lacks: a fifth of what the attributes cost. NULL where there is none. */
static PyFrameObject *(*get_back)(PyFrameObject *);
static int (*get_instruction)(PyFrameObject *);

static void find_getters(void)
{
    void *back = dlsym(RTLD_DEFAULT, "PyFrame_GetBack");
    void *instruction = dlsym(RTLD_DEFAULT, "PyFrame_GetLasti");

    memcpy(&get_back, &back, sizeof back);
    memcpy(&get_instruction, &instruction, sizeof instruction);
}

mo_code_stacks *mo_code_stacks_open(size_t depth)
{
    mo_code_stacks *s = mo_host_calloc(1, sizeof *s);

    if (s) {
        s->depth = depth < MO_CODE_STACKS_MOST ? depth : MO_CODE_STACKS_MOST;
        s->places = mo_host_calloc(s->capacity = FIRST_PLACES, sizeof *s->places);
    }
    if (!s || !s->places) {
        mo_host_free(s);
        PyErr_NoMemory();
        return NULL;
    }
    find_getters();
    s->back = PyUnicode_InternFromString("f_back");
    s->instruction = PyUnicode_InternFromString("f_lasti");
    if (!s->back || !s->instruction) {
        mo_code_stacks_close(s);
        return NULL;
    }
    return s;
}

void mo_code_stacks_close(mo_code_stacks *s)
{
    if (!s)
        return;
    for (size_t i = 0; i < s->count; i++) {
        for (size_t k = 0; k < s->stacks[i].count; k++)
            Py_DECREF(s->stacks[i].frames[k].code);
        mo_host_free(s->stacks[i].frames);
        mo_host_free(s->stacks[i].lines);
    }
    mo_host_free(s->stacks);
    mo_host_free(s->places);
    Py_XDECREF(s->back);
    Py_XDECREF(s->instruction);
    mo_host_free(s);
}

/* The place of the number of a stack, or the empty one where it would go. */
static uint32_t *place_of(const mo_code_stacks *s, const where *frames, size_t count, uint64_t hash)
{
    size_t i = (size_t)(hash >> 32) & (s->capacity - 1);

    for (; s->places[i]; i = (i + 1) & (s->capacity - 1)) {
        const stack *known = &s->stacks[s->places[i] - 1];

        if (known->hash == hash && known->count == count &&
            (!frames || !memcmp(known->frames, frames, count * sizeof *frames)))
            break;
    }
    return &s->places[i];
}

/* Room for one more. False where there is no host memory; nothing has changed then. */
static int reserve(mo_code_stacks *s)
{
    if (s->count == s->room) {
        const size_t room = s->room ? 2 * s->room : 256;
        stack *larger = mo_host_realloc(s->stacks, room * sizeof *larger);

        if (!larger)
            return 0;
        s->stacks = larger;
        s->room = room;
    }
    if (2 * (s->count + 1) > s->capacity) {
        mo_code_stacks wider = *s;

        wider.places = mo_host_calloc(wider.capacity = 2 * s->capacity, sizeof *wider.places);
        if (!wider.places)
            return 0;
        for (size_t i = 0; i < s->count; i++)
            *place_of(&wider, s->stacks[i].frames, s->stacks[i].count, s->stacks[i].hash) = (uint32_t)i + 1;
        mo_host_free(s->places);
        *s = wider;
    }
    return 1;
}

/* Of frames that this thread runs. 0 where there is no host memory. */
static uint32_t keep(mo_code_stacks *s, const where *frames, PyObject *const *objects, size_t count,
                     uint64_t hash)
{
    stack new = {hash, mo_host_alloc(count * sizeof *frames), mo_host_alloc(count * sizeof *new.lines),
                 count};

    if (!new.frames || !new.lines || !reserve(s)) {
        mo_host_free(new.frames);
        mo_host_free(new.lines);
        return 0;
    }
    for (size_t k = 0; k < count; k++) {
        new.frames[k] = (where){Py_NewRef(frames[k].code), frames[k].instruction};
        new.lines[k] = PyFrame_GetLineNumber((PyFrameObject *)objects[k]);
    }
    *place_of(s, frames, count, hash) = (uint32_t)s->count + 1;
    s->stacks[s->count++] = new;
    return (uint32_t)s->count;
}

static long instruction_of(const mo_code_stacks *s, PyObject *frame)
{
    PyObject *number;
    long instruction;

    if (get_instruction)
        return get_instruction((PyFrameObject *)frame);
    number = PyObject_GetAttr(frame, s->instruction);
    instruction = number ? PyLong_AsLong(number) : -1;
    Py_XDECREF(number);
    return instruction;
}

/* NULL or None behind the outermost. */
static PyObject *back_of(const mo_code_stacks *s, PyObject *frame)
{
    return get_back ? (PyObject *)get_back((PyFrameObject *)frame) : PyObject_GetAttr(frame, s->back);
}

static uint32_t number_of(mo_code_stacks *s)
{
    where frames[MO_CODE_STACKS_MOST];
    PyObject *objects[MO_CODE_STACKS_MOST];
    size_t count = 0;
    uint64_t hash = 0;
    uint32_t number = 0;
    PyObject *frame = (PyObject *)PyEval_GetFrame();

    Py_XINCREF(frame);
    while (frame && frame != Py_None && count < s->depth) {
        where *at = &frames[count];

        objects[count++] = frame;
        at->code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        at->instruction = instruction_of(s, frame);
        hash =
            (hash ^ (uint64_t)(uintptr_t)at->code ^ ((uint64_t)at->instruction << 48)) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
        frame = back_of(s, frame);
    }
    Py_XDECREF(frame);
    if (count) {
        hash *= 0x9E3779B97F4A7C15u;
        number = *place_of(s, frames, count, hash);
        if (!number)
            number = keep(s, frames, objects, count, hash);
    }
    for (size_t k = 0; k < count; k++) {
        Py_DECREF(objects[k]);
        Py_DECREF(frames[k].code);
    }
    return number;
}

uint32_t mo_code_stacks_here(mo_code_stacks *s)
{
    PyObject *type, *value, *traceback;
    const int collects = PyGC_Disable(); /* frames are made: a collection would run the program's code here */
    uint32_t number;

    PyErr_Fetch(&type, &value, &traceback);
    number = number_of(s);
    PyErr_Restore(type, value, traceback);
    if (collects)
        PyGC_Enable();
    return number;
}

bool mo_code_stacks_frame(const mo_code_stacks *s, uint32_t number, size_t k, PyObject **code, int *line)
{
    const stack *of = &s->stacks[number - 1];

    if (k >= of->count)
        return false;
    *code = of->frames[k].code;
    *line = of->lines[k];
    return true;
}

PyObject *mo_code_stacks_list(const mo_code_stacks *s, size_t from)
{
    PyObject *list = PyList_New(0);

    for (size_t i = from - 1; list && i < s->count; i++) {
        PyObject *frames = PyTuple_New(2 * (Py_ssize_t)s->stacks[i].count);
        int failed = !frames;

        for (size_t k = 0; !failed && k < s->stacks[i].count; k++)
            failed =
                PyTuple_SetItem(frames, 2 * (Py_ssize_t)k, Py_NewRef(s->stacks[i].frames[k].code)) < 0 ||
                PyTuple_SetItem(frames, 2 * (Py_ssize_t)k + 1, PyLong_FromLong(s->stacks[i].lines[k])) < 0;
        if (failed || PyList_Append(list, frames) < 0)
            Py_CLEAR(list);
        Py_XDECREF(frames);
    }
    return list;
}
