/* Building a shared container from items that come one by one, of which nobody knows how many there will be.
 *
 * Data go to the memory as they come; their places to a second one, which goes over into the table at the end, piece by
 * piece, each given back as it is copied. So a build's own memory is
 *
 *     a buffer for each of the two (MO_SHARED_BUFFER), and a piece of the table
 *
 * whatever the size of the whole. A dict's index is made in place at the end, and is mapped while it is. */
#ifndef MO_SHARED_BUILDER_H
#define MO_SHARED_BUILDER_H

#include "data/shared_index.h"
#include "data/shared_layout.h"
#include "data/shared_memory.h"

typedef struct mo_shared_builder {
    mo_shared_kind kind;
    mo_shared_budget budget;
    mo_shared_writer data;   /* the container's memory: header, data, then the rest */
    mo_shared_writer places; /* of items: where each begins; of entries: a mo_shared_new_entry each */
    uint64_t count, seed;
} mo_shared_builder;

/* limit: bytes that the container and what is needed on the way may take (0: no limit). In place: it is not moved after. */
mo_status mo_shared_builder_open(mo_shared_kind kind, uint64_t limit, mo_detail *detail,
                                 mo_shared_builder *out);

/* The next item begins where data is now; its bytes are written there. */
mo_status mo_shared_builder_item(mo_shared_builder *b, mo_detail *detail);

/* The next entry of a dict begins with this key (shared_index.h); its value is written to data then. */
mo_status mo_shared_builder_key(mo_shared_builder *b, const mo_shared_key *key, mo_detail *detail);

/* The sealed memory, the caller's; the builder is closed. On failure it can only be closed. */
mo_status mo_shared_builder_finish(mo_shared_builder *b, mo_detail *detail, int *fd);

/* A builder that is finished or closed already is fine. */
void mo_shared_builder_close(mo_shared_builder *b);

#endif
