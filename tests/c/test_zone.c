/* Against an array with an entry for every unit of a span's bytes: its state, its owner, what may still use it. */
#include "alloc/zone.h"

#include "base/hostmem.h"
#include "driver/model_device.h"
#include "test.h"

#define UNIT     unit_size
#define PER_SLOT 4
#define SIZE     (PER_SLOT * UNIT)
#define SLOTS    70 /* more than a word of the bitmap */
#define UNITS    (SLOTS * PER_SLOT)

/* A slot of the least size is a page as a whole; of the largest, two pages. */
static const size_t unit_sizes[] = {MO_ALIGNMENT, MO_LARGEST_PAGE / 2};
static size_t unit_size = MO_ALIGNMENT;

static mo_model_device device;
static mo_granules granules;
static mo_block_store store;
static mo_zone zone;
static mo_span *span;
static mo_detail said;
static size_t host_before;

typedef struct unit {
    mo_block_state state;
    uint64_t owner; /* live: number of the allocation; else of the last one, 0: none since the memory came */
    mo_last_use last_use; /* of all of the free block */
    mo_last_use own;      /* of the last allocation, or of the memory as it came */
} unit;

static unit model[UNITS];

#define CHECK_OK(call)                                                                                       \
    do {                                                                                                     \
        mo_status ok_ = (call);                                                                              \
        test_checks++;                                                                                       \
        if (ok_)                                                                                             \
            TEST_FAIL("%s gives %s: %s", #call, mo_status_name(ok_), said.text);                             \
    } while (0)

static void close_zone(void)
{
    while (zone.spans)
        mo_zone_forget_span(&zone, zone.spans);
    mo_granules_close(&granules);
    mo_blocks_close(&store);
    mo_model_device_close(&device);
}

static void open_zone(size_t slots)
{
    mo_address base = 0;

    close_zone();
    host_before = mo_host_live();
    mo_model_device_open(&device, (size_t)1 << 40, SIZE);
    granules = (mo_granules){.driver = &device.table, .size = SIZE};
    memset(&zone, 0, sizeof zone);
    zone.store = &store;
    zone.granules = &granules;
    memset(model, 0, sizeof model);
    CHECK_OK(device.table.reserve(&device.table, slots * SIZE, &said, &base));
    CHECK_OK(mo_zone_add_span(&zone, base, slots * SIZE, false, &said, &span));
}

static mo_address at(size_t u)
{
    return span->base + u * UNIT;
}

/* Whether the units belong to one block. */
static bool same_block(size_t a, size_t b)
{
    return model[a].state == model[b].state &&
           (model[a].state != MO_BLOCK_LIVE || model[a].owner == model[b].owner);
}

static size_t end_of_block(size_t u)
{
    size_t end = u + 1;

    while (end < UNITS && same_block(u, end))
        end++;
    return end;
}

static size_t start_of_block(size_t u)
{
    while (u && same_block(u - 1, u))
        u--;
    return u;
}

static bool same_use(mo_last_use a, mo_last_use b)
{
    return a.streams == b.streams && a.tick == b.tick;
}

/* What is known of a slot stands for the use of each of its units, and is no more than that where they had the same. */
static void check_slot_use(size_t slot)
{
    const unit *units = &model[slot * PER_SLOT];
    const mo_last_use use = span->slots[slot].last_use;
    bool same = true;

    for (int i = 0; i < PER_SLOT; i++) {
        same &= units[i].owner == units[0].owner;
        CHECK(units[i].state == MO_BLOCK_LIVE ||
              (!(units[i].own.streams & ~use.streams) && units[i].own.tick <= use.tick));
    }
    if (same && units[0].state != MO_BLOCK_LIVE)
        CHECK(same_use(use, units[0].own));
}

static void check_all(void)
{
    mo_block *block = span->lowest, *previous = NULL;
    size_t free_blocks = 0, holes = 0, owned = 0, live = 0, listed = 0;

    for (size_t u = 0, end; u < UNITS; u = end, previous = block, block = block->next) {
        end = end_of_block(u);
        CHECK(block && block->previous == previous && block->span == span);
        CHECK_EQ(block->address, at(u));
        CHECK_EQ(block->size, (end - u) * UNIT);
        CHECK_EQ(block->state, model[u].state);
        if (block->state == MO_BLOCK_LIVE)
            CHECK_EQ(block->serial, model[u].owner);
        if (block->state != MO_BLOCK_HOLE)
            CHECK(same_use(block->last_use, model[u].last_use));
        for (size_t v = u; v < end; v++)
            CHECK(mo_span_block_at(span, at(v)) == block &&
                  mo_span_block_at(span, at(v) + UNIT - 1) == block);
        if (!previous || mo_span_page(span, block->address) != mo_span_page(span, previous->address))
            CHECK(span->firsts[mo_span_page(span, block->address)] == block);
        free_blocks += block->state == MO_BLOCK_FREE;
        holes += block->state == MO_BLOCK_HOLE;
        live += block->state == MO_BLOCK_LIVE;
    }
    CHECK(!block);
    CHECK(span->page <= MO_LARGEST_PAGE);
    for (size_t i = 0; i < SLOTS; i++) {
        CHECK_EQ(mo_slot_owned(&span->slots[i]), model[i * PER_SLOT].state != MO_BLOCK_HOLE);
        if (mo_slot_owned(&span->slots[i]))
            check_slot_use(i);
        owned += mo_slot_owned(&span->slots[i]);
    }
    for (const mo_block *b = mo_free_set_last(&zone.free); b; b = mo_free_set_before(&zone.free, b), listed++)
        CHECK_EQ(b->state, MO_BLOCK_FREE);
    CHECK_EQ(listed, free_blocks);
    CHECK_EQ(zone.free.count, free_blocks);
    listed = 0;
    for (const mo_block *b = zone.holes, *last = NULL; b; last = b, b = b->link[1], listed++)
        CHECK(b->state == MO_BLOCK_HOLE && b->link[0] == last);
    CHECK_EQ(listed, holes);
    CHECK_EQ(zone.owned, owned);
    CHECK_EQ(zone.live_count, live);
}

/* The free run around u has one use: the union of its parts. */
static void unite(size_t u)
{
    const size_t start = start_of_block(u), end = end_of_block(u);
    mo_last_use use = {0};

    for (size_t v = start; v < end; v++)
        use = mo_last_use_union(use, model[v].last_use);
    for (size_t v = start; v < end; v++)
        model[v].last_use = use;
}

/* ---- the operations, on both -------------------------------------------------------------------------------------------- */

static void take(size_t from, size_t count)
{
    static uint64_t serial;
    mo_block *block = mo_span_block_at(span, at(from));

    CHECK_OK(mo_blocks_reserve(&store, 2, &said));
    block = mo_zone_take(&zone, block, at(from), count * UNIT);
    CHECK(block == mo_span_block_at(span, at(from)));
    block->serial = ++serial;
    for (size_t u = from; u < from + count; u++) {
        model[u].state = MO_BLOCK_LIVE;
        model[u].owner = serial;
    }
}

static void put(size_t u, mo_last_use use)
{
    const size_t start = start_of_block(u), end = end_of_block(u);
    mo_block *block = mo_span_block_at(span, at(u));

    block->last_use = use;
    block = mo_zone_put(&zone, block);
    for (size_t v = start; v < end; v++)
        model[v] = (unit){.state = MO_BLOCK_FREE, .owner = model[v].owner, .last_use = use, .own = use};
    unite(start);
    CHECK(block == mo_span_block_at(span, at(u)));
}

static void disown(size_t slot, size_t count)
{
    mo_block *block = mo_span_block_at(span, at(slot * PER_SLOT));
    mo_granule *suspended[SLOTS];

    for (size_t i = 0; i < count; i++)
        suspended[i] = span->slots[slot + i].granule->handle ? span->slots[slot + i].granule : NULL;
    CHECK_OK(mo_blocks_reserve(&store, 2, &said));
    mo_zone_disown(&zone, block, slot, count);
    for (size_t i = slot; i < slot + count; i++)
        if (suspended[i - slot])
            CHECK(span->slots[i].granule == suspended[i - slot] &&
                  same_use(span->slots[i].granule->last_use, span->slots[i].last_use));
        else
            CHECK(!span->slots[i].granule && !span->slots[i].granted);
    memset(&model[slot * PER_SLOT], 0, count * PER_SLOT * sizeof *model);
}

static void own(size_t slot, size_t count)
{
    mo_block *block;

    for (size_t i = slot; i < slot + count; i++) {
        mo_slot *s = &span->slots[i];

        if (s->granule && s->granule->owner)
            CHECK_OK(mo_granule_unmap(&granules, s, mo_slot_address(span, i), &said));
        if (!s->granule) {
            if (!granules.spare)
                CHECK_OK(mo_granule_create(&granules, &said));
            CHECK_OK(mo_granule_map(&granules, granules.spare, span, s, mo_slot_address(span, i), &said));
            CHECK_OK(mo_granules_grant(&granules, s, mo_slot_address(span, i), 1, &said));
        }
        mo_granule_own(&granules, s);
    }
    for (size_t u = slot * PER_SLOT; u < (slot + count) * PER_SLOT; u++)
        model[u] = (unit){.state = MO_BLOCK_FREE,
                          .last_use = span->slots[u / PER_SLOT].granule->last_use,
                          .own = span->slots[u / PER_SLOT].granule->last_use};
    CHECK_OK(mo_blocks_reserve(&store, 2, &said));
    block = mo_zone_own(&zone, span, slot, count);
    unite(slot * PER_SLOT);
    CHECK(block == mo_span_block_at(span, mo_slot_address(span, slot)));
}

/* ---- tests --------------------------------------------------------------------------------------------------------------- */

TEST(a_new_span_is_one_hole)
{
    open_zone(SLOTS);
    check_all();
    CHECK(zone.holes == span->lowest && span->lowest->size == SLOTS * SIZE);
    mo_zone_remove_span(&zone, span);
    CHECK(!zone.spans && !zone.holes);
    close_zone();
    CHECK_EQ(mo_host_live(), host_before);
}

TEST(memory_is_carved_from_either_end_and_the_middle_and_joins_again)
{
    open_zone(SLOTS);
    own(3, 4);
    check_all();
    take(12, 1);
    check_all();
    take(26, 2);
    check_all();
    take(18, 3);
    check_all();
    put(12, (mo_last_use){1, 5});
    check_all();
    put(26, (mo_last_use){2, 9});
    check_all();
    put(19, (mo_last_use){4, 7});
    check_all();
    CHECK_EQ(mo_span_block_at(span, at(12))->size, 4 * SIZE);
    CHECK(same_use(mo_span_block_at(span, at(12))->last_use, (mo_last_use){7, 9}));
    disown(4, 2);
    check_all();
    own(4, 2);
    check_all();
    CHECK_EQ(mo_span_block_at(span, at(12))->size, 4 * SIZE);
    close_zone();
}

TEST(all_of_a_block_is_taken_without_a_block_to_spare)
{
    size_t spare;

    open_zone(SLOTS);
    own(0, SLOTS);
    spare = store.spare_count;
    take(0, UNITS);
    CHECK_EQ(store.spare_count, spare);
    check_all();
    put(0, (mo_last_use){0});
    disown(0, SLOTS);
    CHECK_EQ(store.spare_count, spare);
    check_all();
    close_zone();
}

TEST(the_slots_of_a_block_are_those_that_lie_in_it_whole)
{
    for (size_t from = 0; from < 2 * PER_SLOT; from++)
        for (size_t count = 1; count < 4 * PER_SLOT; count++) {
            size_t low, high, whole = 0;

            open_zone(SLOTS);
            own(0, 8);
            take(from, count);
            mo_block_slots(mo_span_block_at(span, at(from)), &low, &high);
            for (size_t i = 0; i < SLOTS; i++)
                if (i * PER_SLOT >= from && (i + 1) * PER_SLOT <= from + count) {
                    CHECK(i >= low && i < high);
                    whole++;
                }
            CHECK_EQ(high > low ? high - low : 0, whole);
        }
    close_zone();
}

static void one_operation(uint64_t *random)
{
    const uint64_t r = test_random(random);
    const size_t u = (r >> 8) % UNITS, start = start_of_block(u), end = end_of_block(u), slot = u / PER_SLOT;
    const mo_last_use use = {1ull << (r >> 20) % 6, (r >> 30) % 1000};
    size_t count = 1;

    switch (model[u].state) {
    case MO_BLOCK_FREE:
        if (r % 4 == 0 && slot * PER_SLOT >= start && (slot + 1) * PER_SLOT <= end) {
            while ((slot + count + 1) * PER_SLOT <= end && (r >> 40) % (count + 2))
                count++;
            disown(slot, count);
        } else if (r % 4 == 1 && slot * PER_SLOT >= start && (slot + 1) * PER_SLOT <= end) {
            mo_slot *s = &span->slots[slot]; /* memory that went away, as in an arena that was paused */

            if (s->granule->handle && s->granule->views == s && !s->next_view) {
                CHECK_OK(mo_granule_suspend(&granules, s, mo_slot_address(span, slot), &said));
                disown(slot, 1);
            }
        } else {
            count = 1 + (r >> 40) % (end - u);
            take(u, r % 8 == 7 ? end - u : count);
        }
        break;
    case MO_BLOCK_LIVE:
        put(u, use);
        break;
    default:
        while ((slot + count + 1) * PER_SLOT <= end && (r >> 40) % (count + 2))
            count++;
        own(slot, count);
    }
}

TEST(any_sequence_of_operations_leaves_what_the_array_says)
{
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(16, 1000); round++) {
        unit_size = unit_sizes[round % 2];
        open_zone(SLOTS);
        for (int n = 0; n < 1500; n++) {
            one_operation(&random);
            check_all();
        }
    }
    unit_size = MO_ALIGNMENT;
    close_zone();
}

