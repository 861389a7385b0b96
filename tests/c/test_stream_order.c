/* On the model device in its checking mode, whose vector clocks know what is behind what: memory that the order lets a
 * stream have is used on it, and none of these uses may be a violation. */
#include "alloc/stream_order.h"

#include "driver/model_device.h"
#include "test.h"

#define PIECE     ((size_t)1 << 16)
#define PIECES    24
#define STREAM(i) ((mo_stream)(uintptr_t)(0x1000 + 16 * (i)))

typedef struct piece {
    mo_address address;
    mo_last_use use; /* as a block's */
    bool live;
    unsigned stream;      /* live: its number */
    uint64_t owner;       /* of the last allocation */
    uint64_t queued[200]; /* free: operations of each stream at the free, if it used the piece */
} piece;

static mo_model_device device;
static mo_stream_order order;
static mo_detail said;
static piece pieces[PIECES];
static uint64_t owners;
static uint64_t captured_records; /* event calls on a stream under capture: none may be */

#define CHECK_OK(call)                                                                                       \
    do {                                                                                                     \
        mo_status ok_ = (call);                                                                              \
        test_checks++;                                                                                       \
        if (ok_)                                                                                             \
            TEST_FAIL("%s gives %s: %s", #call, mo_status_name(ok_), said.text);                             \
    } while (0)

#define CHECK_CLEAN()                                                                                        \
    do {                                                                                                     \
        test_checks++;                                                                                       \
        if (device.violations)                                                                               \
            TEST_FAIL("%" PRIu64 " violations: %s", device.violations, device.violation);                    \
        CHECK_EQ(captured_records, 0);                                                                       \
    } while (0)

static mo_status (*plain_record)(mo_driver *, mo_event *, mo_stream, mo_detail *);
static mo_status (*plain_wait)(mo_driver *, mo_stream, mo_event *, mo_detail *);

static bool under_capture(mo_driver *driver, mo_stream stream)
{
    const uint64_t calls = device.calls[MO_MODEL_DEVICE_capture_id];
    uint64_t id = 0;

    mo_model_device_fail_never(&device);
    driver->capture_id(driver, stream, NULL, &id);
    device.calls[MO_MODEL_DEVICE_capture_id] = calls;
    return id != 0;
}

static mo_status watched_record(mo_driver *driver, mo_event *event, mo_stream stream, mo_detail *detail)
{
    const mo_status status = plain_record(driver, event, stream, detail);

    captured_records += !status && under_capture(driver, stream);
    return status;
}

static mo_status watched_wait(mo_driver *driver, mo_stream stream, mo_event *event, mo_detail *detail)
{
    const mo_status status = plain_wait(driver, stream, event, detail);

    captured_records += !status && under_capture(driver, stream);
    return status;
}

static void open_order(void)
{
    mo_driver *m = &device.table;
    mo_address base = 0;
    mo_physical handle = 0;

    mo_model_device_close(&device);
    mo_model_device_open(&device, PIECE * PIECES, PIECE);
    mo_model_device_watch(&device);
    CHECK_OK(m->reserve(m, PIECE * PIECES, &said, &base));
    CHECK_OK(m->create(m, PIECE * PIECES, &said, &handle));
    CHECK_OK(m->map(m, base, PIECE * PIECES, handle, &said));
    CHECK_OK(m->grant(m, base, PIECE * PIECES, &said));
    plain_record = m->event_record;
    plain_wait = m->stream_wait;
    m->event_record = watched_record;
    m->stream_wait = watched_wait;
    order = (mo_stream_order){.driver = m};
    memset(pieces, 0, sizeof pieces);
    for (size_t i = 0; i < PIECES; i++)
        pieces[i].address = base + i * PIECE;
    owners = captured_records = 0;
}

static void close_order(void)
{
    mo_stream_order_close(&order);
    CHECK_EQ(device.blocks[MO_MODEL_DEVICE_EVENT].live, 0);
    CHECK_CLEAN();
    mo_model_device_close(&device);
}

static unsigned number(mo_stream stream)
{
    unsigned t = 99;

    CHECK_OK(mo_stream_order_number(&order, stream, &said, &t));
    CHECK(t < MO_STREAMS);
    CHECK(order.streams[t].handle == stream);
    return t;
}

static void use_piece(piece *p, mo_stream stream)
{
    mo_model_device_use(&device, stream, p->address, PIECE, p->owner);
    CHECK_CLEAN();
}

/* The piece becomes an allocation of the stream's, which it uses; whoever calls has seen to the order. */
static void take(piece *p, unsigned t)
{
    p->live = true;
    p->owner = ++owners;
    p->use = (mo_last_use){0};
    p->stream = t;
    order.streams[t].users++;
    use_piece(p, order.streams[t].handle);
}

/* Another stream uses it, ordered by the program itself. */
static void use_on(piece *p, mo_stream stream)
{
    mo_driver *m = &device.table;
    const unsigned t = number(stream);
    mo_event *e;

    CHECK_OK(m->event_create(m, &said, &e));
    CHECK_OK(plain_record(m, e, order.streams[p->stream].handle, &said));
    CHECK_OK(plain_wait(m, stream, e, &said));
    CHECK_OK(m->event_destroy(m, e, &said));
    use_piece(p, stream);
    if (t != p->stream && !(p->use.streams >> t & 1)) {
        p->use.streams |= 1ull << t;
        order.streams[t].users++;
    }
}

/* As a host that waits: at most so many looks, between which the device works on. */
static mo_status wait_for(mo_last_use use, int looks)
{
    mo_status status = MO_NOT_READY;

    while (looks-- && (status = mo_stream_order_await(&order, &use, &said)) == MO_NOT_READY)
        device.table.pause(&device.table, 20000);
    return status;
}

static mo_status synchronize(void)
{
    const uint64_t tick = order.tick;
    const mo_status status = device.table.synchronize(&device.table, &said);

    if (!status)
        mo_stream_order_synchronized(&order, tick);
    return status;
}

static uint64_t queued_on(mo_stream stream)
{
    uint64_t queued = 0, over = 0;

    mo_model_device_progress(&device, stream, &queued, &over);
    return queued;
}

/* As a pool frees a block. */
static void give(piece *p)
{
    p->live = false;
    p->use.streams |= 1ull << p->stream;
    p->use.tick = ++order.tick;
    for (uint64_t rest = p->use.streams; rest; rest &= rest - 1) {
        mo_stream_state *state = &order.streams[__builtin_ctzll(rest)];
        const size_t i = ((uintptr_t)state->handle - 0x1000) / 16;

        state->users--;
        state->last = order.tick;
        p->queued[i] = queued_on(state->handle);
    }
}

/* What the order calls over is over on the device. */
static void check_over(const piece *p)
{
    for (size_t i = 0; i < 200; i++) {
        uint64_t queued = 0, over = 0;

        if (p->queued[i])
            mo_model_device_progress(&device, STREAM(i), &queued, &over);
        CHECK(over >= p->queued[i]);
    }
}

/* ---- one or two streams -------------------------------------------------------------------------------------------- */

TEST(a_stream_by_itself_needs_no_event)
{
    open_order();
    for (int n = 0; n < 1000; n++) {
        piece *p = &pieces[n % PIECES];

        CHECK_EQ(mo_stream_order_missing(&order, number(STREAM(0)), false, p->use), 0);
        CHECK_OK(mo_stream_order_join(&order, number(STREAM(0)), false, p->use, &said));
        take(p, number(STREAM(0)));
        give(p);
    }
    CHECK_EQ(order.recorded + order.waited + order.synchronized, 0);
    CHECK_EQ(device.calls[MO_MODEL_DEVICE_event_create] + device.calls[MO_MODEL_DEVICE_event_record], 0);
    close_order();
}

TEST(a_stream_behind_another_waits_once_for_all_that_was_freed_before)
{
    unsigned a, b;

    open_order();
    a = number(STREAM(0));
    b = number(STREAM(1));
    for (int i = 0; i < 8; i++)
        take(&pieces[i], a);
    for (int i = 0; i < 8; i++)
        give(&pieces[i]);
    for (int i = 7; i >= 0; i--) {
        CHECK_EQ(mo_stream_order_missing(&order, b, false, pieces[i].use), i == 7 ? 1ull << a : 0);
        CHECK_OK(mo_stream_order_join(&order, b, false, pieces[i].use, &said));
        take(&pieces[i], b);
    }
    CHECK_EQ(order.waited, 1);
    CHECK_EQ(order.recorded, 1);
    CHECK(mo_model_device_ordered(&device, STREAM(0), STREAM(1)));
    CHECK(!mo_model_device_ordered(&device, STREAM(1), STREAM(0)));
    close_order();
}

TEST(behind_a_new_mark_is_behind_all_that_the_marked_stream_waited_for_and_behind_an_old_one_is_not)
{
    for (int old = 0; old < 2; old++) {
        unsigned a, b, c;

        open_order();
        a = number(STREAM(0));
        b = number(STREAM(1));
        c = number(STREAM(2));
        take(&pieces[0], a);
        take(&pieces[1], b);
        give(&pieces[1]);
        if (old)
            CHECK_OK(mo_stream_order_mark(&order, 1ull << b, pieces[1].use.tick, &said));
        give(&pieces[0]);
        CHECK_OK(mo_stream_order_join(&order, b, false, pieces[0].use, &said)); /* b behind a */
        CHECK_OK(mo_stream_order_join(&order, c, false, pieces[1].use, &said)); /* c behind b */
        CHECK_EQ(mo_stream_order_missing(&order, c, false, pieces[0].use), old ? 1ull << a : 0);
        CHECK_EQ(mo_model_device_ordered(&device, STREAM(0), STREAM(2)), !old);
        CHECK_OK(mo_stream_order_join(&order, c, false, pieces[0].use, &said));
        take(&pieces[0], c);
        take(&pieces[1], c);
        close_order();
    }
}

TEST(a_union_holds_the_streams_of_both_and_asks_no_stream_for_more_than_its_last_use)
{
    unsigned a, b;
    mo_last_use use;

    open_order();
    a = number(STREAM(0));
    b = number(STREAM(1));
    take(&pieces[0], a);
    take(&pieces[1], b);
    give(&pieces[0]);
    CHECK_OK(mo_stream_order_mark(&order, 1ull << a, pieces[0].use.tick, &said));
    mo_model_device_complete(&device, STREAM(0), SIZE_MAX);
    mo_stream_order_poll(&order);
    give(&pieces[1]);
    use = mo_last_use_union(pieces[0].use, pieces[1].use);
    CHECK_EQ(use.tick, pieces[1].use.tick);
    CHECK_EQ(mo_stream_order_missing(&order, 9, false, use), 1ull << b); /* a is over at its own last tick */
    close_order();
}

/* ---- marks ------------------------------------------------------------------------------------------------------------ */

/* Else the newest event would move on with every free, and be over never. */
TEST(a_stream_with_full_marks_keeps_those_it_has)
{
    unsigned a;

    open_order();
    a = number(STREAM(0));
    for (int i = 0; i < PIECES; i++)
        take(&pieces[i], a);
    for (int i = 0; i < PIECES; i++) {
        mo_model_device_submit(&device, STREAM(0));
        give(&pieces[i]);
        CHECK_OK(mo_stream_order_mark(&order, 1ull << a, pieces[i].use.tick, &said));
    }
    CHECK_EQ(order.streams[a].mark_count, MO_MARKS);
    CHECK_EQ(order.streams[a].marks[MO_MARKS - 1].tick, pieces[MO_MARKS - 1].use.tick);
    CHECK_EQ(order.recorded, MO_MARKS);
    close_order();
}

TEST(marks_stay_few_and_over_is_only_what_ended)
{
    unsigned a, b;

    open_order();
    a = number(STREAM(0));
    b = number(STREAM(1));
    for (int i = 0; i < PIECES; i++)
        take(&pieces[i], a);
    for (int i = 0; i < PIECES; i++) {
        mo_model_device_submit(&device, STREAM(0));
        give(&pieces[i]);
        CHECK_OK(mo_stream_order_mark(&order, 1ull << a, pieces[i].use.tick, &said));
        CHECK(order.streams[a].mark_count <= MO_MARKS);
        for (unsigned m = 1; m < order.streams[a].mark_count; m++)
            CHECK(order.streams[a].marks[m - 1].tick < order.streams[a].marks[m].tick);
    }
    CHECK_EQ(order.streams[a].mark_count, MO_MARKS);
    CHECK_OK(
        mo_stream_order_join(&order, b, false, pieces[PIECES - 1].use, &said)); /* the newest mark moves */
    CHECK_EQ(order.streams[a].mark_count, MO_MARKS);
    take(&pieces[PIECES - 1], b);
    for (int i = 0; i < PIECES - 1; i++) {
        CHECK_OK(mo_stream_order_join(&order, b, false, pieces[i].use, &said));
        take(&pieces[i], b);
    }
    CHECK_EQ(order.waited, 1); /* behind the newest is behind all */
    for (size_t n = 0; n < 2 * PIECES; n++) {
        mo_model_device_complete(&device, STREAM(0), 1);
        mo_stream_order_poll(&order);
        CHECK(order.streams[a].done < n + 1); /* uses first, then what was queued between the frees */
    }
    mo_model_device_complete(&device, STREAM(0), SIZE_MAX);
    mo_stream_order_poll(&order);
    CHECK_EQ(order.streams[a].mark_count, 0);
    CHECK_EQ(order.streams[a].done, order.tick);
    close_order();
}

TEST(one_mark_is_enough_for_what_was_freed_before_it)
{
    unsigned a;

    open_order();
    a = number(STREAM(0));
    take(&pieces[0], a);
    give(&pieces[0]);
    for (int i = 0; i < 10; i++)
        CHECK_OK(mo_stream_order_mark(&order, 1ull << a, pieces[0].use.tick, &said));
    CHECK_EQ(order.recorded, 1);
    mo_model_device_complete(&device, STREAM(0), SIZE_MAX);
    mo_stream_order_poll(&order);
    CHECK_OK(mo_stream_order_mark(&order, 1ull << a, pieces[0].use.tick, &said));
    CHECK_EQ(order.recorded, 1);
    CHECK(mo_stream_order_over(&order, pieces[0].use));
    close_order();
}

TEST(events_are_used_again)
{
    unsigned a;

    open_order();
    a = number(STREAM(0));
    for (int n = 0; n < 500; n++) {
        take(&pieces[0], a);
        give(&pieces[0]);
        CHECK_OK(mo_stream_order_mark(&order, 1ull << a, order.tick, &said));
        mo_model_device_complete(&device, STREAM(0), SIZE_MAX);
        mo_stream_order_poll(&order);
        CHECK(mo_stream_order_over(&order, pieces[0].use));
    }
    CHECK_EQ(device.calls[MO_MODEL_DEVICE_event_create], 1);
    CHECK_EQ(order.recorded, 500);
    close_order();
}

TEST(what_is_known_to_be_over_lags_little_behind_what_is)
{
    const unsigned behind = 64; /* frees that the device is behind */
    unsigned a;

    open_order();
    a = number(STREAM(0));
    for (unsigned n = 0; n < 3000; n++) {
        take(&pieces[0], a); /* one operation, and the free's one tick */
        give(&pieces[0]);
        if (n >= behind)
            mo_model_device_complete(&device, STREAM(0), 1);
        mo_stream_order_probe(&order, a);
        CHECK(order.streams[a].mark_count <= MO_PROBES);
        CHECK(order.streams[a].done <= n + 1 - (n < behind ? n + 1 : behind)); /* only what ended */
        CHECK(n < 4 * behind || order.streams[a].done + behind + behind / 2 > n);
    }
    mo_model_device_complete(&device, STREAM(0), SIZE_MAX);
    mo_stream_order_probe(&order, a);
    mo_stream_order_probe(&order, a);
    CHECK(mo_stream_order_over(&order, pieces[0].use));
    CHECK_EQ(order.streams[a].mark_count, 0);
    close_order();
}

/* ---- capture ------------------------------------------------------------------------------------------------------------ */

TEST(a_graph_gets_only_what_is_over_and_neither_records_nor_waits)
{
    unsigned a, g;

    open_order();
    a = number(STREAM(0));
    g = number(STREAM(1));
    take(&pieces[0], a);
    take(&pieces[1], g);
    give(&pieces[0]);
    give(&pieces[1]);
    mo_model_device_capture(&device, STREAM(1), 7);
    CHECK_EQ(mo_stream_order_missing(&order, g, true, pieces[0].use), 1ull << a);
    CHECK_EQ(mo_stream_order_missing(&order, g, true, pieces[1].use),
             1ull << g); /* its own use before is one like any */
    CHECK_EQ(mo_stream_order_join(&order, g, true, pieces[0].use, &said), MO_NOT_READY);
    CHECK_EQ(mo_stream_order_join(&order, g, false, pieces[0].use, &said), MO_NOT_READY);
    CHECK_EQ(mo_stream_order_join(&order, a, false, pieces[1].use, &said), MO_NOT_READY);
    CHECK_OK(mo_stream_order_mark(&order, 1ull << g | 1ull << a, order.tick, &said));
    CHECK_EQ(order.recorded, 1); /* on a */
    mo_model_device_complete(&device, STREAM(0), SIZE_MAX);
    mo_stream_order_poll(&order);
    CHECK_OK(mo_stream_order_join(&order, g, true, pieces[0].use, &said));
    take(&pieces[0], g);
    mo_model_device_capture(&device, STREAM(1), 0);
    CHECK_OK(mo_stream_order_join(&order, a, false, pieces[1].use, &said));
    take(&pieces[1], a);
    close_order();
}

TEST(one_stream_of_several_under_capture_leaves_the_waiter_as_it_was)
{
    uint64_t queued;
    unsigned a, b, c;

    open_order();
    a = number(STREAM(0));
    b = number(STREAM(1));
    c = number(STREAM(2));
    take(&pieces[0], a);
    use_on(&pieces[0], STREAM(1));
    give(&pieces[0]);
    CHECK_EQ(pieces[0].use.streams, 1ull << a | 1ull << b);
    mo_model_device_capture(&device, STREAM(1), 3);
    queued = queued_on(STREAM(2));
    CHECK_EQ(mo_stream_order_join(&order, c, false, pieces[0].use, &said), MO_NOT_READY);
    CHECK_EQ(queued_on(STREAM(2)), queued);
    CHECK_EQ(order.waited + order.recorded, 0);
    close_order();
}

/* ---- waiting ------------------------------------------------------------------------------------------------------------ */

TEST(what_is_waited_for_is_over_when_nothing_is_left_of_it)
{
    mo_last_use use;
    unsigned a;

    open_order();
    a = number(STREAM(0));
    take(&pieces[0], a);
    give(&pieces[0]);
    for (int i = 0; i < 100; i++)
        mo_model_device_submit(&device, STREAM(0));
    device.work_per_pause = 0;
    CHECK_EQ(wait_for(pieces[0].use, 250), MO_NOT_READY);
    CHECK(!mo_stream_order_over(&order, pieces[0].use));
    CHECK_EQ(order.recorded, 1); /* one event, however often it is looked at */
    device.work_per_pause = 10;
    CHECK_OK(wait_for(pieces[0].use, 250));
    CHECK(mo_stream_order_over(&order, pieces[0].use));
    check_over(&pieces[0]);
    use = mo_stream_order_pending(&order);
    CHECK_EQ(use.streams, 0);
    CHECK_OK(wait_for(pieces[0].use, 1)); /* it is known */
    CHECK_EQ(order.recorded, 1);
    close_order();
}

/* It would be waited for until the capture's end, which may never come. */
TEST(what_is_being_captured_is_left_out_of_a_wait_and_what_was_marked_before_is_not)
{
    unsigned a, g;
    mo_last_use use;

    open_order();
    a = number(STREAM(0));
    g = number(STREAM(1));
    take(&pieces[0], a);
    use_on(&pieces[0], STREAM(1));
    take(&pieces[1], g);
    device.work_per_pause = 1;
    give(&pieces[1]);
    CHECK_OK(mo_stream_order_mark(&order, 1ull << g, order.tick, &said));
    mo_model_device_capture(&device, STREAM(1), 7);
    use = pieces[1].use;
    CHECK_EQ(mo_stream_order_await(&order, &use, &said), MO_NOT_READY);
    CHECK_OK(wait_for(pieces[1].use, 100));
    check_over(&pieces[1]);
    give(&pieces[0]); /* used by the capture, for all that is known */
    use = pieces[0].use;
    CHECK_EQ(mo_stream_order_await(&order, &use, &said), MO_OK); /* a's use ended long ago */
    CHECK_EQ(use.streams, 0);
    CHECK(!mo_stream_order_over(&order, pieces[0].use));
    CHECK(mo_stream_order_capturing(&order));
    mo_model_device_capture(&device, STREAM(1), 0);
    CHECK(!mo_stream_order_capturing(&order));
    CHECK_OK(wait_for(pieces[0].use, 100));
    CHECK(mo_stream_order_over(&order, pieces[0].use));
    close_order();
}

TEST(a_stream_that_cannot_be_asked_is_left_to_whoever_waits_for_the_whole_device)
{
    mo_last_use use;

    open_order();
    take(&pieces[0], number(STREAM(0)));
    give(&pieces[0]);
    use = pieces[0].use;
    mo_model_device_fail(&device, MO_MODEL_DEVICE_capture_id, 0, 1, MO_DRIVER);
    CHECK_EQ(mo_stream_order_await(&order, &use, &said), MO_OK);
    CHECK_EQ(use.streams, pieces[0].use.streams);
    CHECK(!mo_stream_order_over(&order, use));
    CHECK_OK(synchronize());
    CHECK(mo_stream_order_over(&order, use));
    close_order();
}

/* An event that fails for good is never over: whoever waits must hear of it. */
TEST(a_driver_that_answers_no_more_ends_a_wait)
{
    static const mo_model_device_call calls[] = {MO_MODEL_DEVICE_event_create, MO_MODEL_DEVICE_event_record,
                                                 MO_MODEL_DEVICE_event_query};

    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        open_order();
        take(&pieces[0], number(STREAM(0)));
        give(&pieces[0]);
        device.work_per_pause = 0;
        if (calls[i] == MO_MODEL_DEVICE_event_query)
            CHECK_OK(mo_stream_order_mark(&order, 1, order.tick, &said));
        mo_model_device_fail(&device, calls[i], 0, 1000, MO_DRIVER);
        CHECK_EQ(wait_for(pieces[0].use, 3), MO_DRIVER);
        mo_model_device_fail_never(&device);
        device.work_per_pause = 10;
        CHECK_OK(wait_for(pieces[0].use, 3));
        check_over(&pieces[0]);
        close_order();
    }
}

