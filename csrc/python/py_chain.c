/* Checkpointing a chain: the solver's tables as the type memopt._C.ChainTable, and a schedule's replay. A chain
 * comes as
 *
 *     (stages, input_bytes, output_grad_bytes)        stage = (output_bytes, input_grad_bytes, put, get, options)
 *     option = (saved_bytes, forward_overhead_bytes, backward_overhead_bytes, forward, backward, remake)
 *
 * and a schedule as a list of (op, stage, option). */
#include "python/module.h"

#include <stdbool.h>
#include <string.h>

#include "base/hostmem.h"
#include "checkpoint/solver.h"

/* ---- from Python ------------------------------------------------------------------------------------------------- */

/* The tuple at an index of a tuple, borrowed. */
static PyObject *tuple_at(PyObject *tuple, Py_ssize_t at)
{
    PyObject *item = PyTuple_GetItem(tuple, at);

    if (item && !PyTuple_Check(item)) {
        PyErr_Format(PyExc_TypeError, "a chain must consist of tuples, not of %R", item);
        return NULL;
    }
    return item;
}

static int parse_option(PyObject *tuple, mo_chain_option *out)
{
    unsigned long long saved, forward_overhead, backward_overhead;

    if (!PyArg_ParseTuple(tuple, "KKKddd", &saved, &forward_overhead, &backward_overhead, &out->forward,
                          &out->backward, &out->remake))
        return -1;
    out->saved = saved;
    out->forward_overhead = forward_overhead;
    out->backward_overhead = backward_overhead;
    return 0;
}

/* options: where the stage's begin; moved on behind them. */
static int parse_stage(PyObject *tuple, mo_chain_stage *out, mo_chain_option **options)
{
    unsigned long long output, input_grad;
    PyObject *list;

    if (!PyArg_ParseTuple(tuple, "KKddO!", &output, &input_grad, &out->put, &out->get, &PyTuple_Type, &list))
        return -1;
    out->output = output;
    out->input_grad = input_grad;
    out->options = *options;
    out->option_count = (uint32_t)PyTuple_Size(list);
    for (Py_ssize_t k = 0; k < (Py_ssize_t)out->option_count; k++) {
        PyObject *option = tuple_at(list, k);
        if (!option || parse_option(option, (*options)++) < 0)
            return -1;
    }
    return 0;
}

/* How many options the stages have in all; -1: an exception. */
static Py_ssize_t count_options(PyObject *stages)
{
    Py_ssize_t count = 0;

    for (Py_ssize_t i = 0; i < PyTuple_Size(stages); i++) {
        PyObject *stage = tuple_at(stages, i), *options;
        if (!stage)
            return -1;
        options = PyTuple_Size(stage) == 5 ? tuple_at(stage, 4) : NULL;
        if (!options) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError,
                                "a stage must be (output_bytes, input_grad_bytes, put, get, options)");
            return -1;
        }
        count += PyTuple_Size(options);
    }
    return count;
}

/* A chain that mo_chain_check() passes, for mo_chain_close(); -1: an exception, and nothing to close. */
static int parse_chain(PyObject *module, PyObject *stages, unsigned long long input,
                       unsigned long long output_grad, mo_chain *out)
{
    const Py_ssize_t options = count_options(stages);
    mo_detail detail;
    mo_status status;
    mo_chain_option *next;

    if (options < 0)
        return -1;
    status = mo_chain_open((size_t)PyTuple_Size(stages), (size_t)options, &detail, out);
    if (status) {
        mo_raise(module, status, &detail);
        return -1;
    }
    out->input = input;
    out->output_grad = output_grad;
    next = out->options;
    for (uint32_t i = 0; i < out->length; i++)
        if (parse_stage(PyTuple_GetItem(stages, i), &out->stages[i], &next) < 0)
            goto fail;
    status = mo_chain_check(out, &detail);
    if (!status)
        return 0;
    mo_raise(module, status, &detail);
fail:
    mo_chain_close(out);
    return -1;
}

PyDoc_STRVAR(chain_check_doc, "chain_check($module, stages, input_bytes, output_grad_bytes, /)\n--\n\n"
                              "Raises ValueError for a chain that makes no sense, saying which stage.");

static PyObject *chain_check(PyObject *module, PyObject *args)
{
    PyObject *stages;
    unsigned long long input, output_grad;
    mo_chain chain;

    if (!PyArg_ParseTuple(args, "O!KK:chain_check", &PyTuple_Type, &stages, &input, &output_grad) ||
        parse_chain(module, stages, input, output_grad, &chain) < 0)
        return NULL;
    mo_chain_close(&chain);
    Py_RETURN_NONE;
}

