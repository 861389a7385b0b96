#include "alloc/out_of_memory.h"
#include "alloc/pool_parts.h"
#include "pool_fixture.h"

/* What is told of a pool, against what the model, the device and the list of blocks say; and that the pool's own check
 * sees each of the faults that it is there for: one is planted in a sound pool, named, and taken out again. */

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

/* ---- statistics and blocks --------------------------------------------------------------------------------- */

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

TEST(each_arena_is_told_apart)
{
    mo_arena_held_bytes *list = NULL;
    mo_arena_info info;
    size_t count = 0;
    open_pool(1024 * MIB, GRANULE, plain_settings);
    CHECK_OK(mo_pool_arenas(pool, &said, &list, &count));
    CHECK_EQ(count, 0); /* the general one is no memory pool */
    mo_host_free(list);
    CHECK_EQ(mo_pool_arena_info(pool, mine, &said, &info), MO_INVALID);
    CHECK(strstr(said.text, "(0, 3)"));
    CHECK_OK(mo_pool_arena_retain(pool, mine, false, 99 * MIB, &said));
    get(8 * MIB, A);
    const mo_address block = get_in(mine, 5 * MIB, A);
    get_in(mine, 700, A);
    CHECK_OK(mo_pool_arenas(pool, &said, &list, &count));
    CHECK_EQ(count, 1);
    CHECK(list->id.first == mine.first && list->id.second == mine.second);
    CHECK_EQ(list->bytes[MO_STAT_SMALL].current, 2 * MIB);
    CHECK_EQ(list->bytes[MO_STAT_LARGE].current, 6 * MIB);
    CHECK_EQ(list->bytes[MO_STAT_ALL].current, 8 * MIB);
    mo_host_free(list);
    put(block);
    CHECK_OK(mo_pool_arena_info(pool, mine, &said, &info));
    CHECK(!info.pinned && !info.paused && info.references == 1 && info.budget == 99 * MIB);
    CHECK(info.held_bytes == 8 * MIB && info.live_blocks == 1 && info.live_bytes == 1024);
    CHECK(info.requested_bytes == 700 && info.peak_bytes == 5 * MIB + 1024);
    CHECK_EQ(info.free_bytes, 8 * MIB - 1024);
    CHECK_OK(mo_pool_pause(pool, mine, &said));
    CHECK_OK(mo_pool_arena_info(pool, mine, &said, &info));
    CHECK(info.paused && info.held_bytes == 0 && info.free_bytes == 0 && info.live_bytes == 1024);
    CHECK_OK(mo_pool_resume(pool, mine, &said));
    close_pool();
}

TEST(a_list_that_there_is_no_host_memory_for_is_an_error_and_the_pool_goes_on)
{
    mo_block_view *blocks = NULL;
    mo_arena_held_bytes *arenas = NULL;
    size_t count = 77;
    open_pool(1024 * MIB, GRANULE, plain_settings);
    get(3 * MIB, A);
    mo_host_fail_after(0);
    CHECK_EQ(mo_pool_blocks(pool, &said, &blocks, &count), MO_NO_HOST_MEMORY);
    CHECK(strstr(said.text, "2 blocks")); /* the live one and the rest of its granules */
    mo_host_fail_after(0);
    CHECK_EQ(mo_pool_arenas(pool, &said, &arenas, &count), MO_NO_HOST_MEMORY);
    mo_host_fail_never();
    CHECK(!blocks && !arenas && count == 77);
    CHECK_POOL();
    close_pool();
}

/* ---- fragmentation and out of memory ------------------------------------------------------------------------- */

