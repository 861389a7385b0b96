/* What driver.h promises, as tests of any mo_driver: test_model_device.c and test_driver_cuda.c (over the
 * simulated device) give each a device to run on and list them under their own names. A check here is one
 * that both must pass, so it asks for "refused", never for a code. */
#ifndef MEMOPT_DRIVER_CONTRACT_TESTS_H
#define MEMOPT_DRIVER_CONTRACT_TESTS_H

#include "driver_contract.h"

/* ---- addresses ----------------------------------------------------------------------------------------- */

static void contract_reservations_do_not_overlap_and_cost_no_memory(const contract_device *d)
{
    mo_driver *m = d->driver;
    const contract_state start = contract_look(d);
    mo_address ranges[8];
    for (size_t i = 0; i < 8; i++)
        ranges[i] = contract_reserve(m, i + 1);
    CHECK_EQ(contract_look(d).free_bytes, start.free_bytes);
    CHECK_EQ(contract_look(d).live, start.live + 8);
    for (size_t i = 0; i < 8; i++)
        for (size_t j = 0; j < i; j++)
            CHECK(ranges[i] + (i + 1) * m->granularity <= ranges[j] ||
                  ranges[j] + (j + 1) * m->granularity <= ranges[i]);
    for (size_t i = 0; i < 8; i++)
        CHECK_OK(m->unreserve(m, ranges[i], (i + 1) * m->granularity, NULL));
    CHECK_SAME(d, start);
}

static void contract_a_reservation_is_given_back_whole_and_once(const contract_device *d)
{
    mo_driver *m = d->driver;
    const size_t g = m->granularity;
    const contract_state start = contract_look(d);
    const mo_address a = contract_reserve(m, 4);
    CHECK_REFUSED(d, m->unreserve(m, a, 2 * g, &detail));
    CHECK_REFUSED(d, m->unreserve(m, a, 5 * g, &detail));
    CHECK_REFUSED(d, m->unreserve(m, a + g, 3 * g, &detail));
    CHECK_REFUSED(d, m->unreserve(m, a + g, 4 * g, &detail));
    CHECK_OK(m->unreserve(m, a, 4 * g, NULL));
    CHECK_REFUSED(d, m->unreserve(m, a, 4 * g, &detail));
    CHECK_SAME(d, start);
}

static void contract_a_reservation_with_something_mapped_stays(const contract_device *d)
{
    mo_driver *m = d->driver;
    const size_t g = m->granularity;
    const contract_state start = contract_look(d);
    const mo_address a = contract_reserve(m, 4);
    const mo_physical h = contract_create(m, 1);
    contract_map(m, a + 2 * g, 1, h);
    CHECK_REFUSED(d, m->unreserve(m, a, 4 * g, &detail));
    CHECK_OK(m->unmap(m, a + 2 * g, g, NULL));
    CHECK_OK(m->unreserve(m, a, 4 * g, NULL));
    CHECK_OK(m->release(m, h, NULL));
    CHECK_SAME(d, start);
}

static void contract_a_reservation_beyond_all_addresses_is_refused(const contract_device *d)
{
    mo_driver *m = d->driver;
    mo_address a = 77;
    CHECK_REFUSED(d, m->reserve(m, (size_t)1 << 62, &detail, &a));
    CHECK_REFUSED(d, m->reserve(m, SIZE_MAX / m->granularity * m->granularity, &detail, &a));
    CHECK_EQ(a, 77);
}

/* ---- physical memory ----------------------------------------------------------------------------------- */

static void contract_memory_is_what_is_created_and_the_rest_is_free(const contract_device *d)
{
    mo_driver *m = d->driver;
    const contract_state start = contract_look(d);
    const mo_physical a = contract_create(m, 1), b = contract_create(m, 5);
    CHECK(a != b);
    CHECK_EQ(contract_look(d).free_bytes, start.free_bytes - 6 * m->granularity);
    CHECK_OK(m->release(m, a, NULL));
    CHECK_EQ(contract_look(d).free_bytes, start.free_bytes - 5 * m->granularity);
    CHECK_OK(m->release(m, b, NULL));
    CHECK_SAME(d, start);
}