/* ---- the tables -------------------------------------------------------------------------------------------------- */

typedef struct table {
    PyObject_HEAD mo_chain chain;
    mo_solver *solver;
} table;

/* Without the GIL but between the rows, where the user may have asked to stop. */
static int solve(mo_solver *solver)
{
    bool more = true;

    while (more) {
        Py_BEGIN_ALLOW_THREADS;
        more = mo_solver_advance(solver);
        Py_END_ALLOW_THREADS;
        if (PyErr_CheckSignals() < 0)
            return -1;
    }
    return 0;
}

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *stages, *module = PyType_GetModule(type);
    unsigned long long input, output_grad, budget;
    Py_ssize_t slots;
    int level;
    mo_detail detail;
    mo_status status;
    table *t;

    if (!module)
        return NULL;
    if (keywords && PyDict_Size(keywords))
        return PyErr_Format(PyExc_TypeError, "ChainTable() takes no keyword arguments");
    if (!PyArg_ParseTuple(args, "O!KKKni:ChainTable", &PyTuple_Type, &stages, &input, &output_grad, &budget,
                          &slots, &level))
        return NULL;
    if (level < 0 || level >= MO_SOLVE_COUNT)
        return PyErr_Format(PyExc_ValueError, "level %d: expected 0 to %d", level, MO_SOLVE_COUNT - 1);
    t = (table *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!t)
        return NULL;
    if (parse_chain(module, stages, input, output_grad, &t->chain) < 0)
        goto fail;
    Py_BEGIN_ALLOW_THREADS;
    status = mo_solver_open(&t->chain, budget, slots < 0 ? 0 : (size_t)slots, (mo_solver_level)level, &detail,
                            &t->solver);
    Py_END_ALLOW_THREADS;
    if (status) {
        mo_raise(module, status, &detail);
        goto fail;
    }
    if (solve(t->solver) < 0)
        goto fail;
    return (PyObject *)t;
fail:
    Py_DECREF(t);
    return NULL;
}

static void table_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    mo_solver_close(((table *)self)->solver);
    mo_chain_close(&((table *)self)->chain);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *table_least(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(mo_solver_least(((table *)self)->solver));
}

PyDoc_STRVAR(curve_doc,
             "curve($self, /)\n--\n\n"
             "(budget, seconds) from the least feasible budget to the table's own, both ints and floats "
             "strictly\nmonotone; empty where the table's own is not feasible.");

static PyObject *table_curve(PyObject *self, PyObject *unused)
{
    const mo_solver *solver = ((table *)self)->solver;
    const size_t count = mo_solver_curve(solver, NULL);
    mo_solver_point *points = mo_host_calloc(count, sizeof *points);
    PyObject *list;

    (void)unused;
    if (!points)
        return PyErr_NoMemory();
    mo_solver_curve(solver, points);
    list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *point =
            Py_BuildValue("Kd", (unsigned long long)points[i].budget, (double)points[i].seconds);
        if (!point || PyList_SetItem(list, (Py_ssize_t)i, point) < 0)
            Py_CLEAR(list);
    }
    mo_host_free(points);
    return list;
}

PyDoc_STRVAR(schedule_doc,
             "schedule($self, budget, /)\n--\n\n"
             "The operations for a budget between the least feasible one and the table's own, as a "
             "list of\n(op, stage, option). Raises ValueError for others.");

static PyObject *table_schedule(PyObject *self, PyObject *budget)
{
    PyObject *list, *module = PyType_GetModule(Py_TYPE(self));
    const unsigned long long bytes = PyLong_AsUnsignedLongLong(budget);
    mo_schedule schedule = {0};
    mo_detail detail;
    mo_status status;

    if (!module || (bytes == (unsigned long long)-1 && PyErr_Occurred()))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = mo_solver_schedule(((table *)self)->solver, bytes, &detail, &schedule);
    Py_END_ALLOW_THREADS;
    if (status)
        return mo_raise(module, status, &detail);
    list = PyList_New((Py_ssize_t)schedule.count);
    for (size_t i = 0; list && i < schedule.count; i++) {
        const mo_action *action = &schedule.actions[i];
        PyObject *tuple =
            Py_BuildValue("sIi", mo_op_name((mo_op)action->op), (unsigned)action->stage, (int)action->option);
        if (!tuple || PyList_SetItem(list, (Py_ssize_t)i, tuple) < 0)
            Py_CLEAR(list);
    }
    mo_schedule_clear(&schedule);
    return list;
}