TEST(with_full_marks_that_are_older_the_wait_still_ends)
{
    unsigned a;

    open_order();
    a = number(STREAM(0));
    for (int i = 0; i < MO_MARKS; i++) {
        take(&pieces[i], a);
        give(&pieces[i]);
        CHECK_OK(mo_stream_order_mark(&order, 1ull << a, order.tick, &said));
    }
    take(&pieces[MO_MARKS], a);
    give(&pieces[MO_MARKS]);
    CHECK_EQ(order.streams[a].mark_count, MO_MARKS);
    device.work_per_pause = 1;
    CHECK_OK(wait_for(pieces[MO_MARKS].use, 1000));
    check_over(&pieces[MO_MARKS]);
    close_order();
}

TEST(after_a_synchronisation_all_is_over_that_was_freed_before_it_began)
{
    uint64_t tick;

    open_order();
    for (int i = 0; i < PIECES; i++)
        take(&pieces[i], number(STREAM(i)));
    for (int i = 0; i < PIECES; i++) {
        give(&pieces[i]);
        if (i % 2)
            CHECK_OK(mo_stream_order_mark(&order, pieces[i].use.streams, order.tick, &said));
    }
    CHECK_OK(synchronize());
    for (int i = 0; i < PIECES; i++) {
        CHECK(mo_stream_order_over(&order, pieces[i].use));
        check_over(&pieces[i]);
    }
    tick = order.tick;
    take(&pieces[0], number(STREAM(0)));
    give(&pieces[0]);
    CHECK_OK(mo_stream_order_mark(&order, pieces[0].use.streams, order.tick, &said));
    mo_stream_order_synchronized(&order, tick);
    CHECK(!mo_stream_order_over(&order, pieces[0].use));
    CHECK_EQ(order.streams[0].mark_count, 1);
    close_order();
}

