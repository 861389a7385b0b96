#include "python/py_optim.h"

/* ---- hyper-parameters ------------------------------------------------------------------------------------------------- */

static int as_double(PyObject *value, double *out)
{
    *out = PyFloat_AsDouble(value); /* a tensor's too, which waits for its device */
    return *out == -1 && PyErr_Occurred() ? -1 : 0;
}

static int number(const plan *u, PyObject *group, int name, double *out)
{
    PyObject *value = PyDict_GetItemWithError(group, u->names[name]);

    if (!value) {
        if (!PyErr_Occurred())
            PyErr_SetObject(PyExc_KeyError, u->names[name]);
        return -1;
    }
    return as_double(value, out);
}

static int flag(const plan *u, PyObject *group, int name, bool *out)
{
    PyObject *value = PyDict_GetItemWithError(group, u->names[name]);
    int truth = value ? PyObject_IsTrue(value) : 0;

    if (truth < 0 || PyErr_Occurred())
        return -1;
    *out = truth;
    return 0;
}

/* lr may be a tensor; on a CUDA device it is left there, for the kernel to read. */
static int read_rate(plan *u, PyObject *module, size_t which, mo_hyper *out)
{
    PyObject *rate = PyDict_GetItemWithError(u->groups[which], u->names[LR]);
    mo_tensor_view view;
    int known;

    if (!rate || PyFloat_CheckExact(rate))
        return number(u, u->groups[which], LR, &out->lr);
    known = mo_py_tensor_view(module, rate, &view);
    if (known < 0)
        return -1;
    if (!known || view.device == MO_CPU || view.count != 1 || (view.kind != MO_F32 && view.kind != MO_F64))
        return as_double(rate, &out->lr);
    out->lr_address = view.address;
    out->lr_kind = view.kind;
    u->rate_devices[which] = view.device;
    return 0;
}

static int read_betas(const plan *u, PyObject *group, mo_hyper *out)
{
    PyObject *betas = PyDict_GetItemWithError(group, u->names[BETAS]);
    double *const each[] = {&out->beta1, &out->beta2};

    if (!betas) {
        if (!PyErr_Occurred())
            PyErr_SetObject(PyExc_KeyError, u->names[BETAS]);
        return -1;
    }
    for (Py_ssize_t i = 0; i < 2; i++) {
        PyObject *beta = PySequence_GetItem(betas, i);
        int failed = beta ? as_double(beta, each[i]) : -1;

        Py_XDECREF(beta);
        if (failed)
            return -1;
    }
    return 0;
}

static int read_hyper(plan *u, PyObject *module, size_t which, mo_hyper *out)
{
    PyObject *group = u->groups[which];
    bool decoupled = false;

    *out = (mo_hyper){0};
    if (read_rate(u, module, which, out) < 0 || number(u, group, WEIGHT_DECAY, &out->weight_decay) < 0 ||
        flag(u, group, MAXIMIZE, &out->maximize) < 0 || flag(u, group, STOCHASTIC, &out->stochastic) < 0)
        return -1;
    if (u->sgd) {
        out->rule = MO_SGD;
        return number(u, group, MOMENTUM, &out->momentum) < 0 ||
                       number(u, group, DAMPENING, &out->dampening) < 0 ||
                       flag(u, group, NESTEROV, &out->nesterov) < 0
                   ? -1
                   : 0;
    }
    if (read_betas(u, group, out) < 0 || number(u, group, EPS, &out->eps) < 0 ||
        flag(u, group, AMSGRAD, &out->amsgrad) < 0 || flag(u, group, DECOUPLED, &decoupled) < 0)
        return -1;
    out->rule = decoupled ? MO_ADAMW : MO_ADAM;
    return 0;
}

int mo_plan_read_hypers(plan *u, PyObject *module)
{
    for (size_t i = 0; i < u->group_count; i++)
        if (read_hyper(u, module, i, &u->hypers[i]) < 0)
            return -1;
    return 0;
}

