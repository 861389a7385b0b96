#include "driver/staging.h"

#include "fake_cuda.h"
#include "test.h"

#define STREAM(n) ((CUstream)(uintptr_t)(0x5000 + (n)))

static mo_staging staging;

static void start(void)
{
    fake_reset();
    memset(&staging, 0, sizeof staging);
}

static void finish(void)
{
    fake.countdown = -1;
    fake.pending = false;
    CHECK_EQ(mo_staging_clear(&staging, &fake_api, NULL), MO_OK);
    CHECK_EQ(fake.events, 0);
    CHECK_EQ(fake.blocks, (int)staging.counts.captured);
    CHECK_EQ(fake.pinned, (int)staging.counts.captured);
}

static mo_status put_on(CUstream stream, const void *table, size_t size, mo_staging_slot **slot)
{
    CUdeviceptr at = 0;
    mo_detail detail;
    mo_status status =
        mo_staging_put(&staging, &fake_api, stream, table, size, /* room */ 0, slot, &at, &detail);

    CHECK(status || at);
    return status ? status : mo_staging_used(&fake_api, *slot, &detail);
}

static mo_status put(int stream, const void *table, size_t size, mo_staging_slot **slot)
{
    return put_on(STREAM(stream), table, size, slot);
}

TEST(a_table_that_repeats_on_its_stream_is_not_copied_again)
{
    mo_staging_slot *first, *second;

    start();
    CHECK_EQ(put(1, "table a", 8, &first), MO_OK);
    CHECK_EQ(put(1, "table a", 8, &second), MO_OK);
    CHECK(first == second);
    CHECK_EQ(fake.copies, 1);
    fake.pending = true; /* also while it is in flight: it is only read */
    CHECK_EQ(put(1, "table a", 8, &second), MO_OK);
    CHECK_EQ(fake.copies, 1);
    CHECK_EQ(put(2, "table a", 8, &second), MO_OK); /* another stream is not ordered behind the copy */
    CHECK(first != second);
    CHECK_EQ(fake.copies, 2);
    CHECK_EQ(staging.counts.uploads, 2);
    CHECK_EQ(staging.counts.repeats, 2);
    finish();
}

TEST(a_repeat_waits_for_the_tables_last_use_since_a_handle_may_be_of_another_stream)
{
    CUstream const streams[] = {CU_STREAM_PER_THREAD, STREAM(1), CU_STREAM_LEGACY, NULL};
    mo_staging_slot *first, *second;

    for (int i = 0; i < 4; i++) {
        start();
        fake.pending = true;
        CHECK_EQ(put_on(streams[i], "table a", 8, &first), MO_OK);
        CHECK_EQ(fake.stream_waits, 0);
        CHECK_EQ(put_on(streams[i], "table a", 8, &second), MO_OK);
        CHECK(first == second);
        CHECK_EQ(fake.stream_waits, 1);
        CHECK(fake.waiting == streams[i]);
        CHECK_EQ(fake.waits, 0); /* not the host */
        finish();
    }
}

TEST(a_repeat_whose_last_use_was_seen_complete_does_not_wait)
{
    static char large[5000];
    mo_staging_slot *first, *second;

    start();
    fake.pending = true;
    CHECK_EQ(put(1, large, sizeof large, &first), MO_OK);
    CHECK_EQ(put(1, "table b", 8, &second), MO_OK);
    fake.pending = false;
    large[0] = 1; /* looks for a free slot: both are, and the first is taken */
    CHECK_EQ(put(1, large, sizeof large, &first), MO_OK);
    CHECK(!second->in_flight);
    CHECK_EQ(put(1, "table b", 8, &first), MO_OK);
    CHECK(first == second);
    CHECK_EQ(fake.stream_waits, 0);
    CHECK_EQ(put(1, "table b", 8, &first), MO_OK); /* that use has not been looked at yet */
    CHECK_EQ(fake.stream_waits, 1);
    CHECK_EQ(staging.counts.repeats, 2);
    finish();
}

TEST(a_repeat_that_cannot_wait_fails_and_the_next_one_works)
{
    mo_staging_slot *slot;

    start();
    CHECK_EQ(put(1, "table a", 8, &slot), MO_OK);
    fake.countdown = 1; /* the question about a capture, then the wait */
    fake.code = CUDA_ERROR_INVALID_HANDLE;
    CHECK_EQ(put(1, "table a", 8, &slot), MO_DRIVER);
    CHECK_EQ(put(1, "table a", 8, &slot), MO_OK);
    CHECK_EQ(staging.counts.repeats, 1);
    CHECK_EQ(fake.copies, 1);
    finish();
}

TEST(the_legacy_stream_is_not_asked_whether_it_is_captured)
{
    mo_staging_slot *slot;

    start();
    fake.capturing = true; /* some blocking stream is: the question would be answered with an error */
    CHECK_EQ(put_on(NULL, "table a", 8, &slot), MO_OK);
    CHECK(slot);
    CHECK_EQ(put_on(CU_STREAM_LEGACY, "table b", 8, &slot), MO_OK);
    CHECK(slot);
    CHECK_EQ(fake.capture_questions, 0);
    CHECK_EQ(put_on(CU_STREAM_PER_THREAD, "table c", 8, &slot), MO_OK);
    CHECK(!slot);
    CHECK_EQ(fake.capture_questions, 1);
    fake.capturing = false;
    finish();
    fake_reset();
}

TEST(a_slot_in_flight_is_not_overwritten)
{
    mo_staging_slot *first, *second;

    start();
    fake.pending = true;
    CHECK_EQ(put(1, "table a", 8, &first), MO_OK);
    CHECK_EQ(put(1, "table b", 8, &second), MO_OK);
    CHECK(first != second);
    CHECK_STR(first->host, "table a");
    finish();
}

