/* Where requests go, from inside the pool: every site's price is compared with that of all others of a small space. */
#include "alloc/placement.h"
#include "alloc/remap.h"
#include "base/size.h"
#include "pool_fixture.h"

static mo_zone *large(void)
{
    return &pool->general.zones[MO_ZONE_LARGE];
}

static mo_request request_of(size_t size, mo_stream stream)
{
    mo_request request = {.arena = &pool->general, .zone = large(), .size = size, .requested = size};

    CHECK_OK(mo_stream_order_number(&pool->order, stream, &said, &request.stream));
    return request;
}

/* ---- free blocks ----------------------------------------------------------------------------------------------------- */

/* The first `scan` free blocks that are large enough, by (size, address): the first without waiting, the first with. */
static mo_block *first_fit(const mo_request *request, int scan, mo_block **waiting)
{
    const mo_block *last = NULL;

    *waiting = NULL;
    for (; scan; scan--) {
        mo_block *next = NULL;

        for (mo_span *span = request->zone->spans; span; span = span->next)
            for (mo_block *b = span->lowest; b; b = b->next)
                if (b->state == MO_BLOCK_FREE && b->size >= request->size &&
                    (!last || b->size > last->size ||
                     (b->size == last->size && b->address > last->address)) &&
                    (!next || b->size < next->size || (b->size == next->size && b->address < next->address)))
                    next = b;
        if (!next)
            return NULL;
        if (!mo_stream_order_missing(&pool->order, request->stream, false, next->last_use))
            return next;
        if (!*waiting)
            *waiting = next;
        last = next;
    }
    return NULL;
}

/* ---- all sites ---------------------------------------------------------------------------------------------------------- */

typedef struct price {
    bool possible, shares; /* shares: a granule is mapped at two of the site's slots */
    size_t calls, need;
} price;

/* Of having the request in [low, high) of a span, whose bytes are all free or holes. */
static price price_of(const mo_request *request, mo_span *span, mo_address low, mo_address high)
{
    const mo_site site = {.span = span, .at = low};
    price p = {.possible = true};

    for (size_t i = mo_span_slot(span, low); i <= mo_span_slot(span, high - 1); i++) {
        const mo_slot *slot = &span->slots[i];
        mo_block *elsewhere;

        for (size_t k = mo_span_slot(span, low); k < i; k++)
            p.shares |= slot->granule && slot->granule == span->slots[k].granule;
        if (mo_slot_owned(slot))
            continue;
        p.need++;
        if (mo_remap_switchable(pool, request, &site, slot, &elsewhere))
            continue;
        p.calls += slot->granule ? 2 : 1;
        p.possible &= !slot->granule || mo_stream_order_over(&pool->order, slot->last_use);
    }
    return p;
}

static bool open_to(const mo_request *request, const mo_block *block, bool join)
{
    return block->state == MO_BLOCK_HOLE ||
           (block->state == MO_BLOCK_FREE &&
            (join || !mo_stream_order_missing(&pool->order, request->stream, false, block->last_use)));
}

/* Whether [low, high) holds nothing that the request may not have. */
static bool is_site(const mo_request *request, mo_span *span, mo_address low, mo_address high, bool join)
{
    if (low < span->base || high > span->base + span->size || low >= high)
        return false;
    for (const mo_block *b = span->lowest; b; b = b->next)
        if (b->address < high && b->address + b->size > low && !open_to(request, b, join))
            return false;
    return true;
}

/* By calls, then by granules; `sparing`, by granules first. */
static bool cheaper(price a, price b, bool sparing)
{
    const size_t factor = 1u << 20;

    return sparing ? a.need * factor + a.calls < b.need * factor + b.calls
                   : a.calls * factor + a.need < b.calls * factor + b.need;
}

/* The cheapest site with an edge at a hole, or at the far end of free memory beside one, or that begins where nothing was
 * mapped yet. One that begins in a hole takes its slots whole. */