/* ---- one parameter ---------------------------------------------------------------------------------------------------- */

/* A parameter that is being read. */
typedef struct reading {
    plan *u;
    PyObject *module;
    entry *e;
    mo_tensor_view p;
    bool moved; /* p is elsewhere than at the last step, and may have another shape */
    mo_parameter out;
} reading;

/* What a tensor must be to serve. */
enum { AS_P = -1, ANY = -2 }; /* as many elements as p, and in p's order; any number of them */

static bool is_aligned(const mo_tensor_view *view)
{
    return view->address % mo_float_size(view->kind) == 0;
}

/* A tensor that outlives the step; OTHER where it is not plain. */
static found kept_view(reading *r, int which, PyObject *tensor, mo_tensor_view *out)
{
    PyObject *before = r->e->seen[which];
    mo_tensor_hold *hold = &r->e->holds[which];
    int known;

    if (before == tensor) {
        known = mo_py_tensor_unsigned(r->module, tensor, out);
    } else {
        known = mo_py_tensor_view(r->module, tensor, out);
        mo_py_tensor_release(hold);
        if (known > 0) {
            r->e->seen[which] = Py_NewRef(tensor);
            Py_XDECREF(before);
        }
    }
    return (found)known;
}

/* The tensor under that name, borrowed; NULL where there is none, or with an exception. */
static PyObject *state(const reading *r, int name)
{
    return r->e->states ? PyDict_GetItemWithError(r->e->states, r->u->names[name]) : NULL;
}

/* LACKING where it has not `count` elements (or AS_P) on p's device. Where both are contiguous their shapes are compared when
 * one of them is new or elsewhere than before. */
static found fitting_view(reading *r, PyObject *tensor, int which, Py_ssize_t count, mo_tensor_view *out)
{
    mo_tensor_hold *hold = &r->e->holds[which];
    found known = kept_view(r, which, tensor, out);
    const bool moved = known == PLAIN && hold->address != out->address;

    if (moved)
        mo_py_tensor_release(hold); /* its former memory */
    if (known != PLAIN)
        return known == OTHER ? LACKING : known;
    if (out->device != r->p.device ||
        (count != ANY && out->count != (count == AS_P ? r->p.count : (size_t)count)))
        return LACKING;
    if (!is_aligned(out))
        return OTHER;
    if (count == AS_P && out->count && (moved || r->moved || !(r->p.contiguous && out->contiguous)))
        known = (found)mo_py_tensor_same_order(r->module, r->e->p, tensor);
    if (known == PLAIN && moved)
        mo_py_tensor_hold(r->module, tensor, out->address, hold);
    return known;
}

/* The same of the tensor under that name; LACKING where there is none. Held meanwhile: a mode of torch's may run Python code
 * whatever is asked of a tensor. */
static found state_view(reading *r, int name, int which, Py_ssize_t count, mo_tensor_view *out)
{
    PyObject *tensor = state(r, name);
    found known;

    if (!tensor)
        return PyErr_Occurred() ? FAILED : LACKING;
    Py_INCREF(tensor);
    known = fitting_view(r, tensor, which, count, out);
    Py_DECREF(tensor);
    return known;
}

/* The same for codes: a byte for each element in p's order, or 4 bits in one row, of a contiguous p. */
static found code_view(reading *r, int name, unsigned *out_bits, uintptr_t *out)
{
    PyObject *tensor = state(r, name);
    mo_tensor_view codes;
    int known;

    if (!tensor)
        return PyErr_Occurred() ? FAILED : LACKING;
    Py_INCREF(tensor);
    known = mo_py_tensor_bytes(r->module, tensor, &codes);
    if (known <= 0)
        known = known < 0 ? FAILED : LACKING;
    else if (codes.device != r->p.device)
        known = LACKING;
    else if (codes.count == r->p.count / 2 + r->p.count % 2 && r->p.count > 1)
        known = r->p.contiguous && codes.contiguous ? PLAIN : LACKING;
    else if (codes.count != r->p.count)
        known = LACKING;
    else if (!(r->p.contiguous && codes.contiguous))
        known = mo_py_tensor_same_order(r->module, r->e->p, tensor);
    Py_DECREF(tensor);
    if (known != PLAIN)
        return (found)known;
    *out = codes.address;
    *out_bits = codes.count == r->p.count ? 8 : 4;
    return PLAIN;
}