/* ---- numbers ------------------------------------------------------------------------------------------------------------ */

TEST(a_number_goes_to_another_stream_only_when_its_own_has_no_memory_and_is_over)
{
    unsigned t;

    open_order();
    for (unsigned i = 0; i < MO_STREAMS; i++) {
        CHECK_EQ(number(STREAM(i)), i);
        order.streams[i].users++;
    }
    CHECK_EQ(mo_stream_order_number(&order, STREAM(100), &said, &t), MO_UNSUPPORTED);
    CHECK(strstr(said.text, "64 streams"));
    /* one has none any more, but is not over: it is to be waited for */
    mo_model_device_submit(&device, STREAM(7));
    order.streams[7].users--;
    order.streams[7].last = ++order.tick;
    CHECK_EQ(mo_stream_order_number(&order, STREAM(100), &said, &t), MO_NOT_READY);
    device.work_per_pause = 10;
    CHECK_OK(wait_for(mo_stream_order_pending(&order), 3));
    CHECK_EQ(number(STREAM(100)), 7);
    CHECK(mo_model_device_ordered(&device, STREAM(7), STREAM(8)));
    order.streams[7].users++;
    /* one that never used anything */
    order.streams[9].users--;
    CHECK_EQ(number(STREAM(101)), 9);
    CHECK_EQ(number(STREAM(100)), 7);
    close_order();
}