static price cheapest(const mo_request *request, bool join, bool sparing)
{
    price best = {0};

    for (mo_span *span = request->zone->spans; span; span = span->next) {
        mo_address lows[2000];
        size_t count = 0;

        lows[count++] = mo_slot_address(span, span->fresh);
        for (const mo_block *b = span->lowest; b; b = b->next) {
            const bool before = b->previous && open_to(request, b->previous, join);
            const bool behind = b->next && open_to(request, b->next, join);
            const mo_block *last = behind ? b->next : b;

            if (b->state != MO_BLOCK_HOLE)
                continue;
            lows[count++] = before ? b->previous->address : b->address;
            lows[count++] = last->address + last->size - request->size;
        }
        CHECK(count < 2000);
        for (size_t i = 0; i < count; i++) {
            mo_address low = lows[i];
            price p;

            if (!is_site(request, span, low, low + request->size, join))
                continue;
            if (mo_span_block_at(span, low)->state == MO_BLOCK_HOLE)
                low = mo_slot_address(span, mo_span_slot(span, low));
            p = price_of(request, span, low, lows[i] + request->size);
            if (p.possible && (!best.possible || cheaper(p, best, sparing)))
                best = p;
        }
    }
    return best;
}

/* ---- random pools --------------------------------------------------------------------------------------------------------- */

/* Now small ones, now large ones: what one kind leaves has to be brought together for the other. */
static size_t some_size(uint64_t *random)
{
    static unsigned asked;
    const uint64_t r = test_random(random);

    return (asked++ / 64 % 2 ? (size_t)3 << 20 : (size_t)24 << 20) / 1024 * (350 + r % 675) / MO_ALIGNMENT *
           MO_ALIGNMENT;
}

static struct {
    mo_address address;
    size_t size;
} past[64]; /* some of the blocks there ever were */

static void remember(mo_address address, size_t size, uint64_t r)
{
    past[r % 64].address = address;
    past[r % 64].size = size;
}

/* Blocks come and go on three streams, some of whose work ends. */
static void churn(uint64_t *random, int operations)
{
    static const mo_stream streams[] = {A, B, C};

    while (operations--) {
        const uint64_t r = test_random(random);

        if (model.count && r % 100 < 30 + model.count)
            put(model.blocks[(r >> 8) % model.count].address);
        else {
            const mo_stream stream = streams[(r >> 8) % 3];
            const size_t size = some_size(random);
            mo_address address;

            if (mo_pool_alloc(pool, size, stream, &said, &address) == MO_OK)
                remember(address, take_in(address, size, stream)->size, r >> 20);
        }
        if (r >> 60 == 0)
            finish(streams[(r >> 8) % 3]);
    }
}

/* All is free, and most of it is over: nothing is in the way of a return. */
static void drain(uint64_t *random)
{
    while (model.count > test_random(random) % 4)
        put(model.blocks[test_random(random) % model.count].address);
    finish(A);
    finish(B);
    mo_stream_order_poll(&pool->order);
}

static mo_pool_settings settings_of(uint64_t r)
{
    return (mo_pool_settings){.slack = r % 3 * 10, .double_map = r & 8, .recall = r & 16};
}

TEST(the_block_that_fits_best_without_waiting_is_found_among_the_first_eight)
{
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(30, 1000); round++) {
        open_pool(128 * MIB, GRANULE, settings_of(test_random(&random)));
        for (int n = 0; n < 60; n++) {
            mo_block *waiting, *expected_waiting, *expected, *block;
            mo_request request;

            churn(&random, 5);
            request = request_of(some_size(&random) / 4 + 512, n % 2 ? A : B);
            expected = first_fit(&request, 8, &expected_waiting);
            block = mo_fit(pool, &request, &waiting);
            CHECK(block == expected);
            CHECK(waiting == expected_waiting);
        }
        close_pool();
    }
}

