/* The ring of events: what it keeps, what a reader gets that races with the writer, and what a record costs. */
#include <pthread.h>
#include <stdatomic.h>

#include "alloc/trace_ring.h"
#include "alloc/trace_stacks.h"
#include "base/hostmem.h"
#include "test.h"

static void put(mo_trace *ring, uint64_t n)
{
    mo_trace_put(ring, (int)(n % 7), (mo_trace_op)(n % 3), n, n * 512, n * 3, (mo_stream)(uintptr_t)(n * 5),
                 (mo_arena_id){n * 7, n * 11});
}

/* Every word of a record that put() has made but the time. */
static bool is(const mo_trace_record *r, uint64_t n)
{
    return r->serial == n && r->address == n * 512 && r->size == n * 3 && (uintptr_t)r->stream == n * 5 &&
           r->arena.first == n * 7 && r->arena.second == n * 11 && r->device == n % 7 && r->op == n % 3;
}

static mo_trace *fresh(size_t capacity)
{
    mo_trace *ring = NULL;
    mo_detail detail;

    CHECK_EQ(mo_trace_open(capacity, &detail, &ring), MO_OK);
    CHECK_EQ(mo_trace_capacity(ring), capacity);
    return ring;
}

TEST(the_last_events_are_kept_in_order)
{
    static mo_trace_record got[20000];
    const size_t capacities[] = {1, 2, 100, 4095, 4096, 4097, 10000};
    const size_t live = mo_host_live();

    for (size_t c = 0; c < sizeof capacities / sizeof *capacities; c++) {
        mo_trace *ring = fresh(capacities[c]);
        uint64_t n = 0, first = 77;
        CHECK_EQ(mo_trace_read(ring, 0, got, 20000, &first), 0);
        CHECK_EQ(first, 0);
        for (int part = 0; part < 5; part++) {
            for (uint64_t end = n + 1 + capacities[c] * 2 / 3; n < end; n++)
                put(ring, n);
            const size_t kept = n < capacities[c] ? n : capacities[c];
            CHECK_EQ(mo_trace_written(ring), n);
            CHECK_EQ(mo_trace_read(ring, 0, got, 20000, &first), kept);
            CHECK_EQ(first, n - kept);
            for (size_t i = 0; i < kept; i++)
                CHECK(is(&got[i], first + i) && (!i || got[i - 1].time <= got[i].time));
        }
        CHECK_EQ(mo_trace_lost(ring), 0);
        mo_trace_close(ring);
    }
    CHECK_EQ(mo_host_live(), live);
}

TEST(a_reader_reads_on_where_it_was)
{
    mo_trace *ring = fresh(1000);
    mo_trace_record got[300];
    uint64_t first, next = 0;

    for (uint64_t n = 0; n < 900; n++)
        put(ring, n);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(mo_trace_read(ring, next, got, 300, &first), 300);
        CHECK_EQ(first, next);
        CHECK(is(&got[299], first + 299));
        next = first + 300;
    }
    CHECK_EQ(mo_trace_read(ring, next, got, 300, &first), 0);
    CHECK_EQ(first, 900);
    /* Ahead of the writer there is nothing yet. */
    CHECK_EQ(mo_trace_read(ring, 5000, got, 300, &first), 0);
    CHECK_EQ(first, 900);
    mo_trace_close(ring);
}

TEST(what_was_cleared_is_not_read)
{
    mo_trace *ring = fresh(100);
    mo_trace_record got[100];
    uint64_t first;

    for (uint64_t n = 0; n < 150; n++)
        put(ring, n);
    mo_trace_clear(ring);
    CHECK_EQ(mo_trace_read(ring, 0, got, 100, &first), 0);
    CHECK_EQ(first, 150);
    put(ring, 150);
    CHECK_EQ(mo_trace_read(ring, 0, got, 100, &first), 1);
    CHECK(first == 150 && is(&got[0], 150));
    mo_trace_close(ring);
}

TEST(a_record_has_the_time_and_its_threads_stack)
{
    mo_trace *ring = fresh(4);
    mo_trace_record got[4];
    uint64_t first;
    struct timespec before, after;

    clock_gettime(CLOCK_REALTIME, &before);
    mo_trace_set_stack_of_thread(31);
    put(ring, 0);
    mo_trace_set_stack_of_thread(0);
    put(ring, 1);
    clock_gettime(CLOCK_REALTIME, &after);
    CHECK_EQ(mo_trace_read(ring, 0, got, 4, &first), 2);
    CHECK_EQ(got[0].stack, 31);
    CHECK_EQ(got[1].stack, 0);
    CHECK(got[0].time >= (uint64_t)before.tv_sec * 1000000000u + (uint64_t)before.tv_nsec);
    CHECK(got[1].time <= (uint64_t)after.tv_sec * 1000000000u + (uint64_t)after.tv_nsec);
    mo_trace_close(ring);
}

