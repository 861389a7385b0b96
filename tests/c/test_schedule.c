#include "checkpoint/schedule.h"

#include "base/hostmem.h"
#include "chain_fixture.h"

enum { FNONE = MO_OP_FNONE, FCK, FALL, BWD, DROP_INPUT, DROP_SAVED, PUT_INPUT, GET_INPUT };

/* Three stages: a = 5, 2, 3, 1; d = 7, 11, 13, 4; saved 20 + i or, by option 1, 10; overheads 100 forwards, 200
 * backwards; seconds 1, 2, 4 forwards, 10 times that backwards, half of it remade. a[1] is put away in 6 seconds and
 * got back in 7, a[2] stays. */
static mo_chain three_stages(void)
{
    static const uint64_t a[] = {2, 3, 1}, d[] = {7, 11, 13};
    mo_chain chain;

    CHECK_EQ(mo_chain_open(3, 6, NULL, &chain), MO_OK);
    chain.input = 5;
    chain.output_grad = 4;
    for (size_t i = 0; i < 3; i++) {
        const double forward = (double)(1 << i);
        mo_chain_stage *stage = &chain.stages[i];
        *stage = (mo_chain_stage){a[i], d[i], i == 1 ? 6 : INFINITY, 7, 2, chain.options + 2 * i};
        stage->options[0] = (mo_chain_option){20 + i, 100, 200, forward, 10 * forward, forward / 2};
        stage->options[1] = (mo_chain_option){10, 0, 0, 3 * forward, 30 * forward, forward};
    }
    CHECK_EQ(mo_chain_check(&chain, NULL), MO_OK);
    return chain;
}

typedef struct expected {
    mo_action action;
    mo_moment moment;
} expected;

TEST(every_operation_takes_and_leaves_what_its_words_say)
{
    mo_chain chain = three_stages();
    static const expected all[] = {
        {{FCK, 0, 0}, {1, 4 + 2 + 100, 6}},
        {{FALL, 0, 1}, {2, 6 + 21 + 100, 27}},
        {{DROP_INPUT, 0, 1}, {0, 27, 25}},     /* a[1], which nothing else holds */
        {{FCK, 0, 0}, {1, 25 + 2 + 100, 27}},  /* made again */
        {{FALL, 1, 2}, {12, 27 + 10 + 0, 37}}, /* by option 1; its input is in s[1] */
        {{DROP_INPUT, 0, 1}, {0, 37, 35}},
        {{DROP_SAVED, 0, 2}, {0, 35, 25}},
        {{FALL, 0, 2}, {2, 25 + 22 + 100, 47}}, /* right before its backward */
        {{BWD, 0, 2}, {40, 47 + 13 + 200, 25 + 13 - 4}},
        {{DROP_SAVED, 0, 1}, {0, 34, 13}},
        {{FNONE, 0, 0}, {1, 13 + 2 + 100, 15}},
        {{FALL, 0, 1}, {1, 15 + 21 + 100, 36}},
        {{BWD, 0, 1}, {20, 36 + 11 + 200, 36 + 11 - 13 - 21 - 2}},
        {{FALL, 1, 0}, {1, 11 + 10, 21}},
        {{BWD, 1, 0}, {30, 21 + 7, 21 + 7 - 11 - 10}},
    };
    enum { COUNT = sizeof all / sizeof all[0] };
    mo_action actions[COUNT];
    mo_moment moments[COUNT];
    mo_replay_totals totals;
    mo_detail detail;

    for (size_t i = 0; i < COUNT; i++)
        actions[i] = all[i].action;
    if (mo_schedule_replay(&chain, actions, COUNT, &detail, moments, &totals))
        TEST_FAIL("%s", detail.text);
    for (size_t i = 0; i < COUNT; i++) {
        CHECK(moments[i].seconds == all[i].moment.seconds);
        CHECK_EQ(moments[i].during, all[i].moment.during);
        CHECK_EQ(moments[i].after, all[i].moment.after);
    }
    CHECK_EQ(totals.peak, 47 + 13 + 200);
    CHECK_EQ(totals.peak_at, 8);
    CHECK(totals.seconds == 111);
    mo_chain_close(&chain);
}

/* The last of the actions cannot be done. */
static void check_refused(const mo_action *actions, size_t count, const char *words)
{
    mo_chain chain = three_stages();
    mo_replay_totals totals = {.seconds = -1};
    mo_detail detail;

    CHECK_EQ(mo_schedule_replay(&chain, actions, count, &detail, NULL, &totals), MO_INVALID);
    CHECK(totals.seconds == -1);
    if (!strstr(detail.text, words))
        TEST_FAIL("\"%s\" does not say \"%s\"", detail.text, words);
    mo_chain_close(&chain);
}

#define REFUSED(words, ...)                                                                                  \
    do {                                                                                                     \
        const mo_action actions_[] = {__VA_ARGS__};                                                          \
        check_refused(actions_, sizeof actions_ / sizeof actions_[0], words);                                \
    } while (0)

