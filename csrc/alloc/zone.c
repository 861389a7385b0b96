#include "alloc/zone.h"

#include <string.h>

#include "base/assert.h"
#include "base/hostmem.h"
#include "base/size.h"

/* ---- where blocks begin ------------------------------------------------------------------------------------ */

static void mark_start(mo_span *span, size_t page)
{
    for (int level = 0; level < MO_STARTS_LEVELS && span->starts[level]; level++) {
        span->starts[level][page / 64] |= 1ull << (page % 64);
        page /= 64;
    }
}

static void clear_start(mo_span *span, size_t page)
{
    for (int level = 0; level < MO_STARTS_LEVELS && span->starts[level]; level++) {
        span->starts[level][page / 64] &= ~(1ull << (page % 64));
        if (span->starts[level][page / 64])
            return;
        page /= 64;
    }
}

/* The last page <= page in which a block begins. There is one: a block begins at the span's base. */
static size_t start_at_or_before(const mo_span *span, size_t page)
{
    int level = 0;

    for (;; level++, page = page / 64 - 1) {
        uint64_t bits = span->starts[level][page / 64] & (~0ull >> (63 - page % 64));

        if (bits) {
            page = page / 64 * 64 + 63 - (size_t)__builtin_clzll(bits);
            break;
        }
        MO_ASSERT(page >= 64);
    }
    while (level--)
        page = page * 64 + 63 - (size_t)__builtin_clzll(span->starts[level][page]);
    return page;
}

static void add_start(mo_block *block)
{
    mo_span *span = block->span;

    if (!span->slot_count)
        return;
    size_t page = mo_span_page(span, block->address);
    mo_block **first = &span->firsts[page];

    if (!*first)
        mark_start(span, page);
    if (!*first || block->address < (*first)->address)
        *first = block;
}

/* While the block is still linked to its neighbours. */
static void remove_start(mo_block *block)
{
    mo_span *span = block->span;

    if (!span->slot_count)
        return;
    size_t page = mo_span_page(span, block->address);
    mo_block **first = &span->firsts[page];

    if (*first != block)
        return;
    *first = block->next && mo_span_page(span, block->next->address) == page ? block->next : NULL;
    if (!*first)
        clear_start(span, page);
}

mo_block *mo_span_block_at(const mo_span *span, mo_address address)
{
    size_t page = mo_span_page(span, address);
    mo_block *block = span->firsts[page];

    if (!block || block->address > address) {
        if (!page)
            return span->lowest;
        block = span->firsts[start_at_or_before(span, page - 1)];
    }
    while (address - block->address >= block->size)
        block = block->next;
    return block;
}

/* ---- the sequence of blocks -------------------------------------------------------------------------------- */

/* What follows `size` bytes of a block becomes a block of its own, in the same state and in no set or list. */
static mo_block *split(mo_zone *zone, mo_block *block, size_t size)
{
    mo_block *rest = mo_block_take(zone->store);

    MO_ASSERT(size && size < block->size);
    rest->address = block->address + size;
    rest->size = block->size - size;
    rest->span = block->span;
    rest->state = block->state;
    rest->last_use = block->last_use;
    rest->stream = block->stream;
    rest->previous = block;
    rest->next = block->next;
    if (rest->next)
        rest->next->previous = rest;
    block->next = rest;
    block->size = size;
    add_start(rest);
    return rest;
}

/* Takes `next` into `block`, its neighbour before. */
static void absorb(mo_zone *zone, mo_block *block, mo_block *next)
{
    MO_ASSERT(block->next == next && block->state == next->state);
    remove_start(next);
    block->size += next->size;
    block->last_use = mo_last_use_union(block->last_use, next->last_use);
    block->next = next->next;
    if (block->next)
        block->next->previous = block;
    mo_block_give(zone->store, next);
}

static void list_hole(mo_zone *zone, mo_block *hole)
{
    hole->link[0] = NULL;
    hole->link[1] = zone->holes;
    if (zone->holes)
        zone->holes->link[0] = hole;
    zone->holes = hole;
}

