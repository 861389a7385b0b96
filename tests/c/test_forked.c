#include "driver/forked.h"

#include "child.h"

/* Each test in a child that starts unwatched, for a watch stays. */

static void is_forked(void)
{
    CHECK(mo_forked());
}

static void is_not_forked(void)
{
    CHECK(!mo_forked());
}

static void nobody_watched(void)
{
    CHECK_CHILD(is_not_forked);
}

TEST(a_child_of_a_process_that_did_not_watch_is_not_forked)
{
    CHECK_CHILD(nobody_watched);
}

static void and_its_child(void)
{
    CHECK(mo_forked());
    CHECK_CHILD(is_forked);
}

static void watched(void)
{
    mo_forked_watch();
    CHECK(!mo_forked());
    CHECK_CHILD(and_its_child);
    CHECK(!mo_forked());
}

TEST(a_child_of_a_process_that_watched_is_forked_and_so_are_its_children)
{
    CHECK_CHILD(watched);
}

static void watched_and_unwatched(void)
{
    mo_forked_watch();
    mo_forked_watch();
    mo_forked_unwatch();
    CHECK_CHILD(is_forked);
    mo_forked_unwatch();
    CHECK_CHILD(is_not_forked);
    mo_forked_watch();
    CHECK_CHILD(is_forked);
}

TEST(watching_lasts_until_as_many_have_stopped)
{
    CHECK_CHILD(watched_and_unwatched);
}

TEST(a_refusal_names_the_call_and_the_mend)
{
    mo_detail detail;
    CHECK_EQ(mo_forked_refuse("cuX(1)", &detail), MO_DRIVER);
    CHECK_EQ(detail.status, MO_DRIVER);
    CHECK(strncmp(detail.text, "cuX(1): ", 8) == 0);
    CHECK(strstr(detail.text, "'spawn'") && strstr(detail.text, "'forkserver'"));
    CHECK_EQ(mo_forked_refuse("cuX(1)", NULL), MO_DRIVER);
}

TEST_MAIN
