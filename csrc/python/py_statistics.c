#include "python/module.h"

#include <stddef.h>

#include "alloc/pool.h"
#include "base/hostmem.h"
#include "driver/forked.h"

/* The device that was asked for and its pool: NULL where it was never used (no context is made by asking), and in a
 * forked child, where any lock may be one that nobody gives back. False with an exception. */
static bool pool_of(PyObject *module, int device, mo_pool **out)
{
    mo_detail detail;

    if (device < 0 || device >= MO_MAX_DEVICES) {
        mo_raise(module,
                 mo_fail(&detail, MO_INVALID, 0, "device %d: expected a device number from 0 to %d", device,
                         MO_MAX_DEVICES - 1),
                 &detail);
        return false;
    }
    *out = mo_forked() ? NULL : mo_pool_if_open(device);
    return true;
}

/* dict[key] = value (stolen, may be NULL); 0 on success. */
static int give_item(PyObject *dict, const char *key, PyObject *value)
{
    int failed = !value || PyDict_SetItemString(dict, key, value) < 0;
    Py_XDECREF(value);
    return failed;
}

/* ---- counters ------------------------------------------------------------------------------------------- */

static const struct {
    const char *key;
    size_t at; /* of a uint64_t of mo_stats */
} counters[] = {
#define COUNTER(name)                                                                                        \
    {                                                                                                        \
#name, offsetof(mo_stats, name)                                                                      \
    }
    COUNTER(num_alloc_retries), COUNTER(num_ooms),        COUNTER(num_sync_all_streams),
    COUNTER(num_device_alloc),  COUNTER(num_device_free), COUNTER(granules_moved),
    COUNTER(granules_switched), COUNTER(stitches),        COUNTER(recalled),
    COUNTER(events_recorded),   COUNTER(stream_waits),    COUNTER(double_frees),
    COUNTER(foreign_frees),     COUNTER(foreign_streams), COUNTER(failed_releases),
    COUNTER(driver_calls),
#undef COUNTER
};

/* torch's order. */
static const char *const column_keys[MO_STAT_COLUMN_COUNT] = {"all", "small_pool", "large_pool"};

static PyObject *columns_as_dict(const mo_stat column[MO_STAT_COLUMN_COUNT])
{
    PyObject *dict = PyDict_New();

    for (int i = 0; dict && i < MO_STAT_COLUMN_COUNT; i++) {
        const mo_stat *s = &column[i];
        PyObject *value =
            Py_BuildValue("{s:L,s:L,s:L,s:L}", "current", (long long)s->current, "peak", (long long)s->peak,
                          "allocated", (long long)s->allocated, "freed", (long long)s->freed);
        if (give_item(dict, column_keys[i], value))
            Py_CLEAR(dict);
    }
    return dict;
}

PyDoc_STRVAR(
    statistics_doc,
    "allocator_statistics($module, device=0, /)\n--\n\n"
    "What the device's pool counts: torch's statistics, nested as torch nests them (kind, column,\n"
    "current / peak / allocated / freed), and every single counter by its name. All 0 where the device was\n"
    "never used. Raises memopt.Error in a forked child.");

static PyObject *allocator_statistics(PyObject *module, PyObject *args)
{
    int device = 0;
    mo_pool *pool = NULL;
    mo_stats stats = {0};
    PyObject *dict;

    if (!PyArg_ParseTuple(args, "|i:allocator_statistics", &device) || !pool_of(module, device, &pool))
        return NULL;
    if (pool) {
        Py_BEGIN_ALLOW_THREADS;
        mo_pool_read_stats(pool, &stats);
        Py_END_ALLOW_THREADS;
    }
    dict = PyDict_New();
    for (int kind = 0; dict && kind < MO_STAT_KIND_COUNT; kind++)
        if (give_item(dict, mo_stat_key((mo_stat_kind)kind), columns_as_dict(stats.of[kind])))
            Py_CLEAR(dict);
    for (size_t i = 0; dict && i < sizeof counters / sizeof *counters; i++) {
        const uint64_t *count = (const uint64_t *)(const void *)((const char *)&stats + counters[i].at);
        if (give_item(dict, counters[i].key, PyLong_FromUnsignedLongLong(*count)))
            Py_CLEAR(dict);
    }
    return dict;
}

PyDoc_STRVAR(private_pools_doc,
             "allocator_private_pools($module, device=0, /)\n--\n\n"
             "By pool number (two ints), what each private pool holds of the device, in torch's columns.");