/* ---- spans of many slots ---------------------------------------------------------------------------------------------------- */

static int by_number(const void *a, const void *b)
{
    const size_t x = *(const size_t *)a, y = *(const size_t *)b;

    return (x > y) - (x < y);
}

/* The block that holds an address is the last one that begins there or before. */
static void check_lookups(const size_t *owned, size_t count, size_t slots, uint64_t *random)
{
    for (size_t n = 0; n < 40 * count; n++) {
        const size_t around = owned[test_random(random) % count];
        size_t slot = n % 4 ? around + test_random(random) % 131 : test_random(random) % slots, i = 0;
        mo_address address, start = span->base;
        const mo_block *block;

        slot = slot < 65 ? 0 : slot - 65;
        slot = slot < slots ? slot : slots - 1;
        address = mo_slot_address(span, slot) + test_random(random) % SIZE;
        for (; i < count && mo_slot_address(span, owned[i]) <= address; i++) {
            start = mo_slot_address(span, owned[i]);
            if (start + SIZE <= address && !(i + 1 < count && owned[i + 1] == owned[i] + 1))
                start += SIZE; /* the hole behind it */
        }
        block = mo_span_block_at(span, address);
        CHECK(block->address <= address && address - block->address < block->size);
        CHECK_EQ(block->address, start);
    }
}

