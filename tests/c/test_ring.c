#include "transfer/ring.h"

#include "base/hostmem.h"
#include "test.h"

static mo_ring ring;

static bool take(size_t size, uint64_t *slot, size_t *offset)
{
    uint64_t after;
    const mo_status status = mo_ring_take(&ring, size, slot, offset, &after);
    CHECK(status == MO_OK || status == MO_NO_HOST_MEMORY);
    CHECK(mo_ring_is_valid(&ring));
    return !status;
}

static uint64_t taken(size_t size, size_t offset)
{
    uint64_t slot = 77;
    size_t at = 77;
    CHECK(take(size, &slot, &at));
    CHECK_EQ(at, offset);
    return slot;
}

static void give(uint64_t slot)
{
    CHECK_EQ(mo_ring_give(&ring, slot, 0), MO_OK);
    CHECK(mo_ring_is_valid(&ring));
}

TEST(slots_lie_in_order_and_are_rounded_up)
{
    mo_ring_init(&ring, 100 * 64, 64);
    taken(1, 0);
    taken(64, 64);
    taken(65, 128);
    taken(1, 256);
    CHECK_EQ(ring.held, 320);
    mo_ring_fini(&ring);
    CHECK_EQ(mo_host_live(), 0);
}

TEST(a_queue_goes_round_and_leaves_nothing_behind)
{
    uint64_t slots[3];
    mo_ring_init(&ring, 4 * 64, 64);
    for (size_t i = 0; i < 3; i++)
        slots[i] = taken(64, 64 * i);
    for (size_t i = 3; i < 1000; i++) {
        give(slots[i % 3]);
        slots[i % 3] = taken(64, 64 * (i % 4));
        CHECK_EQ(ring.held, 192);
    }
    CHECK_EQ(ring.peak, 192);
    mo_ring_fini(&ring);
}

TEST(a_stack_leaves_nothing_behind)
{
    uint64_t slots[50];
    mo_ring_init(&ring, 50 * 64, 64);
    for (int round = 0; round < 20; round++) {
        for (size_t i = 0; i < 50; i++)
            slots[i] = taken(64, 64 * i);
        uint64_t none;
        size_t at;
        CHECK(!take(1, &none, &at));
        for (size_t i = 50; i-- > 0;) {
            give(slots[i]);
            CHECK_EQ(ring.held, 64 * i);
        }
    }
    mo_ring_fini(&ring);
}

TEST(what_is_given_back_between_others_is_free_when_those_on_one_side_are)
{
    mo_ring_init(&ring, 5 * 64, 64);
    const uint64_t a = taken(64, 0), b = taken(64, 64), c = taken(64, 128), d = taken(64, 192);
    give(c);
    CHECK_EQ(ring.held, 256);
    give(d);
    CHECK_EQ(ring.held, 128);
    const uint64_t e = taken(192, 128);
    give(b);
    CHECK_EQ(ring.held, 320);
    give(a);
    CHECK_EQ(ring.held, 192);
    taken(128, 0);
    give(e);
    CHECK_EQ(ring.held, 128);
    mo_ring_fini(&ring);
}

TEST(what_does_not_fit_behind_the_last_goes_to_the_front_if_it_fits_there)
{
    mo_ring_init(&ring, 10 * 64, 64);
    const uint64_t a = taken(3 * 64, 0);
    uint64_t none;
    size_t at;
    taken(5 * 64, 3 * 64);
    CHECK(!take(3 * 64, &none, &at)); /* two at the end */
    give(a);
    taken(3 * 64, 0);
    CHECK(!take(1, &none, &at)); /* gone on at 0: what is left at the end is not for now */
    mo_ring_fini(&ring);
}

TEST(what_is_larger_than_all_is_refused)
{
    uint64_t none;
    size_t at;
    mo_ring_init(&ring, 1000, 64); /* no multiple: 960 can be used */
    CHECK(!take(961, &none, &at) && !take(SIZE_MAX, &none, &at));
    taken(960, 0);
    mo_ring_fini(&ring);
}