TEST(fragmentation_knows_what_pends_on_whichever_stream_and_what_cannot_move)
{
    mo_fragmentation f;
    mo_pool_settings settings = plain_settings;
    settings.budget = 64 * MIB;
    open_pool(1024 * MIB, GRANULE, settings);
    CHECK_OK(mo_pool_arena_retain(pool, mine, true, 0, &said)); /* pinned: its granules stay */
    const mo_address a = get(10 * MIB, A);
    get(2 * MIB, A);
    const mo_address b = get(4 * MIB, A);
    const mo_address fixed = get_in(mine, 6 * MIB, A);
    use_on(b, B);
    put(a), put(b);
    put(fixed);
    mo_pool_fragmentation(pool, &f);
    CHECK_EQ(f.held_bytes, 22 * MIB);
    CHECK_EQ(f.live_bytes, 2 * MIB);
    CHECK_EQ(f.free_bytes, 20 * MIB);
    CHECK_EQ(f.largest_free, 10 * MIB);
    CHECK_EQ(f.largest_allocatable,
             (14 + 42) * MIB); /* what is free elsewhere, and what may be created yet */
    CHECK_EQ(f.pending_bytes, 20 * MIB);
    size_t freed;
    finish(A), finish(B), finish(A);
    CHECK_OK(mo_pool_trim(pool, 20 * MIB, &said, &freed)); /* asks what is over */
    mo_pool_fragmentation(pool, &f);
    CHECK(freed == 2 * MIB && f.pending_bytes == 0 && f.live_bytes == 2 * MIB && f.internal == 0);
    CHECK(f.unused_at_peak > -1e-9 && f.unused_at_peak < 1e-9);
    close_pool();
}

/* The facts, told apart by their sizes. */
TEST(an_out_of_memory_says_how_much_is_where_and_who_still_uses_it)
{
    mo_pool_settings settings = plain_settings;
    mo_address address, blocks[3];
    mo_stream streams[3] = {A, B, C};
    settings.budget = 40 * MIB;
    open_pool(64 * MIB, GRANULE, settings);
    CHECK_OK(mo_pool_arena_retain(pool, mine, false, 16 * MIB, &said));
    for (int i = 0; i < 3; i++) {
        blocks[i] = get((size_t)(i + 1) * 2 * MIB, streams[i]);
        get(4 * MIB - 100, A);
    }
    for (int i = 0; i < 3; i++)
        put(blocks[i]);
    mo_lock_take(&pool->lock);
    mo_pool_describe_oom(pool, &pool->general, 50 * MIB, &said);
    mo_lock_give(&pool->lock);
    CHECK_EQ(said.status, MO_NO_DEVICE_MEMORY);
    CHECK(strstr(said.text, "Tried to allocate 50.00 MiB. GPU 0 has a total capacity of 64.00 MiB of which "
                            "40.00 MiB is free. 40.00 MiB allowed."));
    CHECK(strstr(said.text, "memopt holds 24.00 MiB: 12.00 MiB in live tensors (12.00 MiB asked for) and "
                            "12.00 MiB free, of which the largest run is 6.00 MiB, or 28.00 MiB with"));
    CHECK(strstr(said.text, "12.00 MiB is freed but may still be used by queued work: 6.00 MiB on stream "
                            "0x30, 4.00 MiB on stream 0x20, 2.00 MiB on stream 0x10."));
    CHECK_OUT_OF_MEMORY(mo_pool_alloc_in(pool, mine, 18 * MIB, A, &said, &address));
    CHECK(strstr(said.text, "16.00 MiB allowed.")); /* the tighter of two budgets is the one that counts */
    close_pool();
}

/* ---- soundness -------------------------------------------------------------------------------------------------
 *
 *     general, small    600, (free), 900, the rest free            general, large    4 MiB, (free), 4 MiB …
 *     a hole in the midst whose granules are elsewhere (stale), spare granules, one arena with a block, a retired one */

static struct {
    mo_address small[3], large[4], first;
} at;

static mo_zone *zone_of(mo_zone_kind kind)
{
    return &pool->general.zones[kind];
}

static mo_block *block_at(mo_address address)
{
    mo_block *block = mo_pool_live_at(pool, address);
    CHECK(block && block->address == address);
    return block;
}

