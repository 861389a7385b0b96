#include "driver/model_device.h"

#include "driver_contract.h"

#define MIB ((size_t)1 << 20)
#define A   ((mo_stream)0x10)
#define B   ((mo_stream)0x20)
#define C   ((mo_stream)0x30)

/* Each violation is caught, and what only looks like one is not. */

static mo_model_device device;

static mo_driver *fresh(size_t granularity)
{
    mo_model_device_close(&device);
    mo_model_device_open(&device, 64 * MIB, granularity);
    mo_model_device_watch(&device);
    return &device.table;
}

/* Granules of 2 MiB, mapped at fresh addresses. */
static mo_address memory(mo_driver *m, size_t granules, mo_physical *handles)
{
    const mo_address a = contract_reserve(m, granules);
    for (size_t i = 0; i < granules; i++) {
        const mo_physical h = contract_create(m, 1);
        contract_map(m, a + i * 2 * MIB, 1, h);
        if (handles)
            handles[i] = h;
    }
    return a;
}

/* `after` waits on the device for what is queued on `before`. */
static void order(mo_driver *m, mo_stream before, mo_stream after)
{
    mo_event *e = contract_event(m);
    CHECK_OK(m->event_record(m, e, before, NULL));
    CHECK_OK(m->stream_wait(m, after, e, NULL));
    CHECK_OK(m->event_destroy(m, e, NULL));
}

/* The host asks whether what is queued on a stream is over. */
static mo_status ask(mo_driver *m, mo_stream stream)
{
    mo_event *e = contract_event(m);
    CHECK_OK(m->event_record(m, e, stream, NULL));
    const mo_status status = m->event_query(m, e, NULL);
    CHECK_OK(m->event_destroy(m, e, NULL));
    return status;
}

#define CHECK_CLEAN()                                                                                        \
    do {                                                                                                     \
        test_checks++;                                                                                       \
        if (device.violations)                                                                               \
            TEST_FAIL("%s", device.violation);                                                               \
    } while (0)

#define CHECK_VIOLATED(words)                                                                                \
    do {                                                                                                     \
        CHECK_EQ(device.violations, 1);                                                                      \
        if (!strstr(device.violation, words))                                                                \
            TEST_FAIL("\"%s\" is not said in: %s", words, device.violation);                                 \
    } while (0)

/* ---- what can be used ---------------------------------------------------------------------------------- */

TEST(using_what_is_not_mapped_is_a_violation)
{
    mo_driver *m = fresh(2 * MIB);
    const mo_address a = memory(m, 2, NULL);
    mo_model_device_use(&device, A, a, 4 * MIB, 1);
    CHECK_CLEAN();
    mo_model_device_use(&device, A, a + 4 * MIB - 1, 2, 1);
    CHECK_VIOLATED("where nothing is mapped and granted");
}

TEST(using_what_is_mapped_and_not_granted_is_a_violation)
{
    mo_driver *m = fresh(2 * MIB);
    const mo_address a = contract_reserve(m, 1);
    CHECK_OK(m->map(m, a, 2 * MIB, contract_create(m, 1), NULL));
    CHECK(!mo_model_device_usable(&device, a, 1));
    mo_model_device_use(&device, A, a, 1, 1);
    CHECK_VIOLATED("where nothing is mapped and granted");
    CHECK_OK(m->grant(m, a, 2 * MIB, NULL));
    CHECK(mo_model_device_usable(&device, a, 2 * MIB));
    mo_model_device_use(&device, A, a, 1, 1);
    CHECK_EQ(device.violations, 1);
}

TEST(what_lies_behind_an_address_is_told)
{
    mo_driver *m = fresh(2 * MIB);
    mo_physical handles[2];
    const mo_address a = memory(m, 2, handles);
    CHECK_EQ(mo_model_device_behind(&device, a), handles[0]);
    CHECK_EQ(mo_model_device_behind(&device, a + 2 * MIB - 1), handles[0]);
    CHECK_EQ(mo_model_device_behind(&device, a + 2 * MIB), handles[1]);
    CHECK_EQ(mo_model_device_behind(&device, a + 4 * MIB), 0);
    CHECK(mo_model_device_usable(&device, a + 1, 4 * MIB - 1));
    CHECK(!mo_model_device_usable(&device, a + 1, 4 * MIB));
    CHECK(!mo_model_device_usable(&device, a - 1, 2));
}