/* ---- replay ------------------------------------------------------------------------------------------------------ */

static int parse_action(PyObject *item, mo_schedule *schedule)
{
    const char *name;
    unsigned int stage, option, op = 0;
    mo_detail detail;

    if (!PyTuple_Check(item)) {
        PyErr_Format(PyExc_TypeError, "an operation must be (op, stage, option), not %R", item);
        return -1;
    }
    if (!PyArg_ParseTuple(item, "sII", &name, &stage, &option))
        return -1;
    while (op < MO_OP_COUNT && strcmp(name, mo_op_name((mo_op)op)) != 0)
        op++;
    if (op == MO_OP_COUNT || option > MO_CHAIN_MAX_OPTIONS) {
        PyErr_Format(PyExc_ValueError,
                     "%R is not an operation: expected one of fnone, fck, fall, bwd, drop_input, drop_saved, "
                     "put_input, get_input",
                     item);
        return -1;
    }
    if (mo_schedule_add(schedule, (mo_op)op, stage, option, &detail)) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static PyObject *moments_as_list(const mo_moment *moments, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);

    for (size_t i = 0; list && i < count; i++) {
        PyObject *tuple = Py_BuildValue("dKK", moments[i].seconds, (unsigned long long)moments[i].during,
                                        (unsigned long long)moments[i].after);
        if (!tuple || PyList_SetItem(list, (Py_ssize_t)i, tuple) < 0)
            Py_CLEAR(list);
    }
    return list;
}

PyDoc_STRVAR(
    chain_replay_doc,
    "chain_replay($module, stages, input_bytes, output_grad_bytes, ops, /)\n--\n\n"
    "(seconds, peak bytes, index of the first op at the peak, [(seconds, bytes while it runs, bytes\n"
    "after) of each op]). Raises ValueError for ops that cannot be done, saying which, and why.");

static PyObject *chain_replay(PyObject *module, PyObject *args)
{
    PyObject *stages, *ops, *list, *result = NULL;
    unsigned long long input, output_grad;
    mo_chain chain;
    mo_schedule schedule = {0};
    mo_replay_totals totals = {0};
    mo_moment *moments = NULL;
    mo_detail detail;
    mo_status status;

    if (!PyArg_ParseTuple(args, "O!KKO!:chain_replay", &PyTuple_Type, &stages, &input, &output_grad,
                          &PyList_Type, &ops) ||
        parse_chain(module, stages, input, output_grad, &chain) < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_Size(ops); i++)
        if (parse_action(PyList_GetItem(ops, i), &schedule) < 0)
            goto done;
    moments = mo_host_calloc(schedule.count, sizeof *moments);
    if (!moments) {
        PyErr_NoMemory();
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS;
    status = mo_schedule_replay(&chain, schedule.actions, schedule.count, &detail, moments, &totals);
    Py_END_ALLOW_THREADS;
    if (status) {
        mo_raise(module, status, &detail);
        goto done;
    }
    list = moments_as_list(moments, schedule.count);
    if (list)
        result = Py_BuildValue("dKnN", totals.seconds, (unsigned long long)totals.peak,
                               (Py_ssize_t)totals.peak_at, list);
done:
    mo_host_free(moments);
    mo_schedule_clear(&schedule);
    mo_chain_close(&chain);
    return result;
}

/* ---- the module -------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(
    table_doc,
    "ChainTable(stages, input_bytes, output_grad_bytes, budget, slots, level, /)\n--\n\n"
    "The least seconds of a chain for every budget up to one. level: 0 persistent, 1 default, 2 full.");

static PyMethodDef table_methods[] = {
    {"curve", table_curve, METH_NOARGS, curve_doc},
    {"schedule", table_schedule, METH_O, schedule_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef table_attributes[] = {
    {"least_budget", table_least, NULL, "The least feasible budget, in bytes.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)table_doc}, {Py_tp_new, table_new},           {Py_tp_dealloc, table_dealloc},
    {Py_tp_methods, table_methods}, {Py_tp_getset, table_attributes}, {0, NULL},
};

static PyType_Spec spec = {
    .name = "memopt._C.ChainTable",
    .basicsize = sizeof(table),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

static PyMethodDef methods[] = {
    {"chain_check", chain_check, METH_VARARGS, chain_check_doc},
    {"chain_replay", chain_replay, METH_VARARGS, chain_replay_doc},
    {NULL, NULL, 0, NULL},
};

int mo_py_chain_init(PyObject *module)
{
    return mo_py_add_type(module, &spec, NULL) < 0 ? -1 : PyModule_AddFunctions(module, methods);
}