TEST(a_stream_with_a_reused_number_is_behind_nothing_and_nothing_is_behind_it)
{
    unsigned a = 0, b;

    open_order();
    b = number(STREAM(1));
    order.streams[b].users++;
    a = number(STREAM(0));
    take(&pieces[0], a);
    take(&pieces[1], b);
    give(&pieces[0]);
    CHECK_OK(mo_stream_order_join(&order, b, false, pieces[0].use, &said)); /* b behind a */
    give(&pieces[1]);
    CHECK_OK(mo_stream_order_join(&order, a, false, pieces[1].use, &said)); /* a behind b */
    mo_model_device_complete(&device, STREAM(0), SIZE_MAX);
    mo_model_device_complete(&device, STREAM(1), SIZE_MAX);
    mo_model_device_complete(&device, STREAM(0), SIZE_MAX);
    mo_stream_order_poll(&order);
    for (unsigned i = 2; i < MO_STREAMS; i++)
        order.streams[number(STREAM(i))].users++;
    CHECK_EQ(number(STREAM(150)), a);
    CHECK_EQ(order.streams[a].behind[b], 0);
    CHECK_EQ(order.streams[b].behind[a], 0);
    take(&pieces[2], a);
    give(&pieces[2]);
    CHECK_EQ(mo_stream_order_missing(&order, b, false, pieces[2].use), 1ull << a);
    CHECK_EQ(mo_stream_order_missing(&order, b, false, pieces[0].use),
             0); /* the old one's memory, which was over */
    close_order();
}