TEST(segments_are_used_as_mappings_are)
{
    mo_driver *m = fresh(0);
    mo_address a;
    CHECK_OK(m->segment_alloc(m, 1000, NULL, &a));
    CHECK(mo_model_device_usable(&device, a, 1000));
    CHECK(!mo_model_device_usable(&device, a, 1001));
    mo_model_device_use(&device, A, a, 1000, 1);
    CHECK_CLEAN();
    mo_model_device_use(&device, B, a + 999, 1, 2);
    CHECK_VIOLATED("is not behind");
    CHECK_OK(m->segment_free(m, a, NULL));
    mo_model_device_use(&device, A, a, 1, 1);
    CHECK_EQ(device.violations, 2);
}

/* ---- unmap --------------------------------------------------------------------------------------------- */

TEST(unmapping_under_work_that_is_pending_is_a_violation)
{
    mo_driver *m = fresh(2 * MIB);
    const mo_address a = memory(m, 1, NULL);
    mo_model_device_use(&device, A, a, 1, 1);
    CHECK_OK(m->unmap(m, a, 2 * MIB, NULL));
    CHECK_VIOLATED("unmap: operation 1 of stream 0x10 uses memory at");
}

TEST(unmapping_is_a_violation_also_where_the_work_is_over_by_luck)
{
    mo_driver *m = fresh(2 * MIB);
    const mo_address a = memory(m, 1, NULL);
    mo_model_device_use(&device, A, a, 1, 1);
    mo_model_device_complete(&device, A, 1);
    CHECK_OK(m->unmap(m, a, 2 * MIB, NULL));
    CHECK_VIOLATED("the host does not know it to be over");
}

TEST(a_stream_that_waits_is_not_the_host_that_knows)
{
    mo_driver *m = fresh(2 * MIB);
    const mo_address a = memory(m, 1, NULL);
    mo_model_device_use(&device, A, a, 1, 1);
    order(m, A, B);
    CHECK_EQ(ask(m, B), MO_NOT_READY);
    CHECK_OK(m->unmap(m, a, 2 * MIB, NULL));
    CHECK_VIOLATED("unmap");
}

TEST(unmapping_what_an_event_said_to_be_over_is_fine)
{
    mo_driver *m = fresh(2 * MIB);
    const mo_address a = memory(m, 1, NULL);
    mo_model_device_use(&device, A, a, 1, 1);
    CHECK_EQ(ask(m, A), MO_NOT_READY);
    mo_model_device_complete(&device, A, 1);
    CHECK_EQ(ask(m, A), MO_OK);
    CHECK_OK(m->unmap(m, a, 2 * MIB, NULL));
    CHECK_CLEAN();
}

TEST(an_event_that_is_over_says_so_of_all_that_it_is_behind)
{
    mo_driver *m = fresh(2 * MIB);
    const mo_address a = memory(m, 1, NULL);
    mo_model_device_use(&device, A, a, 1, 1);
    order(m, A, B);
    order(m, B, C);
    mo_model_device_complete(&device, A, 100);
    mo_model_device_complete(&device, B, 100);
    mo_model_device_complete(&device, C, 100);
    CHECK_EQ(ask(m, C), MO_OK);
    CHECK_OK(m->unmap(m, a, 2 * MIB, NULL));
    CHECK_CLEAN();
}

TEST(an_event_recorded_before_the_use_says_nothing_of_it)
{
    mo_driver *m = fresh(2 * MIB);
    const mo_address a = memory(m, 1, NULL);
    CHECK_EQ(ask(m, A), MO_OK);
    mo_model_device_use(&device, A, a, 1, 1);
    mo_model_device_complete(&device, A, 1);
    CHECK_OK(m->unmap(m, a, 2 * MIB, NULL));
    CHECK_VIOLATED("unmap");
}

