/* That the pool's own check sees each of the faults that it is there for: one is planted in a sound pool, named, and taken
 * out again.
 *
 *     general, small    600, (free), 900, the rest free            general, large    4 MiB, (free), 4 MiB …
 *     a hole in the midst whose granules are elsewhere (stale), spare granules, one arena with a block, a retired one */
#include "alloc/arena.h"
#include "pool_fixture.h"

static const mo_arena_id mine = {0, 3};

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
    const char *expected = "block->last_use.tick <= c->pool->order.tick && block->stream < MO_STREAMS";
    BROKEN(block->last_use.tick, pool->order.tick + 1, expected);
    BROKEN(block->stream, MO_STREAMS, expected);
    BROKEN(block->last_use.streams, 1ull << 1, "pool->order.streams[t].users == c->users[t]");
    BROKEN(pool->order.streams[0].users, 0, "pool->order.streams[t].users == c->users[t]");
    close_pool();
}

TEST(the_check_sees_a_page_that_does_not_know_its_block)
{
    open_sound_pool();
    const mo_block *block = block_at(at.large[0]);
    mo_span *span = block->span;
    const size_t low = mo_span_page(span, block->address), high = low + 2;
    mo_block false_one = {.address = block->address, .size = block->size, .span = span};
    CHECK_EQ(mo_span_page(span, block->address + block->size - 1), high);
    BROKEN(span->firsts[low], NULL, "first && first->address <= block->address");
    BROKEN(span->firsts[low], block->next, "first && first->address <= block->address");
    BROKEN(span->firsts[low], &false_one, "mo_span_block_at(span, block->address) == block");
    BROKEN(span->firsts[high], &false_one,
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

TEST_MAIN