static void open_sound_pool(void)
{
    size_t freed;
    open_pool(1024 * MIB, GRANULE, plain_settings);
    for (int i = 0; i < 3; i++)
        at.small[i] = get(600, A);
    for (int i = 0; i < 4; i++)
        at.large[i] = get(5 * MIB, A);
    put(at.small[1]);
    CHECK_OK(mo_pool_arena_retain(pool, mine, false, 0, &said));
    CHECK_OK(mo_pool_arena_retain(pool, (mo_arena_id){0, 4}, false, 0, &said));
    at.first = get_in(mine, 3 * MIB, B);
    put(get_in((mo_arena_id){0, 4}, 8 * MIB, A));
    CHECK_OK(mo_pool_arena_release(pool, (mo_arena_id){0, 4},
                                   &said)); /* its granules are spare, their views stale */
    put(at.large[1]);
    finish(A), finish(B);
    CHECK_OK(mo_pool_trim(pool, SIZE_MAX, &said, &freed));
    CHECK(pool->retired && pool->granules.spare_count >= 2 && pool->granules.stale_count >= 2);
    CHECK_POOL();
}

static void check_names(const char *expected)
{
    CHECK_EQ(mo_pool_check(pool, &said), MO_CORRUPT);
    if (!strstr(said.text, expected))
        TEST_FAIL("\"%s\" is expected, and \"%s\" said", expected, said.text);
}

/* The check names `expected` while `where` is `wrong`, and nothing before and after. */
#define BROKEN(where, wrong, expected)                                                                       \
    do {                                                                                                     \
        __typeof__(where) *where_ = &(where), was_ = *where_;                                                \
        CHECK_OK(mo_pool_check(pool, &said));                                                                \
        *where_ = (wrong);                                                                                   \
        check_names(expected);                                                                               \
        *where_ = was_;                                                                                      \
        CHECK_OK(mo_pool_check(pool, &said));                                                                \
    } while (0)

TEST(the_check_sees_a_block_that_is_not_where_it_should_be)
{
    open_sound_pool();
    mo_block *block = block_at(at.small[0]), *last = block;
    BROKEN(block->size, 0, "block->size && block->size % MO_ALIGNMENT == 0 && block->span == span");
    BROKEN(block->size, block->size + 1,
           "block->size && block->size % MO_ALIGNMENT == 0 && block->span == span");
    BROKEN(block->span, NULL, "block->size && block->size % MO_ALIGNMENT == 0 && block->span == span");
    BROKEN(block->size, block->size + 512,
           "!block->next || block->next->address == block->address + block->size");
    BROKEN(block->next->address, block->next->address - 512,
           "!block->next || block->next->address == block->address + block->size");
    BROKEN(block->next, block->next->next,
           "!block->next || block->next->address == block->address + block->size");
    BROKEN(block->next->previous, NULL, "!block->next || block->next->previous == block");
    BROKEN(block->state, MO_BLOCK_FREE,
           "!block->next || block->state == MO_BLOCK_LIVE || block->next->state != block->state");
    while (last->next)
        last = last->next;
    CHECK_EQ(last->state, MO_BLOCK_HOLE);
    BROKEN(last->size, last->size - 512,
           "(block->address - span->base) % size == 0 && block->size % size == 0");
    BROKEN(block->span->size, block->span->size + GRANULE, "end == span->base + span->size");
    BROKEN(last->previous->next, NULL, "end == span->base + span->size");
    close_pool();
}

TEST(the_check_sees_an_impossible_use)
{
    open_sound_pool();
    mo_block *block = block_at(at.large[0]);
    const char *expected = "block->use.tick <= c->pool->order.tick && block->stream < MO_STREAMS";
    BROKEN(block->use.tick, pool->order.tick + 1, expected);
    BROKEN(block->stream, MO_STREAMS, expected);
    BROKEN(block->use.streams, 1ull << 1, "pool->order.streams[t].users == c->users[t]");
    BROKEN(pool->order.streams[0].users, 0, "pool->order.streams[t].users == c->users[t]");
    close_pool();
}