static void unlist_hole(mo_zone *zone, mo_block *hole)
{
    if (hole->link[0])
        hole->link[0]->link[1] = hole->link[1];
    else
        zone->holes = hole->link[1];
    if (hole->link[1])
        hole->link[1]->link[0] = hole->link[0];
}

static void enter(mo_zone *zone, mo_block *block)
{
    if (block->state == MO_BLOCK_FREE)
        mo_free_set_insert(&zone->free, block);
    else
        list_hole(zone, block);
}

static void leave(mo_zone *zone, mo_block *block)
{
    if (block->state == MO_BLOCK_FREE)
        mo_free_set_remove(&zone->free, block);
    else
        unlist_hole(zone, block);
}

/* A free block or hole that is nowhere yet joins neighbours of its state, and enters the set or the list. */
static mo_block *join(mo_zone *zone, mo_block *block)
{
    if (block->next && block->next->state == block->state) {
        leave(zone, block->next);
        absorb(zone, block, block->next);
    }
    if (block->previous && block->previous->state == block->state) {
        mo_block *previous = block->previous;

        leave(zone, previous);
        absorb(zone, previous, block);
        block = previous;
    }
    enter(zone, block);
    return block;
}

/* [address, address + size) of a free block or hole, by itself and nowhere; what is left on either side is entered. */
static mo_block *isolate(mo_zone *zone, mo_block *block, mo_address address, size_t size)
{
    MO_ASSERT(address >= block->address && address + size <= block->address + block->size);
    leave(zone, block);
    if (address > block->address) {
        mo_block *left = block;

        block = split(zone, block, address - block->address);
        enter(zone, left);
    }
    if (size < block->size)
        enter(zone, split(zone, block, size));
    return block;
}

mo_block *mo_zone_take(mo_zone *zone, mo_block *block, mo_address address, size_t size)
{
    MO_ASSERT(block->state == MO_BLOCK_FREE);
    block = isolate(zone, block, address, size);
    block->state = MO_BLOCK_LIVE;
    zone->live_count++;
    return block;
}

/* What a free block is used by is known of all of it together; by slots it stays known who used which. What the stream of a
 * block did with it began behind all that had used it before, and stands for that. */
static void note_use(const mo_block *block)
{
    mo_slot *slots = block->span->slots;
    size_t first = mo_span_slot(block->span, block->address), low, high;
    size_t last = mo_span_slot(block->span, block->address + block->size - 1);

    mo_block_slots(block, &low, &high);
    for (size_t i = first; i <= last; i++)
        slots[i].last_use =
            i >= low && i < high ? block->last_use : mo_last_use_union(slots[i].last_use, block->last_use);
}

/* Blocks of a small zone are not worth it: few of them give a slot away, and each free would cost more. */
static bool uses_by_slot(const mo_zone *zone, const mo_span *span)
{
    return zone->column != MO_STAT_SMALL && span->slot_count;
}

mo_block *mo_zone_put(mo_zone *zone, mo_block *block)
{
    MO_ASSERT(block->state == MO_BLOCK_LIVE);
    if (uses_by_slot(zone, block->span))
        note_use(block);
    block->state = MO_BLOCK_FREE;
    zone->live_count--;
    return join(zone, block);
}

/* ---- memory behind addresses --------------------------------------------------------------------------------- */

void mo_zone_disown(mo_zone *zone, mo_block *block, size_t slot, size_t count)
{
    mo_span *span = block->span;

    MO_ASSERT(block->state == MO_BLOCK_FREE);
    for (size_t i = slot; i < slot + count; i++)
        if (span->slots[i].granule->handle)
            mo_granule_disown(zone->granules, &span->slots[i],
                              uses_by_slot(zone, span)
                                  ? mo_last_use_of_both(span->slots[i].last_use, block->last_use)
                                  : block->last_use);
        else
            mo_granule_forget(zone->granules, &span->slots[i]);
    zone->owned -= count;
    block = isolate(zone, block, mo_slot_address(span, slot), count * zone->granules->size);
    block->state = MO_BLOCK_HOLE;
    block->last_use = (mo_last_use){0};
    join(zone, block);
}

