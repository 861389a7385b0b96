/* What a checkpointed region saved for its backward, in order: the form of each tensor, not the tensor. The region run again
 * must save the same forms in the same order; this is what they are compared with.
 *
 *     an index is the number of records before it; records are never taken out, and never change but for `holder`
 *     record.sizes[0 .. dimensions)  =  sizes[record.first .. record.first + record.dimensions)
 *
 * Tensors that have no such form (sparse ones, subclasses) have a record whose form is nothing: dimensions -1. What is compared
 * then, their caller keeps in `described`. No locks. */
#ifndef MO_SAVED_LIST_H
#define MO_SAVED_LIST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* Shape, type and device, in DLPack's numbers. */
typedef struct mo_form {
    int32_t device_type, device_index;
    uint32_t dtype;     /* code << 24 | bits << 16 | lanes */
    int32_t dimensions; /* -1: no form */
    const int64_t *sizes;
} mo_form;

typedef struct mo_saved {
    int32_t device_type, device_index;
    uint32_t dtype;
    int32_t dimensions;
    size_t first;    /* in sizes */
    void *described; /* the caller's */
    void *holder;    /* the caller's: what stands for the tensor, NULL once that is gone */
} mo_saved;

typedef struct mo_saved_list {
    mo_saved *records;
    int64_t *sizes;
    size_t count, room, size_count, size_room;
} mo_saved_list; /* zeroed: empty */

/* Appends a record with the form (whose sizes are copied), nothing described and no holder. On failure nothing has changed. */
mo_status mo_saved_append(mo_saved_list *list, const mo_form *form, size_t *out_index);

/* The form of a record; its sizes are good until the next append. */
mo_form mo_saved_form(const mo_saved_list *list, size_t index);

/* Whether both are forms, and equal. */
bool mo_form_equal(const mo_form *a, const mo_form *b);

/* Forgets all. */
void mo_saved_free(mo_saved_list *list);

#endif
