#include "driver/model_device.h"

#include <pthread.h>

#include "driver_contract_tests.h"

#define MIB ((size_t)1 << 20)

static mo_model_device device;

static mo_driver *fresh(size_t capacity, size_t granularity)
{
    mo_model_device_close(&device);
    mo_model_device_open(&device, capacity, granularity);
    return &device.table;
}

/* ---- the contract -------------------------------------------------------------------------------------- */

static void submit(mo_stream stream)
{
    mo_model_device_submit(&device, stream);
}

static void finish(mo_stream stream)
{
    mo_model_device_complete(&device, stream, SIZE_MAX);
}

static void begin_capture(mo_stream stream)
{
    static uint64_t captures;
    mo_model_device_capture(&device, stream, ++captures);
}

static void end_capture(mo_stream stream)
{
    mo_model_device_capture(&device, stream, 0);
}

static size_t live(void)
{
    return mo_model_device_live(&device);
}

static const char *call_name(int call)
{
    return call < MO_MODEL_DEVICE_CALL_COUNT ? mo_model_device_call_name((mo_model_device_call)call) : NULL;
}

static uint64_t calls(int call)
{
    return device.calls[call];
}

static void fail(int call, uint64_t after)
{
    mo_model_device_fail(&device, (mo_model_device_call)call, after, 1, MO_DRIVER);
}

static void fail_never(void)
{
    mo_model_device_fail_never(&device);
}

static const contract_device *contract(void)
{
    static const contract_device d = {
        .driver = &device.table,
        .stream = (mo_stream)0x10,
        .other = (mo_stream)0x20,
        .submit = submit,
        .finish = finish,
        .begin_capture = begin_capture,
        .end_capture = end_capture,
        .live = live,
        .call_name = call_name,
        .calls = calls,
        .fail = fail,
        .fail_never = fail_never,
    };
    fresh(64 * MIB, 2 * MIB);
    return &d;
}