mo_block *mo_zone_own(mo_zone *zone, mo_span *span, size_t slot, size_t count)
{
    mo_block *block = mo_span_block_at(span, mo_slot_address(span, slot));
    mo_last_use use = {0};

    MO_ASSERT(block->state == MO_BLOCK_HOLE);
    for (size_t i = slot; i < slot + count; i++) {
        MO_ASSERT(mo_slot_owned(&span->slots[i]));
        span->slots[i].last_use = span->slots[i].granule->last_use;
        use = mo_last_use_union(use, span->slots[i].last_use);
    }
    zone->owned += count;
    block = isolate(zone, block, mo_slot_address(span, slot), count * zone->granules->size);
    block->state = MO_BLOCK_FREE;
    block->last_use = use;
    return join(zone, block);
}

/* ---- spans -------------------------------------------------------------------------------------------------- */

static void free_tables(mo_span *span)
{
    for (int level = 0; level < MO_STARTS_LEVELS; level++)
        mo_host_free(span->starts[level]);
    mo_host_free(span->firsts);
    mo_host_free(span->slots);
    mo_host_free(span);
}

/* The tables are large and mostly never touched: calloc's pages come when they are. */
static mo_status make_tables(mo_span *span, mo_detail *detail)
{
    size_t bits = span->size / span->page;
    bool complete;

    span->slots = mo_host_calloc(span->slot_count, sizeof *span->slots);
    span->firsts = mo_host_calloc(bits, sizeof(mo_block *));
    complete = span->slots && span->firsts;
    for (int level = 0; level < MO_STARTS_LEVELS && complete; level++) {
        bits = (bits + 63) / 64;
        span->starts[level] = mo_host_calloc(bits, sizeof *span->starts[level]);
        complete = span->starts[level] != NULL;
        if (bits == 1)
            break;
    }
    if (!complete)
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory for a table of %zu granules",
                       span->slot_count);
    return MO_OK;
}

mo_status mo_zone_add_span(mo_zone *zone, mo_address base, size_t size, bool segment, mo_detail *detail,
                           mo_span **out)
{
    mo_span *span = mo_host_calloc(1, sizeof *span);
    mo_status status = mo_blocks_reserve(zone->store, 1, detail);

    if (!span)
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory for a range of addresses");
    span->zone = zone;
    span->base = base;
    span->size = size;
    span->slot_count = segment ? 0 : size / zone->granules->size;
    span->slot_shift = mo_is_power_of_two(zone->granules->size) ? __builtin_ctzll(zone->granules->size) : 0;
    span->page = segment || zone->granules->size % MO_LARGEST_PAGE ? zone->granules->size : MO_LARGEST_PAGE;
    if (!status && !segment)
        status = make_tables(span, detail);
    if (status) {
        free_tables(span);
        return status;
    }
    span->lowest = mo_block_take(zone->store);
    span->lowest->address = base;
    span->lowest->size = size;
    span->lowest->span = span;
    span->lowest->state = segment ? MO_BLOCK_FREE : MO_BLOCK_HOLE;
    add_start(span->lowest);
    enter(zone, span->lowest);
    if (segment)
        zone->segment_bytes += size;
    span->next = zone->spans;
    zone->spans = span;
    *out = span;
    return MO_OK;
}

static void unlink_span(mo_zone *zone, mo_span *span)
{
    mo_span **place = &zone->spans;

    while (*place != span)
        place = &(*place)->next;
    *place = span->next;
    if (!span->slot_count)
        zone->segment_bytes -= span->size;
}

void mo_zone_remove_span(mo_zone *zone, mo_span *span)
{
    MO_ASSERT(!span->lowest->next && span->lowest->state != MO_BLOCK_LIVE);
    unlink_span(zone, span);
    leave(zone, span->lowest);
    mo_block_give(zone->store, span->lowest);
    free_tables(span);
}

void mo_zone_forget_span(mo_zone *zone, mo_span *span)
{
    unlink_span(zone, span);
    free_tables(span);
}
