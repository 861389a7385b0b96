/* Call stacks are kept once, come back as they were, and survive want of memory and many threads. */
#include <pthread.h>

#include "alloc/trace_stacks.h"
#include "base/hostmem.h"
#include "test.h"

static uint32_t frame(const char *file, const char *function, uint32_t line)
{
    return mo_trace_frame_number(mo_trace_text_number(file, strlen(file)),
                                 mo_trace_text_number(function, strlen(function)), line);
}

TEST(a_stack_comes_back_as_it_was)
{
    mo_trace_frame got[MO_TRACE_MAX_FRAMES];
    const uint32_t f[] = {frame("model.py", "forward", 12), frame("train.py", "step", 300),
                          frame("train.py", "<module>", 7)};
    const uint32_t stack = mo_trace_stack_number(f, 3);

    CHECK(stack != 0);
    CHECK_EQ(mo_trace_stack_frames(stack, got), 3);
    CHECK_STR(got[0].file, "model.py");
    CHECK_STR(got[0].function, "forward");
    CHECK_EQ(got[0].line, 12);
    CHECK_STR(got[1].file, "train.py");
    CHECK_EQ(got[1].line, 300);
    CHECK_STR(got[2].function, "<module>");
    mo_trace_stacks_clear();
}

TEST(the_same_is_kept_once)
{
    const uint32_t a = frame("a.py", "f", 1), b = frame("a.py", "f", 2), ab[] = {a, b}, ba[] = {b, a};

    CHECK(a && b && a != b);
    CHECK_EQ(frame("a.py", "f", 1), a);
    CHECK(frame("f", "a.py", 1) != a);
    const uint32_t stack = mo_trace_stack_number(ab, 2);
    CHECK_EQ(mo_trace_stack_number(ab, 2), stack);
    CHECK(mo_trace_stack_number(ba, 2) != stack);
    CHECK(mo_trace_stack_number(ab, 1) != stack);
    CHECK_EQ(mo_trace_stack_count(), 3);
    mo_trace_stacks_clear();
    CHECK_EQ(mo_trace_stack_count(), 0);
}

TEST(none_is_number_0_and_unknown_numbers_have_no_frames)
{
    mo_trace_frame got[MO_TRACE_MAX_FRAMES];

    CHECK_EQ(mo_trace_stack_number(NULL, 0), 0);
    CHECK_EQ(mo_trace_stack_frames(0, got), 0);
    CHECK_EQ(mo_trace_stack_frames(1, got), 0);
    CHECK_EQ(mo_trace_stack_frames(UINT32_MAX, got), 0);
}

TEST(a_text_may_hold_any_bytes_and_none)
{
    const uint32_t empty = mo_trace_text_number("", 0), zero = mo_trace_text_number("\0", 1);

    CHECK(empty && zero && empty != zero);
    CHECK_EQ(mo_trace_text_number("", 0), empty);
    mo_trace_stacks_clear();
}

TEST(many_stacks_are_told_apart)
{
    static uint32_t stack[5000];
    mo_trace_frame got[MO_TRACE_MAX_FRAMES];
    uint32_t f[MO_TRACE_MAX_FRAMES];
    char name[32];

    for (uint32_t i = 0; i < 5000; i++) {
        const size_t depth = 1 + i % MO_TRACE_MAX_FRAMES;
        for (size_t k = 0; k < depth; k++) {
            sprintf(name, "f%zu", k);
            f[k] = frame("file.py", name, i + (uint32_t)k);
        }
        stack[i] = mo_trace_stack_number(f, depth);
        CHECK_EQ(stack[i], i + 1);
    }
    for (uint32_t i = 0; i < 5000; i++) {
        const size_t depth = mo_trace_stack_frames(stack[i], got);
        CHECK_EQ(depth, 1 + i % MO_TRACE_MAX_FRAMES);
        for (size_t k = 0; k < depth; k++) {
            sprintf(name, "f%zu", k);
            CHECK_STR(got[k].function, name);
            CHECK_EQ(got[k].line, i + k);
        }
    }
    mo_trace_stacks_clear();
}

TEST(want_of_host_memory_gives_number_0_and_breaks_nothing)
{
    const size_t live = mo_host_live();
    uint32_t f[2], stack = 0;
    int failures = 0;

    for (; !stack; failures++) {
        mo_host_fail_after((uint64_t)failures);
        f[0] = frame("a.py", "f", 1);
        f[1] = frame("b.py", "g", 2);
        stack = f[0] && f[1] ? mo_trace_stack_number(f, 2) : 0;
        mo_host_fail_never();
        CHECK(failures < 100);
    }
    CHECK(failures > 1);
    mo_trace_stacks_clear();
    CHECK_EQ(mo_host_live(), live);
}

static void *make_stacks(void *wrong)
{
    mo_trace_frame got[MO_TRACE_MAX_FRAMES];

    for (uint32_t i = 0; i < 2000; i++) {
        const uint32_t f[] = {frame("shared.py", "f", i % 50), frame("shared.py", "g", i % 20)};
        const uint32_t stack = mo_trace_stack_number(f, 2);
        const size_t depth = mo_trace_stack_frames(stack, got);
        if (!stack || depth != 2 || got[0].line != i % 50 || strcmp(got[1].function, "g"))
            *(int *)wrong = 1;
        mo_trace_set_stack_of_thread(stack);
        if (mo_trace_stack_of_thread() != stack)
            *(int *)wrong = 1;
    }
    return NULL;
}

TEST(threads_share_the_table)
{
    pthread_t threads[4];
    int wrong[4] = {0};

    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, make_stacks, &wrong[i]), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(wrong[i], 0);
    CHECK_EQ(mo_trace_stack_count(), 100); /* pairs of i % 50 and i % 20: their least common multiple */
    mo_trace_stacks_clear();
}

static uint32_t answer_5(void)
{
    return 5;
}

TEST(the_collector_says_which_stack_is_the_threads)
{
    mo_trace_collect();
    CHECK_EQ(mo_trace_stack_of_thread(), 0);
    mo_trace_collect_by(answer_5);
    mo_trace_collect();
    CHECK_EQ(mo_trace_stack_of_thread(), 5);
    mo_trace_collect_by(NULL);
    mo_trace_collect();
    CHECK_EQ(mo_trace_stack_of_thread(), 0);
}

TEST_MAIN