static PyObject *allocator_private_pools(PyObject *module, PyObject *args)
{
    int device = 0;
    mo_pool *pool = NULL;
    mo_arena_held_bytes *arenas = NULL;
    size_t count = 0;
    mo_status status = MO_OK;
    mo_detail detail;
    PyObject *dict;

    if (!PyArg_ParseTuple(args, "|i:allocator_private_pools", &device) || !pool_of(module, device, &pool))
        return NULL;
    if (pool) {
        Py_BEGIN_ALLOW_THREADS;
        status = mo_pool_arenas(pool, &detail, &arenas, &count);
        Py_END_ALLOW_THREADS;
    }
    if (status)
        return mo_raise(module, status, &detail);
    dict = PyDict_New();
    for (size_t i = 0; dict && i < count; i++) {
        PyObject *id = Py_BuildValue("(KK)", arenas[i].id.first, arenas[i].id.second);
        PyObject *held = columns_as_dict(arenas[i].bytes);
        if (!id || !held || PyDict_SetItem(dict, id, held) < 0)
            Py_CLEAR(dict);
        Py_XDECREF(id);
        Py_XDECREF(held);
    }
    mo_host_free(arenas);
    return dict;
}

PyDoc_STRVAR(reset_peaks_doc,
             "allocator_reset_peaks($module, device=0, /)\n--\n\nEach peak becomes its current value.");
PyDoc_STRVAR(reset_accumulated_doc, "allocator_reset_accumulated($module, device=0, /)\n--\n\n"
                                    "Each allocated and freed becomes 0, and so does every counter.");

static PyObject *reset(PyObject *module, PyObject *args, void (*of)(mo_pool *))
{
    int device = 0;
    mo_pool *pool = NULL;

    if (!PyArg_ParseTuple(args, "|i", &device) || !pool_of(module, device, &pool))
        return NULL;
    if (pool) {
        Py_BEGIN_ALLOW_THREADS;
        of(pool);
        Py_END_ALLOW_THREADS;
    }
    Py_RETURN_NONE;
}

static PyObject *allocator_reset_peaks(PyObject *module, PyObject *args)
{
    return reset(module, args, mo_pool_reset_peaks);
}

static PyObject *allocator_reset_accumulated(PyObject *module, PyObject *args)
{
    return reset(module, args, mo_pool_reset_accumulated);
}

/* ---- fragmentation ---------------------------------------------------------------------------------------- */

PyDoc_STRVAR(fragmentation_doc, "allocator_fragmentation($module, device=0, /)\n--\n\n"
                                "mo_pool_fragmentation() as a dict, all 0 where the device was never used.");

static PyObject *allocator_fragmentation(PyObject *module, PyObject *args)
{
    int device = 0;
    mo_pool *pool = NULL;
    mo_fragmentation f = {0};

    if (!PyArg_ParseTuple(args, "|i:allocator_fragmentation", &device) || !pool_of(module, device, &pool))
        return NULL;
    if (pool) {
        Py_BEGIN_ALLOW_THREADS;
        mo_pool_fragmentation(pool, &f);
        Py_END_ALLOW_THREADS;
    }
    return Py_BuildValue("{s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:d,s:d,s:d}", "held_bytes",
                         (Py_ssize_t)f.held_bytes, "live_bytes", (Py_ssize_t)f.live_bytes, "requested_bytes",
                         (Py_ssize_t)f.requested_bytes, "free_bytes", (Py_ssize_t)f.free_bytes,
                         "largest_free", (Py_ssize_t)f.largest_free, "largest_allocatable",
                         (Py_ssize_t)f.largest_allocatable, "pending_bytes", (Py_ssize_t)f.pending_bytes,
                         "stale_bytes", (Py_ssize_t)f.stale_bytes, "external", f.external, "internal",
                         f.internal, "unused_at_peak", f.unused_at_peak);
}

/* ---- segments ----------------------------------------------------------------------------------------------- */

