/* On the model device: what torch.cuda.MemPool would be given. */
#include "alloc/segment_source.h"

#include "pool_fixture.h"

static const mo_arena_id own = {7, 1}, other = {7, 2};

static unsigned opened(mo_arena_id id, size_t budget)
{
    unsigned source = 99;
    CHECK_OK(mo_pool_arena_retain(pool, id, false, budget, &said));
    CHECK_OK(mo_segment_source_open(pool, device.table.device, id, &said, &source));
    CHECK(source < MO_SEGMENT_SOURCES);
    return source;
}

static mo_arena_info info_of(mo_arena_id id)
{
    mo_arena_info info;
    CHECK_OK(mo_pool_arena_info(pool, id, &said, &info));
    return info;
}

static void *segment(unsigned source, size_t size)
{
    return mo_segment_source_function(source)((ssize_t)size, device.table.device, A);
}

TEST(each_open_source_gives_segments_of_its_own_arena)
{
    unsigned first, second;
    void *a, *b;

    open_pool(256 * MIB, GRANULE, plain_settings);
    first = opened(own, 0);
    second = opened(other, 0);
    a = segment(first, 20 * MIB);
    b = segment(second, 2 * MIB);
    CHECK(first != second && a && b && a != b);
    CHECK_EQ(info_of(own).requested_bytes, 20 * MIB);
    CHECK_EQ(info_of(other).requested_bytes, 2 * MIB);
    mo_segment_free(a, 20 * MIB, device.table.device, A);
    mo_segment_free(b, 2 * MIB, device.table.device, A);
    CHECK_EQ(info_of(own).live_blocks + info_of(other).live_blocks, 0);
    mo_segment_source_close(first);
    mo_segment_source_close(second);
    close_pool();
}

TEST(what_does_not_fit_is_null_and_nothing_else)
{
    unsigned source;
    void *a;

    open_pool(256 * MIB, GRANULE, plain_settings);
    source = opened(own, 32 * MIB);
    a = segment(source, 20 * MIB);
    CHECK(a);
    CHECK(!segment(source, 20 * MIB));
    CHECK(!segment(source, 0));
    CHECK(!mo_segment_source_function(source)(-1, device.table.device, A));
    CHECK(!mo_segment_source_function(source)(MIB, device.table.device + 1, A));
    CHECK_EQ(info_of(own).live_blocks, 1);
    mo_segment_free(a, 20 * MIB, device.table.device, A);
    mo_segment_source_close(source);
    close_pool();
}

TEST(a_freed_segment_goes_back_to_the_device_but_not_what_is_reserved)
{
    unsigned source;
    void *a;

    open_pool(256 * MIB, GRANULE, plain_settings);
    source = opened(own, 0);
    CHECK_OK(mo_pool_preallocate(pool, own, 16 * MIB, &said));
    a = segment(source, 40 * MIB);
    CHECK(device.used >= 40 * MIB);
    mo_segment_free(a, 40 * MIB, device.table.device, A);
    CHECK_EQ(device.used, 16 * MIB);
    mo_segment_source_close(source);
    close_pool();
}

TEST(a_closed_source_gives_nothing_and_its_segments_can_still_be_freed)
{
    unsigned source, again;
    void *a;

    open_pool(256 * MIB, GRANULE, plain_settings);
    source = opened(own, 0);
    a = segment(source, 20 * MIB);
    mo_segment_source_close(source);
    CHECK_OK(mo_pool_arena_release(pool, own, &said));
    CHECK(!segment(source, 2 * MIB));
    again = opened(other, 0);
    CHECK_EQ(again, source); /* the first that is not open */
    mo_segment_free(a, 20 * MIB, device.table.device, A);
    CHECK_EQ(device.used, 0);
    mo_segment_source_close(again);
    close_pool();
}

TEST(more_arenas_than_functions_are_refused)
{
    unsigned source, sources[MO_SEGMENT_SOURCES];

    open_pool(256 * MIB, GRANULE, plain_settings);
    CHECK_OK(mo_pool_arena_retain(pool, own, false, 0, &said));
    for (int i = 0; i < MO_SEGMENT_SOURCES; i++) {
        CHECK_OK(mo_segment_source_open(pool, device.table.device, own, &said, &sources[i]));
        for (int j = 0; j < i; j++)
            CHECK(mo_segment_source_function(sources[i]) != mo_segment_source_function(sources[j]));
    }
    CHECK_EQ(mo_segment_source_open(pool, device.table.device, own, &said, &source), MO_UNSUPPORTED);
    CHECK(strstr(said.text, "close a pool"));
    for (int i = 0; i < MO_SEGMENT_SOURCES; i++)
        mo_segment_source_close(sources[i]);
    close_pool();
}

TEST(what_is_no_segment_is_refused_and_counted_by_the_pool)
{
    unsigned source;

    open_pool(256 * MIB, GRANULE, plain_settings);
    source = opened(own, 0);
    mo_segment_free((void *)((uintptr_t)12345 * 512), MIB, device.table.device, A);
    mo_segment_free((void *)(uintptr_t)512, MIB, -1, A);
    mo_segment_free((void *)(uintptr_t)512, MIB, MO_MAX_DEVICES, A);
    CHECK_EQ(stats_now().foreign_frees, 1);
    mo_segment_source_close(source);
    close_pool();
}

TEST_MAIN
