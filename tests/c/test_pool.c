#include "pool_fixture.h"

/* One arena and no limit: what a pool gives, and what it counts. */

/* ---- requests ------------------------------------------------------------------------------------------ */

TEST(a_size_of_zero_is_address_zero_and_counts_for_nothing)
{
    mo_address address = 77;
    open_pool(64 * MIB, GRANULE, plain_settings);
    CHECK_OK(mo_pool_alloc(pool, 0, A, &said, &address));
    CHECK_EQ(address, 0);
    CHECK_OK(mo_pool_free(pool, 0, &said));
    check_stats();
    CHECK_EQ(held(), 0);
    close_pool();
}

TEST(opening_makes_no_call_of_the_driver_but_for_its_memory)
{
    open_pool(64 * MIB, GRANULE, plain_settings);
    for (int call = 0; call < MO_MODEL_DEVICE_CALL_COUNT; call++)
        CHECK_EQ(device.calls[call], call == MO_MODEL_DEVICE_memory_info);
    close_pool();
}

/* Calls that give a device's memory to live blocks of 1 GiB. */
static uint64_t calls_to_fill(size_t gibibytes, size_t budget)
{
    mo_pool_settings settings = plain_settings;

    settings.budget = budget;
    open_pool(gibibytes << 30, 2 * MIB, settings);
    for (size_t filled = budget ? budget : gibibytes << 30; filled; filled -= (size_t)1 << 30)
        get((size_t)1 << 30, A);
    const uint64_t calls = device.calls[MO_MODEL_DEVICE_create] + device.calls[MO_MODEL_DEVICE_map];
    CHECK_EQ(held(), budget ? budget : gibibytes << 30);
    close_pool();
    return calls;
}

TEST(a_larger_device_is_filled_by_no_more_calls_than_a_small_one)
{
    CHECK_EQ(calls_to_fill(8, 0), 2 * 4096);
    CHECK_EQ(calls_to_fill(15, 0), 2 * 7680);
    CHECK_EQ(calls_to_fill(16, 0), 2 * 4096);
    CHECK_EQ(calls_to_fill(80, 0), 2 * 5120); /* of 2 MiB: 2 * 40960 */
    CHECK_EQ(calls_to_fill(80, (size_t)15 << 30), 2 * 7680);
}

TEST(every_size_is_rounded_up_to_the_alignment_and_no_further)
{
    open_pool(1024 * MIB, GRANULE, plain_settings);
    for (size_t size = 1; size < 20 * MIB; size += size / 3 + 1)
        for (size_t off = 0; off < 3; off++)
            get(size + off - 1 + (size + off == 1), A); /* get() checks */
    check_stats();
    CHECK_POOL();
    close_pool();
}

TEST(the_base_of_any_byte_of_a_block_is_the_block)
{
    mo_address base = 0;
    size_t size = 0;
    open_pool(64 * MIB, GRANULE, plain_settings);
    for (size_t wanted = 700; wanted < 8 * MIB; wanted *= 9) {
        const mo_address a = get(wanted, A), b = get(wanted, A);
        for (size_t at = 0; at < wanted; at += wanted / 7) {
            CHECK_OK(mo_pool_base(pool, a + at, &said, &base, &size));
            CHECK_EQ(base, a);
            CHECK_OK(mo_pool_base(pool, b + at, &said, &base, &size));
            CHECK_EQ(base, b);
        }
        put(a);
        CHECK_EQ(mo_pool_base(pool, a, &said, &base, &size), MO_INVALID);
        CHECK_EQ(mo_pool_base(pool, a + wanted / 2, &said, &base, &size), MO_INVALID);
    }
    CHECK_EQ(mo_pool_base(pool, 12345, &said, &base, &size), MO_INVALID);
    CHECK(said.text[0]);
    close_pool();
}