static void contract_a_full_device_says_out_of_memory_and_recovers(const contract_device *d)
{
    mo_driver *m = d->driver;
    const contract_state start = contract_look(d);
    const size_t room = start.free_bytes / m->granularity;
    mo_physical *handles = calloc(room + 1, sizeof *handles), one = 77;
    mo_detail said = {.text = ""};
    size_t n = 0;
    mo_status status;

    CHECK(handles && room >= 32);
    while ((status = m->create(m, m->granularity, &said, &handles[n])) == MO_OK)
        if (++n > room)
            TEST_FAIL("more was given than there was");
    CHECK_EQ(status, MO_NO_DEVICE_MEMORY);
    CHECK_EQ(said.status, MO_NO_DEVICE_MEMORY);
    CHECK_EQ(n, room);
    CHECK_EQ(m->create(m, m->granularity, NULL, &one), MO_NO_DEVICE_MEMORY);
    CHECK_EQ(one, 77);
    CHECK_OK(m->release(m, handles[--n], NULL));
    CHECK_EQ(m->create(m, 2 * m->granularity, NULL, &one), MO_NO_DEVICE_MEMORY);
    CHECK_OK(m->create(m, m->granularity, NULL, &handles[n++]));
    while (n)
        CHECK_OK(m->release(m, handles[--n], NULL));
    free(handles);
    CHECK_SAME(d, start);
}

static void contract_a_handle_is_released_once(const contract_device *d)
{
    mo_driver *m = d->driver;
    const mo_physical h = contract_create(m, 1);
    CHECK_OK(m->release(m, h, NULL));
    CHECK_REFUSED(d, m->release(m, h, &detail));
    CHECK_REFUSED(d, m->release(m, h + 12345, &detail));
}

static void contract_sizes_that_are_no_granules_are_refused(const contract_device *d)
{
    mo_driver *m = d->driver;
    mo_physical h = 77;
    CHECK_REFUSED(d, m->create(m, m->granularity / 2, &detail, &h));
    CHECK_REFUSED(d, m->create(m, m->granularity + 1, &detail, &h));
    CHECK_EQ(h, 77);
}

/* ---- mappings ------------------------------------------------------------------------------------------ */

static void contract_memory_returns_after_release_and_unmap_in_either_order(const contract_device *d)
{
    mo_driver *m = d->driver;
    const size_t g = m->granularity;
    const contract_state start = contract_look(d);
    const mo_address a = contract_reserve(m, 4);
    for (int release_first = 0; release_first < 2; release_first++) {
        const mo_physical h = contract_create(m, 2);
        contract_map(m, a, 2, h);
        CHECK_OK(release_first ? m->release(m, h, NULL) : m->unmap(m, a, 2 * g, NULL));
        if (release_first) { /* it is memory still, and nobody's handle */
            CHECK_REFUSED(d, m->release(m, h, &detail));
            CHECK_REFUSED(d, m->map(m, a + 2 * g, 2 * g, h, &detail));
        }
        CHECK_EQ(contract_look(d).free_bytes, start.free_bytes - 2 * g);
        CHECK_OK(release_first ? m->unmap(m, a, 2 * g, NULL) : m->release(m, h, NULL));
        CHECK_EQ(contract_look(d).free_bytes, start.free_bytes);
    }
    CHECK_OK(m->unreserve(m, a, 4 * g, NULL));
    CHECK_SAME(d, start);
}

static void contract_a_handle_may_be_mapped_twice_and_returns_after_the_last(const contract_device *d)
{
    mo_driver *m = d->driver;
    const size_t g = m->granularity;
    const contract_state start = contract_look(d);
    const mo_address a = contract_reserve(m, 4);
    const mo_physical h = contract_create(m, 1);
    contract_map(m, a, 1, h);
    contract_map(m, a + 3 * g, 1, h);
    CHECK_EQ(contract_look(d).free_bytes, start.free_bytes - g);
    CHECK_OK(m->release(m, h, NULL));
    CHECK_OK(m->unmap(m, a, g, NULL));
    CHECK_EQ(contract_look(d).free_bytes, start.free_bytes - g);
    CHECK_OK(m->unmap(m, a + 3 * g, g, NULL));
    CHECK_EQ(contract_look(d).free_bytes, start.free_bytes);
    CHECK_OK(m->unreserve(m, a, 4 * g, NULL));
    CHECK_SAME(d, start);
}

