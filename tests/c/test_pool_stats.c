/* Statistics, against the list of blocks, and the trace of what is held, against them. */
#include "pool_fixture.h"

static const mo_arena_id mine = {0, 3};

/* Allocations and frees at random, on two streams, some used on both. */
static void churn(uint64_t *random, int steps)
{
    for (int i = 0; i < steps; i++) {
        if (model.count && test_random(random) % 5 < 2)
            put(model.blocks[test_random(random) % model.count].address);
        else if (model.live < 200 * MIB)
            get_in(test_random(random) % 4 ? GENERAL : mine,
                   1 + test_random(random) % ((size_t)1 << (9 + test_random(random) % 15)),
                   test_random(random) % 2 ? A : B);
        if (model.count && test_random(random) % 8 == 0) {
            const model_block *block = &model.blocks[test_random(random) % model.count];
            use_on(block->address, block->stream == A ? B : A);
        }
        if (test_random(random) % 16 == 0)
            finish(test_random(random) % 2 ? A : B);
    }
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

TEST(what_is_active_or_split_is_what_the_list_of_blocks_says)
{
    uint64_t random = test_seed();
    open_pool(1024 * MIB, GRANULE, plain_settings);
    CHECK_OK(mo_pool_arena_retain(pool, mine, false, 0, &said));
    for (int round = 0, rounds = test_rounds(60, 2000); round < rounds; round++) {
        mo_block_view *blocks = NULL;
        size_t count = 0;
        int64_t used[3] = {0}, used_bytes[3] = {0}, unused[3] = {0}, unused_bytes[3] = {0};
        churn(&random, 20);
        CHECK_OK(mo_pool_blocks(pool, &said, &blocks, &count));
        const mo_stats s = stats_now();
        for (size_t i = 0; i < count; i++) {
            const int column = blocks[i].small ? MO_STAT_SMALL : MO_STAT_LARGE;
            const bool live = blocks[i].state == MO_BLOCK_LIVE, pending = blocks[i].state == MO_BLOCK_PENDING;
            used[column] += pending;
            used_bytes[column] += pending ? (int64_t)blocks[i].size : 0;
            unused[column] += !live;
            unused_bytes[column] += !live ? (int64_t)blocks[i].size : 0;
        }
        mo_host_free(blocks);
        for (int k = MO_STAT_SMALL; k < MO_STAT_COLUMN_COUNT; k++) { /* never more than was freed */
            const mo_stat *live = &s.of[MO_ALLOCATION][k], *bytes = &s.of[MO_ALLOCATED_BYTES][k];
            CHECK_EQ(s.of[MO_ACTIVE][k].current, live->current + least(used[k], live->freed));
            CHECK_EQ(s.of[MO_ACTIVE_BYTES][k].current, bytes->current + least(used_bytes[k], bytes->freed));
            CHECK_EQ(s.of[MO_INACTIVE_SPLIT][k].current, unused[k]);
            CHECK_EQ(s.of[MO_INACTIVE_SPLIT_BYTES][k].current, unused_bytes[k]);
        }
        check_stats();
    }
    close_pool();
}

/* ---- the trace ------------------------------------------------------------------------------------------- */

static int64_t told(mo_trace *ring)
{
    static mo_trace_record records[1 << 14];
    uint64_t first;
    int64_t bytes = 0;
    const size_t count = mo_trace_read(ring, 0, records, sizeof records / sizeof records[0], &first);

    CHECK_EQ(mo_trace_written(ring), count); /* all of them */
    for (size_t i = 0; i < count; i++)
        bytes += records[i].op == MO_TRACE_MAP     ? (int64_t)records[i].size
                 : records[i].op == MO_TRACE_UNMAP ? -(int64_t)records[i].size
                                                   : 0;
    return bytes;
}

static int64_t in_arenas(void)
{
    const mo_arena_id arenas[] = {GENERAL, mine};
    int64_t bytes = 0;

    for (int i = 0; i < 2; i++) {
        mo_arena_info info;

        if (!mo_pool_arena_info(pool, arenas[i], NULL, &info))
            bytes += info.paused ? 0 : (int64_t)info.held_bytes;
    }
    return bytes;
}

TEST(memory_that_comes_to_addresses_and_leaves_them_is_told_to_the_byte)
{
    for (int virtual_memory = 0; virtual_memory < 2; virtual_memory++) {
        uint64_t random = test_seed();
        size_t freed;
        mo_trace *ring;

        open_pool(512 * MIB, virtual_memory ? GRANULE : 0, plain_settings);
        CHECK_OK(mo_trace_open(1 << 14, &said, &ring));
        mo_pool_trace(pool, ring);
        CHECK_OK(mo_pool_arena_retain(pool, mine, false, 0, &said));
        for (int round = 0; round < 8; round++) {
            churn(&random, 200);
            CHECK_EQ(told(ring), in_arenas());
        }
        if (virtual_memory) {
            CHECK_OK(mo_pool_pause(pool, mine, &said));
            CHECK_EQ(told(ring), in_arenas());
            CHECK_OK(mo_pool_resume(pool, mine, &said));
            CHECK_EQ(told(ring), in_arenas());
        }
        while (model.count)
            put(model.blocks[0].address);
        CHECK_OK(mo_pool_arena_release(pool, mine, &said));
        CHECK_OK(mo_pool_trim(pool, 0, &said, &freed));
        CHECK_EQ(in_arenas(), 0);
        CHECK_EQ(told(ring), 0);
        mo_pool_trace(pool, NULL);
        mo_trace_close(ring);
        close_pool();
    }
}

TEST_MAIN