TEST(after_a_synchronize_all_may_be_unmapped)
{
    mo_driver *m = fresh(2 * MIB);
    const mo_address a = memory(m, 2, NULL);
    mo_model_device_use(&device, A, a, 4 * MIB, 1);
    mo_model_device_use(&device, B, a + 3 * MIB, 1, 1);
    CHECK_OK(m->synchronize(m, NULL));
    CHECK_OK(m->unmap(m, a, 4 * MIB, NULL));
    CHECK_CLEAN();
}

TEST(a_second_mapping_that_nobody_uses_may_go_while_the_first_is_used)
{
    mo_driver *m = fresh(2 * MIB);
    mo_physical h;
    const mo_address a = memory(m, 1, &h), b = contract_reserve(m, 1);
    contract_map(m, b, 1, h);
    mo_model_device_use(&device, A, a, 1, 1);
    CHECK_OK(m->unmap(m, b, 2 * MIB, NULL));
    CHECK_CLEAN();
    CHECK_OK(m->unmap(m, a, 2 * MIB, NULL));
    CHECK_VIOLATED("unmap");
}

TEST(each_use_of_a_mapping_counts_until_it_is_over_not_only_the_first)
{
    mo_driver *m = fresh(2 * MIB);
    const mo_address a = memory(m, 1, NULL);
    mo_model_device_use(&device, A, a, 1, 1);
    mo_model_device_complete(&device, A, 1);
    CHECK_EQ(ask(m, A), MO_OK);
    mo_model_device_use(&device, A, a + MIB, 1, 1);
    CHECK_OK(m->unmap(m, a, 2 * MIB, NULL));
    CHECK_VIOLATED("operation 2");
}

/* ---- the same bytes, by two owners ------------------------------------------------------------------------ */

TEST(one_stream_is_in_order)
{
    mo_driver *m = fresh(2 * MIB);
    const mo_address a = memory(m, 1, NULL);
    for (uint64_t owner = 1; owner < 10; owner++)
        mo_model_device_use(&device, A, a, MIB, owner);
    CHECK_CLEAN();
}

TEST(another_stream_that_does_not_wait_is_a_violation)
{
    mo_driver *m = fresh(2 * MIB);
    const mo_address a = memory(m, 1, NULL);
    mo_model_device_use(&device, A, a, MIB, 1);
    mo_model_device_use(&device, B, a + MIB - 1, MIB, 2);
    CHECK_VIOLATED("operation 1 of stream 0x20 (owner 2) uses");
}

TEST(another_stream_is_a_violation_also_where_the_work_is_over_by_luck)
{
    mo_driver *m = fresh(2 * MIB);
    const mo_address a = memory(m, 1, NULL);
    mo_model_device_use(&device, A, a, MIB, 1);
    mo_model_device_complete(&device, A, 1);
    mo_model_device_use(&device, B, a, MIB, 2);
    CHECK_VIOLATED("is not behind");
}

TEST(other_bytes_of_a_granule_are_anyones)
{
    mo_driver *m = fresh(2 * MIB);
    const mo_address a = memory(m, 2, NULL);
    mo_model_device_use(&device, A, a, MIB, 1);
    mo_model_device_use(&device, B, a + MIB, 2 * MIB, 2);
    mo_model_device_use(&device, C, a + 3 * MIB, MIB, 3);
    CHECK_CLEAN();
}

TEST(a_stream_that_waited_may_use_the_bytes)
{
    mo_driver *m = fresh(2 * MIB);
    const mo_address a = memory(m, 1, NULL);
    mo_model_device_use(&device, A, a, MIB, 1);
    order(m, A, B);
    mo_model_device_use(&device, B, a, MIB, 2);
    order(m, B, C);
    mo_model_device_use(&device, C, a, MIB, 3);
    CHECK_CLEAN();
    CHECK(mo_model_device_ordered(&device, A, C));
    CHECK(!mo_model_device_ordered(&device, C, A));
}

TEST(a_wait_for_an_event_from_before_the_use_orders_nothing)
{
    mo_driver *m = fresh(2 * MIB);
    const mo_address a = memory(m, 1, NULL);
    mo_event *e = contract_event(m);
    CHECK_OK(m->event_record(m, e, A, NULL));
    mo_model_device_use(&device, A, a, MIB, 1);
    CHECK_OK(m->stream_wait(m, B, e, NULL));
    mo_model_device_use(&device, B, a, MIB, 2);
    CHECK_VIOLATED("is not behind");
}

