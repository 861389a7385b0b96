#include "alloc/free_set.h"

#include "base/assert.h"

/* Units of MO_ALIGNMENT below 32 have a bin each; from there 32 to a power of two. */
static unsigned bin_of(size_t size)
{
    size_t units = size / MO_ALIGNMENT;
    unsigned power, bin;

    if (units < 32)
        return (unsigned)units;
    power = 63u - (unsigned)__builtin_clzll(units);
    bin = 32 * (power - 4) + (unsigned)((units >> (power - 5)) & 31);
    return bin < MO_BINS ? bin : MO_BINS - 1;
}

static bool before(const mo_block *a, const mo_block *b)
{
    return a->size != b->size ? a->size < b->size : a->address < b->address;
}

static void note_filled(mo_free_set *set, unsigned bin)
{
    set->bins[bin / 64] |= 1ull << (bin % 64);
    set->words |= 1ull << (bin / 64);
}

static void note_emptied(mo_free_set *set, unsigned bin)
{
    set->bins[bin / 64] &= ~(1ull << (bin % 64));
    if (!set->bins[bin / 64])
        set->words &= ~(1ull << (bin / 64));
}

/* A treap: a search tree by (size, address) that is a heap by priority. */
void mo_free_set_insert(mo_free_set *set, mo_block *block)
{
    unsigned bin = bin_of(block->size);
    mo_block **place = &set->root[bin], *rest, **lower, **upper;

    while (*place && (*place)->priority >= block->priority)
        place = &(*place)->link[before(*place, block)];
    if (!set->root[bin])
        note_filled(set, bin);
    rest = *place; /* is split into what comes before the block and what comes after */
    *place = block;
    lower = &block->link[0];
    upper = &block->link[1];
    while (rest)
        if (before(rest, block)) {
            *lower = rest;
            lower = &rest->link[1];
            rest = *lower;
        } else {
            *upper = rest;
            upper = &rest->link[0];
            rest = *upper;
        }
    *lower = *upper = NULL;
    set->count++;
}

void mo_free_set_remove(mo_free_set *set, mo_block *block)
{
    unsigned bin = bin_of(block->size);
    mo_block **place = &set->root[bin], *low, *high;

    while (*place != block) {
        MO_ASSERT(*place);
        place = &(*place)->link[before(*place, block)];
    }
    low = block->link[0];
    high = block->link[1];
    while (low && high)
        if (low->priority >= high->priority) {
            *place = low;
            place = &low->link[1];
            low = *place;
        } else {
            *place = high;
            place = &high->link[0];
            high = *place;
        }
    *place = low ? low : high;
    set->count--;
    if (!set->root[bin])
        note_emptied(set, bin);
}

static mo_block *end_of(mo_block *tree, int side)
{
    while (tree && tree->link[side])
        tree = tree->link[side];
    return tree;
}

/* The first block in a bin after `bin`; its last in one before it. */
static mo_block *in_later_bin(const mo_free_set *set, unsigned bin)
{
    unsigned word = bin / 64;
    uint64_t bits = set->bins[word] & (bin % 64 == 63 ? 0 : ~0ull << (bin % 64 + 1));

    if (!bits) {
        uint64_t words = set->words & (word == 63 ? 0 : ~0ull << (word + 1));

        if (!words)
            return NULL;
        word = (unsigned)__builtin_ctzll(words);
        bits = set->bins[word];
    }
    return end_of(set->root[word * 64 + (unsigned)__builtin_ctzll(bits)], 0);
}

static mo_block *in_earlier_bin(const mo_free_set *set, unsigned bin)
{
    unsigned word = bin / 64;
    uint64_t bits = set->bins[word] & ((1ull << (bin % 64)) - 1);

    if (!bits) {
        uint64_t words = set->words & ((1ull << word) - 1);

        if (!words)
            return NULL;
        word = 63u - (unsigned)__builtin_clzll(words);
        bits = set->bins[word];
    }
    return end_of(set->root[word * 64 + 63u - (unsigned)__builtin_clzll(bits)], 1);
}

mo_block *mo_free_set_fit(const mo_free_set *set, size_t size)
{
    unsigned bin = bin_of(size);
    mo_block *best = NULL;

    for (mo_block *b = set->root[bin]; b;)
        if (b->size >= size) {
            best = b;
            b = b->link[0];
        } else {
            b = b->link[1];
        }
    return best ? best : in_later_bin(set, bin);
}

mo_block *mo_free_set_after(const mo_free_set *set, const mo_block *block)
{
    unsigned bin = bin_of(block->size);
    mo_block *found = NULL;

    for (mo_block *b = set->root[bin]; b;)
        if (before(block, b)) {
            found = b;
            b = b->link[0];
        } else {
            b = b->link[1];
        }
    return found ? found : in_later_bin(set, bin);
}

mo_block *mo_free_set_last(const mo_free_set *set)
{
    if (!set->words)
        return NULL;
    unsigned word = 63u - (unsigned)__builtin_clzll(set->words);
    return end_of(set->root[word * 64 + 63u - (unsigned)__builtin_clzll(set->bins[word])], 1);
}

mo_block *mo_free_set_before(const mo_free_set *set, const mo_block *block)
{
    unsigned bin = bin_of(block->size);
    mo_block *found = NULL;

    for (mo_block *b = set->root[bin]; b;)
        if (before(b, block)) {
            found = b;
            b = b->link[1];
        } else {
            b = b->link[0];
        }
    return found ? found : in_earlier_bin(set, bin);
}
