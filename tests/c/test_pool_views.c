#include "alloc/pool_views.h"

#include "pool_fixture.h"

static const mo_arena_id mine = {0, 3};

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

TEST_MAIN