TEST(a_wait_keeps_what_the_event_stood_for_when_it_is_recorded_again)
{
    mo_driver *m = fresh(2 * MIB);
    const mo_address a = memory(m, 1, NULL);
    mo_event *e = contract_event(m);
    mo_model_device_use(&device, A, a, MIB, 1);
    CHECK_OK(m->event_record(m, e, C, NULL));
    CHECK_OK(m->event_record(m, e, A, NULL));
    CHECK_OK(m->event_record(m, e, C, NULL)); /* stands for nothing of A any more */
    CHECK_OK(m->stream_wait(m, B, e, NULL));
    mo_model_device_use(&device, B, a, MIB, 2);
    CHECK_VIOLATED("is not behind");
}

TEST(what_the_host_knows_to_be_over_is_before_everything)
{
    mo_driver *m = fresh(2 * MIB);
    const mo_address a = memory(m, 1, NULL);
    mo_model_device_use(&device, A, a, MIB, 1);
    mo_model_device_complete(&device, A, 1);
    CHECK(!mo_model_device_ordered(&device, A, B));
    CHECK_EQ(ask(m, A), MO_OK);
    CHECK(mo_model_device_ordered(&device, A, B));
    mo_model_device_use(&device, B, a, MIB, 2);
    CHECK_CLEAN();
}

TEST(uses_of_one_owner_are_its_own_to_order)
{
    mo_driver *m = fresh(2 * MIB);
    const mo_address a = memory(m, 1, NULL);
    mo_model_device_use(&device, A, a, MIB, 7);
    mo_model_device_use(&device, B, a, MIB, 7);
    mo_model_device_use(&device, A, a, MIB, 7);
    CHECK_CLEAN();
    order(m, A, C);
    mo_model_device_use(&device, C, a, MIB, 8); /* behind A's, not B's */
    CHECK_VIOLATED("operation 1 of stream 0x20 (owner 7) that used");
}

TEST(a_use_under_another_address_of_the_granule_is_seen)
{
    mo_driver *m = fresh(2 * MIB);
    mo_physical h;
    const mo_address a = memory(m, 1, &h), b = contract_reserve(m, 1);
    mo_model_device_use(&device, A, a + MIB, 512, 1);
    CHECK_EQ(device.maps_in_use, 0);
    contract_map(m, b, 1, h);
    CHECK_EQ(device.maps_in_use, 1);
    mo_model_device_use(&device, B, b, MIB, 2);
    mo_model_device_use(&device, A, b + MIB, 512, 3);
    CHECK_CLEAN();
    mo_model_device_use(&device, B, b + MIB + 511, 1, 4);
    CHECK_VIOLATED("is not behind operation 2 of stream 0x10 (owner 3)");
}

TEST(mapping_again_what_is_known_to_be_over_is_no_map_in_use)
{
    mo_driver *m = fresh(2 * MIB);
    mo_physical h;
    const mo_address a = memory(m, 1, &h), b = contract_reserve(m, 2);
    mo_model_device_use(&device, A, a, MIB, 1);
    CHECK_OK(m->synchronize(m, NULL));
    contract_map(m, b, 1, h);
    CHECK_EQ(device.maps_in_use, 0);
    CHECK_EQ(device.violations, 0);
}

TEST(a_use_covers_only_its_part_of_an_older_one)
{
    mo_driver *m = fresh(2 * MIB);
    const mo_address a = memory(m, 1, NULL);
    mo_model_device_use(&device, A, a, 2 * MIB, 1);
    order(m, A, B);
    mo_model_device_use(&device, B, a + MIB, 512, 2);
    order(m, B, C);
    mo_model_device_use(&device, C, a, 2 * MIB, 3); /* behind B, and by it behind A */
    CHECK_CLEAN();
    mo_model_device_use(&device, A, a + MIB + 512, 1, 4);
    CHECK_VIOLATED("is not behind operation");
}

