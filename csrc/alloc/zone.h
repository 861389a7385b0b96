/* A zone: addresses of one kind (small or large requests of one arena), and the blocks that cover them.
 *
 *     span      a range of addresses reserved from the driver, in slots of a granule; or a segment, where the device has no
 *               virtual memory: addresses with memory behind them for good, and no slots
 *     block     LIVE, FREE or HOLE (block.h); the blocks of a span cover it without a gap
 *
 *     a slot under a live or free byte is owned; a slot of a hole is empty or stale
 *     no two neighbours are both free, or both holes; holes begin and end at slots
 *     the free blocks are those of the free set, the holes those of the list
 *     firsts[i] = the lowest block that begins in the span's page i, a slot or 2 MiB of one; bit i of starts = page i has one
 *     slot.last_use: covers what the last blocks in it were used by; where one block held all of it last, is that alone. (A free
 *               block's use is all its slots' together, and says of none how long ago it was.) Not kept in small zones
 *
 * Functions that split take blocks from the store: two at most, reserved by the caller. None can fail, unless it says
 * so. No locks: the pool's. */
#ifndef MO_ZONE_H
#define MO_ZONE_H

#include "alloc/block.h"
#include "alloc/free_set.h"
#include "alloc/granules.h"

typedef struct mo_zone mo_zone;
typedef struct mo_arena mo_arena;

#define MO_LARGEST_PAGE  ((size_t)2 << 20)
#define MO_STARTS_LEVELS 5 /* 64^5 pages of 2 MiB: more than there are addresses */

struct mo_span {
    mo_zone *zone;
    mo_span *next;
    mo_address base;
    size_t size;
    size_t slot_count;   /* 0: a segment */
    int slot_shift;      /* log2 of a slot's size, 0: it has none */
    size_t fresh;        /* slots from here on were never mapped */
    size_t stale_search; /* where the search for stale views to unmap goes on */
    mo_slot *slots;
    size_t page; /* bytes: however large slots are, a block is found by a short walk */
    mo_block **firsts;
    uint64_t *starts[MO_STARTS_LEVELS]; /* [0]: a bit a page; [n + 1]: a bit a word of [n] */
    mo_block *lowest;
};

struct mo_zone {
    mo_arena *arena;
    mo_block_store *store;
    mo_granules *granules;
    mo_stat_column column; /* MO_STAT_SMALL or MO_STAT_LARGE */
    mo_free_set free;
    mo_block *holes;
    mo_span *spans;
    size_t owned; /* slots */
    size_t segment_bytes;
    size_t live_count;
};

/* Addresses [base, base + size) as one hole; with `segment`, as one free block. Takes one block. MO_NO_HOST_MEMORY. */
mo_status mo_zone_add_span(mo_zone *zone, mo_address base, size_t size, bool segment, mo_detail *detail,
                           mo_span **out);
/* Forgets a span that is one hole or one free block, and frees its tables. */
void mo_zone_remove_span(mo_zone *zone, mo_span *span);

/* Forgets a span whatever is in it: the zone's end. */
void mo_zone_forget_span(mo_zone *zone, mo_span *span);

/* The block that holds an address of a span with slots. */
mo_block *mo_span_block_at(const mo_span *span, mo_address address);

static inline size_t mo_span_slot(const mo_span *span, mo_address address)
{
    const size_t offset = address - span->base;

    return span->slot_shift ? offset >> span->slot_shift : offset / span->zone->granules->size;
}

/* Shifts where pages are the largest, as almost always. */
static inline size_t mo_span_page(const mo_span *span, mo_address address)
{
    const size_t offset = address - span->base;

    return span->page == MO_LARGEST_PAGE ? offset / MO_LARGEST_PAGE : offset / span->page;
}

static inline mo_address mo_slot_address(const mo_span *span, size_t slot)
{
    return span->base + slot * span->zone->granules->size;
}

/* The address of a slot that something is or was mapped in. */
static inline mo_address mo_view_address(const mo_slot *slot)
{
    return mo_slot_address(slot->span, (size_t)(slot - slot->span->slots));
}

/* The slots that lie in the block as a whole: [*low, *high), none where *low >= *high. */
static inline void mo_block_slots(const mo_block *block, size_t *low, size_t *high)
{
    *low = mo_span_slot(block->span, block->address + block->span->zone->granules->size - 1);
    *high = mo_span_slot(block->span, block->address + block->size);
}

/* Cuts [address, address + size) out of a free block; it is live then, its use what the memory's was. */
mo_block *mo_zone_take(mo_zone *zone, mo_block *block, mo_address address, size_t size);

/* A live block becomes free, with what block->last_use says, and joins its free neighbours. Returns the joined block. */
mo_block *mo_zone_put(mo_zone *zone, mo_block *block);

/* `count` whole slots of a free block become a hole and their granules spare (suspended ones are dropped). */
void mo_zone_disown(mo_zone *zone, mo_block *block, size_t slot, size_t count);

/* `count` slots of a hole, each the owner of its granule by now, become a free block, joined to its neighbours. */
mo_block *mo_zone_own(mo_zone *zone, mo_span *span, size_t slot, size_t count);

#endif
