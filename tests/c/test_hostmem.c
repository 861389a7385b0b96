#include "base/hostmem.h"

#include <pthread.h>

#include "test.h"

TEST(live_counts_what_is_allocated_and_not_freed)
{
    const size_t start = mo_host_live();
    void *a = mo_host_alloc(10), *b = mo_host_calloc(3, 7), *c = mo_host_realloc(NULL, 5);
    CHECK(a && b && c);
    CHECK_EQ(mo_host_live(), start + 3);
    c = mo_host_realloc(c, 5000);
    CHECK(c);
    CHECK_EQ(mo_host_live(), start + 3);
    mo_host_free(b);
    mo_host_free(a);
    CHECK_EQ(mo_host_live(), start + 1);
    mo_host_free(c);
    mo_host_free(NULL);
    CHECK_EQ(mo_host_live(), start);
}

TEST(calloc_gives_zeros)
{
    for (size_t size = 1; size < 100000; size *= 3) {
        unsigned char *block = mo_host_calloc(size, 3);
        CHECK(block);
        for (size_t i = 0; i < size * 3; i++)
            CHECK(block[i] == 0);
        memset(block, 0xAA, size * 3); /* so that the next one may get dirty memory */
        mo_host_free(block);
    }
}

TEST(a_dense_table_is_one_block_of_zeros_of_any_size)
{
    const size_t start = mo_host_live();

    CHECK(!mo_host_calloc_dense(SIZE_MAX, 2));
    for (size_t size = 1; size < (size_t)64 << 20; size *= 5) {
        unsigned char *block = mo_host_calloc_dense(size, 1);

        CHECK(block);
        CHECK_EQ(mo_host_live(), start + 1);
        for (size_t i = 0; i < size; i += size / 1000 + 1)
            CHECK(block[i] == 0);
        memset(block, 0xAA, size);
        mo_host_free(block);
    }
    mo_host_fail_after(0);
    CHECK(!mo_host_calloc_dense(1, 8));
    mo_host_fail_never();
    CHECK_EQ(mo_host_live(), start);
}

TEST(a_product_that_does_not_fit_is_no_block)
{
    const size_t start = mo_host_live();
    CHECK(!mo_host_calloc(SIZE_MAX, 2));
    CHECK(!mo_host_calloc(SIZE_MAX / 2 + 1, 2));
    CHECK(!mo_host_calloc((size_t)1 << 33, (size_t)1 << 33));
    CHECK_EQ(mo_host_live(), start);
}

TEST(no_bytes_are_still_a_block)
{
    const size_t start = mo_host_live();
    void *blocks[] = {mo_host_alloc(0), mo_host_calloc(0, 8), mo_host_calloc(8, 0), mo_host_realloc(NULL, 0)};
    for (int i = 0; i < 4; i++)
        CHECK(blocks[i]);
    CHECK_EQ(mo_host_live(), start + 4);
    blocks[0] = mo_host_realloc(blocks[0], 0); /* where realloc(p, 0) would free it and say NULL */
    CHECK(blocks[0]);
    for (int i = 0; i < 4; i++)
        mo_host_free(blocks[i]);
    CHECK_EQ(mo_host_live(), start);
}

TEST(a_plan_fails_every_request_from_the_nth_on)
{
    const size_t start = mo_host_live();
    for (uint64_t after = 0; after < 5; after++) {
        void *got[8];
        mo_host_fail_after(after);
        for (int i = 0; i < 8; i++)
            got[i] = i % 2 ? mo_host_calloc(1, 8) : mo_host_alloc(8);
        mo_host_fail_never();
        for (uint64_t i = 0; i < 8; i++) {
            CHECK((got[i] != NULL) == (i < after));
            mo_host_free(got[i]);
        }
        CHECK_EQ(mo_host_live(), start);
        void *next = mo_host_alloc(8);
        CHECK(next);
        mo_host_free(next);
    }
}

TEST(a_realloc_that_fails_leaves_the_old_block_as_it_was)
{
    const size_t start = mo_host_live();
    char *block = mo_host_alloc(6);
    CHECK(block);
    memcpy(block, "block", 6);
    mo_host_fail_after(0);
    CHECK(!mo_host_realloc(block, 1000));
    CHECK(!mo_host_realloc(NULL, 10));
    mo_host_fail_never();
    CHECK_STR(block, "block");
    CHECK_EQ(mo_host_live(), start + 1);
    block = mo_host_realloc(block, 1000);
    CHECK_STR(block, "block");
    mo_host_free(block);
    CHECK_EQ(mo_host_live(), start);
}

/* The sanitizers' malloc ends the program where the C library's says NULL, unless told otherwise. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "allocator_may_return_null=1";
}

const char *__tsan_default_options(void);
const char *__tsan_default_options(void)
{
    return "allocator_may_return_null=1";
}

/* What the malloc below cannot give is refused by it, not by a plan. */
TEST(a_request_that_malloc_refuses_is_not_counted)
{
    const size_t start = mo_host_live();
    volatile size_t huge = (size_t)1 << 62;
    char *block = mo_host_alloc(6);
    CHECK(!mo_host_alloc(huge));
    CHECK(!mo_host_calloc(huge, 1));
    CHECK(!mo_host_realloc(block, huge));
    CHECK_EQ(mo_host_live(), start + 1);
    mo_host_free(block);
    CHECK_EQ(mo_host_live(), start);
}

static pthread_barrier_t together;

static void *churn(void *rounds)
{
    pthread_barrier_wait(&together);
    for (int i = 0; i < *(int *)rounds; i++) {
        void *a = mo_host_alloc(16), *b = mo_host_calloc(2, 8);
        mo_host_free(a);
        b = mo_host_realloc(b, 64);
        mo_host_free(b);
    }
    return NULL;
}

TEST(threads_lose_no_count)
{
    const size_t start = mo_host_live();
    int rounds = test_rounds(50000, 2000000);
    pthread_t threads[4];
    pthread_barrier_init(&together, NULL, 4);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, churn, &rounds), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    CHECK_EQ(mo_host_live(), start);
}

TEST_MAIN