TEST(a_block_is_found_among_any_number_of_slots)
{
    static const size_t sizes[] = {1,
                                   2,
                                   63,
                                   64,
                                   65,
                                   4095,
                                   4096,
                                   4097,
                                   64 * 64 * 64 - 1,
                                   64 * 64 * 64,
                                   64 * 64 * 64 + 1,
                                   64 * 64 * 64 + 70,
                                   1000000,
                                   64 * 64 * 64 * 64 + 1};
    uint64_t random = test_seed();
    size_t owned[400];

    for (size_t s = 0; s < 2 * sizeof sizes / sizeof *sizes; s++) {
        const size_t slots = sizes[s / 2];
        size_t count = 0;

        unit_size = unit_sizes[s % 2];
        open_zone(slots);
        for (int n = 0; n < 400; n++) {
            size_t slot =
                n % 3 ? test_random(&random) % slots : 64 * 64 * (test_random(&random) % 80) + (size_t)n % 2;

            if (n < 4)
                slot = n % 2 ? 0 : slots - 1;
            if (slot >= slots || mo_slot_owned(&span->slots[slot]))
                continue;
            CHECK_OK(mo_granule_create(&granules, &said));
            CHECK_OK(mo_granule_map(&granules, granules.spare, span, &span->slots[slot],
                                    mo_slot_address(span, slot), &said));
            mo_granule_own(&granules, &span->slots[slot]);
            CHECK_OK(mo_blocks_reserve(&store, 2, &said));
            mo_zone_own(&zone, span, slot, 1);
            mo_zone_take(&zone, mo_span_block_at(span, mo_slot_address(span, slot)),
                         mo_slot_address(span, slot), SIZE);
            owned[count++] = slot;
        }
        qsort(owned, count, sizeof *owned, by_number);
        check_lookups(owned, count, slots, &random);
        while (count > 1) { /* gone again, from the left, the right, the middle */
            const size_t gone = count % 3 == 0 ? 0 : count % 3 == 1 ? count - 1 : count / 2;
            const mo_address address = mo_slot_address(span, owned[gone]);

            CHECK_OK(mo_blocks_reserve(&store, 2, &said));
            mo_zone_disown(&zone, mo_zone_put(&zone, mo_span_block_at(span, address)), owned[gone], 1);
            memmove(&owned[gone], &owned[gone + 1], (--count - gone) * sizeof *owned);
            if (count % 50 == 1 || count < 4)
                check_lookups(owned, count, slots, &random);
        }
    }
    unit_size = MO_ALIGNMENT;
    close_zone();
}

