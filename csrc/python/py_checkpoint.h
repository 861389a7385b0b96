/* Activation checkpointing: a region is a function that ran under hooks which keep none of the tensors that autograd would
 * save; at their first use in a backward pass it runs once more, and those tensors are taken from that.
 *
 *     Engine         torch's functions, found once by memopt/_checkpoint/drop_in/engine.py, and the hooks that all regions share
 *     surroundings   what a run depends on beside its arguments: random states, autocast
 *     region         one run of a function, its arguments, and the forms of what it saved (checkpoint/saved_list.h)
 *     holder         stands in the graph for one saved tensor: a region and an index
 *     replay         one more run of a region, for one backward pass
 *
 * Who holds whom: the graph the holders, a holder its region, a region its replays and its arguments (tensors among them as
 * torch's SavedTensor, so that changing one in place is noticed, and so that they are saved tensors of a region around it). A
 * region knows its holders, and forgets one that dies. What a replay made stays with the holder until it is unpacked, once, or
 * until the holder dies. So the graph's end is the end of all, and no cycle is ours.
 *
 * Everything here runs under the GIL. Any call of Python may let another thread in, or run the same code again (a region in a
 * region): after one, nothing is assumed of lists. */
#ifndef MO_PY_CHECKPOINT_H
#define MO_PY_CHECKPOINT_H

#include "python/module.h"

#include <stdbool.h>

#include "checkpoint/saved_list.h"

/* What Python gives the engine, by name:
 *     push_hooks(pack, unpack), pop_hooks(), graph_task(), exec_group() or None
 *     save_input(tensor, is_output): a saved_input, whose unpack() gives the tensor
 *     is_grad_enabled(), set_grad_enabled(bool), autocast_enabled(device), autocast_dtype(device), autocast_cache()
 *     under_autocast(function, args, kwargs, device, enabled, dtype, cpu_enabled, cpu_dtype, cache): calls it so
 *     describe(tensor): what is kept of a tensor that has no form; equal(saved, tensor): whether a tensor is as it was
 *     note(function, index, saved, tensor): what is kept of a difference
 *     complain(kind, function, …): the exception to raise
 *     stop, error: torch's exceptions for a run that has made enough, and for one that differs */
#define MO_ENGINE_NAMES(X)                                                                                   \
    X(push_hooks)                                                                                            \
    X(pop_hooks)                                                                                             \
    X(save_input)                                                                                            \
    X(saved_input)                                                                                           \
    X(graph_task)                                                                                            \
    X(exec_group)                                                                                            \
    X(is_grad_enabled)                                                                                       \
    X(set_grad_enabled)                                                                                      \
    X(autocast_enabled)                                                                                      \
    X(autocast_dtype)                                                                                        \
    X(autocast_cache)                                                                                        \
    X(under_autocast)                                                                                        \
    X(describe)                                                                                              \
    X(equal)                                                                                                 \
    X(note)                                                                                                  \
    X(complain)                                                                                              \
    X(stop)                                                                                                  \
    X(error)

#define MO_ENGINE_FIELD(name) PyObject *name;
typedef struct mo_engine {
    PyObject_HEAD union {
        struct {
            MO_ENGINE_NAMES(MO_ENGINE_FIELD)
        };
        PyObject *names[18];
    };
    PyObject *unpack, *same; /* the hooks that all regions share */
    PyObject *cpu, *get_state, *set_state, *unpack_name, *requires_grad, *detach, *data, *is_cpu;
} mo_engine;
#undef MO_ENGINE_FIELD

/* Random states of the generators (a tuple of objects with get_state() and set_state(); None: left alone), and autocast of the
 * device (a name; "cpu" or None: of the CPU alone), as they are now. NULL with an exception. */
PyObject *mo_surroundings_new(mo_engine *engine, PyObject *generators, PyObject *device);

/* Calls a function under them, in grad mode, and restores what was there before, whatever happens. kwargs may be NULL. */
PyObject *mo_surroundings_call(PyObject *surroundings, PyObject *function, PyObject *args, PyObject *kwargs);

/* The type of one of ours, borrowed. */
static inline PyTypeObject *mo_checkpoint_type(PyObject *of_ours, int which)
{
    mo_module_state *state = (mo_module_state *)PyType_GetModuleState(Py_TYPE(of_ours));

    return (PyTypeObject *)state->checkpoint_types[which];
}

/* A new object of a GC type, zeroed behind its head; NULL with an exception. */
static inline void *mo_checkpoint_object(PyObject *of_ours, int which)
{
    return PyType_GenericAlloc(mo_checkpoint_type(of_ours, which), 0);
}

/* Frees an object whose fields are cleared. */
static inline void mo_checkpoint_free(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);

    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* function(*args, **kwargs) of the engine's, the result dropped; -1 with an exception. */
static inline int mo_called(PyObject *result)
{
    Py_XDECREF(result);
    return result ? 0 : -1;
}

extern PyType_Spec mo_surroundings_spec, mo_region_spec, mo_replay_spec, mo_holder_spec;

/* One run of a function (py_checkpoint_region.c). extras: None, or (forward, again, wrap, on_error), each a callable or None:
 * what runs now and what runs later in function's place, what each pack hook is passed through, what is called with an error
 * of torch's checkpointing and raises another. */
PyObject *mo_region_run(mo_engine *engine, PyObject *function, PyObject *args, PyObject *kwargs,
                        PyObject *surroundings, bool early_stop, bool check, PyObject *extras);

/* The unpack hook: holder -> tensor. self is the engine. */
PyObject *mo_region_unpack(PyObject *self, PyObject *holder);

#endif
