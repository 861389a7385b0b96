#include "transfer/copies.h"

#include <pthread.h>

#include "driver/model_device.h"
#include "test.h"

#define USER  ((mo_stream)0x10)
#define OTHER ((mo_stream)0x20)
enum { SIZE = 4096, PIECES = 3 };

static mo_model_device device;
static mo_copies copies;
static mo_address memory;
static char *host;

/* A watched device with a segment, pinned memory and copies, all of SIZE bytes; what its checking mode finds to be
 * unordered is a violation. */
static void start(void)
{
    mo_model_device_close(&device);
    mo_model_device_open(&device, 1 << 20, 0);
    mo_model_device_watch(&device);
    mo_driver *m = &device.table;
    CHECK_EQ(m->segment_alloc(m, SIZE, NULL, &memory), MO_OK);
    CHECK_EQ(m->pinned_alloc(m, SIZE, NULL, (void **)&host), MO_OK);
    CHECK_EQ(mo_copies_open(m, &copies, NULL), MO_OK);
}

static void finish(void)
{
    mo_driver *m = &device.table;
    if (device.violations)
        TEST_FAIL("%s", device.violation);
    CHECK_EQ(mo_copies_close(&copies, NULL), MO_OK);
    CHECK_EQ(m->pinned_free(m, host, NULL), MO_OK);
    CHECK_EQ(m->segment_free(m, memory, NULL), MO_OK);
    CHECK_EQ(mo_model_device_live(&device), 0);
}

static mo_ticket copy(mo_way way, mo_ticket after)
{
    mo_ticket ticket = 0;
    CHECK_EQ(mo_copy(&copies, way, USER, memory, host, SIZE, after, NULL, &ticket), MO_OK);
    CHECK(ticket);
    return ticket;
}

/* All of the memory, in `count` pieces of different sizes, at most PIECES. */
static mo_status copy_pieces(mo_way way, size_t count, mo_ticket after, mo_detail *detail, mo_ticket *out)
{
    mo_piece pieces[PIECES];
    size_t offset = 0;

    for (size_t i = 0; i < count; i++) {
        const size_t size = i + 1 < count ? (i + 1) * 256 : SIZE - offset;
        pieces[i] = (mo_piece){memory + offset, host + offset, size};
        offset += size;
    }
    return mo_copy_pieces(&copies, way, USER, pieces, count, after, detail, out);
}

static void use(mo_stream stream)
{
    static uint64_t owner;
    mo_model_device_use(&device, stream, memory, SIZE, ++owner);
}

TEST(what_is_awaited_is_ordered_whoever_waits)
{
    const mo_stream waiting[] = {USER, OTHER};
    for (int i = 0; i < 2; i++)
        for (mo_way way = MO_OUT; way <= MO_IN; way++) {
            start();
            use(USER);
            const mo_ticket ticket = copy(way, 0);
            CHECK_EQ(mo_copies_await(&copies, waiting[i], ticket, NULL), MO_OK);
            use(waiting[i]);
            finish();
        }
}

TEST(what_is_not_awaited_is_a_violation)
{
    start();
    use(USER);
    copy(MO_OUT, 0);
    use(USER);
    CHECK(device.violations > 0);
    device.violations = 0;
    finish();
}

TEST(pieces_are_ordered_once_and_are_one_copy)
{
    for (mo_way way = MO_OUT; way <= MO_IN; way++)
        for (int awaited = 0; awaited < 2; awaited++) {
            start();
            use(USER);
            const mo_ticket before =
                copy(way == MO_OUT ? MO_IN : MO_OUT, 0); /* one more wait: not for USER */
            mo_ticket ticket = 0;
            const uint64_t records = device.calls[MO_MODEL_DEVICE_event_record],
                           waits = device.calls[MO_MODEL_DEVICE_stream_wait];
            CHECK_EQ(copy_pieces(way, PIECES, before, NULL, &ticket), MO_OK);
            CHECK_EQ(device.calls[MO_MODEL_DEVICE_event_record] - records, 2);
            CHECK_EQ(device.calls[MO_MODEL_DEVICE_stream_wait] - waits, 2);
            CHECK_EQ(
                device.calls[way == MO_OUT ? MO_MODEL_DEVICE_copy_to_host : MO_MODEL_DEVICE_copy_to_device],
                PIECES);
            CHECK(copies.lines[way].begun == 1 && copies.lines[way].bytes == SIZE);
            if (awaited)
                CHECK_EQ(mo_copies_await(&copies, USER, ticket, NULL), MO_OK);
            CHECK_EQ(mo_copies_await(&copies, USER, before, NULL), MO_OK);
            CHECK_EQ(device.violations, 0);
            static uint64_t owner = 1000;                                      /* not one of use()'s */
            mo_model_device_use(&device, USER, memory + SIZE - 8, 8, ++owner); /* of the last piece */
            CHECK_EQ(device.violations > 0, !awaited);
            device.violations = 0;
            finish();
        }
}

