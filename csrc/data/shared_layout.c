#include "data/shared_layout.h"

#include <inttypes.h>
#include <stddef.h>

#define MOST ((uint64_t)1 << 60) /* above it no count or size is a true one, and below it no sum overflows */

const char *mo_shared_kind_name(mo_shared_kind kind)
{
    switch (kind) {
    case MO_SHARED_STRINGS:
        return "strings";
    case MO_SHARED_LIST:
        return "list";
    case MO_SHARED_DICT:
        return "dict";
    }
    return "nothing known";
}

/* FNV-1a by 8 bytes: it tells a torn header from a whole one, not from a forged one. */
uint64_t mo_shared_header_sum(const mo_shared_header *header)
{
    uint64_t sum = UINT64_C(0xcbf29ce484222325), word;

    for (size_t at = 0; at < offsetof(mo_shared_header, sum); at += sizeof word) {
        memcpy(&word, (const uint8_t *)header + at, sizeof word);
        sum = (sum ^ word) * UINT64_C(0x100000001b3);
        sum ^= sum >> 29;
    }
    return sum;
}

/* The equations of shared_layout.h. */
static bool lies_right(const mo_shared_header *h)
{
    const uint64_t places = h->count < MOST ? mo_shared_places((mo_shared_kind)h->kind, h->count) : 0;

    if (h->count >= MOST || h->size >= MOST || h->slots >= MOST || (h->width != 4 && h->width != 8))
        return false;
    if (h->data_end < MO_SHARED_DATA || h->table < h->data_end || h->index < h->table || h->size < h->index)
        return false;
    if (h->table % 8 || h->index % 8 || places > (h->index - h->table) / h->width)
        return false;
    if (h->kind != MO_SHARED_DICT)
        return !h->slots;
    return h->slots > h->count && !(h->slots & (h->slots - 1)) && h->slots <= (h->size - h->index) / 8;
}

mo_status mo_shared_attach(const uint8_t *base, uint64_t size, mo_detail *detail, mo_shared_view *out)
{
    mo_shared_header h;

    if (size < MO_SHARED_DATA)
        return mo_fail(detail, MO_CORRUPT, 0,
                       "%" PRIu64 " bytes are too few for a shared container: its header alone has %d", size,
                       MO_SHARED_DATA);
    memcpy(&h, base, sizeof h);
    if (h.magic != MO_SHARED_MAGIC)
        return mo_fail(detail, MO_CORRUPT, 0, "this memory is not a memopt shared container");
    if (h.version != MO_SHARED_VERSION)
        return mo_fail(detail, MO_CORRUPT, 0,
                       "a shared container of version %" PRIu32 ", but this memopt reads version %d: use "
                       "the same memopt in all processes",
                       h.version, MO_SHARED_VERSION);
    if (h.sum != mo_shared_header_sum(&h))
        return mo_fail(detail, MO_CORRUPT, 0,
                       "the header of this shared container is damaged: its checksum is wrong");
    if (h.kind < MO_SHARED_STRINGS || h.kind > MO_SHARED_DICT)
        return mo_fail(detail, MO_CORRUPT, 0, "a shared container of the unknown kind %" PRIu32, h.kind);
    if (h.size != size || !lies_right(&h))
        return mo_fail(detail, MO_CORRUPT, 0,
                       "this shared container is damaged: its header does not fit its %" PRIu64 " bytes",
                       size);
    *out = (mo_shared_view){
        .base = base,
        .kind = (mo_shared_kind)h.kind,
        .width = h.width,
        .size = h.size,
        .count = h.count,
        .data_end = h.data_end,
        .slots = h.slots,
        .seed = h.seed,
        .table = base + h.table,
        .index = base + h.index,
    };
    return MO_OK;
}