/* One fp32, or an array of them. */
static found fp32_view(reading *r, int name, int which, Py_ssize_t count, uintptr_t *out)
{
    mo_tensor_view view;
    found known = state_view(r, name, which, count, &view);

    if (known != PLAIN)
        return known;
    *out = view.address;
    return view.kind == MO_F32 ? PLAIN : LACKING;
}

static Py_ssize_t blocks_of(const reading *r)
{
    return (Py_ssize_t)(r->p.count / MO_CODE_BLOCK + (r->p.count % MO_CODE_BLOCK != 0));
}

static bool is_factored(const reading *r)
{
    return state(r, ROW) && state(r, COLUMN);
}

/* The averages of rows and columns that p's second moment is. */
static found factored(reading *r)
{
    mo_tensor_view columns;
    found known = state_view(r, COLUMN, OF_COLUMNS, ANY, &columns);

    if (known != PLAIN)
        return known;
    if (columns.kind != MO_F32 || !columns.count || r->p.count % columns.count || !r->p.contiguous ||
        r->p.kind == MO_F64)
        return LACKING;
    r->out.column = columns.address;
    r->out.columns = columns.count;
    return fp32_view(r, ROW, OF_ROWS, (Py_ssize_t)(r->p.count / columns.count), &r->out.row);
}

static found codes(reading *r)
{
    unsigned bits_of_v = 0;
    found known = code_view(r, FIRST_MOMENT, &r->out.code_bits, &r->out.m);

    if (r->p.kind == MO_F64)
        return OTHER;
    if (known == PLAIN)
        known = fp32_view(r, FIRST_SCALE, M_SCALE, blocks_of(r), &r->out.m_scale);
    if (known == PLAIN && is_factored(r))
        return factored(r);
    if (known == PLAIN)
        known = code_view(r, SECOND_MOMENT, &bits_of_v, &r->out.v);
    if (known == PLAIN && bits_of_v != r->out.code_bits)
        known = LACKING;
    if (known == PLAIN)
        known = fp32_view(r, SECOND_SCALE, V_SCALE, blocks_of(r), &r->out.v_scale);
    return known;
}

/* States may be of the parameter's kind, or of fp32 where that is narrower. */
static bool may_be_state(const reading *r, mo_float kind)
{
    return kind == r->p.kind || (kind == MO_F32 && r->p.kind != MO_F64);
}

static found moments(reading *r, bool amsgrad)
{
    mo_tensor_view m, v = {0}, vmax = {0};
    const bool without_v = is_factored(r) && !amsgrad;
    found known = state_view(r, FIRST_MOMENT, M, AS_P, &m);

    if (known == LACKING && !amsgrad)
        return codes(r);
    if (known == PLAIN)
        known = without_v ? factored(r) : state_view(r, SECOND_MOMENT, V, AS_P, &v);
    if (known == PLAIN && amsgrad)
        known = state_view(r, LARGEST, VMAX, AS_P, &vmax);
    if (known != PLAIN)
        return known;
    if (!may_be_state(r, m.kind) || (!without_v && v.kind != m.kind) || (amsgrad && vmax.kind != m.kind))
        return OTHER; /* bf16 states of an fp32 parameter, say: torch may know them */
    r->out.m = m.address;
    r->out.v = v.address;
    r->out.vmax = vmax.address;
    r->out.state_kind = m.kind;
    return PLAIN;
}