TEST(a_double_free_is_refused_and_counted)
{
    open_pool(64 * MIB, GRANULE, plain_settings);
    for (size_t size = 512; size <= 8 * MIB; size *= 128) {
        const mo_address a = get(size, A), b = get(size, A);
        const uint64_t before = stats_now().double_frees + stats_now().foreign_frees;
        put(a);
        CHECK_EQ(mo_pool_free(pool, a, &said), MO_INVALID);
        CHECK(said.text[0]);
        CHECK_EQ(mo_pool_free(pool, a, NULL), MO_INVALID);
        CHECK_EQ(stats_now().double_frees + stats_now().foreign_frees, before + 2);
        put(b);
        check_stats();
        CHECK_POOL();
    }
    close_pool();
}

TEST(an_address_that_is_no_block_is_refused_and_counted)
{
    open_pool(64 * MIB, GRANULE, plain_settings);
    const mo_address a = get(3 * MIB, A), small = get(600, A);
    const mo_address wrong[] = {1, 4096, a + 512, a + 1, a - 512, small + 512, small + 8, UINTPTR_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK_EQ(mo_pool_free(pool, wrong[i], &said), MO_INVALID);
        CHECK_POOL();
    }
    CHECK_EQ(stats_now().foreign_frees + stats_now().double_frees, sizeof wrong / sizeof *wrong);
    CHECK_EQ(mo_pool_record_stream(pool, 4096, B, &said), MO_INVALID);
    CHECK_EQ(stats_now().foreign_streams, 1);
    check_stats();
    put(a);
    put(small);
    close_pool();
}

TEST(absurd_sizes_are_out_of_memory_and_change_nothing)
{
    const size_t sizes[] = {SIZE_MAX, SIZE_MAX - 511, SIZE_MAX / 2, (size_t)1 << 50, 65 * MIB};
    mo_address address = 77;
    open_pool(64 * MIB, GRANULE, plain_settings);
    get(MIB, A);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        CHECK_OUT_OF_MEMORY(mo_pool_alloc(pool, sizes[i], A, &said, &address));
        CHECK_EQ(address, 77);
        CHECK_POOL();
    }
    CHECK_EQ(stats_now().num_ooms, sizeof sizes / sizeof *sizes);
    check_stats();
    close_pool();
}

/* ---- statistics ---------------------------------------------------------------------------------------- */

TEST(peaks_are_since_the_last_reset)
{
    open_pool(1024 * MIB, GRANULE, plain_settings);
    const mo_address a = get(40 * MIB, A);
    get(10 * MIB, A);
    put(a);
    check_stats();
    mo_pool_reset_peaks(pool);
    model_reset_peaks(&model);
    check_stats();
    mo_stats s = stats_now();
    for (int kind = 0; kind < MO_STAT_KIND_COUNT; kind++)
        for (int column = 0; column < MO_STAT_COLUMN_COUNT; column++)
            CHECK_EQ(s.of[kind][column].peak, s.of[kind][column].current);
    put(get(20 * MIB, A));
    check_stats();
    close_pool();
}

TEST(accumulated_numbers_start_again_and_current_ones_stay)
{
    mo_address address;
    open_pool(64 * MIB, GRANULE, plain_settings);
    const mo_address a = get(40 * MIB, A);
    put(get(10 * MIB, A));
    CHECK_OUT_OF_MEMORY(mo_pool_alloc(pool, 90 * MIB, A, &said, &address));
    mo_pool_reset_accumulated(pool);
    mo_stats s = stats_now();
    CHECK_EQ(s.of[MO_ALLOCATED_BYTES][MO_STAT_ALL].current, 40 * MIB);
    CHECK_EQ(s.of[MO_ALLOCATED_BYTES][MO_STAT_ALL].peak, 50 * MIB);
    CHECK_EQ(s.of[MO_ALLOCATED_BYTES][MO_STAT_ALL].allocated, 0);
    CHECK_EQ(s.of[MO_ALLOCATED_BYTES][MO_STAT_ALL].freed, 0);
    CHECK_EQ(s.num_ooms + s.num_device_alloc + s.driver_calls, 0);
    put(a);
    s = stats_now();
    CHECK_EQ(s.of[MO_ALLOCATION][MO_STAT_ALL].freed, 1);
    CHECK_EQ(s.of[MO_ALLOCATION][MO_STAT_ALL].current, 0);
    CHECK_POOL();
    close_pool();
}

