/* Against two lists that are searched from end to end; and with host memory that runs out. */
#include "alloc/life_log.h"

#include "base/hostmem.h"
#include "test.h"

#define MOST 400

typedef struct block {
    int64_t address, size, stack, serial;
    int64_t born, died; /* positions; died 0: it lives */
} block;

static block blocks[4 * MOST];
static size_t count;
static int64_t now;
static int64_t most; /* bytes that lived at once since start_over() or the last reset */
static uint64_t seed;

static block *living_at(int64_t address)
{
    for (size_t i = count; i-- > 0;)
        if (blocks[i].address == address && !blocks[i].died)
            return &blocks[i];
    return NULL;
}

static int64_t bytes_alive(void)
{
    int64_t sum = 0;

    for (size_t i = 0; i < count; i++)
        sum += blocks[i].died ? 0 : blocks[i].size;
    return sum;
}

static void born(mo_life_log *log, int64_t address, int64_t size)
{
    block *there = living_at(address);

    now++;
    if (there)
        there->died = now;
    blocks[count] = (block){.address = address, .size = size, .stack = now, .born = now};
    blocks[count].serial = mo_life_born(log, address, size, now, 0);
    CHECK(blocks[count].serial > 0);
    count++;
    if (bytes_alive() > most)
        most = bytes_alive();
}

static void died(mo_life_log *log, int64_t address, int64_t serial)
{
    block *there = living_at(address);
    const int known = there && (!serial || there->serial == serial);

    CHECK_EQ(mo_life_died(log, address, serial), known);
    if (known)
        there->died = ++now;
}

/* Every event that is kept, and every block that was born before the first of them and had not died by then. */
static void check_all(const mo_life_log *log, size_t capacity)
{
    static mo_life_event events[4 * MOST];
    static mo_life_block before[4 * MOST];
    const size_t kept = mo_life_kept(log), old = mo_life_before_count(log);
    const int64_t first = mo_life_written(log) - (int64_t)kept;
    size_t wanted = 0;

    CHECK_EQ(mo_life_written(log), now);
    CHECK_EQ(mo_life_live(log), bytes_alive());
    CHECK_EQ(mo_life_peak(log), most);
    CHECK_EQ(kept, (size_t)now < capacity ? (size_t)now : capacity);
    mo_life_events(log, events);
    mo_life_before(log, before);
    for (size_t n = 0; n < kept; n++) {
        const int64_t position = first + (int64_t)n + 1;
        const block *of = NULL;

        for (size_t i = 0; i < count; i++)
            if (blocks[i].born == position || (blocks[i].died == position && !events[n].birth))
                of = &blocks[i];
        CHECK(of != NULL);
        CHECK_EQ(events[n].birth, of->born == position);
        CHECK_EQ(events[n].address, of->address);
        CHECK_EQ(events[n].size, of->size);
        CHECK_EQ(events[n].stack, events[n].birth ? of->stack : 0);
    }
    for (size_t i = 0; i < count; i++) {
        const block *b = &blocks[i];

        CHECK_EQ(mo_life_size(log, b->address), living_at(b->address) ? living_at(b->address)->size : 0);
        if (b->born > first || (b->died && b->died <= first))
            continue;
        wanted++;
        for (size_t k = 0; k <= old; k++) {
            CHECK(k < old);
            if (before[k].address == b->address && before[k].size == b->size && before[k].stack == b->stack)
                break;
        }
    }
    CHECK_EQ(old, wanted);
}

static void start_over(void)
{
    count = 0;
    now = 0;
    most = 0;
}

TEST(events_and_what_was_before_them_are_those_of_a_list)
{
    const size_t live = mo_host_live();

    seed = test_seed();
    for (size_t round = 0; round < 40; round++) {
        const size_t capacity = 1 + (size_t)test_random(&seed) % 60;
        mo_life_log *log = NULL;

        start_over();
        CHECK_EQ(mo_life_open(capacity, NULL, &log), MO_OK);
        for (size_t n = 0; n < MOST; n++) {
            const int64_t address = 64 * (1 + (int64_t)(test_random(&seed) % 24));
            const block *there = living_at(address);

            if (test_random(&seed) % 2)
                born(log, address, 1 + (int64_t)(test_random(&seed) % 1000));
            else
                died(log, address,
                     test_random(&seed) % 2 && there ? there->serial + (test_random(&seed) % 4 == 0) : 0);
            if (n % 37 == 0)
                check_all(log, capacity);
            if (n % 50 == 0) {
                mo_life_reset_peak(log);
                most = bytes_alive();
            }
        }
        check_all(log, capacity);
        mo_life_close(log);
    }
    CHECK_EQ(mo_host_live(), live);
}

TEST(what_was_there_before_is_known_and_is_no_event)
{
    mo_life_log *log = NULL;

    CHECK_EQ(mo_life_open(4, NULL, &log), MO_OK);
    const int64_t serial = mo_life_adopt(log, 640, 10);
    CHECK(serial > 0);
    CHECK_EQ(mo_life_written(log), 0);
    CHECK_EQ(mo_life_before_count(log), 1);
    CHECK_EQ(mo_life_size(log, 640), 10);
    CHECK_EQ(mo_life_live(log), 10);
    CHECK_EQ(mo_life_died(log, 640, serial + 1), 0);
    CHECK_EQ(mo_life_died(log, 640, serial), 1);
    CHECK_EQ(mo_life_died(log, 640, serial), 0);
    CHECK_EQ(mo_life_written(log), 1);
    CHECK_EQ(mo_life_adopt(log, 704, 10), 0); /* too late */
    CHECK_EQ(mo_life_before_count(log), 1);   /* it died at the event that is kept */
    mo_life_close(log);
}

TEST(a_large_log_takes_memory_as_it_fills)
{
    mo_life_log *log = NULL;

    CHECK_EQ(mo_life_open((size_t)1 << 40, NULL, &log), MO_OK);
    for (int64_t n = 1; n <= 5000; n++)
        CHECK(mo_life_born(log, 8 * n, n, 0, 0) > 0);
    CHECK_EQ(mo_life_kept(log), 5000);
    mo_life_close(log);
}

TEST(without_host_memory_nothing_is_half_known)
{
    const size_t live = mo_host_live();

    for (uint64_t after = 0; after < 40; after++) {
        mo_life_log *log = NULL;
        int64_t noted = 0, living = 0;

        mo_host_fail_after(after);
        if (mo_life_open(3000, NULL, &log) == MO_OK) {
            for (int64_t n = 1; n <= 4000; n++)
                noted += mo_life_born(log, 16 * n, n, 0, 0) > 0;
            CHECK_EQ(mo_life_written(log), noted);
            CHECK(mo_life_kept(log) <= 3000);
            for (int64_t n = 1; n <= 4000; n++)
                living += mo_life_size(log, 16 * n) > 0;
            CHECK_EQ(living, noted);
            for (int64_t n = 1; n <= 4000; n++)
                noted -= mo_life_died(log, 16 * n, 0);
            CHECK_EQ(noted, 0);
        }
        mo_life_close(log);
        mo_host_fail_never();
        CHECK_EQ(mo_host_live(), live);
    }
}

TEST(a_log_of_nothing_is_refused)
{
    mo_life_log *log = NULL;
    mo_detail detail;

    CHECK_EQ(mo_life_open(0, &detail, &log), MO_INVALID);
    CHECK(!log);
    mo_life_close(NULL);
}

TEST_MAIN
