#include "alloc/block.h"

#include "base/hostmem.h"

#define LEAST 256   /* blocks made at a time: 24 KiB; as many as there are already, */
#define MOST  65536 /* and at most 6 MiB of them */
#define EDGE  32    /* bytes: where blocks begin, so that none lies in more than two cache lines */

_Static_assert(sizeof(mo_block) % EDGE == 0, "and so does the next one");

typedef struct chunk {
    struct chunk *next;
    char room[];
} chunk;

mo_status mo_blocks_make(mo_block_store *store, size_t count, mo_detail *detail)
{
    while (store->spare_count < count) {
        const size_t more = store->made < LEAST ? LEAST : store->made > MOST ? MOST : store->made;
        const size_t size = sizeof(chunk) + EDGE + more * sizeof(mo_block);
        chunk *made = mo_host_calloc_dense(1, size);

        if (!made)
            return mo_fail(detail, MO_NO_HOST_MEMORY, 0,
                           "no host memory for the allocator's bookkeeping (%zu bytes)", size);
        made->next = store->chunks;
        store->chunks = made;
        while (store->fresh < store->fresh_end) { /* few: there was less than is asked for */
            store->spare_count--;
            mo_block_give(store, store->fresh++);
        }
        store->fresh = (mo_block *)(((uintptr_t)made->room + EDGE - 1) / EDGE * EDGE);
        store->fresh_end = store->fresh + more;
        store->spare_count += more;
        store->made += more;
    }
    return MO_OK;
}

void mo_blocks_close(mo_block_store *store)
{
    for (chunk *c = store->chunks, *next; c; c = next) {
        next = c->next;
        mo_host_free(c);
    }
    *store = (mo_block_store){0};
}