/* ---- random programs ------------------------------------------------------------------------------------------------------ */

typedef struct weather {
    unsigned streams; /* handles in all */
    unsigned failing; /* one call in so many, 0: none */
    bool captures;
} weather;

static const mo_model_device_call event_calls[] = {
    MO_MODEL_DEVICE_event_create,  MO_MODEL_DEVICE_event_record, MO_MODEL_DEVICE_event_query,
    MO_MODEL_DEVICE_event_destroy, MO_MODEL_DEVICE_stream_wait,  MO_MODEL_DEVICE_capture_id,
    MO_MODEL_DEVICE_synchronize};

static void random_program(uint64_t *random, weather w, int operations)
{
    uint64_t captured[200] = {0}, taken = 0, allowed = 0;

    open_order();
    for (int n = 0; n < operations; n++) {
        piece *p = &pieces[test_random(random) % PIECES];
        const unsigned i = (unsigned)(test_random(random) % w.streams);
        const uint64_t r = test_random(random) % 100;
        unsigned t;

        mo_model_device_fail_never(&device);
        if (w.failing && test_random(random) % w.failing == 0)
            mo_model_device_fail(&device, event_calls[test_random(random) % 7], test_random(random) % 3, 1,
                                 MO_DRIVER);
        if (r < 45 && !p->live) {
            piece *q = &pieces[test_random(random) % PIECES]; /* merged with it, maybe */
            mo_last_use use = p->use;

            if (q->live)
                q = p;
            use = mo_last_use_union(use, q->use);
            p->use = q->use = use;
            if (mo_stream_order_number(&order, STREAM(i), &said, &t) == MO_NOT_READY)
                synchronize();
            if (mo_stream_order_number(&order, STREAM(i), &said, &t))
                continue;
            mo_stream_order_settle(&order, &p->use);
            if (!p->use.streams)
                check_over(p);
            if (!mo_stream_order_missing(&order, t, captured[i], p->use))
                allowed++;
            else if (mo_stream_order_join(&order, t, captured[i], p->use, &said))
                continue;
            CHECK_EQ(mo_stream_order_missing(&order, t, captured[i], p->use), 0);
            memset(p->queued, 0, sizeof p->queued);
            take(p, t);
            taken++;
        } else if (r < 55 && p->live) {
            mo_model_device_fail_never(&device);
            if (!captured[i] && !under_capture(&device.table, order.streams[p->stream].handle) &&
                !mo_stream_order_number(&order, STREAM(i), &said, &t))
                use_on(p, STREAM(i));
        } else if (r < 75 && p->live) {
            give(p);
            if (r % 4 == 0)
                mo_stream_order_mark(&order, p->use.streams, p->use.tick, NULL);
        } else if (r < 90) {
            mo_model_device_complete(&device, STREAM(i), test_random(random) % 8);
        } else if (r < 94) {
            mo_stream_order_poll(&order);
        } else if (r < 95) {
            device.work_per_pause = test_random(random) % 10;
            wait_for(p->use, (int)(test_random(random) % 10));
        } else if (r == 95 && n % 7 == 0) {
            synchronize();
        } else if (w.captures && r > 97) {
            captured[i] = captured[i] ? 0 : n + 1u;
            mo_model_device_capture(&device, STREAM(i), captured[i]);
        }
        CHECK_CLEAN();
        for (unsigned s = 0; s < order.count; s++) {
            CHECK(order.streams[s].done <= order.tick && order.streams[s].last <= order.tick);
            CHECK(order.streams[s].mark_count <= MO_MARKS);
        }
        CHECK(order.spare_count <= MO_EVENTS);
        CHECK(device.blocks[MO_MODEL_DEVICE_EVENT].live <= MO_EVENTS);
    }
    CHECK(taken > (uint64_t)operations / 100);
    CHECK(allowed);
    mo_model_device_fail_never(&device);
    close_order();
}

