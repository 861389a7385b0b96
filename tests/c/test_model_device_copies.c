#include "driver/model_device.h"

#include "test.h"

static mo_model_device device;

static mo_driver *fresh(void)
{
    mo_model_device_close(&device);
    mo_model_device_open(&device, 1 << 20, 0);
    mo_model_device_watch(&device);
    return &device.table;
}

TEST(pinned_memory_is_bounded_where_the_test_says_so)
{
    mo_driver *m = fresh();
    void *one = NULL, *other = NULL;
    mo_detail detail;
    device.pinned_capacity = 5000;
    CHECK_EQ(m->pinned_alloc(m, 4000, NULL, &one), MO_OK);
    CHECK_EQ(m->pinned_alloc(m, 1001, &detail, &other), MO_NO_HOST_MEMORY);
    CHECK(detail.text[0] && !other);
    CHECK_EQ(m->pinned_alloc(m, 1000, NULL, &other), MO_OK);
    CHECK_EQ(device.pinned, 5000);
    CHECK_EQ(m->pinned_free(m, one, NULL), MO_OK);
    CHECK_EQ(m->pinned_free(m, other, NULL), MO_OK);
    CHECK_EQ(device.pinned, 0);
    CHECK_EQ(mo_model_device_live(&device), 0);
}

TEST(streams_have_names_of_their_own)
{
    mo_driver *m = fresh();
    mo_stream one, other;
    CHECK_EQ(m->stream_create(m, NULL, &one), MO_OK);
    CHECK_EQ(m->stream_destroy(m, one, NULL), MO_OK);
    CHECK_EQ(m->stream_destroy(m, one, NULL), MO_INVALID);
    CHECK_EQ(m->stream_create(m, NULL, &other), MO_OK);
    CHECK(one && other && one != other);
    CHECK_EQ(m->stream_destroy(m, other, NULL), MO_OK);
}

/* A copy is behind all that used either end, or it is a violation, and so is what is not behind it. */
TEST(copies_that_are_not_ordered_are_violations)
{
    for (int ordered = 0; ordered < 2; ordered++) {
        mo_driver *m = fresh();
        mo_address memory;
        mo_stream side;
        mo_event *event;
        void *host;
        CHECK_EQ(m->segment_alloc(m, 8192, NULL, &memory), MO_OK);
        CHECK_EQ(m->pinned_alloc(m, 8192, NULL, &host), MO_OK);
        CHECK_EQ(m->stream_create(m, NULL, &side), MO_OK);
        CHECK_EQ(m->event_create(m, NULL, &event), MO_OK);
        mo_model_device_use(&device, NULL, memory, 4096, 1);
        if (ordered) {
            CHECK_EQ(m->event_record(m, event, NULL, NULL), MO_OK);
            CHECK_EQ(m->stream_wait(m, side, event, NULL), MO_OK);
        }
        CHECK_EQ(m->copy_to_host(m, side, host, memory, 4096, NULL), MO_OK);
        CHECK_EQ(device.violations, !ordered);
        CHECK_EQ(m->copy_to_host(m, NULL, (char *)host + 4096, memory + 4096, 4096, NULL),
                 MO_OK); /* other bytes */
        CHECK_EQ(device.violations, !ordered);
        /* The host's end alone. */
        CHECK_EQ(m->copy_to_device(m, NULL, memory + 4096, host, 4096, NULL), MO_OK);
        CHECK_EQ(device.violations, 1 + !ordered);
    }
}

TEST(a_copy_is_within_one_pinned_block)
{
    mo_driver *m = fresh();
    mo_address memory;
    void *host;
    char other[16];
    CHECK_EQ(m->segment_alloc(m, 8192, NULL, &memory), MO_OK);
    CHECK_EQ(m->pinned_alloc(m, 4096, NULL, &host), MO_OK);
    CHECK_EQ(m->copy_to_host(m, NULL, other, memory, 16, NULL), MO_INVALID);
    CHECK_EQ(m->copy_to_host(m, NULL, (char *)host + 1, memory, 4096, NULL), MO_INVALID);
    CHECK_EQ(m->copy_to_device(m, NULL, memory, host, 0, NULL), MO_INVALID);
    CHECK_EQ(m->copy_to_device(m, NULL, memory, host, 4096, NULL), MO_OK);
    CHECK_EQ(device.violations, 0);
    /* Memory that is not there is used. */
    CHECK_EQ(m->copy_to_device(m, NULL, memory + 8000, host, 4096, NULL), MO_OK);
    CHECK_EQ(device.violations, 1);
}

TEST_MAIN
