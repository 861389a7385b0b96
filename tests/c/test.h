/* The C test harness: one header, one binary a test file.
 *
 *     #include "test.h"
 *     TEST(two_blocks_merge) { CHECK(merged); CHECK_EQ(free_bytes, 64); }
 *     TEST_MAIN
 *
 * A failed check says where and goes on with the next test (longjmp), so that one run shows every broken
 * test. A line a test goes to standard output, "ok NAME", "not ok NAME: why" or "skip NAME: why" (TEST_SKIP: what it
 * needs is not here), which is what pytest reads.
 * `--list` prints the names; names as arguments run only those. MEMOPT_SEED sets the seed, MEMOPT_SOAK=1
 * takes the long form of every test_rounds(). */
#ifndef MEMOPT_TEST_H
#define MEMOPT_TEST_H

#include <inttypes.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct test_case {
    const char *name;
    void (*run)(void);
    struct test_case *next;
} test_case;

typedef enum test_outcome { TEST_PASSED, TEST_FAILED, TEST_SKIPPED } test_outcome;

static test_case *test_first, **test_last = &test_first;
static jmp_buf test_escape;
static char test_why[4096];
static unsigned long test_checks;

#define TEST(name_)                                                                                          \
    static void test_##name_(void);                                                                          \
    __attribute__((constructor)) static void test_register_##name_(void)                                     \
    {                                                                                                        \
        static test_case self = {#name_, test_##name_, NULL};                                                \
        *test_last = &self;                                                                                  \
        test_last = &self.next;                                                                              \
    }                                                                                                        \
    static void test_##name_(void)

#define TEST_FAIL(...)                                                                                       \
    do {                                                                                                     \
        int at_ = snprintf(test_why, sizeof test_why, "%s:%d: ", __FILE__, __LINE__);                        \
        snprintf(test_why + at_, sizeof test_why - (size_t)at_, __VA_ARGS__);                                \
        longjmp(test_escape, TEST_FAILED);                                                                   \
    } while (0)

/* Before anything that would have to be given back. */
#define TEST_SKIP(...)                                                                                       \
    do {                                                                                                     \
        snprintf(test_why, sizeof test_why, __VA_ARGS__);                                                    \
        longjmp(test_escape, TEST_SKIPPED);                                                                  \
    } while (0)

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        test_checks++;                                                                                       \
        if (!(condition))                                                                                    \
            TEST_FAIL("%s", #condition);                                                                     \
    } while (0)

/* Integers of any kind; both values are shown as signed and, being the same bits, compared as such. */
#define CHECK_EQ(got, expected)                                                                              \
    do {                                                                                                     \
        intmax_t got_ = (intmax_t)(got), expected_ = (intmax_t)(expected);                                   \
        test_checks++;                                                                                       \
        if (got_ != expected_)                                                                               \
            TEST_FAIL("%s is %" PRIdMAX ", expected %s = %" PRIdMAX, #got, got_, #expected, expected_);      \
    } while (0)

#define CHECK_STR(got, expected)                                                                             \
    do {                                                                                                     \
        const char *got_ = (got), *expected_ = (expected);                                                   \
        test_checks++;                                                                                       \
        if (strcmp(got_, expected_) != 0)                                                                    \
            TEST_FAIL("%s is \"%s\", expected \"%s\"", #got, got_, expected_);                               \
    } while (0)

/* The seed of this run, printed once: from MEMOPT_SEED, else fresh. */
__attribute__((unused)) static uint64_t test_seed(void)
{
    static uint64_t seed;
    if (!seed) {
        const char *given = getenv("MEMOPT_SEED");
        seed = given ? strtoull(given, NULL, 0) : (uint64_t)time(NULL) * 2654435761u + (uint64_t)clock();
        seed |= !seed;
        printf("# MEMOPT_SEED=%" PRIu64 "\n", seed);
    }
    return seed;
}

/* splitmix64: 64 well-mixed bits a call, any state is a good one. */
__attribute__((unused)) static uint64_t test_random(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

/* How often a random test repeats: few times in `make test`, many in `make soak`. */
__attribute__((unused)) static int test_rounds(int few, int many)
{
    const char *soak = getenv("MEMOPT_SOAK");
    return soak && *soak && *soak != '0' ? many : few;
}

/* In a function of its own: setjmp spoils the locals of the one that calls it. */
static test_outcome test_run(const test_case *t)
{
    switch (setjmp(test_escape)) {
    case TEST_PASSED:
        t->run();
        return TEST_PASSED;
    case TEST_SKIPPED:
        return TEST_SKIPPED;
    default:
        return TEST_FAILED;
    }
}

static int test_main(int argc, char **argv)
{
    int failed = 0, ran = 0;
    for (test_case *t = test_first; t; t = t->next) {
        bool wanted = argc < 2;
        for (int i = 1; i < argc; i++)
            wanted |= strcmp(argv[i], t->name) == 0;
        if (argc == 2 && strcmp(argv[1], "--list") == 0) {
            puts(t->name);
            continue;
        }
        if (!wanted)
            continue;
        ran++;
        switch (test_run(t)) {
        case TEST_PASSED:
            printf("ok %s\n", t->name);
            break;
        case TEST_SKIPPED:
            printf("skip %s: %s\n", t->name, test_why);
            break;
        default:
            printf("not ok %s: %s\n", t->name, test_why);
            failed++;
        }
        fflush(stdout);
    }
    if (argc == 2 && strcmp(argv[1], "--list") == 0)
        return 0;
    printf("# %d tests, %d failed, %lu checks\n", ran, failed, test_checks);
    return failed || !ran;
}

#define TEST_MAIN                                                                                            \
    int main(int argc, char **argv)                                                                          \
    {                                                                                                        \
        return test_main(argc, argv);                                                                        \
    }
#endif