/* Of 8 bits, with what their dither needs. */
static found coded_buffer(reading *r)
{
    found known = code_view(r, BUFFER, &r->out.code_bits, &r->out.m);

    if (r->p.kind == MO_F64)
        return OTHER;
    if (known == PLAIN)
        known = fp32_view(r, BUFFER_SCALE, M_SCALE, blocks_of(r), &r->out.m_scale);
    if (known == PLAIN)
        known = fp32_view(r, STEP, COUNT, 1, &r->out.step);
    r->out.state_kind = MO_F32;
    return known;
}

static found momentum_buffer(reading *r)
{
    mo_tensor_view m;
    found known = state_view(r, BUFFER, M, AS_P, &m);

    r->out.first = r->e->first;
    if (known == LACKING)
        return coded_buffer(r);
    if (known != PLAIN)
        return known;
    if (!may_be_state(r, m.kind))
        return OTHER;
    r->out.m = m.address;
    r->out.state_kind = m.kind;
    return PLAIN;
}

/* What only parameters of 16 bits have: an fp32 copy, if it is there. */
static found master(reading *r)
{
    if (!state(r, MASTER))
        return PyErr_Occurred() ? FAILED : PLAIN;
    return fp32_view(r, MASTER, WIDE, AS_P, &r->out.master);
}

static found states(reading *r)
{
    const mo_hyper *hyper = &r->u->hypers[r->e->group];
    const bool narrow = r->p.kind == MO_F16 || r->p.kind == MO_BF16;
    found known = narrow ? master(r) : PLAIN;

    if (known == PLAIN && (!r->u->sgd || (narrow && hyper->stochastic && !r->out.master)))
        known = fp32_view(r, STEP, COUNT, 1, &r->out.step);
    if (known != PLAIN)
        return known;
    if (!r->u->sgd)
        return moments(r, hyper->amsgrad);
    return hyper->momentum != 0 ? momentum_buffer(r) : PLAIN;
}

found mo_plan_take(plan *u, PyObject *module, entry *e, PyObject *grad)
{
    reading r = {.u = u, .module = module, .e = e};
    mo_tensor_view g;
    found known = kept_view(&r, P, e->p, &r.p);

    if (known == PLAIN)
        known = (found)mo_py_tensor_view(module, grad, &g);
    if (known != PLAIN)
        return known;
    if (u->hypers[e->group].lr_address && u->rate_devices[e->group] != r.p.device)
        return OTHER;
    if (g.device != r.p.device || g.count != r.p.count || !is_aligned(&r.p) || !is_aligned(&g) ||
        (g.kind == MO_F64) != (r.p.kind == MO_F64))
        return OTHER;
    if (!(r.p.contiguous && g.contiguous))
        known = (found)mo_py_tensor_same_order(module, e->p, grad);
    if (known != PLAIN)
        return known;
    r.moved = e->holds[P].address != r.p.address;
    r.out = (mo_parameter){.p = r.p.address,
                           .g = g.address,
                           .count = r.p.count,
                           .kind = r.p.kind,
                           .grad_kind = g.kind,
                           .state_kind = r.p.kind,
                           .group = e->group};
    if (!u->sgd && r.p.kind != MO_F64)
        r.out.state_kind = MO_F32; /* of codes, which have none */
    known = states(&r);
    if (known != PLAIN)
        return known;
    e->holds[P].address = r.p.address;
    u->parameters[u->count] = r.out;
    u->grads[u->count] = Py_NewRef(grad);
    u->devices[u->count] = r.p.device;
    u->who[u->count++] = e;
    return PLAIN;
}

found mo_plan_look(plan *u, PyObject *module, entry *e)
{
    PyObject *grad = PyObject_GetAttr(e->p, u->names[GRAD]);
    found known = !grad ? FAILED : grad == Py_None ? WITHOUT_GRADIENT : mo_plan_take(u, module, e, grad);

    Py_XDECREF(grad);
    return known;
}