/* torch's keys of a snapshot, made once a snapshot: a pickle of it then holds each of them once. */
typedef enum key {
    KEY_DEVICE,
    KEY_ADDRESS,
    KEY_TOTAL_SIZE,
    KEY_ALLOCATED_SIZE,
    KEY_ACTIVE_SIZE,
    KEY_REQUESTED_SIZE,
    KEY_STREAM,
    KEY_SEGMENT_TYPE,
    KEY_SEGMENT_POOL_ID,
    KEY_IS_EXPANDABLE,
    KEY_FRAMES,
    KEY_BLOCKS,
    KEY_SIZE,
    KEY_STATE,
    WORD_SMALL,
    WORD_LARGE,
    WORD_ACTIVE_ALLOCATED,
    WORD_ACTIVE_PENDING_FREE,
    WORD_INACTIVE,
    WORD_COUNT
} key;

static const char *const words[WORD_COUNT] = {
    "device",
    "address",
    "total_size",
    "allocated_size",
    "active_size",
    "requested_size",
    "stream",
    "segment_type",
    "segment_pool_id",
    "is_expandable",
    "frames",
    "blocks",
    "size",
    "state",
    "small",
    "large",
    "active_allocated",
    "active_pending_free",
    "inactive",
};

typedef struct snapshot {
    PyObject *word[WORD_COUNT];
    PyObject *frames; /* address -> list of frames; borrowed */
    PyObject *segments;
} snapshot;

static int set(const snapshot *s, PyObject *dict, key name, PyObject *value)
{
    int failed = !value || PyDict_SetItem(dict, s->word[name], value) < 0;
    Py_XDECREF(value);
    return failed;
}

static PyObject *word_ref(const snapshot *s, key word)
{
    Py_INCREF(s->word[word]);
    return s->word[word];
}

/* The frames known for a live block, else a list of none. */
static PyObject *frames_of(const snapshot *s, const mo_block_view *block)
{
    PyObject *found = NULL;

    if (block->state == MO_BLOCK_LIVE && PyDict_Size(s->frames) > 0) {
        PyObject *address = PyLong_FromSize_t(block->address);
        if (!address)
            return NULL;
        found = PyDict_GetItemWithError(s->frames, address);
        Py_DECREF(address);
        if (!found && PyErr_Occurred())
            return NULL;
        Py_XINCREF(found);
    }
    return found ? found : PyList_New(0);
}

static PyObject *block_as_dict(const snapshot *s, const mo_block_view *block)
{
    PyObject *dict = PyDict_New();
    key state = block->state == MO_BLOCK_LIVE      ? WORD_ACTIVE_ALLOCATED
                : block->state == MO_BLOCK_PENDING ? WORD_ACTIVE_PENDING_FREE
                                                   : WORD_INACTIVE;

    if (dict &&
        (set(s, dict, KEY_ADDRESS, PyLong_FromSize_t(block->address)) ||
         set(s, dict, KEY_SIZE, PyLong_FromSize_t(block->size)) ||
         set(s, dict, KEY_REQUESTED_SIZE, PyLong_FromSize_t(block->requested)) ||
         set(s, dict, KEY_STATE, word_ref(s, state)) || set(s, dict, KEY_FRAMES, frames_of(s, block))))
        Py_CLEAR(dict);
    return dict;
}

/* Blocks first … last - 1, which lie in a row, as one of torch's segments. */
static int add_segment(const snapshot *s, int device, const mo_block_view *first, const mo_block_view *last)
{
    size_t total = 0, allocated = 0, active = 0, requested = 0;
    PyObject *blocks = PyList_New(0), *segment = PyDict_New();
    int failed = !blocks || !segment;

    for (const mo_block_view *b = first; !failed && b < last; b++) {
        PyObject *block = block_as_dict(s, b);
        total += b->size;
        allocated += b->state == MO_BLOCK_LIVE ? b->size : 0;
        active += b->state == MO_BLOCK_FREE ? 0 : b->size;
        requested += b->requested;
        failed = !block || PyList_Append(blocks, block) < 0;
        Py_XDECREF(block);
    }
    failed = failed || set(s, segment, KEY_DEVICE, PyLong_FromLong(device)) ||
             set(s, segment, KEY_ADDRESS, PyLong_FromSize_t(first->address)) ||
             set(s, segment, KEY_TOTAL_SIZE, PyLong_FromSize_t(total)) ||
             set(s, segment, KEY_ALLOCATED_SIZE, PyLong_FromSize_t(allocated)) ||
             set(s, segment, KEY_ACTIVE_SIZE, PyLong_FromSize_t(active)) ||
             set(s, segment, KEY_REQUESTED_SIZE, PyLong_FromSize_t(requested)) ||
             set(s, segment, KEY_STREAM, PyLong_FromSize_t((uintptr_t)first->stream)) ||
             set(s, segment, KEY_SEGMENT_TYPE, word_ref(s, first->small ? WORD_SMALL : WORD_LARGE)) ||
             set(s, segment, KEY_SEGMENT_POOL_ID,
                 Py_BuildValue("(KK)", first->arena.first, first->arena.second)) ||
             set(s, segment, KEY_IS_EXPANDABLE, PyBool_FromLong(1)) ||
             set(s, segment, KEY_FRAMES, PyList_New(0)) ||
             PyDict_SetItem(segment, s->word[KEY_BLOCKS], blocks) < 0 ||
             PyList_Append(s->segments, segment) < 0;
    Py_XDECREF(blocks);
    Py_XDECREF(segment);
    return failed;
}

