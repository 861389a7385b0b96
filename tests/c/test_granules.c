/* Against a table that says of each slot what is mapped there, and of each granule who owns it; and against the device,
 * which knows what is mapped. */
#include "alloc/granules.h"

#include "base/hostmem.h"
#include "driver/model_device.h"
#include "test.h"

#define SIZE     ((size_t)1 << 16)
#define SLOTS    48
#define GRANULES 40

static mo_model_device device;
static mo_granules granules;
static mo_detail said;
static mo_address base;
static mo_slot slots[SLOTS];

/* The model: granules by the number of their creation. */
static mo_granule *made[GRANULES]; /* NULL: there is none */
static mo_slot *owner_of[GRANULES];
static bool suspended[GRANULES];
static int mapped[SLOTS]; /* the number of what is mapped there, -1: nothing */
static size_t lost;       /* granules that the driver would not take back */

#define CHECK_OK(call)                                                                                       \
    do {                                                                                                     \
        mo_status ok_ = (call);                                                                              \
        test_checks++;                                                                                       \
        if (ok_)                                                                                             \
            TEST_FAIL("%s gives %s: %s", #call, mo_status_name(ok_), said.text);                             \
    } while (0)

static void open_granules(void)
{
    mo_granules_close(&granules);
    mo_model_device_close(&device);
    mo_model_device_open(&device, GRANULES * SIZE, SIZE);
    granules = (mo_granules){.driver = &device.table, .size = SIZE};
    memset(slots, 0, sizeof slots);
    memset(made, 0, sizeof made);
    memset(owner_of, 0, sizeof owner_of);
    memset(suspended, 0, sizeof suspended);
    lost = 0;
    for (int i = 0; i < SLOTS; i++)
        mapped[i] = -1;
    CHECK_OK(device.table.reserve(&device.table, SLOTS * SIZE, &said, &base));
}

static mo_address at(int slot)
{
    return base + (size_t)slot * SIZE;
}

static int number_of(const mo_granule *granule)
{
    for (int g = 0; g < GRANULES; g++)
        if (made[g] && made[g] == granule)
            return g;
    TEST_FAIL("a granule that nobody made");
}

static uint64_t calls(void)
{
    return device.calls[MO_MODEL_DEVICE_create] + device.calls[MO_MODEL_DEVICE_release] +
           device.calls[MO_MODEL_DEVICE_map] + device.calls[MO_MODEL_DEVICE_unmap] +
           device.calls[MO_MODEL_DEVICE_grant];
}

static void check_all(void)
{
    size_t count = 0, spare = 0, stale = 0, listed = 0;

    for (int g = 0; g < GRANULES; g++) {
        size_t views = 0, seen = 0;

        if (!made[g])
            continue;
        count += !suspended[g];
        spare += !owner_of[g];
        CHECK(made[g]->owner == owner_of[g]);
        CHECK_EQ(!made[g]->handle, suspended[g]);
        for (int i = 0; i < SLOTS; i++)
            views += mapped[i] == g;
        for (const mo_slot *view = made[g]->views; view; view = view->next_view, seen++)
            CHECK_EQ(mapped[view - slots], g);
        CHECK_EQ(seen, views);
    }
    for (int i = 0; i < SLOTS; i++) {
        const int g = mapped[i];
        const bool owned = g >= 0 && owner_of[g] == &slots[i];

        stale += g >= 0 && !owned;
        CHECK(slots[i].granule == (g >= 0 ? made[g] : NULL));
        CHECK_EQ(mo_slot_owned(&slots[i]), owned);
        CHECK_EQ(mo_model_device_behind(&device, at(i)), g >= 0 ? made[g]->handle : 0);
        if (g >= 0 && !suspended[g])
            CHECK_EQ(mo_model_device_usable(&device, at(i), SIZE), slots[i].granted);
    }
    for (const mo_granule *g = granules.spare, *before = NULL; g; before = g, g = g->next, listed++) {
        CHECK(g->previous == before);
        CHECK(!owner_of[number_of(g)]);
    }
    CHECK_EQ(granules.count, count);
    CHECK_EQ(granules.spare_count, spare);
    CHECK_EQ(listed, spare);
    CHECK_EQ(granules.stale_count, stale);
    CHECK_EQ(device.used, (count + lost) * SIZE);
    CHECK_EQ(granules.calls, calls());
}

/* ---- the operations, on both ------------------------------------------------------------------------------------------- */

static bool create(void)
{
    int g = 0;
    mo_status status;

    while (g < GRANULES && made[g])
        g++;
    if (g == GRANULES) /* suspended ones leave the device room for more than the table has */
        return false;
    status = mo_granule_create(&granules, &said);
    if (status) {
        CHECK(status == MO_NO_DEVICE_MEMORY || status == MO_DRIVER);
        return false;
    }
    made[g] = granules.spare;
    return true;
}

static bool release(int g)
{
    const mo_status status = mo_granule_release(&granules, made[g], &said);

    lost += status != MO_OK;
    made[g] = NULL;
    return !status;
}

static bool map(int g, int i)
{
    if (mo_granule_map(&granules, made[g], NULL, &slots[i], at(i), &said))
        return false;
    mapped[i] = g;
    CHECK(!slots[i].granted);
    return true;
}

static bool unmap(int i)
{
    if (mo_granule_unmap(&granules, &slots[i], at(i), &said))
        return false;
    mapped[i] = -1;
    return true;
}

static void own(int i)
{
    mo_granule_own(&granules, &slots[i]);
    owner_of[mapped[i]] = &slots[i];
}

static void disown(int i)
{
    const mo_last_use use = {1ull << i, (uint64_t)i + 100};

    mo_granule_disown(&granules, &slots[i], use);
    owner_of[mapped[i]] = NULL;
    CHECK(slots[i].last_use.streams == use.streams && slots[i].last_use.tick == use.tick);
    CHECK(slots[i].granule->last_use.streams == use.streams && slots[i].granule->last_use.tick == use.tick);
    CHECK(granules.spare == slots[i].granule); /* what was used last is asked first */
}

static bool alone(int i)
{
    for (int k = 0; k < SLOTS; k++)
        if (k != i && mapped[k] == mapped[i])
            return false;
    return mapped[i] >= 0;
}

/* ---- tests ----------------------------------------------------------------------------------------------------------------- */

TEST(memory_moves_from_slot_to_slot_and_back_without_a_call)
{
    uint64_t before;

    open_granules();
    CHECK(create() && map(0, 3) && map(0, 9));
    CHECK_OK(mo_granules_grant(&granules, &slots[3], at(3), 1, &said));
    CHECK_OK(mo_granules_grant(&granules, &slots[9], at(9), 1, &said));
    before = calls();
    for (int n = 0; n < 10; n++) {
        own(n % 2 ? 3 : 9);
        check_all();
        disown(n % 2 ? 3 : 9);
        check_all();
    }
    CHECK_EQ(calls(), before);
    CHECK(unmap(3) && unmap(9) && release(0));
    check_all();
    CHECK_EQ(device.used, 0);
}

TEST(a_run_is_granted_by_one_call_and_by_one_that_fails_not_at_all)
{
    open_granules();
    for (int i = 0; i < 8; i++)
        CHECK(create() && map(i, i + 4));
    mo_model_device_fail(&device, MO_MODEL_DEVICE_grant, 0, 1, MO_DRIVER);
    CHECK_EQ(mo_granules_grant(&granules, &slots[4], at(4), 8, &said), MO_DRIVER);
    for (int i = 4; i < 12; i++)
        CHECK(!slots[i].granted);
    check_all();
    CHECK_OK(mo_granules_grant(&granules, &slots[4], at(4), 8, &said));
    for (int i = 0; i < SLOTS; i++)
        CHECK_EQ(slots[i].granted, i >= 4 && i < 12);
    CHECK_EQ(device.calls[MO_MODEL_DEVICE_grant], 2);
    check_all();
}

TEST(what_is_unmapped_and_mapped_again_is_granted_again)
{
    open_granules();
    CHECK(create() && map(0, 0));
    CHECK_OK(mo_granules_grant(&granules, slots, at(0), 1, &said));
    CHECK(unmap(0) && map(0, 0));
    CHECK(!slots[0].granted);
    check_all();
}

TEST(a_suspended_granule_keeps_its_slot_and_gives_its_memory_back)
{
    open_granules();
    CHECK(create() && create() && map(0, 5) && map(1, 6));
    CHECK_OK(mo_granules_grant(&granules, &slots[5], at(5), 2, &said));
    own(5);
    own(6);
    CHECK_OK(mo_granule_suspend(&granules, &slots[5], at(5), &said));
    suspended[0] = true;
    check_all();
    CHECK(!mo_model_device_usable(&device, at(5), SIZE));
    CHECK_OK(mo_granule_restore(&granules, &slots[5], at(5), &said));
    suspended[0] = false;
    check_all();
    CHECK(mo_model_device_usable(&device, at(5), 2 * SIZE));
    CHECK_OK(mo_granule_suspend(&granules, &slots[6], at(6), &said));
    mo_granule_forget(&granules, &slots[6]);
    made[1] = NULL;
    mapped[6] = -1;
    owner_of[1] = NULL;
    check_all();
    CHECK(create() && map(1, 6)); /* as if it had never been */
    check_all();
}

TEST(suspending_and_restoring_fail_at_any_call_with_nothing_changed)
{
    static const mo_model_device_call down[] = {MO_MODEL_DEVICE_unmap, MO_MODEL_DEVICE_release},
                                      up[] = {MO_MODEL_DEVICE_create, MO_MODEL_DEVICE_map,
                                              MO_MODEL_DEVICE_grant};

    open_granules();
    CHECK(create() && map(0, 5));
    CHECK_OK(mo_granules_grant(&granules, &slots[5], at(5), 1, &said));
    own(5);
    for (size_t i = 0; i < 2; i++) {
        mo_model_device_fail(&device, down[i], 0, 1, MO_DRIVER);
        CHECK_EQ(mo_granule_suspend(&granules, &slots[5], at(5), &said), MO_DRIVER);
        check_all();
        CHECK(mo_model_device_usable(&device, at(5), SIZE));
    }
    CHECK_OK(mo_granule_suspend(&granules, &slots[5], at(5), &said));
    suspended[0] = true;
    for (size_t i = 0; i < 3; i++) {
        mo_model_device_fail(&device, up[i], 0, 1, MO_NO_DEVICE_MEMORY);
        CHECK_EQ(mo_granule_restore(&granules, &slots[5], at(5), &said), MO_NO_DEVICE_MEMORY);
        check_all();
    }
    CHECK_OK(mo_granule_restore(&granules, &slots[5], at(5), &said));
    suspended[0] = false;
    check_all();
}

TEST(without_host_memory_nothing_is_created)
{
    open_granules();
    mo_host_fail_after(0);
    CHECK_EQ(mo_granule_create(&granules, &said), MO_NO_HOST_MEMORY);
    mo_host_fail_never();
    CHECK(strstr(said.text, "table of granules"));
    CHECK_EQ(calls(), 0);
    check_all();
    CHECK(create());
    check_all();
}

TEST(thousands_of_granules_come_and_go_in_the_host_memory_of_their_most)
{
    const size_t most = 5000;
    size_t live;

    mo_granules_close(&granules);
    mo_model_device_close(&device);
    mo_model_device_open(&device, most * SIZE, SIZE);
    granules = (mo_granules){.driver = &device.table, .size = SIZE};
    live = mo_host_live();
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < most; i++)
            CHECK_OK(mo_granule_create(&granules, &said));
        CHECK_EQ(mo_granule_create(&granules, &said), MO_NO_DEVICE_MEMORY);
        CHECK_EQ(granules.count, most);
        while (granules.spare)
            CHECK_OK(mo_granule_release(&granules, granules.spare, &said));
        CHECK_EQ(granules.count + granules.spare_count, 0);
        CHECK(mo_host_live() - live <= most / 500 + 1);
    }
    mo_granules_close(&granules);
    CHECK_EQ(mo_host_live(), live);
}

