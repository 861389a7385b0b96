/* What lies where in a shared container's memory, and the checks without which nothing in it is believed.
 *
 *     header | data | table | index
 *
 *     data    [MO_SHARED_DATA, data_end)   strings: their UTF-8 bytes, one behind the other
 *                                          list: a value each (shared_values.h)
 *                                          dict: of each entry a key's bytes (shared_index.h), then its value
 *     table   at a multiple of 8, numbers of `width` bytes (4 or 8), each a place in [MO_SHARED_DATA, data_end]
 *                                          strings, list: count + 1; item i is [table[i], table[i + 1])
 *                                          dict: 2 * count; entry i is (key, value)
 *     index   dict: `slots` numbers of 8 bytes, a power of two
 *
 *     MO_SHARED_DATA <= data_end <= table <= index <= size,  the last three multiples of 8
 *
 * mo_shared_attach checks the header: O(1). A place in the table is checked when it is used, and so is each value, so
 * that damaged or foreign memory gives an error whatever is in it. Numbers are in this machine's order of bytes; another
 * order's magic is not ours. */
#ifndef MO_SHARED_LAYOUT_H
#define MO_SHARED_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "base/status.h"

#define MO_SHARED_MAGIC   UINT64_C(0x4853746d6f706d65)
#define MO_SHARED_VERSION 1
#define MO_SHARED_DATA    128 /* bytes of the header */

typedef enum mo_shared_kind { MO_SHARED_STRINGS = 1, MO_SHARED_LIST, MO_SHARED_DICT } mo_shared_kind;

typedef struct mo_shared_header {
    uint64_t magic;
    uint32_t version, kind;
    uint64_t size, count;
    uint64_t data_end;
    uint64_t table;
    uint32_t width, unused;
    uint64_t index, slots;
    uint64_t seed; /* of the index's hashes */
    uint64_t sum;  /* mo_shared_header_sum */
} mo_shared_header;

_Static_assert(sizeof(mo_shared_header) <= MO_SHARED_DATA, "the header has its place");

/* Memory that has been checked. It does not own it. */
typedef struct mo_shared_view {
    const uint8_t *base;
    mo_shared_kind kind;
    uint32_t width;
    uint64_t size, count, data_end, slots, seed;
    const uint8_t *table, *index;
} mo_shared_view;

/* [begin, end) in the memory. */
typedef struct mo_shared_span {
    uint64_t begin, end;
} mo_shared_span;

/* "strings", "list", "dict". */
const char *mo_shared_kind_name(mo_shared_kind kind);

uint64_t mo_shared_header_sum(const mo_shared_header *header);

/* MO_CORRUPT, and what is wrong, for what is no such memory. base: at a multiple of 8. */
mo_status mo_shared_attach(const uint8_t *base, uint64_t size, mo_detail *detail, mo_shared_view *out);

/* The i-th number of the table, i below 2**60 and in it. */
static inline uint64_t mo_shared_place(const mo_shared_view *v, uint64_t i)
{
    uint32_t narrow;
    uint64_t wide;

    if (v->width == 4) {
        memcpy(&narrow, v->table + i * 4, sizeof narrow);
        return narrow;
    }
    memcpy(&wide, v->table + i * 8, sizeof wide);
    return wide;
}

static inline bool mo_shared_span_is_inside(const mo_shared_view *v, const mo_shared_span *span)
{
    return span->begin >= MO_SHARED_DATA && span->begin <= span->end && span->end <= v->data_end;
}

/* Item i < count of strings or a list. False: the table is damaged. */
static inline bool mo_shared_item(const mo_shared_view *v, uint64_t i, mo_shared_span *out)
{
    out->begin = mo_shared_place(v, i);
    out->end = mo_shared_place(v, i + 1);
    return mo_shared_span_is_inside(v, out);
}

/* Entry i < count of a dict: its key, or its value, and what lies behind. False: the table is damaged. */
static inline bool mo_shared_entry(const mo_shared_view *v, uint64_t i, bool value, mo_shared_span *out)
{
    out->begin = mo_shared_place(v, 2 * i + value);
    out->end = v->data_end;
    return mo_shared_span_is_inside(v, out);
}

/* How many numbers the table of `count` items has. */
static inline uint64_t mo_shared_places(mo_shared_kind kind, uint64_t count)
{
    return kind == MO_SHARED_DICT ? 2 * count : count + 1;
}

#endif