TEST(the_blocks_that_are_listed_are_those_that_live_and_all_that_is_held)
{
    uint64_t random = test_seed();
    open_pool(1024 * MIB, GRANULE, plain_settings);
    for (int i = 0; i < 400; i++) {
        if (model.count && test_random(&random) % 5 < 2)
            put(model.blocks[test_random(&random) % model.count].address);
        else if (model.live < 500 * MIB)
            get(1 + test_random(&random) % ((size_t)1 << (9 + test_random(&random) % 14)), A);
        if (i % 20)
            continue;
        mo_block_view *blocks = NULL;
        size_t count = 0, lives = 0, bytes = 0;
        CHECK_OK(mo_pool_blocks(pool, &said, &blocks, &count));
        for (size_t k = 0; k < count; k++) {
            const mo_block_view *v = &blocks[k];
            const model_block *block = model_at(&model, v->address);
            bytes += v->size;
            CHECK(v->state != MO_BLOCK_HOLE);
            CHECK(mo_model_device_usable(&device, v->address, v->size));
            if (k && blocks[k - 1].small == v->small && blocks[k - 1].address < v->address)
                CHECK_EQ(v->starts_segment, blocks[k - 1].address + blocks[k - 1].size != v->address);
            CHECK(k || v->starts_segment);
            if (v->state != MO_BLOCK_LIVE) {
                CHECK(!block || block->address >= v->address + v->size);
                CHECK_EQ(v->requested, 0);
                continue;
            }
            lives++;
            CHECK(block && block->address == v->address && block->size == v->size);
            CHECK_EQ(v->requested, block->requested);
            CHECK_EQ(v->serial, block->owner);
            CHECK(v->stream == A && v->arena.first == 0 && v->arena.second == 0);
        }
        mo_host_free(blocks);
        CHECK_EQ(lives, model.count);
        CHECK_EQ(bytes, held());
    }
    close_pool();
}

TEST(fragmentation_is_what_its_definitions_say)
{
    uint64_t random = test_seed();
    for (int round = 0, rounds = test_rounds(20, 400); round < rounds; round++) {
        mo_pool_settings settings = plain_settings;
        mo_fragmentation f;
        settings.budget = 256 * MIB;
        open_pool(1024 * MIB, GRANULE, settings);
        for (int i = 0; i < 120; i++) {
            if (model.count && test_random(&random) % 5 < 2)
                put(model.blocks[test_random(&random) % model.count].address);
            else if (model.live < 120 * MIB)
                get(MIB + 1 + test_random(&random) % (9 * MIB), A);
            finish(A);
        }
        mo_pool_fragmentation(pool, &f);
        CHECK_EQ(f.held_bytes, device.used);
        CHECK_EQ(f.live_bytes, model.live);
        CHECK_EQ(f.requested_bytes, model.requested);
        CHECK_EQ(f.free_bytes, f.held_bytes - f.live_bytes);
        CHECK(f.largest_free <= f.free_bytes && f.largest_free <= f.largest_allocatable);
        const double room = (double)f.free_bytes + (double)(settings.budget - f.held_bytes);
        const double external = room > 0 ? 1 - (double)f.largest_allocatable / room : 0;
        CHECK(f.external > external - 1e-9 && f.external < external + 1e-9);
        const double internal = model.live ? 1 - (double)model.requested / (double)model.live : 0;
        CHECK(f.internal > internal - 1e-9 && f.internal < internal + 1e-9);
        if (f.largest_allocatable >= MO_ALIGNMENT)
            put(get(f.largest_allocatable, A)); /* it can be had indeed */
        CHECK_POOL();
        close_pool();
    }
}

TEST(the_defaults_are_those_that_are_documented_and_can_be_set)
{
    mo_pool_settings s = mo_pool_defaults();
    CHECK(s.budget == 0 && s.slack == 20 && !s.double_map && !s.test_aliases && s.recall);
    const mo_pool_settings mine = {.budget = 5 * MIB, .slack = 7, .double_map = true, .recall = false};
    mo_pool_set_defaults(mine);
    const mo_pool_settings got = mo_pool_defaults();
    mo_pool_set_defaults(s);
    CHECK(got.budget == 5 * MIB && got.slack == 7 && got.double_map && !got.recall);
    CHECK(mo_pool_defaults().slack == 20);
}

