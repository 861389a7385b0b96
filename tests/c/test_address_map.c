/* Against an array that is searched from end to end. */
#include "alloc/address_map.h"

#include "base/hostmem.h"
#include "test.h"

#define MOST 600

static mo_block blocks[20000];
static mo_block *members[MOST];
static size_t count;
static mo_address_map map;

static mo_block *member_at(mo_address address)
{
    for (size_t i = 0; i < count; i++)
        if (members[i]->address == address)
            return members[i];
    return NULL;
}

static void put(mo_block *block)
{
    CHECK_EQ(mo_address_map_reserve(&map, NULL), MO_OK);
    mo_address_map_put(&map, block);
    members[count++] = block;
}

static void check_all(void)
{
    CHECK_EQ(map.count, count);
    CHECK(2 * map.count <= map.capacity || !map.capacity);
    for (size_t i = 0; i < count; i++)
        CHECK(mo_address_map_find(&map, members[i]->address) == members[i]);
}

/* Where an address belongs in an empty map of the first size: asked of the map itself. */
static size_t home_of(mo_address address)
{
    mo_address_map probe = {0};
    mo_block block = {.address = address};
    size_t home = 0;

    CHECK_EQ(mo_address_map_reserve(&probe, NULL), MO_OK);
    mo_address_map_put(&probe, &block);
    while (!probe.entries[home].address)
        home++;
    mo_address_map_close(&probe);
    return home;
}

TEST(an_empty_map_has_nothing)
{
    CHECK(!mo_address_map_find(&map, 512));
    CHECK(!mo_address_map_take(&map, 512));
    CHECK(!mo_address_map_find(&map, 0));
    CHECK_EQ(mo_address_map_reserve(&map, NULL), MO_OK);
    CHECK(!mo_address_map_find(&map, 512));
    CHECK(!mo_address_map_take(&map, 0));
    mo_address_map_close(&map);
}

TEST(the_map_is_an_array_of_members)
{
    uint64_t random = test_seed();
    const int operations = test_rounds(100000, 3000000);

    count = 0;
    for (int n = 0; n < operations; n++) {
        /* few addresses, so that most come back, close together as blocks are, and far apart */
        const mo_address address = (n / 20000 % 2 ? (mo_address)7 << 44 : MO_ALIGNMENT) +
                                   test_random(&random) % (2 * MOST) * (n % 3 ? MO_ALIGNMENT : 2 << 20);
        mo_block *member = member_at(address);

        CHECK(mo_address_map_find(&map, address) == member);
        if (member || count == MOST) {
            CHECK(mo_address_map_take(&map, address) == member);
            for (size_t i = 0; i < count && member; i++)
                if (members[i] == member)
                    members[i--] = members[--count], member = NULL;
            CHECK(!mo_address_map_find(&map, address));
        } else {
            size_t i = 0;

            while (blocks[i].address && member_at(blocks[i].address) == &blocks[i])
                i++;
            blocks[i] = (mo_block){.address = address};
            put(&blocks[i]);
        }
        if (n % 997 == 0)
            check_all();
    }
    check_all();
    mo_address_map_close(&map);
}

/* Runs of entries whose homes are the table's last places go on at its first; a removal closes the gap across the end. */
TEST(runs_that_wrap_around_the_end_are_closed_in_every_order_of_removal)
{
    enum { RUN = 7 };
    mo_address last[RUN + 1] = {0};
    size_t found = 0;

    count = 0;
    for (mo_address address = MO_ALIGNMENT; found < RUN; address += MO_ALIGNMENT)
        if (home_of(address) >= 1022 || (found > 3 && home_of(address) < 2)) /* of 1024 */
            last[found++] = address;
    for (unsigned order = 0; order < 5040; order++) { /* 7! permutations */
        mo_address rest[RUN];
        unsigned code = order;

        memcpy(rest, last, sizeof rest);
        for (size_t i = 0; i < RUN; i++) {
            blocks[i] = (mo_block){.address = last[(i + order) % RUN]};
            put(&blocks[i]);
        }
        for (size_t left = RUN; left; left--) {
            const size_t pick = code % left;
            const mo_address gone = rest[pick];

            code /= (unsigned)left;
            rest[pick] = rest[left - 1];
            CHECK_EQ(mo_address_map_take(&map, gone)->address, gone);
            CHECK(!mo_address_map_find(&map, gone));
            for (size_t i = 0; i + 1 < left; i++)
                CHECK_EQ(mo_address_map_find(&map, rest[i])->address, rest[i]);
        }
        count = 0;
        CHECK_EQ(map.count, 0);
        for (size_t i = 0; i < map.capacity; i++)
            CHECK(!map.entries[i].address);
    }
    CHECK_EQ(map.capacity, 1024); /* so those were its last places */
    mo_address_map_close(&map);
}

TEST(it_grows_and_finds_all_that_was_there)
{
    size_t capacity = 0, grown = 0;

    for (size_t i = 0; i < 20000; i++) {
        blocks[i] = (mo_block){.address = (i + 1) * MO_ALIGNMENT * 3};
        CHECK_EQ(mo_address_map_reserve(&map, NULL), MO_OK);
        mo_address_map_put(&map, &blocks[i]);
        CHECK(2 * map.count <= map.capacity);
        grown += map.capacity != capacity;
        capacity = map.capacity;
    }
    CHECK(grown > 5);
    for (size_t i = 0; i < 20000; i++)
        CHECK(mo_address_map_find(&map, blocks[i].address) == &blocks[i]);
    CHECK(!mo_address_map_find(&map, 20001 * MO_ALIGNMENT * 3));
    CHECK_EQ(map.count, 20000);
    mo_address_map_close(&map);
}

TEST(addresses_a_power_of_two_apart_do_not_pile_up)
{
    for (unsigned shift = 9; shift < 34; shift++) {
        size_t longest = 0, run = 0;

        count = 0;
        for (size_t i = 0; i < 500; i++) {
            blocks[i] = (mo_block){.address = (i + 1) << shift};
            put(&blocks[i]);
        }
        for (size_t i = 0; i < 2 * map.capacity; i++) {
            run = map.entries[i % map.capacity].address ? run + 1 : 0;
            longest = run > longest ? run : longest;
        }
        CHECK(longest < 100); /* of 500 in 1024 places */
        mo_address_map_close(&map);
    }
}

TEST(without_host_memory_the_map_is_as_it_was)
{
    const size_t live = mo_host_live();
    mo_detail detail = {0};

    count = 0;
    mo_host_fail_after(0);
    CHECK_EQ(mo_address_map_reserve(&map, &detail), MO_NO_HOST_MEMORY);
    mo_host_fail_never();
    CHECK(strstr(detail.text, "table of addresses"));
    for (size_t i = 0; i < 512; i++) {
        blocks[i] = (mo_block){.address = (i + 1) * MO_ALIGNMENT};
        put(&blocks[i]);
    }
    mo_host_fail_after(0); /* the next one needs a larger table */
    CHECK_EQ(mo_address_map_reserve(&map, &detail), MO_NO_HOST_MEMORY);
    mo_host_fail_never();
    check_all();
    blocks[512] = (mo_block){.address = 513 * MO_ALIGNMENT};
    put(&blocks[512]);
    check_all();
    mo_address_map_close(&map);
    CHECK_EQ(mo_host_live(), live);
}

TEST_MAIN
