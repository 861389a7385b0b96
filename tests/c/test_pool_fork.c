#include "child.h"
#include "driver/forked.h"
#include "pool_fixture.h"

#include <pthread.h>
#include <stdatomic.h>

/* A fork at every state of the lock: in the child every call answers, whoever held the lock when the process was
 * copied, and none hangs (in_child() ends a child that does). */

static const mo_arena_id mine = {0, 3};
static mo_address block;

/* Every function that a child may be made to call, by torch's destructors or by its own will. What may not work is refused;
 * what may only be counted answers as if it were done. */
static void every_call_answers(void)
{
    mo_address address = 77, base = 77;
    mo_arena_info info;
    mo_block_view *blocks = NULL;
    mo_fragmentation f;
    mo_stats stats;
    size_t size, count = 0, freed;

    CHECK(mo_forked());
    CHECK(mo_pool_alloc(pool, 4 * MIB, A, &said, &address) != MO_OK);
    CHECK(strstr(said.text, "'spawn'"));
    CHECK(mo_pool_alloc_in(pool, mine, 4 * MIB, A, &said, &address) != MO_OK);
    CHECK_EQ(address, 77);
    CHECK_EQ(mo_pool_free(pool, block, &said), MO_OK); /* an inherited tensor dies */
    CHECK_EQ(mo_pool_free(pool, block, &said), MO_OK);
    CHECK_EQ(mo_pool_free(pool, 0, &said), MO_OK);
    CHECK_EQ(mo_pool_record_stream(pool, block, B, &said), MO_OK);
    (void)mo_pool_base(pool, block, &said, &base, &size);
    (void)mo_pool_trim(pool, 0, &said, &freed);
    mo_pool_limit(pool, 64 * MIB);
    (void)mo_pool_preallocate(pool, GENERAL, 4 * MIB, &said);
    (void)mo_pool_arena_retain(pool, mine, false, 0, &said);
    (void)mo_pool_arena_release(pool, mine, &said);
    (void)mo_pool_route(pool, mine, (mo_route){NULL, NULL, NULL}, &said);
    (void)mo_pool_unroute(pool, mine, &said);
    (void)mo_pool_pause(pool, mine, &said);
    (void)mo_pool_resume(pool, mine, &said);
    (void)mo_pool_arena_info(pool, mine, &said, &info);
    mo_pool_read_stats(pool, &stats);
    mo_pool_reset_peaks(pool);
    mo_pool_reset_accumulated(pool);
    if (mo_pool_blocks(pool, &said, &blocks, &count) == MO_OK)
        mo_host_free(blocks);
    mo_pool_fragmentation(pool, &f);
    mo_pool_trace(pool, NULL);
    (void)mo_pool_check(pool, &said);
}

/* A child of the child, and that child's exit, are no different. */
static void and_in_a_grandchild(void)
{
    every_call_answers();
    CHECK_CHILD(every_call_answers);
}

static void open_watched(void)
{
    open_pool(256 * MIB, GRANULE, plain_settings);
    mo_forked_watch(); /* as the CUDA driver does when it is first used */
    CHECK_OK(mo_pool_alloc(pool, 6 * MIB, A, &said, &block));
}

TEST(in_a_child_every_call_answers)
{
    open_watched();
    CHECK_CHILD(and_in_a_grandchild);
    CHECK_OK(mo_pool_free(pool, block, &said)); /* the parent goes on */
    CHECK_POOL();
    close_pool();
    mo_forked_unwatch();
}

/* ---- while another thread holds the lock ---------------------------------------------------------------------- */

static pthread_barrier_t inside, forked_by_now;

static bool linger(void *user, mo_stream stream)
{
    (void)user, (void)stream;
    pthread_barrier_wait(&inside); /* under the pool's lock, says pool.h */
    pthread_barrier_wait(&forked_by_now);
    return false;
}

static void *allocate(void *unused)
{
    mo_address address;
    (void)unused;
    return mo_pool_alloc(pool, 4 * MIB, A, NULL, &address) == MO_OK ? &pool : NULL;
}

TEST(in_a_child_that_was_forked_while_the_lock_was_held_every_call_answers)
{
    pthread_t thread;
    void *done;
    open_watched();
    CHECK_OK(mo_pool_arena_retain(pool, mine, false, 0, &said));
    CHECK_OK(mo_pool_route(pool, mine, (mo_route){linger, NULL, NULL}, &said));
    pthread_barrier_init(&inside, NULL, 2);
    pthread_barrier_init(&forked_by_now, NULL, 2);
    CHECK_EQ(pthread_create(&thread, NULL, allocate, NULL), 0);
    pthread_barrier_wait(&inside);
    const child_end end = in_child(and_in_a_grandchild);
    pthread_barrier_wait(&forked_by_now);
    pthread_join(thread, &done);
    CHECK(done == &pool); /* the parent's thread got what it asked for */
    if (!child_passed(&end))
        TEST_FAIL("the child ended with %#x: %.300s", end.status, end.said);
    CHECK_OK(mo_pool_unroute(pool, mine, &said));
    CHECK_POOL();
    close_pool();
    mo_forked_unwatch();
}

/* ---- at any time ------------------------------------------------------------------------------------------------ */

static atomic_bool stop;

static void *churn(void *argument)
{
    uint64_t random = (uintptr_t)argument;
    while (!atomic_load(&stop)) {
        mo_address address;
        size_t freed;
        if (mo_pool_alloc(pool, 1 + test_random(&random) % (9 * MIB), (mo_stream)(random % 3 * 0x10), NULL,
                          &address) == MO_OK)
            mo_pool_free(pool, address, NULL);
        if (random % 16 == 0)
            mo_pool_trim(pool, 0, NULL, &freed);
    }
    return NULL;
}

TEST(children_forked_at_any_time_answer)
{
    pthread_t threads[3];
    open_watched();
    atomic_store(&stop, false);
    for (uintptr_t i = 0; i < 3; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, churn, (void *)(i + 1)), 0);
    child_end end = {0};
    for (int i = 0, n = test_rounds(20, 2000); i < n; i++) {
        end = in_child(every_call_answers);
        if (!child_passed(&end))
            break;
    }
    atomic_store(&stop, true);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    if (!child_passed(&end))
        TEST_FAIL("a child ended with %#x: %.300s", end.status, end.said);
    CHECK_POOL();
    CHECK_OK(mo_pool_free(pool, block, &said));
    close_pool();
    mo_forked_unwatch();
}

TEST_MAIN