TEST(the_check_sees_a_slot_that_does_not_know_its_block)
{
    open_sound_pool();
    const mo_block *block = block_at(at.large[0]);
    mo_span *span = block->span;
    const size_t low = mo_span_slot(span, block->address), high = low + 2;
    mo_block false_one = {.address = block->address, .size = block->size, .span = span};
    CHECK_EQ(mo_span_slot(span, block->address + block->size - 1), high);
    BROKEN(span->slots[low].first, NULL,
           "span->slots[low].first && span->slots[low].first->address <= block->address");
    BROKEN(span->slots[low].first, block->next,
           "span->slots[low].first && span->slots[low].first->address <= block->address");
    BROKEN(span->slots[low].first, &false_one, "mo_span_block_at(span, block->address) == block");
    BROKEN(span->slots[high].first, &false_one,
           "mo_span_block_at(span, block->address + block->size - 1) == block");
    close_pool();
}

TEST(the_check_sees_memory_that_is_not_there_or_whose_it_is_not)
{
    open_sound_pool();
    mo_block *block = block_at(at.large[0]);
    mo_slot *slot = &block->span->slots[mo_span_slot(block->span, block->address)];
    mo_granule *spare = pool->granules.spare, *owned = slot->granule;
    const char *behind = "mo_slot_owned(&span->slots[i]) && span->slots[i].granted";
    CHECK(spare->views && spare->next);
    BROKEN(slot->granted, false, behind);
    BROKEN(slot->granule, NULL, behind);
    BROKEN(slot->granule, spare, behind);
    BROKEN(owned->owner, NULL, behind);
    BROKEN(spare->owner, spare->views, "i >= span->fresh || !mo_slot_owned(&span->slots[i])");
    BROKEN(spare->owner, slot, "!g->owner && g->handle");
    BROKEN(spare->handle, 0, "!g->owner && g->handle");
    BROKEN(spare->views->granule, spare->next, "view->granule == g");
    BROKEN(spare->next, NULL, "spare == granules->spare_count");
    BROKEN(pool->granules.spare_count, pool->granules.spare_count + 1, "spare == granules->spare_count");
    BROKEN(pool->granules.count, pool->granules.count + 1,
           "owned + spare == granules->count && c->stale == granules->stale_count");
    BROKEN(pool->granules.stale_count, pool->granules.stale_count - 1,
           "owned + spare == granules->count && c->stale == granules->stale_count");
    close_pool();
}

/* The tree of a bin with one block in it. */
static mo_block **root_of(mo_free_set *set, const mo_block *block)
{
    size_t bin = 0;
    while (bin < MO_BINS && set->root[bin] != block)
        bin++;
    CHECK(bin < MO_BINS);
    return &set->root[bin];
}

TEST(the_check_sees_a_set_of_free_blocks_that_is_not_that)
{
    open_sound_pool();
    mo_zone *small = zone_of(MO_ZONE_SMALL);
    mo_block *live = block_at(at.small[0]), *larger = mo_free_set_last(&small->free);
    mo_block *smaller = mo_free_set_before(&small->free, larger);
    const char *count = "listed == c->free_blocks - free_before && listed == zone->free.count";
    CHECK(smaller && smaller->size < larger->size);
    mo_free_set_insert(&small->free, live);
    check_names("b->state == MO_BLOCK_FREE");
    mo_free_set_remove(&small->free, live);
    BROKEN(*root_of(&small->free, smaller), larger,
           "!earlier || earlier->size < b->size || (earlier->size == b->size && earlier->address < "
           "b->address)");
    BROKEN(small->free.count, small->free.count + 1, count);
    BROKEN(small->free.words, 0, count);
    mo_free_set_remove(&small->free, smaller);
    check_names(count);
    mo_free_set_insert(&small->free, smaller);
    BROKEN(small->holes, NULL, "listed == c->holes - holes_before");
    close_pool();
}

