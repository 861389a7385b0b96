/* What an allocator has given out, as a person would write it down: live blocks, sorted by address.
 *
 *     no two blocks overlap; each is aligned and at least as large as was asked for
 *     live = sum of sizes, requested = sum of what was asked for; peaks since model_reset_peaks()
 *
 * Shorter than any allocator, and so its oracle. */
#ifndef MEMOPT_INTERVAL_MODEL_H
#define MEMOPT_INTERVAL_MODEL_H

#include "alloc/pool.h"
#include "test.h"

typedef struct model_block {
    mo_address address;
    size_t size, requested;
    mo_stream stream;
    uint64_t owner; /* counted from 1: the first block's, the second's … */
} model_block;

typedef struct interval_model {
    model_block *blocks;
    size_t count, places;
    size_t live, requested, peak_live, peak_requested, peak_count;
    uint64_t allocations, frees;
} interval_model;

/* The place of the first block that ends behind address. */
static size_t model_place(const interval_model *m, mo_address address)
{
    size_t low = 0, high = m->count;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (m->blocks[middle].address + m->blocks[middle].size <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

__attribute__((unused)) static model_block *model_at(const interval_model *m, mo_address address)
{
    const size_t i = model_place(m, address);
    return i < m->count && m->blocks[i].address <= address ? &m->blocks[i] : NULL;
}

static void model_reset_peaks(interval_model *m)
{
    m->peak_live = m->live;
    m->peak_requested = m->requested;
    m->peak_count = m->count;
}

/* Checks a new block against the rules and remembers it. */
__attribute__((unused)) static model_block *model_add(interval_model *m, mo_address address, size_t size,
                                                      size_t requested, mo_stream stream)
{
    const size_t i = model_place(m, address);
    CHECK(address);
    CHECK_EQ(address % MO_ALIGNMENT, 0);
    CHECK(size >= requested);
    if (i < m->count && m->blocks[i].address < address + size)
        TEST_FAIL("[%#zx, +%zu) overlaps the live block [%#zx, +%zu)", (size_t)address, size,
                  (size_t)m->blocks[i].address, m->blocks[i].size);
    if (m->count == m->places) {
        m->places = m->places * 2 + 64;
        m->blocks = realloc(m->blocks, m->places * sizeof *m->blocks);
        CHECK(m->blocks);
    }
    memmove(&m->blocks[i + 1], &m->blocks[i], (m->count++ - i) * sizeof *m->blocks);
    m->blocks[i] = (model_block){address, size, requested, stream, ++m->allocations};
    m->live += size;
    m->requested += requested;
    if (m->peak_live < m->live)
        m->peak_live = m->live;
    if (m->peak_requested < m->requested)
        m->peak_requested = m->requested;
    if (m->peak_count < m->count)
        m->peak_count = m->count;
    return &m->blocks[i];
}

__attribute__((unused)) static void model_remove(interval_model *m, mo_address address)
{
    const size_t i = model_place(m, address);
    CHECK(i < m->count && m->blocks[i].address == address);
    m->live -= m->blocks[i].size;
    m->requested -= m->blocks[i].requested;
    m->frees++;
    memmove(&m->blocks[i], &m->blocks[i + 1], (--m->count - i) * sizeof *m->blocks);
}

/* Bytes of all granules that a live block touches: less memory cannot hold the blocks where they lie. */
__attribute__((unused)) static size_t model_touched(const interval_model *m, size_t granularity)
{
    size_t granules = 0;
    mo_address next = 0; /* the first granule that is not counted yet */
    for (size_t i = 0; i < m->count; i++) {
        mo_address from = m->blocks[i].address / granularity;
        const mo_address to = (m->blocks[i].address + m->blocks[i].size - 1) / granularity + 1;
        from = from < next ? next : from;
        granules += to - from;
        next = to;
    }
    return granules * granularity;
}

__attribute__((unused)) static void model_clear(interval_model *m)
{
    free(m->blocks);
    *m = (interval_model){0};
    model_reset_peaks(m);
}

#endif
