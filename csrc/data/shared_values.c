#include "data/shared_values.h"

#include <string.h>

#include "base/assert.h"

enum { MOST_VARINT = 10 };

/* Seven bits a byte, the lowest first; the last byte has no high bit. */
static size_t encode_varint(uint64_t value, uint8_t out[MOST_VARINT])
{
    size_t n = 0;

    for (; value >= 128; value >>= 7)
        out[n++] = (uint8_t)(value | 128);
    out[n++] = (uint8_t)value;
    return n;
}

static uint64_t zigzag(int64_t value)
{
    return ((uint64_t)value << 1) ^ (value < 0 ? UINT64_MAX : 0);
}

static int64_t unzigzag(uint64_t value)
{
    return (int64_t)((value >> 1) ^ (value & 1 ? UINT64_MAX : 0));
}

static mo_status put_number(mo_shared_writer *w, mo_shared_tag tag, uint64_t value, mo_detail *detail)
{
    uint8_t bytes[1 + MOST_VARINT] = {(uint8_t)tag};

    return mo_shared_write(w, bytes, 1 + encode_varint(value, bytes + 1), detail);
}

mo_status mo_shared_put_tag(mo_shared_writer *w, mo_shared_tag tag, mo_detail *detail)
{
    const uint8_t byte = (uint8_t)tag;

    MO_ASSERT(tag <= MO_SHARED_TRUE);
    return mo_shared_write(w, &byte, 1, detail);
}

mo_status mo_shared_put_int(mo_shared_writer *w, int64_t value, mo_detail *detail)
{
    return put_number(w, MO_SHARED_INT, zigzag(value), detail);
}

mo_status mo_shared_put_float(mo_shared_writer *w, double value, mo_detail *detail)
{
    uint8_t bytes[1 + sizeof value] = {MO_SHARED_FLOAT};

    memcpy(bytes + 1, &value, sizeof value);
    return mo_shared_write(w, bytes, sizeof bytes, detail);
}

mo_status mo_shared_put_complex(mo_shared_writer *w, double real, double imaginary, mo_detail *detail)
{
    uint8_t bytes[1 + 2 * sizeof real] = {MO_SHARED_COMPLEX};

    memcpy(bytes + 1, &real, sizeof real);
    memcpy(bytes + 1 + sizeof real, &imaginary, sizeof imaginary);
    return mo_shared_write(w, bytes, sizeof bytes, detail);
}

mo_status mo_shared_put_bytes(mo_shared_writer *w, mo_shared_tag tag, const void *bytes, size_t size,
                              mo_detail *detail)
{
    const mo_status status = put_number(w, tag, size, detail);

    return status ? status : mo_shared_write(w, bytes, size, detail);
}

mo_status mo_shared_put_container(mo_shared_writer *w, mo_shared_tag tag, uint64_t count, mo_detail *detail)
{
    MO_ASSERT(tag >= MO_SHARED_TUPLE && tag <= MO_SHARED_DICT_VALUE);
    return put_number(w, tag, count, detail);
}

mo_status mo_shared_put_leaf(mo_shared_writer *w, uint8_t kind, mo_detail *detail)
{
    const uint8_t bytes[2] = {MO_SHARED_LEAF, kind};

    return mo_shared_write(w, bytes, sizeof bytes, detail);
}

mo_status mo_shared_put_block(mo_shared_writer *w, const void *bytes, size_t size, mo_detail *detail)
{
    uint8_t length[MOST_VARINT];
    mo_status status = mo_shared_write(w, length, encode_varint(size, length), detail);

    if (!status)
        status = mo_shared_write_padding(w, MO_SHARED_ALIGNMENT, detail);
    return status ? status : mo_shared_write(w, bytes, size, detail);
}

/* ---- reading ----------------------------------------------------------------------------------------------------- */

static bool read_varint(mo_shared_cursor *c, uint64_t *out)
{
    uint64_t value = 0;

    for (unsigned shift = 0; shift < 64 && c->at < c->end; shift += 7) {
        const uint8_t byte = c->base[c->at++];
        if (shift == 63 && byte > 1)
            return false;
        value |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) {
            *out = value;
            return byte || !shift; /* as short as it can be */
        }
    }
    return false;
}

/* `size` bytes that are there; moves past them. */
static bool read_bytes(mo_shared_cursor *c, uint64_t size, const uint8_t **out)
{
    if (size > c->end - c->at)
        return false;
    *out = c->base + c->at;
    c->at += size;
    return true;
}

static bool read_real(mo_shared_cursor *c, double *out)
{
    const uint8_t *bytes;

    if (!read_bytes(c, sizeof *out, &bytes))
        return false;
    memcpy(out, bytes, sizeof *out);
    return true;
}

bool mo_shared_read(mo_shared_cursor *c, mo_shared_value *out)
{
    uint64_t number;

    if (c->at >= c->end || c->base[c->at] >= MO_SHARED_TAGS)
        return false;
    out->tag = (mo_shared_tag)c->base[c->at++];
    switch (out->tag) {
    case MO_SHARED_NONE:
    case MO_SHARED_FALSE:
    case MO_SHARED_TRUE:
        return true;
    case MO_SHARED_INT:
        if (!read_varint(c, &number))
            return false;
        out->integer = unzigzag(number);
        return true;
    case MO_SHARED_FLOAT:
        return read_real(c, &out->real);
    case MO_SHARED_COMPLEX:
        return read_real(c, &out->real) && read_real(c, &out->imaginary);
    case MO_SHARED_BIG_INT:
    case MO_SHARED_STR:
    case MO_SHARED_BYTES:
    case MO_SHARED_BYTEARRAY:
        return read_varint(c, &out->length) && read_bytes(c, out->length, &out->bytes);
    case MO_SHARED_LEAF:
        if (c->at >= c->end)
            return false;
        out->leaf = c->base[c->at++];
        return true;
    default: /* a container: each value has a byte at least */
        return read_varint(c, &out->length) &&
               out->length <= (c->end - c->at) / (out->tag == MO_SHARED_DICT_VALUE ? 2 : 1);
    }
}

bool mo_shared_read_block(mo_shared_cursor *c, mo_shared_span *out)
{
    const uint8_t *bytes;
    uint64_t length;

    if (!read_varint(c, &length) || !read_bytes(c, -c->at & (MO_SHARED_ALIGNMENT - 1), &bytes))
        return false;
    out->begin = c->at;
    if (!read_bytes(c, length, &bytes))
        return false;
    out->end = c->at;
    return true;
}

static bool skip(mo_shared_cursor *c, int depth)
{
    mo_shared_value v;
    mo_shared_span block;

    if (depth > MO_SHARED_MOST_DEPTH || !mo_shared_read(c, &v))
        return false;
    if (v.tag == MO_SHARED_LEAF)
        return skip(c, depth + 1) && mo_shared_read_block(c, &block);
    if (v.tag < MO_SHARED_TUPLE)
        return true;
    for (uint64_t i = 0, n = v.tag == MO_SHARED_DICT_VALUE ? 2 * v.length : v.length; i < n; i++)
        if (!skip(c, depth + 1))
            return false;
    return true;
}

bool mo_shared_skip(mo_shared_cursor *c)
{
    return skip(c, 0);
}