TEST(what_cannot_be_done_is_refused_by_operation)
{
    REFUSED("operation 0, fnone 1, cannot be done: the input", {FNONE, 0, 1});
    REFUSED("operation 0, ? 0, cannot be done: there is no such operation", {MO_OP_COUNT, 0, 0});
    REFUSED("no such stage", {FALL, 0, 3});
    REFUSED("no such option", {FALL, 2, 0});
    REFUSED("operation 1, fck 0, cannot be done: the stage's output already exists", {FCK, 0, 0},
            {FCK, 0, 0});
    REFUSED("the stage's output already exists", {FALL, 0, 0}, {FNONE, 0, 0});
    REFUSED("the stage is already saved", {FALL, 0, 0}, {FALL, 1, 0});
    REFUSED("the input of the stage does not exist", {FNONE, 0, 0}, {FNONE, 0, 1}, {FALL, 0, 1});
    REFUSED("nothing is saved for this stage", {FCK, 0, 0}, {FCK, 0, 1}, {BWD, 0, 2});
    REFUSED("the gradient of the stage's output", {FALL, 0, 0}, {BWD, 0, 0});
    REFUSED("made with another option", {FCK, 0, 0}, {FCK, 0, 1}, {FALL, 0, 2}, {BWD, 1, 2});
    REFUSED("nothing is saved", {DROP_SAVED, 0, 1});
    REFUSED("this input does not exist", {DROP_INPUT, 0, 1});
    REFUSED("belongs to its caller", {DROP_INPUT, 0, 0});
    REFUSED("the schedule ends before bwd 1", {FCK, 0, 0}, {FCK, 0, 1}, {FALL, 0, 2}, {BWD, 0, 2});
    REFUSED("operation 0, put_input 0, cannot be done: this input cannot be put away", {PUT_INPUT, 0, 0});
    REFUSED("cannot be put away", {FCK, 0, 0}, {FCK, 0, 1}, {PUT_INPUT, 0, 2});
    REFUSED("in its own right", {PUT_INPUT, 0, 1});
    REFUSED("in its own right", {FALL, 0, 0}, {PUT_INPUT, 0, 1});
    REFUSED("in its own right", {FCK, 0, 0}, {PUT_INPUT, 0, 1}, {PUT_INPUT, 0, 1});
    REFUSED("was not put away", {FCK, 0, 0}, {GET_INPUT, 0, 1});
    REFUSED("exists already", {FCK, 0, 0}, {PUT_INPUT, 0, 1}, {FCK, 0, 0}, {GET_INPUT, 0, 1});
    REFUSED("the input of the stage does not exist", {FCK, 0, 0}, {PUT_INPUT, 0, 1}, {FNONE, 0, 1});
    REFUSED("operation 4, fck 1, cannot be done: the input", {FCK, 0, 0}, {FNONE, 0, 1}, {FALL, 0, 2},
            {BWD, 0, 2}, {FCK, 0, 1});
}

TEST(an_input_within_a_saved_set_stays_when_it_is_dropped_or_run_over)
{
    mo_chain chain = three_stages();
    static const mo_action actions[] = {{FALL, 0, 0}, {DROP_INPUT, 0, 1}, {FNONE, 0, 1}, {FALL, 0, 2},
                                        {BWD, 0, 2},  {FALL, 0, 1},       {BWD, 0, 1},   {BWD, 0, 0}};
    mo_moment moments[8];
    mo_replay_totals totals;

    CHECK_EQ(mo_schedule_replay(&chain, actions, 8, NULL, moments, &totals), MO_OK);
    CHECK_EQ(moments[0].after, 4 + 20);
    CHECK_EQ(moments[1].after, 4 + 20);
    CHECK_EQ(moments[2].after, 4 + 20 + 3);
    mo_chain_close(&chain);
}

TEST(an_input_that_is_away_takes_nothing_until_it_is_back)
{
    mo_chain chain = three_stages();
    static const mo_action actions[] = {{FCK, 0, 0},  {FCK, 0, 1},       {PUT_INPUT, 0, 1}, {FALL, 0, 2},
                                        {BWD, 0, 2},  {GET_INPUT, 0, 1}, {FALL, 0, 1},      {BWD, 0, 1},
                                        {FALL, 0, 0}, {BWD, 0, 0}};
    mo_moment moments[10];
    mo_replay_totals totals;

    CHECK_EQ(mo_schedule_replay(&chain, actions, 10, NULL, moments, &totals), MO_OK);
    CHECK(moments[2].seconds == 6 && moments[2].during == 4 + 2 + 3 && moments[2].after == 4 + 3);
    CHECK_EQ(moments[4].after, 13);
    CHECK(moments[5].seconds == 7 && moments[5].during == 13 + 2 && moments[5].after == 13 + 2);
    mo_chain_close(&chain);
}

TEST(names_are_those_of_the_list)
{
    CHECK_STR(mo_op_name(MO_OP_FNONE), "fnone");
    CHECK_STR(mo_op_name(MO_OP_DROP_SAVED), "drop_saved");
    CHECK_STR(mo_op_name(MO_OP_COUNT), "?");
}

TEST(without_host_memory_a_schedule_is_as_it_was)
{
    const size_t before = mo_host_live();
    mo_chain chain = three_stages();
    mo_schedule schedule = {0};
    mo_replay_totals totals;

    for (int i = 0; i < 64; i++)
        CHECK_EQ(mo_schedule_add(&schedule, MO_OP_FCK, 0, 0, NULL), MO_OK);
    mo_host_fail_after(0);
    CHECK_EQ(mo_schedule_add(&schedule, MO_OP_FCK, 0, 0, NULL), MO_NO_HOST_MEMORY);
    mo_host_fail_never();
    CHECK_EQ(schedule.count, 64);
    CHECK_EQ(mo_schedule_add(&schedule, MO_OP_FCK, 0, 0, NULL), MO_OK);
    mo_schedule_clear(&schedule);
    for (uint64_t after = 0; after < 2; after++) {
        mo_host_fail_after(after);
        const mo_status status = mo_schedule_replay(&chain, NULL, 0, NULL, NULL, &totals);
        mo_host_fail_never();
        CHECK_EQ(status, MO_NO_HOST_MEMORY);
    }
    mo_chain_close(&chain);
    CHECK_EQ(mo_host_live(), before);
}

TEST_MAIN
