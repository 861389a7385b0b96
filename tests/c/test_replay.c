/* A trace through the allocator on a device of numbers: what is counted, what is too small, where the frontier lies. */
#include "alloc/replay.h"
#include "base/hostmem.h"
#include "test.h"

#define MIB ((size_t)1 << 20)

static mo_detail why;
static mo_trace_text trace;
static mo_replay_result result;

static void parse(const char *text)
{
    mo_trace_text_clear(&trace);
    CHECK_EQ(mo_trace_text_parse(text, strlen(text), &why, &trace), MO_OK);
}

static mo_replay_options checked(void)
{
    mo_replay_options o = mo_replay_defaults();
    o.check = true;
    return o;
}

/* Every way that a run can go. */
static mo_replay_options way(int number)
{
    mo_replay_options o = checked();
    o.lazy = number & 1;
    o.double_map = number & 2;
    o.recall = number & 4;
    o.granularity = number & 8 ? 0 : 2 * MIB;
    return o;
}

static void run(const mo_replay_options *options)
{
    mo_replay_clear(&result);
    why.text[0] = 0;
    const mo_status status = mo_replay_run(&trace, options, &why, &result);
    if (status)
        TEST_FAIL("%s: %s", mo_status_name(status), why.text);
}

TEST(requests_are_counted_and_steps_add_up)
{
    mo_replay_options o = checked();

    parse("a 1 6000000 0\ns\na 2 3000000 0\nr 1 4\nf 1 0\ns\na 3 100 0\nf 3 0\nf 2 4\n");
    run(&o);
    CHECK(result.completed);
    CHECK_STR(result.failure, "");
    CHECK_EQ(result.live_peak, 9000000);
    CHECK_EQ(result.operations,
             8); /* 3 requests, 3 frees, 1 record_stream, 1 more for the free on another stream */
    CHECK_EQ(result.step_count, 2);
    CHECK(result.steps[0].driver_calls >= 7); /* three granules to create and map, and a grant */
    CHECK(result.steps[0].held >= 6 * MIB && result.steps[0].held <= result.peak_reserved);
    CHECK(result.steps[0].driver_calls + result.steps[1].driver_calls <= result.total.driver_calls);
    CHECK(result.peak_reserved >= 9000000 && result.peak_reserved <= 16 * MIB);
    CHECK(result.nanoseconds > 0);
}

TEST(the_slowest_requests_of_a_hundred_do_not_count_for_the_99th_percentile)
{
    mo_replay_options o = mo_replay_defaults();
    char text[1 << 15];
    size_t length = 0;

    parse("s\na 1 1000 0\n");
    run(&o);
    CHECK(result.request.p50 > 0);
    CHECK_EQ(result.request.p50, result.request.p99);
    CHECK_EQ(result.request.p50, result.request.max);
    for (size_t i = 0; i < 400; i++) /* two of them map a thousand granules */
        length += (size_t)snprintf(text + length, sizeof text - length, "a %zu %zu 0\nf %zu 0\n", i,
                                   i % 200 == 50 ? (i + 1000) * 2 * MIB : 1000, i);
    parse(text);
    for (int n = 0; n < 50; n++) { /* a busy machine delays small requests too */
        run(&o);
        CHECK(result.request.p50 <= result.request.p99 && result.request.max <= result.nanoseconds);
        if (10 * result.request.p99 < result.request.max)
            return;
    }
    TEST_FAIL("none of 50 runs has a 99th percentile below a tenth of its slowest request");
}

TEST(a_trace_without_steps_is_one)
{
    mo_replay_options o = checked();

    parse("a 1 6000000 0\nf 1 0\n");
    run(&o);
    CHECK_EQ(result.step_count, 1);
    CHECK_EQ(result.steps[0].driver_calls, result.total.driver_calls);
    CHECK_EQ(result.steps[0].held, result.total.held);
}

