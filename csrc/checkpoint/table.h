/* Where the solver's functions are kept. A budget is seen in slots,
 *
 *     bytes_of(k) = offset + k * unit,  0 <= k <= last;  0 <= budget - bytes_of(last) < unit
 *
 * and each function of each part of the chain (moves.h) has an entry: its seconds as an array, a slot each, that
 * only falls and is infinite below `first`. Once it is done, when every move of it was made,
 *
 *     first = the least slot k with bytes_of(k) >= least;  more than `last` where there is none
 *     at_least >= array[k]                                      first <= k <= last
 *     ends[b] = array[last slot of block b]                     infinite where it has none
 *
 * A table is its solver's. */
#ifndef MO_TABLE_H
#define MO_TABLE_H

#include "base/assert.h"
#include "base/size.h"
#include "checkpoint/moves.h"
#include "checkpoint/relax.h"

typedef struct mo_entry {
    uint64_t least; /* bytes; MO_SOLVER_NEVER: no move, whatever the budget */
    float at_least; /* seconds with `least` bytes; infinite where that is more than the budget */
    bool done;
    size_t first;
} mo_entry;

/* (s, t), whose entries stand one after the other: O for each `right`; P for each, where a[s] can be put away; and in
 * full Q for each option and `right`, H for each `right`. */
typedef struct mo_pair {
    size_t index; /* of the first */
    uint32_t rights, kinds;
    bool puts;
} mo_pair;

enum { MO_TABLE_BLOCKS = MO_RELAX_BLOCKS };

typedef struct mo_table {
    size_t stages;
    uint64_t budget, unit, offset;
    size_t last, width;  /* width = last + 1 */
    unsigned block_bits; /* slot k is in block k >> block_bits, of MO_TABLE_BLOCKS */
    mo_pair *pairs;      /* s <= t, by s, then t */
    mo_entry *entries;
    float *seconds; /* width of them an entry */
    float *ends; /* 2 * MO_TABLE_BLOCKS an entry: first infinities, for what a shift leaves without a slot */
} mo_table;

/* For a budget in at most `slots` steps, nothing filled in; for mo_table_close(), on failure too. MO_INVALID where
 * it would take half of the machine's memory, MO_NO_HOST_MEMORY. */
mo_status mo_table_open(const mo_moves *moves, uint64_t budget, size_t slots, mo_detail *detail,
                        mo_table *out);

/* Zeroed is fine. */
void mo_table_close(mo_table *table);

/* An entry without a move, all infinite. */
void mo_table_begin(const mo_table *table, mo_entry *entry);

/* What stands above of an entry that is done. */
void mo_table_end(const mo_table *table, mo_entry *entry);

static inline uint64_t mo_table_bytes(const mo_table *table, size_t slot)
{
    return table->offset + slot * table->unit;
}

/* The least slot with that many bytes. */
static inline size_t mo_table_slot(const mo_table *table, uint64_t bytes)
{
    return bytes <= table->offset ? 0 : (size_t)mo_ceil_div(bytes - table->offset, table->unit);
}

/* How many slots a part has less that is given `bytes` less. */
static inline size_t mo_table_shift(const mo_table *table, uint64_t bytes)
{
    return (size_t)mo_ceil_div(bytes, table->unit);
}

static inline mo_pair *mo_table_pair(const mo_table *table, size_t s, size_t t)
{
    return &table->pairs[s * (2 * table->stages - s + 1) / 2 + t - s];
}

static inline mo_entry *mo_table_entry(const mo_table *table, mo_part part)
{
    const mo_pair *pair = mo_table_pair(table, part.s, part.t);
    const size_t kind = part.kind == MO_PART_O   ? 0
                        : part.kind == MO_PART_P ? 1
                        : part.kind == MO_PART_Q ? 1u + pair->puts + part.option
                                                 : pair->kinds - 1;

    MO_ASSERT(part.kind != MO_PART_NONE && part.right < pair->rights && kind < pair->kinds);
    return &table->entries[pair->index + kind * pair->rights + part.right];
}

/* The entry of a part; NULL of MO_PART_NONE. */
static inline const mo_entry *mo_table_find(const mo_table *table, mo_part part)
{
    return part.kind == MO_PART_NONE ? NULL : mo_table_entry(table, part);
}

static inline float *mo_table_array(const mo_table *table, const mo_entry *entry)
{
    return table->seconds + (size_t)(entry - table->entries) * table->width;
}

static inline float *mo_table_ends(const mo_table *table, const mo_entry *entry)
{
    return table->ends + (size_t)(entry - table->entries) * (2 * MO_TABLE_BLOCKS) + MO_TABLE_BLOCKS;
}

/* Seconds with m bytes, infinite where they are too few. m <= budget; the entry is done. */
float mo_table_value(const mo_table *table, const mo_entry *entry, uint64_t m);

#endif
