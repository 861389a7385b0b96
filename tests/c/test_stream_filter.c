/* A std::function as libstdc++ lays it out, made by hand: what is copied, asked and destroyed. torch's own come in
 * tests/sim/test_pluggable_allocator.py. */
#include "alloc/stream_filter.h"

#include <stddef.h>

#include "test.h"

static int alive, asked;

/* A functor on the heap that accepts one stream. */
static bool manage(void *self, const void *other, int operation)
{
    void **functor = self;

    if (operation == 2) {
        functor[0] = malloc(sizeof(mo_stream));
        if (!functor[0])
            abort();
        memcpy(functor[0], *(void *const *)other, sizeof(mo_stream));
        alive++;
    } else if (operation == 3) {
        free(functor[0]);
        alive--;
    } else {
        abort();
    }
    return false;
}

static bool is_that_stream(const void *self, mo_stream *stream)
{
    asked++;
    return **(mo_stream *const *)self == *stream;
}

TEST(a_copy_outlives_its_original_and_is_destroyed_once)
{
    mo_stream wanted = (mo_stream)0x1234;
    mo_stream_filter original = {{&wanted, NULL}, manage, is_that_stream}, copy;

    memset(&copy, 0xff, sizeof copy);
    mo_stream_filter_copy(&copy, &original);
    CHECK_EQ(alive, 1);
    wanted = NULL;
    memset(&original, 0xff, sizeof original);
    CHECK(mo_stream_filter_accepts(&copy, (mo_stream)0x1234));
    CHECK(!mo_stream_filter_accepts(&copy, NULL));
    CHECK_EQ(asked, 2);
    mo_stream_filter_destroy(&copy);
    CHECK_EQ(alive, 0);
    mo_stream_filter_destroy(&copy); /* empty now */
    CHECK_EQ(alive, 0);
    CHECK(!mo_stream_filter_accepts(&copy, (mo_stream)0x1234));
}

TEST(an_empty_function_accepts_nothing)
{
    mo_stream_filter empty = {{NULL, NULL}, NULL, is_that_stream}, copy;

    mo_stream_filter_copy(&copy, &empty);
    CHECK(!copy.manager && !copy.invoker);
    CHECK(!mo_stream_filter_accepts(&copy, NULL));
    mo_stream_filter_destroy(&copy);
}

/* Two words and two functions, at these places: the ABI. */
TEST(the_layout_is_libstdcxxs)
{
    CHECK_EQ(sizeof(mo_stream_filter), 32);
    CHECK_EQ(offsetof(mo_stream_filter, manager), 16);
    CHECK_EQ(offsetof(mo_stream_filter, invoker), 24);
}

TEST_MAIN