TEST(no_site_is_cheaper_than_the_one_that_is_chosen)
{
    uint64_t random = test_seed() + 1;
    static const mo_effort efforts[] = {MO_EFFORT_SWITCH, MO_EFFORT_JOIN, MO_EFFORT_CREATE};
    size_t placed = 0;

    for (int round = 0; round < test_rounds(150, 5000); round++) {
        open_pool(512 * MIB, 512 * KIB, settings_of(test_random(&random)));
        memset(past, 0, sizeof past);
        for (int n = 0; n < 40; n++) {
            const mo_effort effort = efforts[test_random(&random) % 3];
            const bool join = effort >= MO_EFFORT_JOIN;
            mo_request request;
            mo_block *block;
            mo_address at;
            uint64_t calls;
            price best;
            mo_status status;

            churn(&random, 6);
            if (n % 10 == 9) {
                drain(&random);
                for (int i = 0; i < 20; i++) { /* memory returns to many places */
                    request = request_of(past[i].size, A);
                    if (past[i].size)
                        mo_remap_at(pool, &request, past[i].address);
                }
            }
            mo_stream_order_poll(&pool->order);
            request = request_of(some_size(&random), n % 3 ? A : B);
            request.size = mo_ceil_div(request.size, MO_ALIGNMENT) * MO_ALIGNMENT;
            if (mo_fit(pool, &request, &block) || (join && block)) /* needs no site */
                continue;
            best = cheapest(&request, join, effort == MO_EFFORT_CREATE);
            if (!best.possible || best.shares)
                continue;
            calls = device.calls[MO_MODEL_DEVICE_map] + device.calls[MO_MODEL_DEVICE_unmap];
            status = mo_place(pool, &request, effort, &said, &block, &at);
            CHECK_OK(mo_pool_check(pool, &said));
            CHECK_CLEAN();
            if (status) {
                CHECK(status == MO_NO_DEVICE_MEMORY || status == MO_NOT_READY);
                continue;
            }
            calls = device.calls[MO_MODEL_DEVICE_map] + device.calls[MO_MODEL_DEVICE_unmap] - calls;
            placed++;
            CHECK(block->state == MO_BLOCK_FREE && block->address <= at &&
                  at + request.size <= block->address + block->size);
            CHECK(mo_model_device_usable(&device, at, request.size));
            if (pool->settings.double_map) /* else what moves is unmapped where it was, too */
                CHECK_EQ(calls, best.calls);
        }
        close_pool();
    }
    CHECK(placed > 500);
}

/*      0      6         14    17 18
 *      | live | hole    | live |f| never mapped …         7 MiB in the hole: 4 granules, and no call; from 17 on: 3, mapped */
TEST(calls_are_saved_where_there_is_memory_and_memory_where_there_is_not)
{
    for (int created = 0; created < 2; created++) {
        mo_pool_settings settings = plain_settings;
        mo_address first, second, huge, at;
        mo_request request;
        mo_block *block;

        settings.budget = 22 * MIB;
        settings.huge_limit = 12 * MIB;
        open_pool(64 * MIB, GRANULE, settings);
        first = get(6 * MIB, A);
        second = get(8 * MIB, A);
        CHECK_EQ(second, first + 6 * MIB);
        CHECK_EQ(get(3 * MIB, A), first + 14 * MIB);
        put(second);
        huge = get(12 * MIB, A); /* has the second's four granules, and two new ones */
        put(huge);
        CHECK_EQ(pool->stats.granules_moved, 4);
        request = request_of(7 * MIB, A);
        CHECK_OK(mo_place(pool, &request, created ? MO_EFFORT_CREATE : MO_EFFORT_SWITCH, &said, &block, &at));
        CHECK_EQ(at, created ? first + 17 * MIB : second);
        CHECK_EQ(large()->owned, created ? 8 : 9);
        CHECK_POOL();
        while (model.count)
            put(model.blocks[0].address);
        close_pool();
    }
}

/* ---- what is huge ------------------------------------------------------------------------------------------------------ */

/* A request's zone is by the limit, or by the largest sum of bytes that was ever live before it, whichever says more. */
TEST(what_is_huge_grows_with_the_live_peak_and_does_not_shrink)
{
    const size_t limit = 4 * MIB;
    uint64_t random = test_seed() + 3;
    mo_pool_settings settings = plain_settings;
    size_t live = 0, peak = 0, grown[2] = {0};

    settings.huge_limit = limit;
    open_pool((size_t)4 << 30, GRANULE, settings);
    for (int n = 0; n < 600; n++) {
        const uint64_t r = test_random(&random);
        const size_t size = 2 * MIB + r % (20 * MIB), share = peak / MO_HUGE_SHARE;
        const bool huge = size >= (share > limit ? share : limit);
        const mo_zone *zone;

        if (live > (size_t)2 << 30 || (n >= 300 && live)) {
            live -= model.blocks[0].requested;
            put(model.blocks[0].address);
        }
        zone = mo_pool_live_at(pool, get(size, A))->span->zone;
        CHECK(zone == &pool->general.zones[huge ? MO_ZONE_HUGE : MO_ZONE_LARGE]);
        grown[huge] += share > limit;
        live += size;
        peak = live > peak ? live : peak;
    }
    CHECK(grown[0] > 50 && grown[1] > 50);
    while (model.count)
        put(model.blocks[0].address);
    close_pool();
}