static void contract_mappings_do_not_overlap_and_lie_in_a_reservation(const contract_device *d)
{
    mo_driver *m = d->driver;
    const size_t g = m->granularity;
    const mo_address a = contract_reserve(m, 4);
    const mo_physical two = contract_create(m, 2), one = contract_create(m, 1);
    contract_map(m, a + g, 2, two);
    CHECK_REFUSED(d, m->map(m, a + g, g, one, &detail));
    CHECK_REFUSED(d, m->map(m, a + 2 * g, g, one, &detail));
    CHECK_REFUSED(d, m->map(m, a, 2 * g, two, &detail));           /* half of it is taken */
    CHECK_REFUSED(d, m->map(m, a + 3 * g, 2 * g, two, &detail));   /* over the end */
    CHECK_REFUSED(d, m->map(m, a + g / 2, g, one, &detail));       /* no granule */
    CHECK_REFUSED(d, m->map(m, a, g, one + two + 12345, &detail)); /* no handle */
    CHECK_OK(m->release(m, one, NULL));
    CHECK_REFUSED(d, m->map(m, a, g, one, &detail)); /* released */
    CHECK_OK(m->unmap(m, a + g, 2 * g, NULL));
    CHECK_OK(m->unreserve(m, a, 4 * g, NULL));
    CHECK_REFUSED(d, m->map(m, a, 2 * g, two, &detail)); /* no reservation any more */
    CHECK_OK(m->release(m, two, NULL));
}

static void contract_mappings_are_undone_whole_one_or_several(const contract_device *d)
{
    mo_driver *m = d->driver;
    const size_t g = m->granularity;
    const contract_state start = contract_look(d);
    const mo_address a = contract_reserve(m, 8);
    const mo_physical h = contract_create(m, 2);
    contract_map(m, a, 2, h);
    contract_map(m, a + 2 * g, 2, h);
    contract_map(m, a + 6 * g, 2, h); /* a gap before it */
    CHECK_REFUSED(d, m->unmap(m, a, g, &detail));
    CHECK_REFUSED(d, m->unmap(m, a + g, g, &detail));
    CHECK_REFUSED(d, m->unmap(m, a + g, 2 * g, &detail));
    CHECK_REFUSED(d, m->unmap(m, a, 3 * g, &detail));
    CHECK_REFUSED(d, m->unmap(m, a + 4 * g, 2 * g, &detail));
    CHECK_OK(m->unmap(m, a, 4 * g, NULL));
    CHECK_REFUSED(d, m->unmap(m, a, 4 * g, &detail));
    CHECK_OK(m->unmap(m, a + 6 * g, 2 * g, NULL));
    CHECK_OK(m->release(m, h, NULL));
    CHECK_OK(m->unreserve(m, a, 8 * g, NULL));
    CHECK_SAME(d, start);
}

static void contract_access_is_granted_over_mappings_in_a_row_only(const contract_device *d)
{
    mo_driver *m = d->driver;
    const size_t g = m->granularity;
    const mo_address a = contract_reserve(m, 4);
    const mo_physical h = contract_create(m, 1);
    CHECK_REFUSED(d, m->grant(m, a, g, &detail));
    CHECK_OK(m->map(m, a, g, h, NULL));
    CHECK_OK(m->map(m, a + g, g, h, NULL));
    CHECK_REFUSED(d, m->grant(m, a, 3 * g, &detail));
    CHECK_OK(m->grant(m, a, 2 * g, NULL));
    CHECK_OK(m->grant(m, a, g, NULL)); /* again */
    CHECK_OK(m->unmap(m, a, 2 * g, NULL));
    CHECK_OK(m->release(m, h, NULL));
    CHECK_OK(m->unreserve(m, a, 4 * g, NULL));
}

/* ---- segments ------------------------------------------------------------------------------------------ */

static void contract_segments_are_apart_aligned_and_freed_once(const contract_device *d)
{
    mo_driver *m = d->driver;
    const contract_state start = contract_look(d);
    const size_t sizes[] = {1, 511, 512, 513, 1 << 20, (2 << 20) + 1};
    enum { N = sizeof sizes / sizeof *sizes };
    mo_address segments[N];
    size_t sum = 0;
    for (int i = 0; i < N; i++) {
        CHECK_OK(m->segment_alloc(m, sizes[i], NULL, &segments[i]));
        CHECK(segments[i] && segments[i] % 512 == 0);
        sum += sizes[i];
        for (int j = 0; j < i; j++)
            CHECK(segments[i] + sizes[i] <= segments[j] || segments[j] + sizes[j] <= segments[i]);
    }
    CHECK(contract_look(d).free_bytes <= start.free_bytes - sum);
    CHECK_EQ(contract_look(d).live, start.live + N);
    CHECK_REFUSED(d, m->segment_free(m, segments[4] + 512, &detail));
    for (int i = 0; i < N; i++) {
        CHECK_OK(m->segment_free(m, segments[i], NULL));
        CHECK_REFUSED(d, m->segment_free(m, segments[i], &detail));
    }
    CHECK_SAME(d, start);
}

