#include "driver/model_device.h"

#include "driver_contract.h"

#define MIB ((size_t)1 << 20)

static mo_model_device device;

static mo_driver *fresh(size_t capacity, size_t granularity)
{
    mo_model_device_close(&device);
    mo_model_device_open(&device, capacity, granularity);
    return &device.table;
}

TEST(work_is_over_in_order_and_as_much_as_the_test_says)
{
    mo_driver *m = fresh(8 * MIB, 2 * MIB);
    const mo_stream s = (mo_stream)0x10;
    mo_event *marks[4];
    for (int i = 0; i < 4; i++) {
        mo_model_device_submit(&device, s);
        marks[i] = contract_event(m);
        CHECK_OK(m->event_record(m, marks[i], s, NULL));
    }
    for (int done = 0; done <= 4; done++) {
        for (int i = 0; i < 4; i++)
            CHECK_EQ(m->event_query(m, marks[i], NULL), i < done ? MO_OK : MO_NOT_READY);
        uint64_t queued, over;
        mo_model_device_progress(&device, s, &queued, &over);
        CHECK_EQ(queued, 4);
        CHECK_EQ(over, done);
        CHECK_EQ(mo_model_device_complete(&device, s, 1), done < 4);
    }
}

TEST(completing_stops_at_a_wait_whose_mark_is_not_over)
{
    mo_driver *m = fresh(8 * MIB, 2 * MIB);
    const mo_stream s = (mo_stream)0x10, t = (mo_stream)0x20;
    mo_event *e = contract_event(m);
    mo_model_device_submit(&device, s);
    mo_model_device_submit(&device, s);
    CHECK_OK(m->event_record(m, e, s, NULL));
    mo_model_device_submit(&device, t);
    CHECK_OK(m->stream_wait(m, t, e, NULL));
    mo_model_device_submit(&device, t);
    CHECK_EQ(mo_model_device_complete(&device, t, 100), 1);
    CHECK_EQ(mo_model_device_complete(&device, s, 1), 1);
    CHECK_EQ(mo_model_device_complete(&device, t, 100), 0);
    CHECK_EQ(mo_model_device_complete(&device, s, 1), 1);
    CHECK_EQ(mo_model_device_complete(&device, t, 100), 2);
}

TEST(a_pause_moves_the_clock_and_lets_work_be_done)
{
    mo_driver *m = fresh(8 * MIB, 2 * MIB);
    mo_event *e = contract_event(m);
    for (int i = 0; i < 3; i++)
        mo_model_device_submit(&device, (mo_stream)0x10);
    CHECK_OK(m->event_record(m, e, (mo_stream)0x10, NULL));
    const uint64_t start = m->now(m);
    m->pause(m, 500);
    CHECK_EQ(m->now(m), start + 500);
    CHECK_NOT_OVER(m, e);
    device.work_per_pause = 2;
    m->pause(m, 1);
    CHECK_NOT_OVER(m, e);
    m->pause(m, 1);
    CHECK_OVER(m, e);
}

TEST(events_that_are_not_live_are_refused)
{
    mo_driver *m = fresh(8 * MIB, 2 * MIB);
    mo_event *e = contract_event(m);
    CHECK_OK(m->event_destroy(m, e, NULL));
    CHECK_EQ(m->event_destroy(m, e, NULL), MO_INVALID);
    CHECK_EQ(m->event_query(m, e, NULL), MO_INVALID);
    CHECK_EQ(m->event_record(m, e, NULL, NULL), MO_INVALID);
    CHECK_EQ(m->stream_wait(m, NULL, e, NULL), MO_INVALID);
}

TEST(a_stream_passes_many_waits_one_after_another)
{
    mo_driver *m = fresh(8 * MIB, 2 * MIB);
    const mo_stream s = (mo_stream)0x10, t = (mo_stream)0x20;
    mo_event *e = contract_event(m);
    for (int i = 0; i < 100; i++) {
        mo_model_device_submit(&device, s);
        CHECK_OK(m->event_record(m, e, s, NULL));
        CHECK_OK(m->stream_wait(m, t, e, NULL));
        mo_model_device_submit(&device, t);
    }
    for (size_t i = 0; i < 100; i++) {
        CHECK_EQ(mo_model_device_complete(&device, t, SIZE_MAX), i ? 2 : 0);
        CHECK_EQ(mo_model_device_complete(&device, s, 1), 1);
    }
    CHECK_EQ(mo_model_device_complete(&device, t, 1), 1); /* the wait */
    CHECK_EQ(mo_model_device_complete(&device, t, 5), 1); /* and the work behind it */
}

TEST(a_random_queue_of_waits_is_over_in_an_order_that_keeps_them)
{
    uint64_t random = test_seed();
    for (int round = 0, n = test_rounds(200, 20000); round < n; round++) {
        mo_driver *m = fresh(8 * MIB, 2 * MIB);
        struct {
            uint64_t on, mark, at, by;
        } waits[64];
        uint64_t queued[4] = {0}, over[4] = {0};
        mo_event *e = contract_event(m);
        int count = 0;
        for (int i = 0; i < 100; i++) {
            const uint64_t s = test_random(&random) % 4, t = test_random(&random) % 4;
            if (count < 64 && s != t && queued[s] && test_random(&random) % 3 == 0) {
                CHECK_OK(m->event_record(m, e, (mo_stream)(s + 1), NULL));
                CHECK_OK(m->stream_wait(m, (mo_stream)(t + 1), e, NULL));
                waits[count].on = s, waits[count].mark = queued[s], waits[count].by = t;
                waits[count++].at = queued[t]++;
            } else {
                mo_model_device_submit(&device, (mo_stream)(s + 1));
                queued[s]++;
            }
        }
        for (int stalled = 0; stalled < 200; stalled++) {
            const uint64_t s = test_random(&random) % 4;
            const size_t done =
                mo_model_device_complete(&device, (mo_stream)(s + 1), test_random(&random) % 5);
            over[s] += done;
            for (int i = 0; i < count; i++)
                CHECK(over[waits[i].by] <= waits[i].at || over[waits[i].on] >= waits[i].mark);
            stalled = done ? 0 : stalled;
        }
        for (int s = 0; s < 4; s++)
            CHECK_EQ(over[s], queued[s]);
    }
}

TEST_MAIN