TEST(a_copy_back_comes_after_the_copy_out_that_it_is_told_of)
{
    for (int told = 0; told < 2; told++) {
        start();
        use(USER);
        const mo_ticket out = copy(MO_OUT, 0);
        CHECK_EQ(mo_copies_await(&copies, USER, out, NULL), MO_OK);
        mo_address other;
        mo_ticket in = 0;
        CHECK_EQ(device.table.segment_alloc(&device.table, SIZE, NULL, &other), MO_OK);
        CHECK_EQ(mo_copy(&copies, MO_IN, OTHER, other, host, SIZE, told ? out : 0, NULL, &in), MO_OK);
        CHECK_EQ(device.violations > 0, !told);
        device.violations = 0;
        /* And the host's memory is used again only after that. */
        CHECK_EQ(mo_copy(&copies, MO_OUT, USER, memory, host, SIZE, told ? in : 0, NULL, &in), MO_OK);
        CHECK_EQ(device.violations > 0, !told);
        device.violations = 0;
        CHECK_EQ(device.table.segment_free(&device.table, other, NULL), MO_OK);
        finish();
    }
}

TEST(neither_way_waits_for_the_other)
{
    start();
    const mo_ticket out = copy(MO_OUT, 0);
    mo_model_device_submit(&device, USER); /* what the next copy out waits for */
    mo_address other;
    mo_ticket in = 0;
    CHECK_EQ(mo_copies_await(&copies, USER, out, NULL), MO_OK);
    copy(MO_OUT, 0);
    void *more;
    mo_driver *m = &device.table;
    CHECK_EQ(m->segment_alloc(m, SIZE, NULL, &other), MO_OK);
    CHECK_EQ(m->pinned_alloc(m, SIZE, NULL, &more), MO_OK);
    CHECK_EQ(mo_copy(&copies, MO_IN, OTHER, other, more, SIZE, 0, NULL, &in), MO_OK);
    mo_model_device_complete(&device, copies.lines[MO_IN].stream, SIZE_MAX);
    bool over = false;
    CHECK_EQ(mo_copies_over(&copies, in, NULL, &over), MO_OK);
    CHECK(over);
    CHECK_EQ(m->pinned_free(m, more, NULL), MO_OK);
    CHECK_EQ(m->segment_free(m, other, NULL), MO_OK);
    finish();
}

TEST(a_copy_is_over_when_it_and_all_before_it_are)
{
    start();
    bool over = true;
    CHECK_EQ(mo_copies_over(&copies, 0, NULL, &over), MO_OK);
    CHECK(over);
    mo_model_device_submit(&device, USER);
    mo_ticket first = copy(MO_OUT, 0);
    CHECK_EQ(mo_copies_over(&copies, first, NULL, &over), MO_OK);
    CHECK(!over);
    mo_model_device_complete(&device, copies.lines[MO_OUT].stream, SIZE_MAX); /* it waits for the user's */
    CHECK_EQ(mo_copies_over(&copies, first, NULL, &over), MO_OK);
    CHECK(!over);
    mo_model_device_complete(&device, USER, SIZE_MAX);
    mo_model_device_complete(&device, copies.lines[MO_OUT].stream, SIZE_MAX);
    CHECK_EQ(mo_copies_over(&copies, first, NULL, &over), MO_OK);
    CHECK(over);
    /* What the host knows to be over is not waited for any more. */
    const uint64_t waits = device.calls[MO_MODEL_DEVICE_stream_wait];
    CHECK_EQ(mo_copies_await(&copies, USER, first, NULL), MO_OK);
    CHECK_EQ(mo_copies_await(&copies, USER, 0, NULL), MO_OK);
    CHECK_EQ(device.calls[MO_MODEL_DEVICE_stream_wait], waits);
    finish();
}

TEST(a_mark_that_serves_again_is_waited_for_at_its_later_place)
{
    start();
    const mo_ticket first = copy(MO_OUT, 0);
    for (int i = 0; i < 2 * MO_COPY_MARKS; i++)
        copy(MO_OUT, 0);
    CHECK_EQ(copies.lines[MO_OUT].begun, 2 * MO_COPY_MARKS + 1);
    CHECK_EQ(copies.lines[MO_OUT].bytes, (2 * MO_COPY_MARKS + 1) * (uint64_t)SIZE);
    bool over = true;
    mo_model_device_complete(&device, USER, SIZE_MAX);
    mo_model_device_complete(&device, copies.lines[MO_OUT].stream,
                             3); /* the first copy, and not the last of its mark */
    CHECK_EQ(mo_copies_over(&copies, first, NULL, &over), MO_OK);
    CHECK(!over);
    CHECK_EQ(mo_copies_await(&copies, USER, first, NULL), MO_OK);
    use(USER);
    mo_model_device_complete(&device, copies.lines[MO_OUT].stream, SIZE_MAX);
    CHECK_EQ(mo_copies_over(&copies, first, NULL, &over), MO_OK);
    CHECK(over);
    finish();
}