TEST(a_device_that_is_too_small_ends_the_run_at_a_line)
{
    for (int i = 0; i < 16; i++) {
        mo_replay_options o = way(i);
        o.memory = 8 * MIB;
        parse("a 1 6000000 0\n# the next does not fit\na 2 6000000 0\ns\n");
        run(&o);
        CHECK(!result.completed);
        CHECK_EQ(result.failed_line, 3);
        CHECK(strncmp(result.failure, "CUDA out of memory. Tried to allocate", 37) == 0);
        CHECK_EQ(result.live_peak, 12000000);
        CHECK(result.peak_reserved <= 8 * MIB);
    }
}

TEST(a_steady_step_calls_no_driver)
{
    static char text[8192];
    int at = 0, id = 0;

    for (int step = 0; step < 20; step++) {
        for (int i = 0; i < 6; i++)
            at += sprintf(text + at, "a %d %d 0\n", id + i, 5000000 + 1000000 * i);
        for (int i = 0; i < 6; i++)
            at += sprintf(text + at, "f %d 0\n", id + i);
        id += 6;
        at += sprintf(text + at, "s\n");
    }
    parse(text);
    for (int i = 0; i < 8; i++) {
        mo_replay_options o = way(i);
        run(&o);
        CHECK(result.completed);
        CHECK_EQ(result.step_count, 20);
        CHECK(result.steps[0].driver_calls > 0);
        CHECK_EQ(result.steps[19].driver_calls, 0);
        CHECK_EQ(result.total.host_waits, 0);
        CHECK_EQ(result.steps[19].held, result.peak_reserved);
    }
}

/* Two free granules that do not touch, of work that is not over: the third request gets them once it is. */
TEST(waits_of_the_host_are_counted)
{
    mo_replay_options o = {.granularity = 2u << 20, .memory = 8u << 20, .lazy = true, .slack = 20};

    parse("a 1 2097152 0\na 2 2097152 0\na 3 2097152 0\na 4 2097152 0\nf 1 0\nf 3 0\na 5 4194304 0\ns\n"
          "f 2 0\nf 4 0\nf 5 0\ns\n");
    run(&o);
    CHECK(result.completed);
    CHECK_EQ(result.total.host_waits, 1);
    CHECK_EQ(result.steps[0].host_waits, 1);
    CHECK_EQ(result.steps[1].host_waits, 0);
    o.double_map = true;
    run(&o);
    CHECK_EQ(result.total.host_waits, 0);
}

TEST(blocks_of_no_bytes_have_no_address_and_do_no_harm)
{
    mo_replay_options o = checked();

    parse("a 1 0 0\na 2 0 3\nr 1 3\nf 2 3\nf 1 3\n");
    run(&o);
    CHECK(result.completed);
    CHECK_EQ(result.live_peak, 0);
    CHECK_EQ(result.peak_reserved, 0);
}

TEST(pools_are_kept_apart_and_given_back)
{
    mo_replay_options o = checked();

    parse("a 1 3000000 0\nf 1 0\na 2 3000000 0 0 7\nf 2 0\na 3 3000000 0 0 18446744073709551615\nf 3 0\ns\n");
    run(&o);
    CHECK(result.completed);
    CHECK_EQ(result.live_peak, 3000000);
}

TEST(a_trace_is_replayed_a_device_at_a_time)
{
    mo_replay_options o = checked();
    uint32_t device = 77;

    parse("a 1 3000000 0\na 2 5000000 0 5\nr 2 1\nf 1 0\nf 2 0\n");
    CHECK_EQ(mo_replay_device(&trace, &why, &device), MO_INVALID);
    CHECK_STR(why.text,
              "the trace has requests on several devices, 0 and 5 among them: select the one to replay");
    o.device = 5;
    run(&o);
    CHECK_EQ(result.live_peak, 5000000);
    CHECK_EQ(result.operations, 3);
    o.device = 4;
    CHECK_EQ(mo_replay_run(&trace, &o, &why, &result), MO_INVALID);
    CHECK_STR(why.text, "the trace has no request on device 4");
    o.device = 400;
    CHECK_EQ(mo_replay_run(&trace, &o, &why, &result), MO_INVALID);

    parse("a 2 5000000 0 5\n");
    CHECK_EQ(mo_replay_device(&trace, &why, &device), MO_OK);
    CHECK_EQ(device, 5);
    parse("w 1 2\ns\n");
    CHECK_EQ(mo_replay_device(&trace, &why, &device), MO_INVALID);
    CHECK_STR(why.text, "the trace has no requests: there is nothing to replay");
}