static mo_pool_double_map opened_on(size_t granularity, mo_status answer, mo_pool_settings settings)
{
    mo_model_device other;
    mo_pool *opened = NULL;
    mo_pool_double_map found;

    mo_model_device_open(&other, 64 * MIB, granularity);
    other.aliases = answer;
    CHECK_OK(mo_pool_open(&other.table, &settings, &said, &opened)); /* whatever the test comes to */
    CHECK_EQ(other.alias_tests, settings.test_aliases && granularity);
    mo_pool_read_double_map(opened, &found);
    CHECK_OK(mo_pool_close(opened, &said));
    CHECK_EQ(mo_model_device_live(&other), 0);
    mo_model_device_close(&other);
    return found;
}

TEST(double_map_is_what_the_test_of_the_device_says_where_it_is_asked_for)
{
    static const mo_status answers[] = {MO_OK, MO_CORRUPT, MO_NO_DEVICE_MEMORY, MO_DRIVER};

    for (int set = 0; set < 2; set++) {
        for (size_t i = 0; i < sizeof answers / sizeof *answers; i++) {
            const mo_pool_settings asking = {.double_map = set, .test_aliases = true};
            mo_pool_double_map found = opened_on(GRANULE, answers[i], asking);
            CHECK(found.tested && found.on == !answers[i]);
            CHECK_EQ(found.why.status, answers[i]);
            CHECK(!answers[i] || strstr(found.why.text, mo_status_text(answers[i])));
            found = opened_on(GRANULE, answers[i], (mo_pool_settings){.double_map = set});
            CHECK(!found.tested && found.on == set);
        }
        const mo_pool_double_map found =
            opened_on(0, MO_OK, (mo_pool_settings){.double_map = set, .test_aliases = true});
        CHECK(!found.tested && !found.on); /* nothing can be mapped at all */
    }
}

TEST(a_device_that_is_not_there_is_said_so)
{
    mo_pool *none = NULL;
    CHECK(mo_pool_of_device(MO_MAX_DEVICES, &none, &said) != MO_OK);
    CHECK(said.text[0]);
    CHECK(mo_pool_of_device(-1, &none, &said) != MO_OK);
    CHECK(!none);
}

/* ---- no virtual memory --------------------------------------------------------------------------------- */

TEST(without_virtual_memory_segments_are_cached_and_given_back)
{
    size_t freed = 0;
    open_pool(256 * MIB, 0, plain_settings);
    mo_address blocks[10];
    for (int i = 0; i < 10; i++)
        blocks[i] = get(5 * MIB + (size_t)i, A);
    check_stats();
    for (int i = 0; i < 10; i++)
        put(blocks[i]);
    CHECK(held() > 0);
    const uint64_t then = memory_calls();
    for (int i = 0; i < 10; i++)
        blocks[i] = get(5 * MIB + (size_t)i, A);
    CHECK_EQ(memory_calls(), then);
    for (int i = 0; i < 10; i++)
        put(blocks[i]);
    CHECK_POOL();
    CHECK_OK(mo_pool_trim(pool, 0, &said, &freed));
    CHECK_EQ(held(), 0);
    CHECK_EQ(device.used, 0);
    CHECK(freed >= 50 * MIB);
    close_pool();
}

TEST(without_virtual_memory_free_segments_make_room_for_another_size)
{
    open_pool(64 * MIB, 0, plain_settings);
    mo_address blocks[12], address;
    for (int i = 0; i < 12; i++)
        blocks[i] = get(4 * MIB, A);
    CHECK_OUT_OF_MEMORY(mo_pool_alloc(pool, 20 * MIB, A, &said, &address));
    for (int i = 0; i < 12; i++)
        put(blocks[i]);
    get(60 * MIB, A);
    CHECK_POOL();
    close_pool();
}

TEST_MAIN