TEST(a_ticket_that_no_copy_was_given_is_refused_and_changes_nothing)
{
    start();
    mo_detail detail;
    mo_ticket out = 77;
    bool over = true;
    const mo_ticket first = copy(MO_OUT, 0), next = first + MO_WAYS;
    mo_model_device_complete(&device, USER, SIZE_MAX);
    mo_model_device_complete(&device, copies.lines[MO_OUT].stream, SIZE_MAX);
    CHECK_EQ(mo_copies_over(&copies, next, &detail, &over), MO_INVALID);
    CHECK(strstr(detail.text, "not the ticket of a copy") && copies.lines[MO_OUT].over == 0);
    CHECK_EQ(mo_copies_over(&copies, first | 1, NULL, &over), MO_INVALID); /* of the other way */
    CHECK_EQ(mo_copies_wait(&copies, next, UINT64_MAX, NULL, &over), MO_INVALID);
    CHECK_EQ(mo_copies_await(&copies, USER, next, &detail), MO_INVALID);
    CHECK_EQ(mo_copy(&copies, MO_IN, USER, memory, host, SIZE, next, NULL, &out), MO_INVALID);
    CHECK(copies.lines[MO_IN].begun == 0 && out == 77);
    CHECK_EQ(mo_copies_over(&copies, first, NULL, &over), MO_OK);
    CHECK(over);
    finish();
}

TEST(nothing_here_waits_for_the_device)
{
    start();
    for (int i = 0; i < 10; i++) {
        use(USER);
        const mo_ticket out = copy(MO_OUT, 0);
        CHECK_EQ(mo_copies_await(&copies, USER, out, NULL), MO_OK);
        CHECK_EQ(mo_copies_await(&copies, USER, copy(MO_IN, out), NULL), MO_OK);
    }
    CHECK_EQ(device.calls[MO_MODEL_DEVICE_synchronize], 0);
    CHECK_EQ(device.calls[MO_MODEL_DEVICE_event_query], 0);
    finish();
}

TEST(a_wait_ends_when_the_copy_is_over_or_its_time_is_up)
{
    start();
    bool over = true;
    mo_model_device_submit(&device, USER);
    const mo_ticket ticket = copy(MO_IN, 0);
    const uint64_t begin = device.table.now(&device.table);
    CHECK_EQ(mo_copies_wait(&copies, ticket, 5000000, NULL, &over), MO_OK);
    CHECK(!over);
    const uint64_t passed = device.table.now(&device.table) - begin; /* asking takes time, too */
    CHECK(passed >= 5000000 && passed < 5001000);
    CHECK_EQ(mo_copies_wait(&copies, ticket, 0, NULL, &over), MO_OK);
    CHECK(!over);
    mo_model_device_complete(&device, USER, SIZE_MAX);
    mo_model_device_complete(&device, copies.lines[MO_IN].stream, SIZE_MAX);
    CHECK_EQ(mo_copies_wait(&copies, ticket, 0, NULL, &over), MO_OK);
    CHECK(over);
    CHECK_EQ(mo_copies_wait(&copies, 0, 1000, NULL, &over), MO_OK);
    CHECK(over);
    CHECK_EQ(device.calls[MO_MODEL_DEVICE_synchronize], 0);
    finish();
}

TEST(a_wait_that_fails_says_so)
{
    start();
    mo_detail detail = {.text = ""};
    bool over = false;
    mo_model_device_submit(&device, USER);
    const mo_ticket ticket = copy(MO_IN, 0);
    mo_model_device_fail(&device, MO_MODEL_DEVICE_event_query, 2, 1, MO_DRIVER);
    CHECK_EQ(mo_copies_wait(&copies, ticket, UINT64_MAX, &detail, &over), MO_DRIVER);
    CHECK(detail.text[0] && !over);
    mo_model_device_fail_never(&device);
    finish();
}

TEST(a_captured_stream_is_refused_and_not_touched)
{
    start();
    mo_detail detail;
    mo_ticket ticket = 77;
    mo_model_device_capture(&device, USER, 5);
    CHECK_EQ(mo_copy(&copies, MO_OUT, USER, memory, host, SIZE, 0, &detail, &ticket), MO_UNSUPPORTED);
    CHECK(strstr(detail.text, "captured into a graph") && ticket == 77);
    CHECK_EQ(device.calls[MO_MODEL_DEVICE_event_record], 0);
    mo_model_device_capture(&device, USER, 0);
    finish();
}