TEST(the_frontier_is_the_smallest_device_that_completes)
{
    mo_replay_options o = checked();
    size_t frontier = 0;

    parse("a 1 41943040 0\ns\nf 1 0\na 2 20971520 0\na 3 20971520 0\ns\n");
    mo_replay_clear(&result);
    CHECK_EQ(mo_replay_frontier(&trace, &o, &why, &frontier, &result), MO_OK);
    CHECK(result.completed);
    CHECK_EQ(result.live_peak, 40 * MIB);
    CHECK_EQ(frontier, 40 * MIB);
    o.memory = 40 * MIB;
    run(&o);
    CHECK(result.completed);
    o.memory = 40 * MIB - 1;
    run(&o);
    CHECK(!result.completed);
}

/* ---- the recorded workloads -------------------------------------------------------------------------------------- */

static const char *const recorded[] = {"gnn", "gpt_varlen", "moe", "two_streams", "unet"};

static void load(const char *name)
{
    char path[64];
    static char text[1 << 20];

    snprintf(path, sizeof path, "benchmarks/traces/%s.txt", name);
    FILE *file = fopen(path, "r");
    if (!file)
        TEST_FAIL("%s is not here: the tests are started in the project's folder", path);
    const size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    parse(text);
}

TEST(recorded_workloads_complete_in_every_way_and_nobody_reads_anothers_bytes)
{
    for (size_t w = 0; w < sizeof recorded / sizeof *recorded; w++) {
        load(recorded[w]);
        for (int i = 0; i < 16; i++) {
            mo_replay_options o = way(i);
            run(&o);
            CHECK(result.completed);
            CHECK_EQ(result.step_count, trace.steps);
            CHECK(result.peak_reserved >= result.live_peak);
        }
    }
}

TEST(a_recorded_workloads_frontier_lies_between_its_live_peak_and_what_it_holds)
{
    load("gpt_varlen");
    for (int lazy = 0; lazy < 2; lazy++) {
        mo_replay_options o = mo_replay_defaults();
        size_t frontier = 0;
        o.lazy = lazy;
        run(&o);
        const size_t held = result.peak_reserved;
        mo_replay_clear(&result);
        CHECK_EQ(mo_replay_frontier(&trace, &o, &why, &frontier, &result), MO_OK);
        CHECK(frontier >= result.live_peak && result.peak_reserved <= frontier);
        CHECK(frontier <= held + result.live_peak / 16);
        o.memory = frontier;
        run(&o);
        CHECK(result.completed);
        o.memory = result.live_peak - 1;
        run(&o);
        CHECK(!result.completed);
    }
}

TEST(want_of_host_memory_is_an_error_and_leaks_nothing)
{
    mo_replay_options o = mo_replay_defaults();
    mo_status status = MO_NO_HOST_MEMORY;
    uint64_t failures = 0;

    parse("a 1 6000000 0\na 2 100 3\ns\nf 1 3\na 3 9000000 3 0 4\nr 2 0\nw 0 3\nf 2 3\ns\n");
    mo_replay_clear(&result);
    const size_t live = mo_host_live();
    for (; status; failures++) {
        mo_host_fail_after(failures);
        status = mo_replay_run(&trace, &o, &why, &result);
        mo_host_fail_never();
        if (!status)
            mo_replay_clear(&result);
        CHECK(!status || status == MO_NO_HOST_MEMORY);
        CHECK_EQ(mo_host_live(), live);
        CHECK(failures < 10000);
    }
    CHECK(failures > 3);
}

TEST_MAIN
