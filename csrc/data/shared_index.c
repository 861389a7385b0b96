#include "data/shared_index.h"

#include <string.h>

#include "base/assert.h"

#define NUMBER_BITS 40
#define NUMBER_MASK (((uint64_t)1 << NUMBER_BITS) - 1)

/* splitmix64's last steps: each bit of what comes in changes half of what goes out. */
static uint64_t mix(uint64_t z)
{
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

uint64_t mo_shared_hash(uint64_t seed, const uint8_t *bytes, size_t size)
{
    uint64_t hash = mix(seed ^ size), word;

    for (; size >= sizeof word; size -= sizeof word, bytes += sizeof word) {
        memcpy(&word, bytes, sizeof word);
        hash = mix(hash ^ word) + UINT64_C(0x9e3779b97f4a7c15);
    }
    word = 0;
    if (size)
        memcpy(&word, bytes, size);
    return mix(hash ^ word);
}

mo_status mo_shared_put_key(mo_shared_writer *w, const mo_shared_key *key, mo_detail *detail)
{
    const uint8_t other = key->other != NULL;
    mo_status status = mo_shared_put_bytes(w, MO_SHARED_BYTES, key->canonical, key->size, detail);

    if (!status)
        status = mo_shared_write(w, &other, 1, detail);
    if (!status && other)
        status = mo_shared_write(w, key->other, key->other_size, detail);
    return status;
}

static bool read_key_at(const mo_shared_view *v, const mo_shared_span *span, mo_shared_key *out,
                        mo_shared_cursor *itself)
{
    mo_shared_cursor c = {v->base, span->begin, span->end};
    mo_shared_value bytes;
    bool other;

    if (!mo_shared_read(&c, &bytes) || bytes.tag != MO_SHARED_BYTES || c.at >= c.end || v->base[c.at] > 1)
        return false;
    other = v->base[c.at++];
    *out = (mo_shared_key){.canonical = bytes.bytes, .size = (size_t)bytes.length};
    if (itself) {
        const uint64_t begin = (uint64_t)(bytes.bytes - v->base);
        *itself = other ? c : (mo_shared_cursor){v->base, begin, begin + bytes.length};
    }
    return true;
}

bool mo_shared_read_key(const mo_shared_view *v, uint64_t i, mo_shared_key *out, mo_shared_cursor *itself)
{
    mo_shared_span span;

    return mo_shared_entry(v, i, /* value */ false, &span) && read_key_at(v, &span, out, itself);
}

/* The slot where the search for a key ends: its own, or a free one. */
static mo_shared_found search(const mo_shared_view *v, uint64_t hash, const uint8_t *canonical, size_t size,
                              uint64_t *slot, uint64_t *entry)
{
    const uint64_t mask = v->slots - 1, print = hash >> NUMBER_BITS << NUMBER_BITS;
    uint64_t at = hash & mask, word;
    mo_shared_key key;

    for (uint64_t probes = 0; probes < v->slots; probes++, at = (at + 1) & mask) {
        memcpy(&word, v->index + at * 8, sizeof word);
        *slot = at;
        if (!word)
            return MO_SHARED_ABSENT;
        if ((word & ~NUMBER_MASK) != print)
            continue;
        *entry = (word & NUMBER_MASK) - 1;
        if (*entry >= v->count || !mo_shared_read_key(v, *entry, &key, NULL))
            return MO_SHARED_DAMAGED;
        if (key.size == size && memcmp(key.canonical, canonical, size) == 0)
            return MO_SHARED_FOUND;
    }
    return MO_SHARED_DAMAGED; /* a whole index has a free slot */
}

mo_shared_found mo_shared_find(const mo_shared_view *v, const uint8_t *canonical, size_t size,
                               uint64_t *entry)
{
    uint64_t slot;

    return search(v, mo_shared_hash(v->seed, canonical, size), canonical, size, &slot, entry);
}

uint64_t mo_shared_slots(uint64_t count)
{
    uint64_t slots = 8;

    if (count > MO_SHARED_MOST_ENTRIES)
        return 0;
    while (slots / 4 * 3 < count)
        slots *= 2;
    return slots;
}

static void write_place(const mo_shared_view *v, uint8_t *table, uint64_t i, uint64_t place)
{
    const uint32_t narrow = (uint32_t)place;

    if (v->width == 4)
        memcpy(table + i * 4, &narrow, sizeof narrow);
    else
        memcpy(table + i * 8, &place, sizeof place);
}

bool mo_shared_add(mo_shared_view *v, uint8_t *table, uint8_t *index, const mo_shared_new_entry *entry)
{
    const mo_shared_span span = {entry->key, v->data_end};
    uint64_t slot, found, word;
    mo_shared_key key;

    MO_ASSERT(v->count < v->slots - 1);
    if (!mo_shared_span_is_inside(v, &span) || !read_key_at(v, &span, &key, NULL))
        return false;
    switch (search(v, entry->hash, key.canonical, key.size, &slot, &found)) {
    case MO_SHARED_FOUND:
        write_place(v, table, 2 * found + 1, entry->value);
        return true;
    case MO_SHARED_ABSENT:
        word = (entry->hash >> NUMBER_BITS << NUMBER_BITS) | (v->count + 1);
        memcpy(index + slot * 8, &word, sizeof word);
        write_place(v, table, 2 * v->count, entry->key);
        write_place(v, table, 2 * v->count + 1, entry->value);
        v->count++;
        return true;
    default:
        return false;
    }
}