TEST(memory_is_idle_when_the_host_knows_its_uses_to_be_over)
{
    mo_driver *m = fresh(2 * MIB);
    mo_physical h;
    const mo_address a = memory(m, 1, &h), b = contract_reserve(m, 1);
    contract_map(m, b, 1, h);
    CHECK(mo_model_device_idle(&device, a, 2 * MIB));
    mo_model_device_use(&device, A, a + MIB, 512, 1);
    CHECK(!mo_model_device_idle(&device, a, 2 * MIB));
    CHECK(!mo_model_device_idle(&device, b + MIB + 511, 1)); /* under the other address */
    CHECK(mo_model_device_idle(&device, b, MIB));
    CHECK(mo_model_device_idle(&device, b + MIB + 512, MIB - 512));
    order(m, A, B);
    mo_model_device_complete(&device, A, 10);
    CHECK(!mo_model_device_idle(&device, a, 2 * MIB));
    CHECK_EQ(ask(m, A), MO_OK);
    CHECK(mo_model_device_idle(&device, a, 2 * MIB));
}

/* ---- captures ------------------------------------------------------------------------------------------ */

TEST(an_event_recorded_on_a_stream_under_capture_is_a_violation)
{
    mo_driver *m = fresh(2 * MIB);
    mo_event *e = contract_event(m);
    mo_model_device_capture(&device, A, 3);
    CHECK_OK(m->event_record(m, e, B, NULL));
    CHECK_CLEAN();
    CHECK_OK(m->event_record(m, e, A, NULL));
    CHECK_VIOLATED("event_record: stream 0x10 is being captured");
}

TEST(a_stream_under_capture_that_is_made_to_wait_is_a_violation)
{
    mo_driver *m = fresh(2 * MIB);
    mo_event *e = contract_event(m);
    CHECK_OK(m->event_record(m, e, A, NULL));
    mo_model_device_capture(&device, A, 3);
    CHECK_OK(m->stream_wait(m, B, e, NULL)); /* what it stands for is from before */
    CHECK_CLEAN();
    CHECK_OK(m->stream_wait(m, A, e, NULL));
    CHECK_VIOLATED("stream_wait: stream 0x10 is being captured");
    mo_model_device_capture(&device, A, 0);
    CHECK_OK(m->event_record(m, e, A, NULL));
    CHECK_EQ(device.violations, 1);
}

/* Against the definition itself: all operations kept, and the relation by reachability. */
TEST(random_uses_are_judged_as_the_definition_says)
{
    enum { STREAMS = 3, OPERATIONS = 60 };
    uint64_t random = test_seed();
    for (int round = 0, n = test_rounds(300, 30000); round < n; round++) {
        struct {
            uint64_t stream, owner, reaches; /* bits of operations that this one is behind */
            size_t from, to;
        } op[OPERATIONS];
        uint64_t last[STREAMS] = {0}; /* bits: what is before the next operation of the stream */
        mo_driver *m = fresh(2 * MIB);
        const mo_address a = memory(m, 1, NULL);
        bool violated = false;
        for (int i = 0; i < OPERATIONS && !violated; i++) {
            const uint64_t s = test_random(&random) % STREAMS, t = test_random(&random) % STREAMS;
            if (s != t && test_random(&random) % 2) {
                order(m, (mo_stream)(s + 1), (mo_stream)(t + 1));
                last[t] |= last[s];
            }
            op[i].stream = s;
            op[i].owner = test_random(&random) % 8 + 1;
            op[i].from = test_random(&random) % 64;
            op[i].to = op[i].from + 1 + test_random(&random) % 4;
            op[i].reaches = last[s];
            last[s] |= UINT64_C(1) << i;
            for (size_t byte = op[i].from; byte < op[i].to; byte++)
                for (int j = 0; j < i; j++) {
                    bool last_there = op[j].from <= byte && byte < op[j].to;
                    for (int k = j + 1; k < i; k++)
                        last_there &= !(op[k].from <= byte && byte < op[k].to && op[k].reaches >> j & 1);
                    violated |= last_there && op[j].owner != op[i].owner && !(op[i].reaches >> j & 1);
                }
            mo_model_device_use(&device, (mo_stream)(s + 1), a + op[i].from * 512,
                                (op[i].to - op[i].from) * 512, op[i].owner);
            CHECK_EQ(device.violations > 0, violated);
        }
    }
}

TEST_MAIN
