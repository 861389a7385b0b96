/* The plan of one optimizer's step (memopt._C.UpdatePlan), in three files: py_optim.c has the type and its methods, py_optim_plan.c
 * makes a plan and says whether it is good still, py_optim_parameter.c reads one parameter.
 *
 * So a step is neither a Python loop nor a hash of a tensor (which is a call of Python code). A plan holds every parameter beside
 * its dict of states, in the order of the param groups:
 *
 *     it is good while  optimizer.state has the same items in the same order
 *                       optimizer.param_groups has the same dicts, their "params" the same tensors
 *
 * compared by identity at each step. Everything else is read anew each step: p.grad, the states in the dicts, the hyper-parameters,
 * and the address of every tensor (which `.data =` may change). */
#ifndef MO_PY_OPTIM_H
#define MO_PY_OPTIM_H

#include "python/module.h"

#include <stdbool.h>

#include "optim/update.h"
#include "python/py_tensor.h"

#define NAME_LIST(X)                                                                                         \
    X(GRAD, "grad")                                                                                          \
    X(PARAMS, "params")                                                                                      \
    X(LR, "lr")                                                                                              \
    X(BETAS, "betas")                                                                                        \
    X(EPS, "eps")                                                                                            \
    X(WEIGHT_DECAY, "weight_decay")                                                                          \
    X(AMSGRAD, "amsgrad")                                                                                    \
    X(MAXIMIZE, "maximize")                                                                                  \
    X(DECOUPLED, "decoupled_weight_decay")                                                                   \
    X(MOMENTUM, "momentum")                                                                                  \
    X(DAMPENING, "dampening")                                                                                \
    X(NESTEROV, "nesterov")                                                                                  \
    X(STOCHASTIC, "stochastic_rounding")                                                                     \
    X(STEP, "step")                                                                                          \
    X(FIRST_MOMENT, "exp_avg")                                                                               \
    X(SECOND_MOMENT, "exp_avg_sq")                                                                           \
    X(LARGEST, "max_exp_avg_sq")                                                                             \
    X(FIRST_SCALE, "exp_avg_scale")                                                                          \
    X(SECOND_SCALE, "exp_avg_sq_scale")                                                                      \
    X(ROW, "exp_avg_sq_row")                                                                                 \
    X(COLUMN, "exp_avg_sq_col")                                                                              \
    X(MASTER, "master_param")                                                                                \
    X(BUFFER, "momentum_buffer")                                                                             \
    X(BUFFER_SCALE, "momentum_buffer_scale")

#define NAME_ENUM(name, text) name,
enum { NAME_LIST(NAME_ENUM) NAME_COUNT };
#undef NAME_ENUM

/* The tensors of one parameter that outlive a step. */
enum { P, M, V, VMAX, M_SCALE, V_SCALE, OF_ROWS, OF_COLUMNS, COUNT, WIDE, KEPT };

typedef struct entry {
    PyObject *p, *states; /* states: NULL where the parameter has none */
    PyObject *seen[KEPT]; /* each tensor as it was found plain: it need not be asked for a negation again */
    mo_tensor_hold
        holds[KEPT]; /* of the states; of p the address alone: its hooks may refer to the optimizer */
    uint32_t group;
    bool first; /* SGD: the momentum buffer has no value yet */
} entry;

typedef struct item {
    PyObject *key, *value;
} item;

typedef struct plan {
    PyObject_HEAD PyObject *names[NAME_COUNT];
    bool sgd;
    bool running; /* somewhere in collect() or run() other code may run meanwhile */

    PyObject *state; /* optimizer.state, and its items */
    item *items;
    size_t item_count;
    PyObject **groups; /* the dicts in optimizer.param_groups */
    mo_hyper *hypers;  /* of each */
    int *rate_devices; /* of each: where its lr is, if that is a tensor on a CUDA device */
    size_t group_count;
    entry *entries;
    size_t entry_count;

    /* What this step will update. */
    mo_parameter *parameters;
    PyObject **grads;
    int *devices; /* of each */
    entry **who;
    size_t count;
} plan;

/* ---- py_optim_plan.c: 0, or -1 with an exception ----------------------------------------------------------------------- */

/* Fills a plan that is all zeros. first: numbers of parameters whose momentum buffer has no value yet, or NULL. */
int mo_plan_fill(plan *u, PyObject *state, PyObject *groups, PyObject *first);
int mo_plan_traverse(plan *u, visitproc visit, void *arg);
void mo_plan_clear(plan *u); /* its references */
void mo_plan_free(plan *u);  /* its memory */
void mo_plan_drop(plan *u);  /* what was taken for this step */

/* 1: it is good; 0; -1. */
int mo_plan_is_good(const plan *u, PyObject *state, PyObject *groups);

/* ---- py_optim_parameter.c ------------------------------------------------------------------------------------------------ */

/* What looking at a parameter may find; FAILED: exception. OTHER: it, its gradient or its states are not of a kind that the step
 * takes. LACKING: a state is not there, or nothing that can be one. */
typedef enum found { FAILED = -1, OTHER, PLAIN, LACKING, WITHOUT_GRADIENT } found;

int mo_plan_read_hypers(plan *u, PyObject *module);

/* Puts a parameter among those of this step: with its gradient, or with this one. */
found mo_plan_look(plan *u, PyObject *module, entry *e);
found mo_plan_take(plan *u, PyObject *module, entry *e, PyObject *grad);

#endif