static void contract_a_segment_that_does_not_fit_is_out_of_memory(const contract_device *d)
{
    mo_driver *m = d->driver;
    const contract_state start = contract_look(d);
    mo_address all, more = 77;
    CHECK_OK(m->segment_alloc(m, start.free_bytes, NULL, &all));
    CHECK_EQ(m->segment_alloc(m, 1, NULL, &more), MO_NO_DEVICE_MEMORY);
    CHECK_OK(m->segment_free(m, all, NULL));
    CHECK_EQ(m->segment_alloc(m, start.free_bytes + 1, NULL, &more), MO_NO_DEVICE_MEMORY);
    CHECK_EQ(m->segment_alloc(m, SIZE_MAX, NULL, &more), MO_NO_DEVICE_MEMORY);
    CHECK_EQ(more, 77);
    CHECK_SAME(d, start);
}

static void contract_freeing_a_segment_waits_for_the_device(const contract_device *d)
{
    mo_driver *m = d->driver;
    mo_event *e = contract_event(m);
    mo_address a;
    CHECK_OK(m->segment_alloc(m, 4096, NULL, &a));
    d->submit(d->stream);
    CHECK_OK(m->event_record(m, e, d->stream, NULL));
    CHECK_NOT_OVER(m, e);
    CHECK_OK(m->segment_free(m, a, NULL));
    CHECK_OVER(m, e);
    CHECK_OK(m->event_destroy(m, e, NULL));
}

/* ---- order --------------------------------------------------------------------------------------------- */

static void contract_an_event_is_over_when_what_was_queued_before_it_is(const contract_device *d)
{
    mo_driver *m = d->driver;
    mo_event *e = contract_event(m), *idle = contract_event(m);
    CHECK_OVER(m, e); /* never recorded */
    d->submit(d->stream);
    d->submit(d->stream);
    CHECK_OK(m->event_record(m, e, d->stream, NULL));
    d->submit(d->other);
    CHECK_NOT_OVER(m, e);
    d->finish(d->other); /* not its stream */
    CHECK_NOT_OVER(m, e);
    CHECK_OK(m->event_record(m, idle, d->other, NULL));
    d->finish(d->other);
    CHECK_OVER(m, idle);
    d->finish(d->stream);
    CHECK_OVER(m, e);
    d->submit(d->stream); /* after the mark */
    CHECK_OVER(m, e);
    d->finish(d->stream);
    CHECK_OK(m->event_destroy(m, e, NULL));
    CHECK_OK(m->event_destroy(m, idle, NULL));
}

static void contract_recording_again_moves_the_mark(const contract_device *d)
{
    mo_driver *m = d->driver;
    mo_event *e = contract_event(m);
    d->submit(d->stream);
    CHECK_OK(m->event_record(m, e, d->stream, NULL));
    d->finish(d->stream);
    CHECK_OVER(m, e);
    d->submit(d->other);
    CHECK_OK(m->event_record(m, e, d->other, NULL));
    CHECK_NOT_OVER(m, e);
    d->finish(d->stream);
    CHECK_NOT_OVER(m, e);
    d->finish(d->other);
    CHECK_OVER(m, e);
    CHECK_OK(m->event_destroy(m, e, NULL));
}

static void contract_a_pending_event_can_be_destroyed(const contract_device *d)
{
    mo_driver *m = d->driver;
    const contract_state start = contract_look(d);
    mo_event *e = contract_event(m);
    CHECK_EQ(contract_look(d).live, start.live + 1);
    d->submit(d->stream);
    CHECK_OK(m->event_record(m, e, d->stream, NULL));
    CHECK_OK(m->stream_wait(m, d->other, e, NULL)); /* and somebody waits for it */
    CHECK_NOT_OVER(m, e);
    CHECK_OK(m->event_destroy(m, e, NULL));
    d->finish(d->stream);
    d->finish(d->other);
    CHECK_OK(m->synchronize(m, NULL));
    CHECK_SAME(d, start);
}