TEST(a_slot_is_given_back_once)
{
    mo_ring_init(&ring, 640, 64);
    const uint64_t a = taken(64, 0), b = taken(64, 64);
    CHECK_EQ(mo_ring_give(&ring, b + 1, 0), MO_INVALID);
    CHECK_EQ(mo_ring_give(&ring, a - 1, 0), MO_INVALID);
    taken(64, 128);
    give(b);
    CHECK_EQ(mo_ring_give(&ring, b, 0), MO_INVALID);
    give(a);
    CHECK_EQ(mo_ring_give(&ring, a, 0), MO_INVALID);
    mo_ring_fini(&ring);
}

TEST(a_slot_comes_behind_the_last_copy_of_all_that_were_given_back)
{
    uint64_t a, b, after = 77;
    size_t at;
    mo_ring_init(&ring, 640, 64);
    CHECK_EQ(mo_ring_take(&ring, 64, &a, &at, &after), MO_OK);
    CHECK_EQ(after, 0);
    CHECK_EQ(mo_ring_take(&ring, 64, &b, &at, &after), MO_OK);
    CHECK_EQ(mo_ring_give(&ring, b, 9), MO_OK);
    CHECK_EQ(mo_ring_give(&ring, a, 7), MO_OK);
    CHECK_EQ(mo_ring_take(&ring, 64, &a, &at, &after), MO_OK);
    CHECK_EQ(after, 9);
    mo_ring_fini(&ring);
}

TEST(without_host_memory_the_ring_is_as_it_was)
{
    mo_ring_init(&ring, 100 * 64, 64);
    uint64_t slots[17], none;
    size_t at;
    mo_host_fail_after(0);
    CHECK(!take(64, &none, &at));
    mo_host_fail_never();
    for (size_t i = 0; i < 16; i++)
        slots[i] = taken(64, 64 * i);
    mo_host_fail_after(0);
    CHECK(!take(64, &none, &at));
    mo_host_fail_never();
    CHECK_EQ(ring.count, 16);
    slots[16] = taken(64, 16 * 64);
    for (size_t i = 0; i < 17; i++)
        give(slots[i]);
    CHECK_EQ(ring.held, 0);
    mo_ring_fini(&ring);
    CHECK_EQ(mo_host_live(), 0);
}

/* Random takes and gives against a map of who has which byte. */
TEST(nobody_is_given_what_another_has)
{
    enum { BYTES = 512, SLOTS = 64 };
    for (int round = 0; round < test_rounds(50, 5000); round++) {
        uint64_t state = test_seed() + (uint64_t)round, slots[SLOTS];
        struct {
            size_t at, size;
        } where[SLOTS];
        char owned[BYTES] = {0};
        size_t live = 0;
        const size_t alignment = (size_t)1 << test_random(&state) % 4;
        mo_ring_init(&ring, BYTES, alignment);
        for (int i = 0; i < 400; i++) {
            const size_t size = 1 + test_random(&state) % 60;
            uint64_t slot;
            size_t at;
            if (live < SLOTS && test_random(&state) % 2 && take(size, &slot, &at)) {
                CHECK(at % alignment == 0 && at + size <= BYTES);
                for (size_t b = at; b < at + size; b++) {
                    CHECK(!owned[b]);
                    owned[b] = 1;
                }
                slots[live] = slot;
                where[live].at = at;
                where[live++].size = size;
            } else if (live) {
                const size_t which = test_random(&state) % live;
                give(slots[which]);
                memset(owned + where[which].at, 0, where[which].size);
                slots[which] = slots[--live];
                where[which] = where[live];
            }
        }
        while (live)
            give(slots[--live]);
        CHECK_EQ(ring.held, 0);
        taken(BYTES, 0); /* and all of it is there again */
        mo_ring_fini(&ring);
    }
}

TEST_MAIN
