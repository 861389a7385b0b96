/* Plain values as bytes: what a list's item and a dict's value are.
 *
 *     none false true                 the tag alone
 *     int                             zigzag varint: what fits in 64 bits with its sign
 *     big int                         length, hexadecimal digits: "-0x1f"
 *     float, complex                  8 and 16 bytes
 *     str, bytes, bytearray           length, bytes (UTF-8; surrogates as they are)
 *     tuple list set frozenset        count, values
 *     dict                            count, then key and value of each
 *     leaf                            a byte for its kind, a value that describes it, then a block: length, zeros up to
 *                                     the next multiple of 64 in the memory, bytes
 *
 * Lengths and counts are varints. One value has one form. A reader believes nothing: every step is checked against the
 * end, a count against the bytes that are left (a value has one at least), and depth against MO_SHARED_MOST_DEPTH. */
#ifndef MO_SHARED_VALUES_H
#define MO_SHARED_VALUES_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "data/shared_layout.h"
#include "data/shared_memory.h"

#define MO_SHARED_ALIGNMENT  64  /* of a leaf's block: a cache line, and what vector loads like */
#define MO_SHARED_MOST_DEPTH 200 /* containers in containers */

typedef enum mo_shared_tag {
    MO_SHARED_NONE,
    MO_SHARED_FALSE,
    MO_SHARED_TRUE,
    MO_SHARED_INT,
    MO_SHARED_BIG_INT,
    MO_SHARED_FLOAT,
    MO_SHARED_COMPLEX,
    MO_SHARED_STR,
    MO_SHARED_BYTES,
    MO_SHARED_BYTEARRAY,
    MO_SHARED_TUPLE,
    MO_SHARED_LIST_VALUE,
    MO_SHARED_SET,
    MO_SHARED_FROZENSET,
    MO_SHARED_DICT_VALUE,
    MO_SHARED_LEAF,
    MO_SHARED_TAGS
} mo_shared_tag;

/* ---- writing ----------------------------------------------------------------------------------------------------- */

/* None, false, true. */
mo_status mo_shared_put_tag(mo_shared_writer *w, mo_shared_tag tag, mo_detail *detail);
mo_status mo_shared_put_int(mo_shared_writer *w, int64_t value, mo_detail *detail);
mo_status mo_shared_put_float(mo_shared_writer *w, double value, mo_detail *detail);
mo_status mo_shared_put_complex(mo_shared_writer *w, double real, double imaginary, mo_detail *detail);

/* Big int, str, bytes, bytearray. */
mo_status mo_shared_put_bytes(mo_shared_writer *w, mo_shared_tag tag, const void *bytes, size_t size,
                              mo_detail *detail);

/* A container of `count` values (of a dict: twice as many), which follow. */
mo_status mo_shared_put_container(mo_shared_writer *w, mo_shared_tag tag, uint64_t count, mo_detail *detail);

/* A leaf, whose description follows, and then its block. */
mo_status mo_shared_put_leaf(mo_shared_writer *w, uint8_t kind, mo_detail *detail);
mo_status mo_shared_put_block(mo_shared_writer *w, const void *bytes, size_t size, mo_detail *detail);

/* ---- reading ----------------------------------------------------------------------------------------------------- */

typedef struct mo_shared_cursor {
    const uint8_t *base;
    uint64_t at, end; /* at <= end <= bytes there */
} mo_shared_cursor;

typedef struct mo_shared_value {
    mo_shared_tag tag;
    int64_t integer;        /* int */
    double real, imaginary; /* float, complex */
    const uint8_t *bytes;   /* big int, str, bytes, bytearray */
    uint64_t length;        /* of bytes; of a container: its count */
    uint8_t leaf;           /* the kind */
} mo_shared_value;

/* The next value; of a container or a leaf, the head of it. False: damaged, and the cursor stands anywhere. */
bool mo_shared_read(mo_shared_cursor *c, mo_shared_value *out);

/* A leaf's block: its place in the memory and its length. */
bool mo_shared_read_block(mo_shared_cursor *c, mo_shared_span *out);

/* Past one whole value. */
bool mo_shared_skip(mo_shared_cursor *c);

#endif