TEST(no_program_on_few_streams_uses_memory_out_of_order)
{
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(60, 3000); round++)
        random_program(&random, (weather){.streams = 1 + (unsigned)round % 6}, 1500);
}

TEST(nor_does_one_with_graphs)
{
    uint64_t random = test_seed() + 1;

    for (int round = 0; round < test_rounds(40, 3000); round++)
        random_program(&random, (weather){.streams = 2 + (unsigned)round % 6, .captures = true}, 1500);
}

TEST(nor_one_with_more_streams_than_numbers)
{
    uint64_t random = test_seed() + 2;

    for (int round = 0; round < test_rounds(20, 1000); round++)
        random_program(&random, (weather){.streams = 66 + (unsigned)round * 5 % 130}, 3000);
}

TEST(nor_one_whose_event_calls_fail)
{
    uint64_t random = test_seed() + 3;

    for (int round = 0; round < test_rounds(60, 3000); round++)
        random_program(&random,
                       (weather){.streams = round % 3 ? 2 + (unsigned)round % 5 : 100,
                                 .failing = 2 + (unsigned)round % 10,
                                 .captures = round % 2},
                       1500);
}

/* One program, in which each call of each kind fails once: whoever asks again gets it, in order. */
TEST(after_the_failure_of_any_one_call_the_next_attempt_succeeds)
{
    for (size_t kind = 0; kind < sizeof event_calls / sizeof *event_calls; kind++)
        for (uint64_t after = 0; after < 12; after++) {
            unsigned a, b, c;
            mo_status status;

            open_order();
            a = number(STREAM(0));
            b = number(STREAM(1));
            c = number(STREAM(2));
            mo_model_device_fail(&device, event_calls[kind], after, 1, MO_DRIVER);
            for (int n = 0; n < 3; n++) {
                take(&pieces[0], a);
                mo_model_device_fail_never(&device);
                use_on(&pieces[0], STREAM(1));
                mo_model_device_fail(&device, event_calls[kind], after, 1, MO_DRIVER);
                give(&pieces[0]);
                status = mo_stream_order_join(&order, c, false, pieces[0].use, &said);
                if (status) {
                    CHECK(status == MO_DRIVER ||
                          (event_calls[kind] == MO_MODEL_DEVICE_capture_id && status == MO_NOT_READY));
                    CHECK(mo_stream_order_missing(&order, c, false, pieces[0].use));
                    mo_model_device_fail_never(&device);
                    CHECK_OK(mo_stream_order_join(&order, c, false, pieces[0].use, &said));
                }
                take(&pieces[0], c);
                give(&pieces[0]);
                mo_model_device_fail_never(&device);
                mo_model_device_fail(&device, event_calls[kind], after, 1, MO_DRIVER);
                device.work_per_pause = 100;
                if (wait_for(pieces[0].use, 100) || !mo_stream_order_over(&order, pieces[0].use))
                    CHECK_OK(wait_for(pieces[0].use, 100));
                check_over(&pieces[0]);
                CHECK_OK(mo_stream_order_join(&order, a, false, pieces[0].use, &said));
            }
            mo_model_device_fail_never(&device);
            (void)b;
            close_order();
        }
}

TEST_MAIN
