/* Against what the set stands for: an array sorted by (size, address). */
#include "alloc/free_set.h"

#include "test.h"

#define MOST 2000

static mo_block blocks[MOST];
static mo_block *sorted[MOST];
static size_t count;
static mo_free_set set;

static void start(void)
{
    memset(&set, 0, sizeof set);
    count = 0;
}

/* How many members come before (size, address). */
static size_t rank_of(size_t size, mo_address address)
{
    size_t low = 0, high = count;

    while (low < high) {
        const size_t middle = (low + high) / 2;
        const mo_block *b = sorted[middle];

        if (b->size < size || (b->size == size && b->address < address))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void add(mo_block *block)
{
    const size_t i = rank_of(block->size, block->address);

    memmove(&sorted[i + 1], &sorted[i], (count++ - i) * sizeof *sorted);
    sorted[i] = block;
    mo_free_set_insert(&set, block);
}

static mo_block *drop(size_t i)
{
    mo_block *block = sorted[i];

    memmove(&sorted[i], &sorted[i + 1], (--count - i) * sizeof *sorted);
    mo_free_set_remove(&set, block);
    return block;
}

static mo_block *at(size_t i)
{
    return i < count ? sorted[i] : NULL;
}

static void check_fit(size_t size)
{
    CHECK(mo_free_set_fit(&set, size) == at(rank_of(size, 0)));
}

static void check_all(void)
{
    CHECK_EQ(set.count, count);
    CHECK(mo_free_set_last(&set) == (count ? sorted[count - 1] : NULL));
    for (size_t i = 0; i < count; i++) {
        CHECK(mo_free_set_after(&set, sorted[i]) == at(i + 1));
        CHECK(mo_free_set_before(&set, sorted[i]) == (i ? sorted[i - 1] : NULL));
        check_fit(sorted[i]->size);
        check_fit(sorted[i]->size + MO_ALIGNMENT);
        if (sorted[i]->size > MO_ALIGNMENT)
            check_fit(sorted[i]->size - MO_ALIGNMENT);
    }
}

TEST(an_empty_set_has_nothing)
{
    start();
    check_all();
    for (size_t size = MO_ALIGNMENT; size < (size_t)1 << 48; size *= 2)
        CHECK(!mo_free_set_fit(&set, size));
}

TEST(every_edge_of_a_bin_is_found_from_below_and_not_from_above)
{
    for (unsigned power = 9; power < 49; power++)
        for (size_t part = 0; part < 32; part++) { /* a bin begins at each of these, where they are sizes */
            const size_t size = ((size_t)1 << power) + (((size_t)1 << power) / 32 * part);

            if (size % MO_ALIGNMENT)
                continue;
            start();
            blocks[0] = (mo_block){.address = MO_ALIGNMENT, .size = size, .priority = 3};
            blocks[1] = (mo_block){.address = 4 * MO_ALIGNMENT, .size = size + MO_ALIGNMENT, .priority = 2};
            blocks[2] = (mo_block){.address = 9 * MO_ALIGNMENT, .size = size - MO_ALIGNMENT, .priority = 1};
            add(&blocks[0]);
            check_all();
            add(&blocks[1]);
            check_all();
            if (blocks[2].size) {
                add(&blocks[2]);
                check_all();
            }
            drop(count - 1);
            check_all();
            drop(0);
            check_all();
        }
}

TEST(blocks_of_one_size_are_in_the_order_of_their_addresses)
{
    uint64_t random = test_seed();

    start();
    for (size_t i = 0; i < 500; i++) {
        blocks[i] = (mo_block){
            .size = 3 << 20, .priority = (uint32_t)test_random(&random), .address = (i * 7 % 500 + 1) << 23};
        add(&blocks[i]);
    }
    check_all();
    CHECK_EQ(mo_free_set_fit(&set, 3 << 20)->address, 1 << 23);
    while (count) {
        drop(test_random(&random) % count);
        if (count % 50 == 0)
            check_all();
    }
}

TEST(blocks_of_one_priority_are_in_order_too)
{
    start();
    for (size_t i = 0; i < 200; i++) {
        blocks[i] = (mo_block){.size = (i * 37 % 200 + 1) << 12, .priority = 7, .address = (i + 1) << 23};
        add(&blocks[i]);
    }
    check_all();
    for (size_t i = 0; count; i++)
        drop(i * 31 % count);
    check_all();
}

/* Sizes as allocators see them: few in a narrow range, many everywhere, many equal. */
static size_t some_size(uint64_t *random)
{
    const uint64_t r = test_random(random);

    switch (r % 4) {
    case 0:
        return MO_ALIGNMENT * (1 + (r >> 8) % 40);
    case 1:
        return (size_t)2 << 20 << (r >> 8) % 8;
    case 2:
        return MO_ALIGNMENT * (1 + (r >> 8) % ((uint64_t)1 << (8 + (r >> 3) % 32)));
    default:
        return ((size_t)1 << 30) + MO_ALIGNMENT * ((r >> 8) % 70000);
    }
}

TEST(the_set_is_a_sorted_array)
{
    uint64_t random = test_seed();
    const int operations = test_rounds(100000, 10000000);
    mo_block *unused[MOST];
    size_t unused_count = 0, aim = 10;

    start();
    for (size_t i = 0; i < MOST; i++)
        unused[unused_count++] = &blocks[i];
    for (int n = 0; n < operations; n++) {
        if (n % 5000 == 0)
            aim = 1 + test_random(&random) % (n % 10000 ? 20 : MOST - 1);
        if (count < MOST && test_random(&random) % (2 * aim) >= count) {
            mo_block *block = unused[--unused_count];

            *block = (mo_block){.size = some_size(&random),
                                .address = MO_ALIGNMENT * (1 + test_random(&random) % ((uint64_t)1 << 36)),
                                .priority = (uint32_t)test_random(&random)};
            if (rank_of(block->size, block->address) < rank_of(block->size, block->address + 1))
                unused[unused_count++] = block; /* there is one of this size and address */
            else
                add(block);
        } else if (count) {
            unused[unused_count++] = drop(test_random(&random) % count);
        }
        CHECK_EQ(set.count, count);
        check_fit(some_size(&random));
        CHECK(mo_free_set_last(&set) == (count ? sorted[count - 1] : NULL));
        if (count) {
            const size_t i = test_random(&random) % count;

            CHECK(mo_free_set_after(&set, sorted[i]) == at(i + 1));
            CHECK(mo_free_set_before(&set, sorted[i]) == (i ? sorted[i - 1] : NULL));
        }
        if (n % 4999 == 0)
            check_all();
    }
    while (count)
        drop(count - 1);
    check_all();
}

/* A walk that removes what it stands on goes on from a copy: what taking memory from the largest blocks does. */
TEST(a_copy_of_a_removed_block_still_has_a_before_and_an_after)
{
    uint64_t random = test_seed();
    mo_block probe;

    start();
    for (size_t i = 0; i < 300; i++) {
        blocks[i] = (mo_block){
            .size = some_size(&random), .address = (i + 1) << 40, .priority = (uint32_t)test_random(&random)};
        add(&blocks[i]);
    }
    for (mo_block *b = mo_free_set_last(&set); b; b = mo_free_set_before(&set, &probe)) {
        probe = *b;
        CHECK(b == sorted[count - 1]);
        drop(count - 1);
        CHECK(!mo_free_set_after(&set, &probe));
    }
    CHECK_EQ(count, 0);
}

TEST(sizes_that_only_grow_make_no_list_of_a_tree)
{
    static mo_block many[20000];
    mo_block_store store = {0};
    size_t deepest = 0;

    start();
    CHECK_EQ(mo_blocks_reserve(&store, 1, NULL), MO_OK);
    for (size_t i = 0; i < 20000; i++) { /* all in one bin: 1 GiB and less than 32 MiB */
        mo_block *b = mo_block_take(&store);

        many[i] = (mo_block){
            .priority = b->priority, .size = ((size_t)1 << 30) + i * MO_ALIGNMENT, .address = (i + 1) << 40};
        mo_block_give(&store, b);
        mo_free_set_insert(&set, &many[i]);
    }
    for (size_t i = 0; i < 20000; i++) {
        size_t depth = 0;

        for (int bin = 0; bin < MO_BINS; bin++)
            for (mo_block *b = set.root[bin]; b && b != &many[i]; depth++)
                b = b->link[b->size < many[i].size];
        deepest = depth > deepest ? depth : deepest;
    }
    CHECK(deepest < 60); /* expected: about 2 ln n = 20, and some 30 at most */
    mo_blocks_close(&store);
}

TEST_MAIN
