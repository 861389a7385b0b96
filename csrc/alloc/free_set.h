/* The free blocks of a zone, by (size, address): best fit in a few steps.
 *
 * Sizes fall into bins, 32 to a power of two (one to a size below 16 KiB); a two-level bitmap finds the next bin that is
 * not empty; each bin is a treap, so that no mix of sizes makes it slow.
 *
 *     a block is in the set once, in the bin of its size; order within and across bins is that of (size, address)
 *
 * The links and the priority of mo_block are the set's while a block is in it. No locks, no memory of its own. */
#ifndef MO_FREE_SET_H
#define MO_FREE_SET_H

#include "alloc/block.h"

#define MO_BINS 1280 /* sizes up to 2^49 bytes */

typedef struct mo_free_set {
    uint64_t words; /* bit w: bins[w] has bits */
    uint64_t bins[MO_BINS / 64];
    mo_block *root[MO_BINS];
    size_t count;
} mo_free_set;

void mo_free_set_insert(mo_free_set *set, mo_block *block);
void mo_free_set_remove(mo_free_set *set, mo_block *block);

/* The first block of at least size bytes in the order of the set, or NULL. */
mo_block *mo_free_set_fit(const mo_free_set *set, size_t size);
/* The next one after a block of the set, or NULL. */
mo_block *mo_free_set_after(const mo_free_set *set, const mo_block *block);
/* The last one, or NULL; the one before a block of the set, or NULL. */
mo_block *mo_free_set_last(const mo_free_set *set);
mo_block *mo_free_set_before(const mo_free_set *set, const mo_block *block);

#endif