static void contract_a_stream_that_waits_goes_on_after_the_mark(const contract_device *d)
{
    mo_driver *m = d->driver;
    mo_event *first = contract_event(m), *second = contract_event(m);
    d->submit(d->stream);
    CHECK_OK(m->event_record(m, first, d->stream, NULL));
    CHECK_OK(m->stream_wait(m, d->other, first, NULL));
    d->submit(d->other);
    CHECK_OK(m->event_record(m, second, d->other, NULL));
    d->finish(d->other);
    CHECK_NOT_OVER(m, second); /* it waits, and the host did not */
    d->finish(d->stream);
    CHECK_OVER(m, first);
    d->finish(d->other);
    CHECK_OVER(m, second);
    CHECK_OK(m->event_destroy(m, first, NULL));
    CHECK_OK(m->event_destroy(m, second, NULL));
}

static void contract_waiting_for_what_was_never_recorded_is_no_wait(const contract_device *d)
{
    mo_driver *m = d->driver;
    mo_event *never = contract_event(m), *after = contract_event(m);
    CHECK_OK(m->stream_wait(m, d->stream, never, NULL));
    d->submit(d->stream);
    CHECK_OK(m->event_record(m, after, d->stream, NULL));
    d->finish(d->stream);
    CHECK_OVER(m, after);
    CHECK_OK(m->event_destroy(m, never, NULL));
    CHECK_OK(m->event_destroy(m, after, NULL));
}

/* A wait is for the mark as it was when the wait was queued. */
static void contract_a_wait_keeps_its_mark_when_the_event_moves_on(const contract_device *d)
{
    mo_driver *m = d->driver;
    mo_event *moving = contract_event(m), *after = contract_event(m);
    d->submit(d->stream);
    CHECK_OK(m->event_record(m, moving, d->stream, NULL));
    CHECK_OK(m->stream_wait(m, d->other, moving, NULL));
    CHECK_OK(m->event_record(m, after, d->other, NULL));
    d->finish(d->stream);
    d->submit(d->stream);
    CHECK_OK(m->event_record(m, moving, d->stream, NULL));
    d->finish(d->other);
    CHECK_NOT_OVER(m, moving);
    CHECK_OVER(m, after);
    d->finish(d->stream);
    CHECK_OK(m->event_destroy(m, moving, NULL));
    CHECK_OK(m->event_destroy(m, after, NULL));
}

static void contract_synchronize_ends_all_work(const contract_device *d)
{
    mo_driver *m = d->driver;
    mo_event *a = contract_event(m), *b = contract_event(m);
    d->submit(d->other);
    CHECK_OK(m->event_record(m, a, d->other, NULL));
    CHECK_OK(m->stream_wait(m, d->stream, a, NULL));
    d->submit(d->stream);
    CHECK_OK(m->event_record(m, b, d->stream, NULL));
    CHECK_OK(m->synchronize(m, NULL));
    CHECK_OVER(m, a);
    CHECK_OVER(m, b);
    CHECK_OK(m->event_destroy(m, a, NULL));
    CHECK_OK(m->event_destroy(m, b, NULL));
}

static void contract_a_capture_has_a_number_while_it_lasts(const contract_device *d)
{
    mo_driver *m = d->driver;
    uint64_t none = 77, id = 0, again = 0, next = 0;
    CHECK_OK(m->capture_id(m, NULL, NULL, &none));
    CHECK_EQ(none, 0);
    none = 77;
    CHECK_OK(m->capture_id(m, d->stream, NULL, &none));
    CHECK_EQ(none, 0);
    d->begin_capture(d->stream);
    CHECK_OK(m->capture_id(m, d->stream, NULL, &id));
    CHECK_OK(m->capture_id(m, d->stream, NULL, &again));
    none = 77;
    CHECK_OK(m->capture_id(m, d->other, NULL, &none));
    CHECK_EQ(none, 0);
    none = 77;
    CHECK_OK(
        m->capture_id(m, NULL, NULL, &none)); /* the default stream is none of it, and asking harms nothing */
    CHECK_EQ(none, 0);
    d->end_capture(d->stream);
    CHECK(id != 0 && again == id);
    CHECK_OK(m->capture_id(m, d->stream, NULL, &none));
    CHECK_EQ(none, 0);
    d->begin_capture(d->stream);
    CHECK_OK(m->capture_id(m, d->stream, NULL, &next));
    d->end_capture(d->stream);
    CHECK(next != 0 && next != id);
}