static bool begins_segment(const mo_block_view *block, const mo_block_view *before)
{
    return block->starts_segment || block->address != before->address + before->size ||
           block->small != before->small || block->arena.first != before->arena.first ||
           block->arena.second != before->arena.second;
}

static PyObject *segments_of(int device, const mo_block_view *blocks, size_t count, const mo_arena_id *only,
                             PyObject *frames)
{
    snapshot s = {.frames = frames, .segments = PyList_New(0)};
    int failed = !s.segments;

    for (int i = 0; !failed && i < WORD_COUNT; i++)
        failed = !(s.word[i] = PyUnicode_InternFromString(words[i]));
    for (size_t first = 0, last; !failed && first < count; first = last) {
        const mo_arena_id arena = blocks[first].arena;

        for (last = first + 1; last < count && !begins_segment(&blocks[last], &blocks[last - 1]); last++)
            ;
        if (!only || (arena.first == only->first && arena.second == only->second))
            failed = add_segment(&s, device, blocks + first, blocks + last);
    }
    for (int i = 0; i < WORD_COUNT; i++)
        Py_XDECREF(s.word[i]);
    if (failed)
        Py_CLEAR(s.segments);
    return s.segments;
}

PyDoc_STRVAR(
    segments_doc,
    "allocator_segments($module, device, pool, frames, /)\n--\n\n"
    "The memory of a device as torch's snapshot lists it: segments, and the blocks in each. pool: the pool\n"
    "number (two ints) whose segments are wanted, None for all. frames: a dict of the frames to give for a\n"
    "live block, by its address. [] where the device was never used.");

static PyObject *allocator_segments(PyObject *module, PyObject *args)
{
    int device;
    mo_pool *pool = NULL;
    mo_arena_id only;
    mo_block_view *blocks = NULL;
    size_t count = 0;
    mo_status status = MO_OK;
    mo_detail detail;
    PyObject *wanted, *frames, *segments;

    if (!PyArg_ParseTuple(args, "iOO!:allocator_segments", &device, &wanted, &PyDict_Type, &frames) ||
        !pool_of(module, device, &pool))
        return NULL;
    if (wanted != Py_None && !PyTuple_Check(wanted))
        return PyErr_Format(PyExc_TypeError, "allocator_segments: a pool must be a tuple of two ints, or "
                                             "None");
    if (wanted != Py_None && !PyArg_ParseTuple(wanted, "KK:pool", &only.first, &only.second))
        return NULL;
    if (pool) {
        Py_BEGIN_ALLOW_THREADS;
        status = mo_pool_blocks(pool, &detail, &blocks, &count);
        Py_END_ALLOW_THREADS;
    }
    if (status)
        return mo_raise(module, status, &detail);
    segments = segments_of(device, blocks, count, wanted == Py_None ? NULL : &only, frames);
    mo_host_free(blocks);
    return segments;
}

static PyMethodDef methods[] = {
    {"allocator_statistics", allocator_statistics, METH_VARARGS, statistics_doc},
    {"allocator_private_pools", allocator_private_pools, METH_VARARGS, private_pools_doc},
    {"allocator_reset_peaks", allocator_reset_peaks, METH_VARARGS, reset_peaks_doc},
    {"allocator_reset_accumulated", allocator_reset_accumulated, METH_VARARGS, reset_accumulated_doc},
    {"allocator_fragmentation", allocator_fragmentation, METH_VARARGS, fragmentation_doc},
    {"allocator_segments", allocator_segments, METH_VARARGS, segments_doc},
    {NULL, NULL, 0, NULL},
};

int mo_py_statistics_init(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
