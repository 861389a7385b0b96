#include "alloc/block.h"

#include "base/assert.h"
#include "base/hostmem.h"

#define CHUNK 256 /* blocks made at a time: 28 KB */

typedef struct chunk {
    struct chunk *next;
    mo_block blocks[CHUNK];
} chunk;

mo_status mo_blocks_make(mo_block_store *store, size_t count, mo_detail *detail)
{
    while (store->spare_count < count) {
        chunk *made = mo_host_calloc(1, sizeof *made);

        if (!made)
            return mo_fail(detail, MO_NO_HOST_MEMORY, 0,
                           "no host memory for the allocator's bookkeeping (%zu bytes)", sizeof *made);
        made->next = store->chunks;
        store->chunks = made;
        for (int i = 0; i < CHUNK; i++)
            mo_block_give(store, &made->blocks[i]);
    }
    return MO_OK;
}

/* Any sequence without pattern will do; this is xorshift32 (Marsaglia 2003). */
static uint32_t next_random(mo_block_store *store)
{
    uint32_t x = store->random ? store->random : 0x9E3779B9u;

    x ^= x << 13;
    x ^= x >> 17;
    x ^= x << 5;
    return store->random = x;
}

mo_block *mo_block_take(mo_block_store *store)
{
    mo_block *block = store->spare;

    MO_ASSERT(block);
    store->spare = block->link[0];
    store->spare_count--;
    *block = (mo_block){.priority = next_random(store)};
    return block;
}

void mo_block_give(mo_block_store *store, mo_block *block)
{
    block->link[0] = store->spare;
    store->spare = block;
    store->spare_count++;
}

void mo_blocks_close(mo_block_store *store)
{
    for (chunk *c = store->chunks, *next; c; c = next) {
        next = c->next;
        mo_host_free(c);
    }
    *store = (mo_block_store){0};
}
