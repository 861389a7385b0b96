/* A dict's keys, and where to find them: open addressing, linear probing.
 *
 *     a key in the data     varint, that many bytes: its canonical form, one value (shared_values.h), such that keys that
 *                           compare equal have equal bytes (1, 1.0 and True: the int)
 *                           a byte: 1 if the key itself is another value, which then follows
 *     a slot of the index   0: none; else 24 bits of the key's hash above 40 of the entry's number, plus 1
 *
 *     count < slots, so every search ends; slots <= 8/3 * count, or 8
 *
 * As in a dict, an equal key that comes later gives its value to the first one's entry. */
#ifndef MO_SHARED_INDEX_H
#define MO_SHARED_INDEX_H

#include "base/status.h"
#include "data/shared_layout.h"
#include "data/shared_memory.h"
#include "data/shared_values.h"

#define MO_SHARED_MOST_ENTRIES (((uint64_t)1 << 40) - 2)

typedef struct mo_shared_key {
    const uint8_t *canonical;
    size_t size;
    const uint8_t *other; /* the key itself, where it is not its canonical form; else NULL */
    size_t other_size;
} mo_shared_key;

/* As it comes, before the table is made. */
typedef struct mo_shared_new_entry {
    uint64_t key, value, hash;
} mo_shared_new_entry;

uint64_t mo_shared_hash(uint64_t seed, const uint8_t *bytes, size_t size);

mo_status mo_shared_put_key(mo_shared_writer *w, const mo_shared_key *key, mo_detail *detail);

/* The key of entry i < count, and, unless NULL, a cursor before the value that it was. False: damaged. */
bool mo_shared_read_key(const mo_shared_view *v, uint64_t i, mo_shared_key *out, mo_shared_cursor *itself);

typedef enum mo_shared_found { MO_SHARED_FOUND, MO_SHARED_ABSENT, MO_SHARED_DAMAGED } mo_shared_found;

/* The entry of a key in its canonical form. */
mo_shared_found mo_shared_find(const mo_shared_view *v, const uint8_t *canonical, size_t size,
                               uint64_t *entry);

/* Slots for `count` entries; 0: too many. */
uint64_t mo_shared_slots(uint64_t count);

/* Puts entries into an index being made: v's table and index are writable memory behind `table` and `index`, v->count the
 * entries so far. Keys are read from v's data. False: damaged. */
bool mo_shared_add(mo_shared_view *v, uint8_t *table, uint8_t *index, const mo_shared_new_entry *entry);

#endif