/* ---- spans ------------------------------------------------------------------------------------------------------------------- */

TEST(a_segment_is_one_free_block_and_counts_until_it_is_removed)
{
    mo_span *first, *second;
    mo_block *block;

    open_zone(SLOTS);
    CHECK_OK(mo_zone_add_span(&zone, (mo_address)1 << 40, 8 * UNIT, true, &said, &first));
    CHECK_OK(mo_zone_add_span(&zone, (mo_address)1 << 41, 20 * UNIT, true, &said, &second));
    CHECK_EQ(zone.segment_bytes, 28 * UNIT);
    CHECK_EQ(zone.free.count, 2);
    CHECK_OK(mo_blocks_reserve(&store, 2, &said));
    block =
        mo_zone_take(&zone, mo_free_set_fit(&zone.free, 9 * UNIT), ((mo_address)1 << 41) + UNIT, 9 * UNIT);
    CHECK_EQ(zone.free.count, 3);
    CHECK(block->previous == second->lowest && block->next && !block->next->next);
    block = mo_zone_put(&zone, block);
    CHECK(block == second->lowest && !block->next && block->size == 20 * UNIT);
    mo_zone_remove_span(&zone, first);
    CHECK_EQ(zone.segment_bytes, 20 * UNIT);
    CHECK(mo_free_set_last(&zone.free) == block && zone.free.count == 1);
    mo_zone_remove_span(&zone, second);
    CHECK_EQ(zone.segment_bytes, 0);
    CHECK(zone.spans == span && !span->next);
    close_zone();
    CHECK_EQ(mo_host_live(), host_before);
}

TEST(without_host_memory_a_span_is_not_added_and_nothing_is_left)
{
    mo_span *added = NULL;
    uint64_t after = 0;
    mo_status status;

    open_zone(SLOTS);
    do {
        const size_t live = mo_host_live();
        const size_t spare = store.spare_count;

        mo_host_fail_after(after++);
        status = mo_zone_add_span(&zone, (mo_address)1 << 42, 64 * 64 * 65 * SIZE, false, &said, &added);
        mo_host_fail_never();
        if (status) {
            CHECK_EQ(status, MO_NO_HOST_MEMORY);
            CHECK_EQ(mo_host_live(), live);
            CHECK_EQ(store.spare_count, spare);
            CHECK(zone.spans == span && zone.holes == span->lowest);
            check_all();
        }
    } while (status && after < 100);
    CHECK_EQ(after, 8); /* the span, its slots, its pages and four bitmaps, and then none failed */
    CHECK(zone.spans == added && added->next == span);
    mo_zone_remove_span(&zone, added);
    check_all();
    close_zone();
    CHECK_EQ(mo_host_live(), host_before);
}

TEST_MAIN