#define RUN(name) contract_##name(contract())
TEST(reservations_do_not_overlap_and_cost_no_memory)
{
    RUN(reservations_do_not_overlap_and_cost_no_memory);
}
TEST(a_reservation_is_given_back_whole_and_once)
{
    RUN(a_reservation_is_given_back_whole_and_once);
}
TEST(a_reservation_with_something_mapped_stays)
{
    RUN(a_reservation_with_something_mapped_stays);
}
TEST(a_reservation_beyond_all_addresses_is_refused)
{
    RUN(a_reservation_beyond_all_addresses_is_refused);
}
TEST(memory_is_what_is_created_and_the_rest_is_free)
{
    RUN(memory_is_what_is_created_and_the_rest_is_free);
}
TEST(a_full_device_says_out_of_memory_and_recovers)
{
    RUN(a_full_device_says_out_of_memory_and_recovers);
}
TEST(a_handle_is_released_once)
{
    RUN(a_handle_is_released_once);
}
TEST(sizes_that_are_no_granules_are_refused)
{
    RUN(sizes_that_are_no_granules_are_refused);
}
TEST(memory_returns_after_release_and_unmap_in_either_order)
{
    RUN(memory_returns_after_release_and_unmap_in_either_order);
}
TEST(a_handle_may_be_mapped_twice_and_returns_after_the_last)
{
    RUN(a_handle_may_be_mapped_twice_and_returns_after_the_last);
}
TEST(mappings_do_not_overlap_and_lie_in_a_reservation)
{
    RUN(mappings_do_not_overlap_and_lie_in_a_reservation);
}
TEST(mappings_are_undone_whole_one_or_several)
{
    RUN(mappings_are_undone_whole_one_or_several);
}
TEST(access_is_granted_over_mappings_in_a_row_only)
{
    RUN(access_is_granted_over_mappings_in_a_row_only);
}
TEST(segments_are_apart_aligned_and_freed_once)
{
    RUN(segments_are_apart_aligned_and_freed_once);
}
TEST(a_segment_that_does_not_fit_is_out_of_memory)
{
    RUN(a_segment_that_does_not_fit_is_out_of_memory);
}
TEST(freeing_a_segment_waits_for_the_device)
{
    RUN(freeing_a_segment_waits_for_the_device);
}
TEST(an_event_is_over_when_what_was_queued_before_it_is)
{
    RUN(an_event_is_over_when_what_was_queued_before_it_is);
}
TEST(recording_again_moves_the_mark)
{
    RUN(recording_again_moves_the_mark);
}
TEST(a_pending_event_can_be_destroyed)
{
    RUN(a_pending_event_can_be_destroyed);
}
TEST(a_stream_that_waits_goes_on_after_the_mark)
{
    RUN(a_stream_that_waits_goes_on_after_the_mark);
}
TEST(waiting_for_what_was_never_recorded_is_no_wait)
{
    RUN(waiting_for_what_was_never_recorded_is_no_wait);
}
TEST(a_wait_keeps_its_mark_when_the_event_moves_on)
{
    RUN(a_wait_keeps_its_mark_when_the_event_moves_on);
}
TEST(synchronize_ends_all_work)
{
    RUN(synchronize_ends_all_work);
}
TEST(pinned_memory_is_whole_aligned_and_freed_once)
{
    RUN(pinned_memory_is_whole_aligned_and_freed_once);
}
TEST(a_copy_is_queued_on_its_stream_and_on_no_other)
{
    RUN(a_copy_is_queued_on_its_stream_and_on_no_other);
}
TEST(a_capture_has_a_number_while_it_lasts)
{
    RUN(a_capture_has_a_number_while_it_lasts);
}
TEST(time_goes_on_and_a_pause_takes_about_as_long_as_asked)
{
    RUN(time_goes_on_and_a_pause_takes_about_as_long_as_asked);
}
TEST(any_call_may_fail_and_nothing_is_left_behind)
{
    RUN(any_call_may_fail_and_nothing_is_left_behind);
}

/* ---- what only the model device promises ---------------------------------------------------------------- */

TEST(a_plan_fails_the_calls_it_names_with_its_status_before_anything_changed)
{
    mo_driver *m = fresh(8 * MIB, 2 * MIB);
    mo_physical h = 77;
    mo_detail detail;
    mo_model_device_fail(&device, MO_MODEL_DEVICE_create, 1, 2, MO_NO_DEVICE_MEMORY);
    CHECK_OK(m->create(m, 2 * MIB, NULL, &h));
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(m->create(m, 2 * MIB, &detail, &h), MO_NO_DEVICE_MEMORY);
        CHECK_STR(detail.text, "create: failed by plan");
        CHECK_EQ(device.used, 2 * MIB);
        CHECK_EQ(mo_model_device_live(&device), 1);
    }
    CHECK_OK(m->create(m, 2 * MIB, NULL, &h));
    CHECK_EQ(device.calls[MO_MODEL_DEVICE_create], 4);
    mo_model_device_fail(&device, MO_MODEL_DEVICE_release, 0, UINT64_MAX, MO_DRIVER);
    for (int i = 0; i < 10; i++)
        CHECK_EQ(m->release(m, h, NULL), MO_DRIVER);
    mo_model_device_fail_never(&device);
    CHECK_OK(m->release(m, h, NULL));
}

TEST(every_call_has_its_name)
{
    CHECK_STR(mo_model_device_call_name(MO_MODEL_DEVICE_reserve), "reserve");
    CHECK_STR(mo_model_device_call_name(MO_MODEL_DEVICE_memory_info), "memory_info");
    CHECK_STR(mo_model_device_call_name(MO_MODEL_DEVICE_CALL_COUNT), "?");
}