/* ---- sites that are given -------------------------------------------------------------------------------------------------- */

TEST(memory_returns_to_an_address_without_a_call_or_not_at_all)
{
    uint64_t random = test_seed() + 2;
    size_t given = 0, switched = 0, refused = 0;

    for (int round = 0; round < test_rounds(60, 3000); round++) {
        open_pool(512 * MIB, 512 * KIB, settings_of(8 | test_random(&random)));
        memset(past, 0, sizeof past);
        for (int n = 0; n < 80; n++) {
            const size_t count = 40;

            churn(&random, 8);
            if (n % 8 == 7)
                drain(&random);
            for (size_t i = 0; i < count; i++) {
                const mo_request request = request_of(past[i].size, A);
                mo_span *span = large()->spans;
                uint64_t calls = memory_calls(), moved = pool->stats.granules_switched;
                mo_block *block;
                bool live = false, possible;

                if (past[i].size <= MIB || !span)
                    continue;
                for (size_t k = 0; k < model.count; k++)
                    live |= model.blocks[k].address < past[i].address + past[i].size &&
                            model.blocks[k].address + model.blocks[k].size > past[i].address;
                while (past[i].address - span->base >= span->size)
                    span = span->next;
                possible = !live;
                for (mo_block *b = span->lowest; b && possible; b = b->next)
                    if (b->address < past[i].address + past[i].size && b->address + b->size > past[i].address)
                        possible = open_to(&request, b, false);
                if (possible) {
                    const price p = price_of(&request, span, past[i].address, past[i].address + past[i].size);

                    possible = !p.calls && !p.shares;
                }
                block = mo_remap_at(pool, &request, past[i].address);
                CHECK_EQ(memory_calls(), calls);
                CHECK(!possible || block);
                CHECK(!live || !block);
                if (block) {
                    CHECK(block->state == MO_BLOCK_FREE && block->address <= past[i].address &&
                          past[i].address + past[i].size <= block->address + block->size);
                    CHECK(mo_model_device_usable(&device, past[i].address, past[i].size));
                }
                given += block != NULL;
                refused += !block;
                switched += block && pool->stats.granules_switched > moved;
            }
            CHECK_POOL();
        }
        close_pool();
    }
    CHECK(given > 100 && refused > 100 && switched > 10);
}

TEST(an_address_that_is_none_of_the_zone_is_not_given)
{
    mo_request request;

    open_pool(64 * MIB, GRANULE, plain_settings);
    get(4 * MIB, A);
    request = request_of(2 * MIB, A);
    CHECK(!mo_remap_at(pool, &request, 512));
    CHECK(!mo_remap_at(pool, &request, large()->spans->base + large()->spans->size));
    CHECK(!mo_remap_at(pool, &request, large()->spans->base + large()->spans->size - MIB));
    CHECK(!mo_remap_at(pool, &request, large()->spans->base - MIB));
    put(model.blocks[0].address);
    close_pool();
}

TEST(an_address_whose_block_ends_with_its_span_is_given_again)
{
    mo_request request;
    mo_address base = 0, address;
    mo_span *span;

    open_pool(64 * MIB, GRANULE, (mo_pool_settings){.slack = 20, .double_map = true, .recall = true});
    CHECK_OK(device.table.reserve(&device.table, 4 * GRANULE, &said, &base));
    CHECK_OK(mo_zone_add_span(large(), base, 4 * GRANULE, false, &said, &span));
    address = get(4 * GRANULE, A);
    CHECK_EQ(address, base);
    put(address);
    request = request_of(4 * GRANULE, A);
    CHECK(mo_remap_at(pool, &request, base) == span->lowest);
    close_pool();
}

TEST(steps_that_repeat_end_without_a_call)
{
    static const size_t sizes[] = {3, 7, 20, 5, 11, 2, 9, 30, 4, 6};

    for (int kind = 0; kind < 2; kind++) {
        uint64_t calls = 0;

        open_pool(256 * MIB, GRANULE, (mo_pool_settings){.double_map = kind, .recall = true});
        for (int step = 0; step < 12; step++) {
            mo_address live[10];

            calls = memory_calls();
            for (int i = 0; i < 10; i++) {
                live[i] = get(sizes[i] * MIB + 512, A);
                if (i % 3 == 2)
                    put(live[i - 1]);
            }
            for (int i = 0; i < 10; i++)
                if (i % 3 != 1 || i == 10)
                    put(live[i]);
            finish(A);
        }
        CHECK_EQ(memory_calls(), calls);
        close_pool();
    }
}