static void fail_sometimes(uint64_t *random)
{
    static const mo_model_device_call kinds[] = {MO_MODEL_DEVICE_create, MO_MODEL_DEVICE_release,
                                                 MO_MODEL_DEVICE_map, MO_MODEL_DEVICE_unmap,
                                                 MO_MODEL_DEVICE_grant};

    mo_model_device_fail_never(&device);
    if (test_random(random) % 8 == 0)
        mo_model_device_fail(&device, kinds[test_random(random) % 5], 0, 1, MO_DRIVER);
}

TEST(any_sequence_of_operations_leaves_what_the_table_says)
{
    uint64_t random = test_seed();
    const int rounds = test_rounds(20, 1000);

    for (int round = 0; round < rounds; round++) {
        open_granules();
        for (int n = 0; n < 3000 && lost < GRANULES / 2; n++) {
            const int i = (int)(test_random(&random) % SLOTS), g = (int)(test_random(&random) % GRANULES);
            const int here = mapped[i];
            const bool owned = here >= 0 && owner_of[here] == &slots[i];

            fail_sometimes(&random);
            switch (test_random(&random) % 10) {
            case 0:
            case 1:
                create();
                break;
            case 2:
                if (made[g] && !made[g]->owner && !made[g]->views)
                    release(g);
                break;
            case 3:
            case 4:
                if (made[g] && !suspended[g] && here < 0)
                    map(g, i);
                break;
            case 5:
                if (here >= 0 && !owned && !suspended[here])
                    unmap(i);
                break;
            case 6:
                if (here >= 0 && !owner_of[here])
                    own(i);
                break;
            case 7:
                if (owned && !suspended[here])
                    disown(i);
                break;
            case 8:
                if (here >= 0 && !suspended[here])
                    mo_granules_grant(&granules, &slots[i], at(i), 1, &said);
                break;
            default:
                if (!owned)
                    break;
                if (suspended[here])
                    suspended[here] = mo_granule_restore(&granules, &slots[i], at(i), &said) != MO_OK;
                else if (alone(i) && slots[i].granted)
                    suspended[here] = !mo_granule_suspend(&granules, &slots[i], at(i), &said);
            }
            mo_model_device_fail_never(&device);
            check_all();
        }
    }
    mo_granules_close(&granules);
    mo_model_device_close(&device);
}

TEST_MAIN