TEST(without_virtual_memory_there_are_segments_only)
{
    mo_driver *m = fresh(8 * MIB, 0);
    mo_address a = 77;
    mo_physical h = 77;
    CHECK_EQ(m->granularity, 0);
    CHECK(m->reserve(m, 2 * MIB, NULL, &a) != MO_OK);
    CHECK(m->create(m, 2 * MIB, NULL, &h) != MO_OK);
    CHECK(a == 77 && h == 77);
    CHECK_OK(m->segment_alloc(m, 100, NULL, &a));
    CHECK_OK(m->segment_free(m, a, NULL));
    CHECK_EQ(mo_model_device_live(&device), 0);
}

TEST(an_address_is_never_handed_out_twice)
{
    mo_driver *m = fresh(8 * MIB, 2 * MIB);
    mo_address last = 0, a;
    for (int i = 0; i < 1000; i++) {
        if (i % 2) {
            CHECK_OK(m->reserve(m, 4 * MIB, NULL, &a));
            CHECK_OK(m->unreserve(m, a, 4 * MIB, NULL));
        } else {
            CHECK_OK(m->segment_alloc(m, 5 * MIB + 1, NULL, &a));
            CHECK_OK(m->segment_free(m, a, NULL));
        }
        CHECK(a >= last + 4 * MIB);
        last = a;
    }
}

TEST(a_handle_is_mapped_whole)
{
    mo_driver *m = fresh(8 * MIB, 2 * MIB);
    const mo_address a = contract_reserve(m, 4);
    const mo_physical h = contract_create(m, 2);
    CHECK_EQ(m->map(m, a, 2 * MIB, h, NULL), MO_INVALID);
    CHECK_EQ(m->map(m, a, 8 * MIB, h, NULL), MO_INVALID);
    CHECK_OK(m->map(m, a, 4 * MIB, h, NULL));
}

TEST(the_most_that_was_used_is_remembered)
{
    mo_driver *m = fresh(64 * MIB, 2 * MIB);
    const mo_physical a = contract_create(m, 3), b = contract_create(m, 4);
    CHECK_OK(m->release(m, a, NULL));
    CHECK_OK(m->release(m, b, NULL));
    (void)contract_create(m, 5);
    CHECK_EQ(device.used, 10 * MIB);
    CHECK_EQ(device.peak, 14 * MIB);
}

TEST(closing_forgets_everything_that_is_live)
{
    mo_driver *m = fresh(8 * MIB, 2 * MIB);
    const mo_address a = contract_reserve(m, 1);
    contract_map(m, a, 1, contract_create(m, 1));
    (void)contract_event(m);
    CHECK_EQ(mo_model_device_live(&device), 4);
    mo_model_device_close(&device); /* LeakSanitizer hears of the rest */
    CHECK_EQ(mo_model_device_live(&device), 0);
}

static void *use(void *unused)
{
    mo_driver *m = &device.table;
    const mo_stream s = (mo_stream)(uintptr_t)&unused;
    for (int i = 0, n = test_rounds(300, 30000); i < n; i++) {
        mo_address a;
        mo_physical h;
        mo_event *e;
        if (m->reserve(m, 2 * MIB, NULL, &a) || m->create(m, 2 * MIB, NULL, &h) ||
            m->map(m, a, 2 * MIB, h, NULL) || m->event_create(m, NULL, &e) ||
            m->event_record(m, e, s, NULL) || m->event_query(m, e, NULL) || m->event_destroy(m, e, NULL) ||
            m->unmap(m, a, 2 * MIB, NULL) || m->release(m, h, NULL) || m->unreserve(m, a, 2 * MIB, NULL) ||
            !m->now(m))
            return unused;
    }
    return &device;
}

TEST(threads_share_a_device)
{
    pthread_t threads[4];
    void *done;
    fresh(64 * MIB, 2 * MIB);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, use, NULL), 0);
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], &done);
        CHECK(done == &device);
    }
    CHECK_EQ(mo_model_device_live(&device), 0);
    CHECK_EQ(device.used, 0);
}

TEST_MAIN
