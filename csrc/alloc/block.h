/* A piece of a span's addresses: live, free or a hole. A span (zone.h) is covered by its blocks without a gap:
 *
 *     block.next.address = block.address + block.size          no two neighbours are both free, or both holes
 *
 * Sizes and addresses are multiples of MO_ALIGNMENT; a hole begins and ends at a granule. Blocks are made ahead of an
 * operation (mo_blocks_reserve), so that in its midst nothing can fail. They are kept for ever. No locks: the pool's. */
#ifndef MO_BLOCK_H
#define MO_BLOCK_H

#include "alloc/stream_order.h"
#include "alloc/pool.h"
#include "base/assert.h"

typedef struct mo_span mo_span;
typedef struct mo_block mo_block;

/* What a walk through a free set reads comes first, 40 bytes of it: a cache line a block, mostly. */
struct mo_block {
    mo_address address;
    size_t size;
    mo_block
        *link[2]; /* free: children in the free set; hole: neighbours in the list of holes; spare: link[0] */
    uint32_t priority;         /* free: place in the free set's heap order */
    uint8_t state;             /* mo_block_state: HOLE, FREE or LIVE */
    uint8_t stream;            /* live: number of its stream; else of the last one it had */
    mo_block *previous, *next; /* by address, within the span */
    mo_span *span;
    mo_last_use last_use; /* free, hole: what may still use it; live: the streams recorded beside its own */
    size_t requested;     /* live: bytes asked for */
    uint64_t serial;      /* live: number of the allocation */
};

typedef struct mo_block_store {
    mo_block *spare;             /* given back: a list */
    mo_block *fresh, *fresh_end; /* of the last chunk: never taken */
    size_t spare_count, made;    /* in both; of all */
    void *chunks;                /* linked through their first word */
    uint32_t random;
} mo_block_store;

/* The rare half of mo_blocks_reserve, which is inline: every request passes through it. */
mo_status mo_blocks_make(mo_block_store *store, size_t count, mo_detail *detail);
/* At least count blocks can be taken now. MO_NO_HOST_MEMORY. */
static inline mo_status mo_blocks_reserve(mo_block_store *store, size_t count, mo_detail *detail)
{
    return count <= store->spare_count ? MO_OK : mo_blocks_make(store, count, detail);
}

/* Any sequence without pattern will do; this is xorshift32 (Marsaglia 2003). */
static inline uint32_t mo_block_priority(mo_block_store *store)
{
    uint32_t x = store->random ? store->random : 0x9E3779B9u;

    x ^= x << 13;
    x ^= x >> 17;
    x ^= x << 5;
    return store->random = x;
}

/* One that was reserved: zero but for its priority. Field by field, since gcc clears a whole block by an instruction
 * that takes longer to start than all of this. */
static inline mo_block *mo_block_take(mo_block_store *store)
{
    mo_block *block = store->spare;

    MO_ASSERT(store->spare_count);
    if (block)
        store->spare = block->link[0];
    else
        block = store->fresh++;
    store->spare_count--;
    block->address = 0;
    block->size = 0;
    block->link[0] = block->link[1] = NULL;
    block->priority = mo_block_priority(store);
    block->state = 0;
    block->stream = 0;
    block->previous = block->next = NULL;
    block->span = NULL;
    block->last_use = (mo_last_use){0};
    block->requested = 0;
    block->serial = 0;
    return block;
}

static inline void mo_block_give(mo_block_store *store, mo_block *block)
{
    block->link[0] = store->spare;
    store->spare = block;
    store->spare_count++;
}

/* Frees every block, whoever has it. */
void mo_blocks_close(mo_block_store *store);

#endif
