/* The structures of py_checkpoint.h: regions, holders, replays, and what the three files about them share. */
#ifndef MO_PY_CHECKPOINT_REGION_H
#define MO_PY_CHECKPOINT_REGION_H

#include "python/py_checkpoint.h"

typedef struct replay replay;
typedef struct region region;

/* What a replay made for a holder, until it is unpacked. */
typedef struct kept {
    struct kept *next;
    const replay *by;
    PyObject *tensor;
} kept;

typedef struct holder {
    PyObject_HEAD region *of;
    size_t index;
    kept *kept;
} holder;

/* The backward passes that a replay is for: those of one graph task, or of one GraphExecGroup. */
typedef struct purpose {
    PyObject *group; /* NULL: the task */
    long long task;  /* -1: outside of a backward pass */
} purpose;

struct replay {
    PyObject_HEAD region *of; /* while it runs */
    purpose purpose;
    size_t count; /* tensors saved so far */
    bool done;
    PyObject *notes; /* of differences: (index, note); NULL: none */
};

struct region {
    PyObject_HEAD mo_engine *engine;
    PyObject *function, *again; /* the user's, and what is run for it */
    PyObject *args, *kwargs;    /* tensors as torch's SavedTensor; NULL: none */
    PyObject *surroundings;
    PyObject *wrap, *on_error; /* NULL: none */
    PyObject *replays;         /* a list, NULL while there is none */
    mo_saved_list saved;
    bool early_stop, check, completed, uneven;
};

#define MO_PRIVATE_TYPE (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION)

/* ---- py_checkpoint_holder.c ---- */

/* What a replay made for a holder stays with it until it is taken; -1 with an exception. */
int mo_holder_keep(holder *h, const replay *by, PyObject *tensor);
/* A new reference, the holder's no longer; NULL, without an exception, where there is nothing. */
PyObject *mo_holder_take(holder *h, const replay *by);
/* Lets go of all that a replay made and nobody took. */
void mo_holder_take_all(region *r, const replay *by);

/* The pack hook of the first run. self is the region. */
PyObject *mo_region_pack(PyObject *self, PyObject *tensor);
/* 1: a tensor is of the form of a record; 0: it is not; -1: exception. */
int mo_region_compare(region *r, size_t index, PyObject *tensor);
/* A record as Python is told of it: (device type, device index, dtype, sizes), or what describe() gave. */
PyObject *mo_region_saved(const region *r, size_t index);

/* ---- py_checkpoint_region.c ---- */

/* Sets the exception that complain() makes of a kind; first and second may be NULL. -1. */
int mo_region_complain(const region *r, const char *kind, PyObject *first, PyObject *second);
int mo_region_complain_of_counts(const region *r, const char *kind, size_t first, size_t second);

/* Makes a hook of a definition and tells torch to call it; 0 or -1. */
int mo_region_push(region *r, PyMethodDef *definition, PyObject *self, PyObject *unpack);
/* Takes the hooks off. An exception that is there stays; result is given up where there is a new one. */
PyObject *mo_region_popped(region *r, PyObject *result);

/* ---- py_checkpoint_replay.c ---- */

/* Runs a region again; what that made for a holder. The replay is listed for others of this purpose, unless it has none. */
PyObject *mo_replay_for(region *r, holder *h, const purpose *wanted);

#endif
