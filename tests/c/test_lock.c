#include "base/lock.h"

#include "child.h"

static mo_lock lock = MO_LOCK_INIT;
static long shared; /* guarded by lock, and a plain long: what ThreadSanitizer watches */

static void *is_held(void *answer)
{
    *(bool *)answer = mo_lock_held(&lock);
    return NULL;
}

static bool held_elsewhere(void)
{
    pthread_t other;
    bool answer = true;
    CHECK_EQ(pthread_create(&other, NULL, is_held, &answer), 0);
    pthread_join(other, NULL);
    return answer;
}

TEST(a_lock_is_held_by_the_thread_that_took_it_and_no_other)
{
    CHECK(!mo_lock_held(&lock));
    CHECK(!held_elsewhere());
    mo_lock_take(&lock);
    CHECK(mo_lock_held(&lock));
    CHECK(!held_elsewhere());
    mo_lock_give(&lock);
    CHECK(!mo_lock_held(&lock));
}

static pthread_barrier_t together;

static void *add(void *rounds)
{
    pthread_barrier_wait(&together);
    for (int i = 0; i < *(int *)rounds; i++) {
        mo_lock_take(&lock);
        shared++;
        mo_lock_give(&lock);
        (void)mo_lock_held(&lock); /* asked without the lock, as an assertion that fails would */
    }
    return NULL;
}

TEST(only_one_thread_at_a_time_holds_it)
{
    int rounds = test_rounds(100000, 2000000);
    pthread_t threads[4];
    shared = 0;
    pthread_barrier_init(&together, NULL, 4);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, add, &rounds), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    CHECK_EQ(shared, 4L * rounds);
}

static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static void *add_and_tell(void *held_here)
{
    mo_lock_take(&lock);
    *(bool *)held_here = mo_lock_held(&lock);
    shared++;
    pthread_cond_broadcast(&changed);
    mo_lock_give(&lock);
    return NULL;
}

TEST(while_one_waits_another_takes_it_and_afterwards_it_is_held_again)
{
    bool held_there = false;
    pthread_t other;
    shared = 0;
    mo_lock_take(&lock);
    CHECK_EQ(pthread_create(&other, NULL, add_and_tell, &held_there), 0);
    while (!shared) /* it cannot have changed before: the lock was held here */
        mo_lock_wait(&lock, &changed);
    CHECK(mo_lock_held(&lock));
    CHECK(held_there);
    mo_lock_give(&lock);
    CHECK(!mo_lock_held(&lock));
    pthread_join(other, NULL);
}

static void wait_without_taking(void)
{
    mo_lock_wait(&lock, &changed);
}

static void take_twice(void)
{
    mo_lock_take(&lock);
    mo_lock_take(&lock);
}

static void give_without_taking(void)
{
    mo_lock_give(&lock);
}

static void *take_and_keep(void *unused)
{
    mo_lock_take(&lock);
    return unused;
}

static void give_what_another_took(void)
{
    pthread_t other;
    pthread_create(&other, NULL, take_and_keep, NULL);
    pthread_join(other, NULL);
    mo_lock_give(&lock);
}

TEST(misuse_is_caught_where_assertions_are_on)
{
    void (*const misuses[])(void) = {take_twice, give_without_taking, give_what_another_took,
                                     wait_without_taking};
    for (int i = 0; i < 4; i++) {
        child_end end = in_child(misuses[i]);
        CHECK(child_aborted(&end));
        CHECK_SAID(&end, "mo_lock_held(lock)");
    }
}

TEST_MAIN