/* Work still runs through the old mapping: it stays until that is over, and the request goes elsewhere. */
TEST(an_address_whose_old_mapping_is_in_use_is_not_mapped_again)
{
    mo_address a, b;

    open_pool(64 * MIB, GRANULE, (mo_pool_settings){.double_map = true});
    for (int n = 0; n < 30; n++) {
        a = get(20 * MIB, A);
        put(a);
        b = get(40 * MIB, A);
        put(b);
        a = get(24 * MIB, B);
        put(a);
        CHECK_POOL(); /* the device would tell of an unmap in use */
    }
    close_pool();
}

TEST(what_is_preallocated_is_held_and_serves)
{
    open_pool(64 * MIB, GRANULE, plain_settings);
    CHECK_OK(mo_arena_fill(pool, &pool->general, 9 * MIB, &said));
    CHECK_EQ(mo_arena_held(&pool->general), 10 * MIB);
    CHECK_OK(mo_arena_fill(pool, &pool->general, 10 * MIB, &said));
    CHECK_EQ(device.used, 10 * MIB);
    CHECK_OK(mo_pool_check(pool, &said));
    get(6 * MIB, A);
    CHECK_EQ(device.used, 10 * MIB);
    CHECK_EQ(mo_arena_fill(pool, &pool->general, 80 * MIB, &said), MO_NO_DEVICE_MEMORY);
    CHECK_POOL();
    put(model.blocks[0].address);
    close_pool();
}

/* ---- failures ------------------------------------------------------------------------------------------------------------------ */

TEST(whichever_call_fails_the_pool_is_sound_and_the_next_request_succeeds)
{
    static const mo_model_device_call kinds[] = {MO_MODEL_DEVICE_reserve, MO_MODEL_DEVICE_create,
                                                 MO_MODEL_DEVICE_map,     MO_MODEL_DEVICE_unmap,
                                                 MO_MODEL_DEVICE_grant,   MO_MODEL_DEVICE_memory_info};
    size_t failures = 0;

    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++)
        for (int settings = 0; settings < 2; settings++)
            for (uint64_t after = 0; after < 30; after++) {
                mo_address address;
                mo_status status;

                open_pool(64 * MIB, GRANULE, (mo_pool_settings){.double_map = settings});
                mo_model_device_fail(&device, kinds[kind], after, 1, MO_DRIVER);
                for (int i = 0; i < 6; i++) {
                    const size_t size = (size_t)(3 + 5 * i % 8) * 2 * MIB;

                    status = mo_pool_alloc(pool, size, A, &said, &address);
                    CHECK_OK(mo_pool_check(pool, &said));
                    if (status) {
                        CHECK_EQ(status, MO_DRIVER);
                        failures++;
                        CHECK_OK(mo_pool_alloc(pool, size, A, &said, &address));
                    }
                    take_in(address, size, A);
                    finish(A);
                    if (i % 3)
                        put(address);
                    CHECK_POOL();
                }
                mo_model_device_fail_never(&device);
                while (model.count)
                    put(model.blocks[0].address);
                close_pool();
            }
    CHECK(failures > 20);
}

TEST(host_memory_that_runs_out_at_any_point_changes_nothing)
{
    size_t failures = 0;

    for (uint64_t after = 0; after < 40; after++) {
        mo_address address;

        open_pool(64 * MIB, GRANULE, (mo_pool_settings){.double_map = true});
        for (int i = 0; i < 6; i++) {
            const size_t size = (size_t)(3 + 5 * i % 8) * 2 * MIB;
            mo_status status;

            mo_host_fail_after(after);
            status = mo_pool_alloc(pool, size, A, &said, &address);
            mo_host_fail_never();
            CHECK_OK(mo_pool_check(pool, &said));
            if (status) {
                CHECK_EQ(status, MO_NO_HOST_MEMORY);
                failures++;
                CHECK_OK(mo_pool_alloc(pool, size, A, &said, &address));
            }
            take_in(address, size, A);
            finish(A);
            if (i % 3)
                put(address);
        }
        while (model.count)
            put(model.blocks[0].address);
        close_pool();
    }
    CHECK(failures > 5);
}

TEST_MAIN