TEST(the_check_sees_a_live_block_that_is_not_in_the_table_or_a_dead_one_that_is)
{
    open_sound_pool();
    mo_block *block = block_at(at.large[0]);
    mo_block other = {.address = 512};
    CHECK(mo_address_map_take(&pool->live, block->address) == block);
    check_names("mo_address_map_find(&c->pool->live, block->address) == block");
    mo_address_map_put(&pool->live, block);
    CHECK_POOL();
    CHECK_OK(mo_address_map_reserve(&pool->live, &said));
    mo_address_map_put(&pool->live, &other);
    check_names("c->live == pool->live.count");
    mo_address_map_take(&pool->live, 512);
    close_pool();
}

TEST(the_check_sees_a_count_that_is_wrong)
{
    open_sound_pool();
    mo_zone *zone = zone_of(MO_ZONE_LARGE);
    mo_arena *arena = mo_arena_find(pool, mine);
    mo_stats *s = &pool->stats;
    const char *of_zone = "mine == zone->owned && bytes == zone->segment_bytes && "
                          "c->live - live_before == zone->live_count";
    const char *of_arena = "arena->live_blocks == c->live - live && "
                           "arena->live_bytes == c->live_bytes - live_bytes";
    BROKEN(zone->owned, zone->owned - 1, of_zone);
    BROKEN(zone->segment_bytes, GRANULE, of_zone);
    BROKEN(zone->live_count, zone->live_count + 1, of_zone);
    BROKEN(arena->live_blocks, 0, of_arena);
    BROKEN(arena->live_bytes, 0, of_arena);
    BROKEN(arena->requested_bytes, 1, "arena->requested_bytes == c->requested - requested");
    BROKEN(pool->retired->live_blocks, 1, "!arena->live_blocks");
    BROKEN(pool->segment_bytes, GRANULE, "segments == pool->segment_bytes");
    BROKEN(s->of[MO_ALLOCATION][MO_STAT_ALL].current, 0,
           "(size_t)pool->stats.of[MO_ALLOCATION][MO_STAT_ALL].current == c->live");
    BROKEN(s->of[MO_ALLOCATED_BYTES][MO_STAT_ALL].current, 0,
           "(size_t)pool->stats.of[MO_ALLOCATED_BYTES][MO_STAT_ALL].current == c->live_bytes");
    BROKEN(s->of[MO_REQUESTED_BYTES][MO_STAT_ALL].current, 0,
           "(size_t)pool->stats.of[MO_REQUESTED_BYTES][MO_STAT_ALL].current == c->requested");
    for (int kind = 0; kind < MO_STAT_KIND_COUNT; kind++)
        BROKEN(s->of[kind][MO_STAT_SMALL].current, 77,
               "stat[MO_STAT_ALL].current == stat[MO_STAT_SMALL].current + stat[MO_STAT_LARGE].current");
    BROKEN(pool->peak, 0, "pool->peak >= c->requested");
    close_pool();
}

TEST(the_check_sees_faults_where_memory_is_segments_too)
{
    open_pool(256 * MIB, 0, plain_settings);
    const mo_address a = get(5 * MIB, A), b = get(512, A);
    put(get(9 * MIB, A));
    mo_block *block = block_at(a);
    BROKEN(block->next->previous, NULL, "!block->next || block->next->previous == block");
    BROKEN(
        block->span->zone->segment_bytes, 0,
        "mine == zone->owned && bytes == zone->segment_bytes && c->live - live_before == zone->live_count");
    BROKEN(pool->segment_bytes, 0, "segments == pool->segment_bytes");
    put(a), put(b);
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
