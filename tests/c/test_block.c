#include "alloc/block.h"

#include "base/hostmem.h"
#include "test.h"

#define MANY 1000

TEST(as_many_as_were_reserved_can_be_taken_and_all_differ)
{
    mo_block_store store = {0};
    mo_block *taken[MANY];

    CHECK_EQ(mo_blocks_reserve(&store, MANY, NULL), MO_OK);
    CHECK(store.spare_count >= MANY);
    for (int i = 0; i < MANY; i++) {
        taken[i] = mo_block_take(&store);
        CHECK(taken[i]);
        for (int k = 0; k < i; k++)
            CHECK(taken[i] != taken[k]);
    }
    mo_blocks_close(&store);
}

TEST(one_that_is_taken_is_zero_but_for_its_priority_whatever_was_in_it)
{
    mo_block_store store = {0};
    mo_block *block;

    CHECK_EQ(mo_blocks_reserve(&store, 1, NULL), MO_OK);
    for (int i = 0; i < 3 * MANY; i++) {
        block = mo_block_take(&store);
        CHECK(block->priority);
        CHECK(!block->address && !block->size && !block->requested && !block->serial);
        CHECK(!block->link[0] && !block->link[1] && !block->previous && !block->next && !block->span);
        CHECK(!block->state && !block->stream && !block->last_use.streams && !block->last_use.tick);
        memset(block, 0xA5, sizeof *block);
        mo_block_give(&store, block);
    }
    mo_blocks_close(&store);
}

TEST(no_block_lies_in_more_than_two_cache_lines)
{
    mo_block_store store = {0};

    for (int i = 0; i < 3 * MANY; i++) {
        CHECK_EQ(mo_blocks_reserve(&store, 1, NULL), MO_OK);
        const uintptr_t start = (uintptr_t)mo_block_take(&store);
        CHECK((start + sizeof(mo_block) - 1) / 64 - start / 64 < 2);
    }
    mo_blocks_close(&store);
}

TEST(one_that_is_given_is_taken_again_before_host_memory_is)
{
    mo_block_store store = {0};
    const size_t live = mo_host_live();
    size_t chunks;

    CHECK_EQ(mo_blocks_reserve(&store, 4, NULL), MO_OK);
    chunks = mo_host_live() - live;
    for (int i = 0; i < MANY; i++) {
        mo_block *block;

        CHECK_EQ(mo_blocks_reserve(&store, 4, NULL), MO_OK);
        block = mo_block_take(&store);
        mo_block_give(&store, block);
        CHECK(mo_block_take(&store) == block);
        mo_block_give(&store, block);
    }
    CHECK_EQ(mo_host_live() - live, chunks);
    mo_blocks_close(&store);
    CHECK_EQ(mo_host_live(), live);
}

TEST(priorities_repeat_rarely_and_halve_the_blocks)
{
    mo_block_store store = {0};
    size_t high = 0, equal = 0;
    uint32_t earlier = 0;

    CHECK_EQ(mo_blocks_reserve(&store, MANY, NULL), MO_OK);
    for (int i = 0; i < MANY; i++) {
        const uint32_t priority = mo_block_take(&store)->priority;

        high += priority >> 31;
        equal += priority == earlier;
        earlier = priority;
    }
    CHECK_EQ(equal, 0);
    CHECK(high > MANY / 2 - 80 && high < MANY / 2 + 80); /* five deviations of a fair coin */
    mo_blocks_close(&store);
}

TEST(without_host_memory_nothing_is_lost_and_the_next_attempt_succeeds)
{
    for (uint64_t after = 0; after < 4; after++) {
        mo_block_store store = {0};
        mo_detail detail = {0};
        const size_t live = mo_host_live();
        size_t made;

        mo_host_fail_after(after);
        CHECK_EQ(mo_blocks_reserve(&store, MANY * 4, &detail), MO_NO_HOST_MEMORY);
        mo_host_fail_never();
        CHECK(strstr(detail.text, "no host memory"));
        CHECK_EQ(mo_host_live() - live, after);
        made = store.spare_count;
        for (size_t i = 0; i < made; i++)
            CHECK(mo_block_take(&store));
        CHECK_EQ(store.spare_count, 0);
        CHECK_EQ(mo_blocks_reserve(&store, MANY * 4, &detail), MO_OK);
        mo_blocks_close(&store);
        CHECK_EQ(mo_host_live(), live);
    }
}

TEST_MAIN
