/* base/assert.h at each of its levels: it is included once for each, and what a level compiles is a function
 * here. */
#include "child.h"

static int evaluated;

static int holds(int value)
{
    evaluated++;
    return value;
}

#define LEVEL_FUNCTIONS(level)                                                                               \
    static void assert_at_##level(void)                                                                      \
    {                                                                                                        \
        MO_ASSERT(holds(0));                                                                                 \
    }                                                                                                        \
    static void check_at_##level(void)                                                                       \
    {                                                                                                        \
        MO_CHECK(holds(0));                                                                                  \
    }                                                                                                        \
    static void check_all_at_##level(void)                                                                   \
    {                                                                                                        \
        MO_CHECK_ALL(holds(0));                                                                              \
    }                                                                                                        \
    static void true_at_##level(void)                                                                        \
    {                                                                                                        \
        MO_ASSERT(holds(1));                                                                                 \
        MO_CHECK(holds(1));                                                                                  \
        MO_CHECK_ALL(holds(1));                                                                              \
    }

#undef MO_LEVEL
#define MO_LEVEL 3
#include "base/assert.h"
LEVEL_FUNCTIONS(3)

#undef MO_LEVEL
#define MO_LEVEL 2
LEVEL_FUNCTIONS(2)

#undef MO_LEVEL
#define MO_LEVEL 1
LEVEL_FUNCTIONS(1)

#undef MO_ASSERT_H
#undef MO_ASSERT_AT
#undef MO_ASSERT
#undef MO_CHECK
#undef MO_CHECK_ALL
#undef MO_LEVEL
#include "base/assert.h" /* the level of a wheel is the one nobody asked for */
LEVEL_FUNCTIONS(0)

static void expect_abort(void (*body)(void))
{
    child_end end = in_child(body);
    CHECK(child_aborted(&end));
    CHECK_SAID(&end, "broken invariant: holds(0)");
    CHECK_SAID(&end, "test_assert.c:");
}

static void expect_silence(void (*body)(void))
{
    evaluated = 0;
    body();
    CHECK_EQ(evaluated, 0);
}

TEST(a_wheel_evaluates_no_assertion)
{
    CHECK_EQ(MO_LEVEL, 0);
    expect_silence(assert_at_0);
    expect_silence(check_at_0);
    expect_silence(check_all_at_0);
    expect_silence(true_at_0);
}

TEST(level_1_has_the_cheap_ones)
{
    expect_abort(assert_at_1);
    expect_silence(check_at_1);
    expect_silence(check_all_at_1);
}

TEST(level_2_walks_one_structure)
{
    expect_abort(assert_at_2);
    expect_abort(check_at_2);
    expect_silence(check_all_at_2);
}

TEST(level_3_walks_everything)
{
    expect_abort(assert_at_3);
    expect_abort(check_at_3);
    expect_abort(check_all_at_3);
}

TEST(what_holds_is_evaluated_once_and_passes)
{
    evaluated = 0;
    true_at_3();
    CHECK_EQ(evaluated, 3);
    true_at_2();
    CHECK_EQ(evaluated, 5);
    true_at_1();
    CHECK_EQ(evaluated, 6);
}

TEST_MAIN