TEST(capacities_that_make_no_sense_are_refused)
{
    mo_trace *ring = NULL;
    mo_detail detail;

    CHECK_EQ(mo_trace_open(0, &detail, &ring), MO_INVALID);
    CHECK_STR(detail.text, "a trace holds 1 to 268435456 events, not 0");
    CHECK_EQ(mo_trace_open(MO_TRACE_MAX_CAPACITY + 1, &detail, &ring), MO_INVALID);
    /* The largest takes no memory for records before there are any. */
    CHECK_EQ(mo_trace_open(MO_TRACE_MAX_CAPACITY, &detail, &ring), MO_OK);
    mo_trace_close(ring);
    mo_trace_close(NULL);
}

TEST(an_event_without_host_memory_is_lost_and_counted)
{
    const size_t live = mo_host_live();
    mo_trace *ring = NULL;
    mo_trace_record got[8];
    uint64_t first;

    mo_host_fail_after(0);
    CHECK_EQ(mo_trace_open(8, NULL, &ring), MO_NO_HOST_MEMORY);
    mo_host_fail_never();
    ring = fresh(8);
    mo_host_fail_after(0);
    put(ring, 0);
    mo_host_fail_never();
    CHECK_EQ(mo_trace_lost(ring), 1);
    CHECK_EQ(mo_trace_written(ring), 0);
    put(ring, 0);
    CHECK_EQ(mo_trace_read(ring, 0, got, 8, &first), 1);
    CHECK(is(&got[0], 0));
    mo_trace_close(ring);
    CHECK_EQ(mo_host_live(), live);
}

/* ---- the race ------------------------------------------------------------------------------------------------ */

static atomic_bool stop;

static void *write_on(void *ring)
{
    for (uint64_t n = 0; !atomic_load_explicit(&stop, memory_order_relaxed); n++)
        put(ring, n);
    return NULL;
}

/* A small ring and a reader of all of it: the writer laps the reader again and again. Where the reader did not look at
 * `claimed` after it copied, torn records and records of other numbers come out. */
TEST(a_racing_reader_gets_whole_records_in_order)
{
    enum { CAPACITY = 64 };
    mo_trace *ring = fresh(CAPACITY);
    mo_trace_record got[CAPACITY];
    uint64_t wrong = 0, read = 0, overtaken = 0, next = 0;
    pthread_t writer;

    atomic_store(&stop, false);
    CHECK_EQ(pthread_create(&writer, NULL, write_on, ring), 0);
    while (mo_trace_written(ring) < CAPACITY)
        continue;
    const int rounds = test_rounds(200000, 20000000);
    for (int i = 0; i < rounds; i++) {
        uint64_t first;
        /* From the oldest: the slots that the writer takes next. */
        const size_t count = mo_trace_read(ring, 0, got, CAPACITY, &first);
        wrong += first < next; /* time goes forward */
        next = first;
        for (size_t k = 0; k < count; k++)
            wrong += !is(&got[k], first + k);
        read += count;
        overtaken += count < CAPACITY;
    }
    atomic_store(&stop, true);
    pthread_join(writer, NULL);
    printf("# %" PRIu64 " events written, %" PRIu64 " records read, %" PRIu64 " reads overtaken\n",
           mo_trace_written(ring), read, overtaken);
    mo_trace_close(ring);
    CHECK_EQ(wrong, 0);
    CHECK(read > 0);
    CHECK(overtaken > 0); /* else there was no race to win */
}

/* A trace that is on may cost 100 ns a record, by design. The figure is printed, in processor time, since machines are
 * shared; what is checked is only that there is no system call and no lock in it, with room for the sanitizers. */
TEST(a_record_is_cheap)
{
    enum { COUNT = 2000000 };
    mo_trace *ring = fresh(1 << 16);
    struct timespec start, end;
    double best = 1e9;

    for (int round = 0; round < 5; round++) {
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &start);
        for (uint64_t n = 0; n < COUNT / 5; n++)
            put(ring, n);
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
        const double ns =
            (1e9 * (double)(end.tv_sec - start.tv_sec) + (double)(end.tv_nsec - start.tv_nsec)) / (COUNT / 5);
        best = ns < best ? ns : best;
    }
    printf("# %.1f ns of processor time a record, its clock included\n", best);
    mo_trace_close(ring);
    CHECK(best < 10000);
}

TEST_MAIN