TEST(the_host_waits_only_when_every_slot_is_in_flight_and_then_for_the_oldest)
{
    mo_staging_slot *slots[MO_STAGING_SLOTS + 1];
    char table[8] = "table 0";

    start();
    fake.pending = true;
    for (int i = 0; i < MO_STAGING_SLOTS; i++, table[6]++)
        CHECK_EQ(put(1, table, 8, &slots[i]), MO_OK);
    CHECK_EQ(fake.waits, 0);
    CHECK_EQ(put(1, "table x", 8, &slots[MO_STAGING_SLOTS]), MO_OK);
    CHECK_EQ(fake.waits, 1);
    CHECK_EQ(staging.counts.waits, 1);
    CHECK(slots[MO_STAGING_SLOTS] == slots[0]);
    finish();
}

TEST(free_slots_are_reused_and_grow)
{
    static char large[100000];
    mo_staging_slot *slot;

    start();
    for (int i = 1; i <= 50; i++) {
        memset(large, i, sizeof large);
        CHECK_EQ(put(1, large, (size_t)i * 2000, &slot), MO_OK);
        CHECK(slot->capacity >= (size_t)i * 2000);
        CHECK(memcmp(slot->host, large, (size_t)i * 2000) == 0);
    }
    CHECK(fake.blocks <= MO_STAGING_SLOTS);
    CHECK_EQ(fake.copies, 50);
    finish();
}

TEST(a_table_whose_copy_failed_is_copied_when_it_comes_again)
{
    mo_staging_slot *slot;

    start();
    CHECK_EQ(put(1, "table a", 8, &slot), MO_OK); /* the slot that the next one takes over */
    fake.countdown = 2;                           /* cuStreamIsCapturing, cuEventQuery, then the copy */
    fake.code = CUDA_ERROR_INVALID_HANDLE;
    CHECK_EQ(put(1, "table b", 8, &slot), MO_DRIVER);
    CHECK_EQ(fake.copies, 1);
    CHECK_EQ(put(1, "table b", 8, &slot), MO_OK);
    CHECK_EQ(fake.copies, 2);
    CHECK_EQ(put(1, "table a", 8, &slot), MO_OK); /* and what lay there before is not taken for it */
    CHECK_EQ(fake.copies, 3);
    finish();
}

TEST(a_captured_table_gets_buffers_of_its_own_for_ever)
{
    mo_staging_slot *slot = NULL;

    start();
    fake.capturing = true;
    for (int i = 0; i < 20; i++) {
        CHECK_EQ(put(1, "table a", 8, &slot), MO_OK);
        CHECK(slot == NULL);
    }
    CHECK_EQ(staging.counts.captured, 20);
    CHECK_EQ(fake.events, 0); /* an event recorded in a capture could not be asked */
    fake.capturing = false;
    CHECK_EQ(put(1, "table a", 8, &slot), MO_OK);
    CHECK_EQ(fake.copies, 21); /* what a graph owns is no repeat */
    finish();
    fake_reset(); /* the graphs' buffers go with the driver */
}

TEST(the_room_behind_a_table_is_the_works_own_and_a_slot_that_lacks_it_is_no_repeat)
{
    mo_staging_slot *first, *second;
    CUdeviceptr at = 0;

    start();
    CHECK_EQ(mo_staging_put(&staging, &fake_api, STREAM(1), "table a", 8, 0, &first, &at, NULL), MO_OK);
    CHECK_EQ(mo_staging_used(&fake_api, first, NULL), MO_OK);
    CHECK_EQ(mo_staging_put(&staging, &fake_api, STREAM(1), "table a", 8, 100000, &second, &at, NULL), MO_OK);
    CHECK_EQ(mo_staging_used(&fake_api, second, NULL), MO_OK);
    CHECK_EQ(fake.copies, 2);
    CHECK(second->capacity >= 100008 && at == second->device);
    CHECK_EQ(mo_staging_put(&staging, &fake_api, STREAM(1), "table a", 8, 100000, &first, &at, NULL), MO_OK);
    CHECK_EQ(mo_staging_used(&fake_api, first, NULL), MO_OK);
    CHECK(first == second);
    CHECK_EQ(fake.copies, 2);
    CHECK_EQ(mo_staging_put(&staging, &fake_api, STREAM(1), "table a", 8, SIZE_MAX, &first, &at, NULL),
             MO_OVERFLOW);
    finish();
}

/* Calls in an order that meets every driver function of the module; the first failure's status. */
static mo_status every_call(void)
{
    static char large[9000];
    mo_staging_slot *slot;
    mo_status status = put(1, "table a", 8, &slot);

    if (!status)
        status = put(1, "table a", 8, &slot);
    for (int i = 0; !status && i <= MO_STAGING_SLOTS; i++) {
        large[0]++;
        fake.pending = i > 1; /* at 2 and later the slots fill up, at the end one is waited for */
        status = put(1, large, i % 2 ? sizeof large : 100, &slot);
    }
    return status;
}

TEST(failing_each_driver_call_in_turn_leaks_nothing_and_the_next_call_works)
{
    for (int n = 0, done = 0; !done; n++) {
        mo_staging_slot *slot;
        start();
        fake.countdown = n;
        fake.code = n % 2 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_HANDLE;
        mo_status status = every_call();
        done = fake.countdown >= 0; /* not reached: all calls were made */
        CHECK(done ? status == MO_OK : status == (n % 2 ? MO_NO_DEVICE_MEMORY : MO_DRIVER));
        fake.countdown = -1;
        CHECK_EQ(put(3, "table z", 8, &slot), MO_OK);
        CHECK_STR(slot->host, "table z");
        finish();
        CHECK(n < 1000);
    }
}

TEST_MAIN
