#include "data/shared_builder.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/hostmem.h"
#include "base/size.h"

enum { PIECE = 24 << 10 }; /* numbers of a piece of the table: a multiple of 3, as entries are three */

/* Any number does; the same one, so that equal contents are equal bytes. */
#define SEED UINT64_C(0x6d656d6f7074)

mo_status mo_shared_builder_open(mo_shared_kind kind, uint64_t limit, mo_detail *detail,
                                 mo_shared_builder *out)
{
    static const uint8_t header[MO_SHARED_DATA];
    mo_status status;

    *out = (mo_shared_builder){.kind = kind, .data.fd = -1, .places.fd = -1, .seed = SEED};
    out->budget.limit = limit ? limit : UINT64_MAX;
    status = mo_shared_writer_open(&out->budget, detail, &out->data);
    if (!status)
        status = mo_shared_writer_open(&out->budget, detail, &out->places);
    if (!status)
        status = mo_shared_write(&out->data, header, sizeof header, detail);
    if (status)
        mo_shared_builder_close(out);
    return status;
}

void mo_shared_builder_close(mo_shared_builder *b)
{
    mo_shared_writer_close(&b->data);
    mo_shared_writer_close(&b->places);
}

mo_status mo_shared_builder_item(mo_shared_builder *b, mo_detail *detail)
{
    const uint64_t place = mo_shared_writer_size(&b->data);
    const mo_status status = mo_shared_write(&b->places, &place, sizeof place, detail);

    MO_ASSERT(b->kind != MO_SHARED_DICT);
    b->count += !status;
    return status;
}

mo_status mo_shared_builder_key(mo_shared_builder *b, const mo_shared_key *key, mo_detail *detail)
{
    mo_shared_new_entry entry = {.key = mo_shared_writer_size(&b->data),
                                 .hash = mo_shared_hash(b->seed, key->canonical, key->size)};
    mo_status status = mo_shared_put_key(&b->data, key, detail);

    MO_ASSERT(b->kind == MO_SHARED_DICT);
    entry.value = mo_shared_writer_size(&b->data);
    if (!status)
        status = mo_shared_write(&b->places, &entry, sizeof entry, detail);
    b->count += !status;
    return status;
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

/* The numbers of a piece, narrowed in place. */
static void narrow(uint64_t *numbers, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const uint32_t number = (uint32_t)numbers[i];
        memcpy((uint8_t *)numbers + i * sizeof number, &number, sizeof number);
    }
}

/* Places go over into the table, and the memory that they had goes back. */
static mo_status write_table(mo_shared_builder *b, const mo_shared_header *h, uint64_t *piece,
                             mo_detail *detail)
{
    const uint64_t bytes = mo_shared_writer_size(&b->places);
    mo_status status = MO_OK;

    for (uint64_t at = 0; at < bytes && !status;) {
        const size_t size = mo_size_min(PIECE * sizeof *piece, (size_t)(bytes - at));
        status = mo_shared_read_back(&b->places, at, piece, size, detail);
        at += size;
        if (status)
            break;
        b->budget.used -= size; /* given back below, taken anew by the table */
        mo_shared_forget(&b->places, at);
        if (h->width == 4)
            narrow(piece, size / sizeof *piece);
        status = mo_shared_write(&b->data, piece, size / sizeof *piece * h->width, detail);
    }
    return status ? status : mo_shared_write_padding(&b->data, 8, detail);
}

/* Table and index of a dict, in place. */
static mo_status write_index(mo_shared_builder *b, mo_shared_header *h, uint64_t *piece, mo_detail *detail)
{
    const uint64_t bytes = mo_shared_writer_size(&b->places);
    size_t table, index, all;
    mo_shared_mapping mapping = {0};
    mo_shared_view v;
    mo_status status;

    h->slots = mo_shared_slots(b->count);
    if (!h->slots || !mo_mul_ok((size_t)b->count, (size_t)2 * h->width, &table) ||
        !mo_align_up_ok(table, 8, &table) || !mo_mul_ok((size_t)h->slots, 8, &index) ||
        !mo_add_ok(table, index, &all))
        return mo_fail(detail, MO_OVERFLOW, 0, "a shared dict of %" PRIu64 " entries", b->count);
    h->index = h->table + table;
    status = mo_shared_extend(&b->data, all, detail);
    if (!status)
        status = mo_shared_map_writer(&b->data, detail, &mapping);
    v = (mo_shared_view){.base = mapping.bytes,
                         .kind = b->kind,
                         .width = h->width,
                         .size = mapping.size,
                         .data_end = h->data_end,
                         .slots = h->slots,
                         .seed = b->seed};
    if (!status) {
        v.table = mapping.bytes + h->table;
        v.index = mapping.bytes + h->index;
    }
    for (uint64_t at = 0; at < bytes && !status;) {
        const size_t size = mo_size_min(PIECE * sizeof *piece, (size_t)(bytes - at));
        const mo_shared_new_entry *entries = (const mo_shared_new_entry *)piece;
        status = mo_shared_read_back(&b->places, at, piece, size, detail);
        at += size;
        for (size_t i = 0; i < size / sizeof *entries && !status; i++)
            if (!mo_shared_add(&v, mapping.bytes + h->table, mapping.bytes + h->index, &entries[i]))
                status = mo_fail(detail, MO_CORRUPT, 0, "a shared dict was damaged while it was built");
        if (!status)
            mo_shared_forget(&b->places, at);
    }
    mo_shared_unmap(&mapping);
    h->count = v.count;
    return status;
}

mo_status mo_shared_builder_finish(mo_shared_builder *b, mo_detail *detail, int *fd)
{
    mo_shared_header h = {.magic = MO_SHARED_MAGIC,
                          .version = MO_SHARED_VERSION,
                          .kind = (uint32_t)b->kind,
                          .count = b->count,
                          .data_end = mo_shared_writer_size(&b->data),
                          .seed = b->seed};
    uint64_t *piece;
    mo_status status = MO_OK;

    h.width = h.data_end <= UINT32_MAX ? 4 : 8;
    if (b->kind != MO_SHARED_DICT) /* where the last one ends */
        status = mo_shared_write(&b->places, &h.data_end, sizeof h.data_end, detail);
    if (!status)
        status = mo_shared_write_padding(&b->data, 8, detail);
    h.table = mo_shared_writer_size(&b->data);
    if (!status)
        status = mo_shared_flush(&b->places, detail);
    if (status)
        return status;
    piece = mo_host_alloc(PIECE * sizeof *piece);
    if (!piece)
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no memory for a piece of a table");
    status =
        b->kind == MO_SHARED_DICT ? write_index(b, &h, piece, detail) : write_table(b, &h, piece, detail);
    mo_host_free(piece);
    if (!status)
        status = mo_shared_flush(&b->data, detail);
    if (status)
        return status;
    h.size = mo_shared_writer_size(&b->data);
    if (b->kind != MO_SHARED_DICT)
        h.index = h.size;
    h.sum = mo_shared_header_sum(&h);
    status = mo_shared_rewrite(&b->data, 0, &h, sizeof h, detail);
    if (!status)
        status = mo_shared_seal(&b->data, detail, fd);
    if (!status)
        mo_shared_builder_close(b);
    return status;
}