static void fail_once(mo_model_device_call call, size_t count)
{
    for (uint64_t after = 0;; after++) {
        start();
        mo_detail detail = {.text = ""};
        mo_ticket ticket = 77;
        uint64_t queued, over;
        const mo_ticket in = copy(MO_IN, 0);
        mo_model_device_fail(&device, call, after, 1, MO_DRIVER);
        const mo_status status = copy_pieces(MO_OUT, count, in, &detail, &ticket);
        mo_model_device_fail_never(&device);
        if (!status) {
            CHECK(after > 0); /* it is called, or the test is about nothing */
            finish();
            return;
        }
        CHECK_EQ(status, MO_DRIVER);
        CHECK(detail.text[0] && ticket == 77);
        CHECK(copies.lines[MO_OUT].begun == 0 && copies.lines[MO_OUT].bytes == 0);
        const uint64_t synchronized = device.calls[MO_MODEL_DEVICE_synchronize];
        CHECK(synchronized == (call == MO_MODEL_DEVICE_event_record
                                   ? after == 1
                                   : call == MO_MODEL_DEVICE_copy_to_host && after > 0));
        if (synchronized) { /* something was queued, and is over */
            mo_model_device_progress(&device, copies.lines[MO_OUT].stream, &queued, &over);
            CHECK_EQ(over, queued);
        }
        CHECK_EQ(mo_copies_await(&copies, USER, in, NULL), MO_OK);
        use(USER);
        copy(MO_OUT, 0); /* the next one works */
        finish();
    }
}

/* Each call that a copy makes fails, the first, the second … time. */
TEST(a_copy_that_fails_leaves_nothing_on_its_way)
{
    static const mo_model_device_call made[] = {MO_MODEL_DEVICE_capture_id, MO_MODEL_DEVICE_event_record,
                                                MO_MODEL_DEVICE_stream_wait, MO_MODEL_DEVICE_copy_to_host};
    for (size_t call = 0; call < sizeof made / sizeof *made; call++)
        for (size_t count = 1; count <= PIECES; count++)
            fail_once(made[call], count);
}

TEST(opening_may_fail_at_any_call_and_holds_nothing_then)
{
    static const mo_model_device_call made[] = {MO_MODEL_DEVICE_event_create, MO_MODEL_DEVICE_stream_create};
    for (size_t call = 0; call < 2; call++)
        for (uint64_t after = 0;; after++) {
            mo_model_device_close(&device);
            mo_model_device_open(&device, 1 << 20, 0);
            mo_model_device_fail(&device, made[call], after, 1, MO_DRIVER);
            if (mo_copies_open(&device.table, &copies, NULL) == MO_OK) {
                CHECK_EQ(after, call ? MO_WAYS : 1 + MO_WAYS * MO_COPY_MARKS);
                CHECK_EQ(mo_copies_close(&copies, NULL), MO_OK);
                break;
            }
            CHECK_EQ(mo_model_device_live(&device), 0);
        }
}

TEST(closing_tells_the_first_failure_and_releases_the_rest)
{
    start();
    mo_detail detail;
    mo_model_device_fail(&device, MO_MODEL_DEVICE_event_destroy, 3, 2, MO_DRIVER);
    const size_t live = mo_model_device_live(&device);
    CHECK_EQ(mo_copies_close(&copies, &detail), MO_DRIVER);
    CHECK(detail.text[0]);
    CHECK_EQ(live - mo_model_device_live(&device), MO_WAYS * (MO_COPY_MARKS + 1) + 1 - 2);
}

TEST(a_device_that_is_none_is_refused)
{
    mo_copies *found = NULL;
    mo_detail detail;
    CHECK(mo_copies_get(MO_MAX_DEVICES, &found, &detail) == MO_NO_DEVICE && !found);
}

static void *copy_a_lot(void *unused)
{
    for (int i = 0; i < 500; i++) {
        mo_ticket out = 0, in = 0;
        bool over;
        if (mo_copy(&copies, MO_OUT, USER, memory, host, SIZE, 0, NULL, &out) ||
            mo_copy(&copies, MO_IN, USER, memory, host, SIZE, out, NULL, &in) ||
            mo_copies_await(&copies, OTHER, in, NULL) || mo_copies_over(&copies, out, NULL, &over))
            return unused;
    }
    return NULL;
}

TEST(threads_may_copy_at_once)
{
    start();
    device.watched = false; /* the threads race for one memory */
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, copy_a_lot, threads), 0);
    for (int i = 0; i < 3; i++) {
        void *failed = threads;
        CHECK_EQ(pthread_join(threads[i], &failed), 0);
        CHECK(!failed);
    }
    CHECK_EQ(copies.lines[MO_OUT].begun, 1500);
    CHECK_EQ(copies.lines[MO_IN].begun, 1500);
    finish();
}

TEST_MAIN