/* ---- copies -------------------------------------------------------------------------------------------- */

static void contract_pinned_memory_is_whole_aligned_and_freed_once(const contract_device *d)
{
    mo_driver *m = d->driver;
    const contract_state before = contract_look(d);
    void *one = NULL, *other = NULL;
    CHECK_OK(m->pinned_alloc(m, 10001, NULL, &one));
    CHECK_OK(m->pinned_alloc(m, 1, NULL, &other));
    CHECK(one && other && (uintptr_t)one % 4096 == 0 && (uintptr_t)other % 4096 == 0);
    memset(one, 1, 10001);
    memset(other, 2, 1);
    CHECK_REFUSED(d, m->pinned_free(m, (char *)one + 1, &detail));
    CHECK_OK(m->pinned_free(m, one, NULL));
    CHECK_OK(m->pinned_free(m, other, NULL));
    CHECK_REFUSED(d, m->pinned_free(m, other, &detail));
    CHECK_SAME(d, before);
}

static void contract_a_copy_is_queued_on_its_stream_and_on_no_other(const contract_device *d)
{
    mo_driver *m = d->driver;
    mo_stream stream = NULL;
    mo_address memory = 0;
    void *pinned = NULL;
    mo_event *to = contract_event(m), *back = contract_event(m), *user = contract_event(m);
    CHECK_OK(m->stream_create(m, NULL, &stream));
    CHECK(stream && stream != d->stream);
    CHECK_OK(m->segment_alloc(m, 4096, NULL, &memory));
    CHECK_OK(m->pinned_alloc(m, 4096, NULL, &pinned));
    d->submit(d->stream);
    CHECK_OK(m->event_record(m, user, d->stream, NULL));
    CHECK_OK(m->stream_wait(m, stream, user, NULL));
    CHECK_OK(m->copy_to_device(m, stream, memory, pinned, 4096, NULL));
    CHECK_OK(m->event_record(m, to, stream, NULL));
    CHECK_OK(m->copy_to_host(m, stream, pinned, memory, 4096, NULL));
    CHECK_OK(m->event_record(m, back, stream, NULL));
    CHECK_NOT_OVER(m, to);
    d->finish(stream); /* as far as the other allows: not at all */
    CHECK_NOT_OVER(m, to);
    d->finish(d->stream);
    d->finish(stream);
    CHECK_OVER(m, to);
    CHECK_OVER(m, back);
    CHECK_OK(m->event_destroy(m, to, NULL));
    CHECK_OK(m->event_destroy(m, back, NULL));
    CHECK_OK(m->event_destroy(m, user, NULL));
    CHECK_OK(m->stream_destroy(m, stream, NULL));
    CHECK_OK(m->pinned_free(m, pinned, NULL));
    CHECK_OK(m->segment_free(m, memory, NULL));
}

/* ---- the clock ----------------------------------------------------------------------------------------- */

static void contract_time_goes_on_and_a_pause_takes_about_as_long_as_asked(const contract_device *d)
{
    mo_driver *m = d->driver;
    const uint64_t asked = 2000000; /* 2 ms */
    uint64_t before = m->now(m), after;
    for (int i = 0; i < 100; i++) {
        after = m->now(m);
        CHECK(after >= before);
        before = after;
    }
    m->pause(m, asked);
    CHECK(m->now(m) >= before + asked);
}

/* ---- the N-th failure ---------------------------------------------------------------------------------- */

/* Each call of each function that a session makes fails once, all others work. */
static void contract_any_call_may_fail_and_nothing_is_left_behind(const contract_device *d)
{
    const contract_state start = contract_look(d);
    for (int call = 0; d->call_name(call); call++) {
        const uint64_t before = d->calls(call);
        CHECK_OK(contract_session(d));
        const uint64_t made = d->calls(call) - before;
        if (!made)
            TEST_FAIL("no session calls %s", d->call_name(call));
        for (uint64_t after = 0; after < made; after++) {
            d->fail(call, after);
            const mo_status status = contract_session(d);
            d->fail_never();
            if (!status && !(d->unheard && d->unheard(call, after)))
                TEST_FAIL("no session heard that call %d of %s failed", (int)after, d->call_name(call));
            CHECK_SAME(d, start);
            CHECK_OK(contract_session(d)); /* the next attempt works */
            CHECK_SAME(d, start);
        }
    }
}

#endif
