/* The loop without torch, with a library that has torch's two functions, and in a fork's child. What is loaded stays
 * loaded, so each of these is a process of its own. torch's own pool is tests/integration/test_parallel.py's. */
#include "base/parallel.h"

#include <dlfcn.h>
#include <pthread.h>

#include "child.h"
#include "made_library.h"

enum { ITEMS = 1000 };

typedef struct tally {
    unsigned char done[ITEMS];
    unsigned calls;
    pthread_t caller;
    bool elsewhere;
} tally;

static void count_items(void *user, size_t begin, size_t end)
{
    tally *t = user;
    __atomic_add_fetch(&t->calls, 1, __ATOMIC_RELAXED);
    if (!pthread_equal(pthread_self(), t->caller))
        __atomic_store_n(&t->elsewhere, true, __ATOMIC_RELAXED);
    for (size_t i = begin; i < end; i++)
        t->done[i]++;
}

static tally counted(size_t count, size_t grain)
{
    tally t = {.caller = pthread_self()};
    mo_parallel_for(count, grain, count_items, &t);
    for (size_t i = 0; i < ITEMS; i++)
        CHECK_EQ(t.done[i], i < count);
    return t;
}

TEST(without_torch_the_caller_does_all_in_one_call)
{
    CHECK(!is_loaded("libtorch_cpu.so"));
    CHECK_EQ(mo_parallel_threads(), 1);
    for (size_t count = 0; count <= ITEMS; count += count < 5 ? 1 : 199)
        for (size_t grain = 0; grain < 4; grain++) {
            const tally t = counted(count, grain);
            CHECK_EQ(t.calls, count > 0);
            CHECK(!t.elsewhere);
        }
}

/* ---- another way ------------------------------------------------------------------------------------------------- */

static size_t way_grain;

static void backwards(size_t count, size_t grain, mo_parallel_body body, void *user)
{
    way_grain = grain;
    for (size_t i = count; i-- > 0;)
        body(user, i, i + 1);
}

TEST(a_test_deals_items_out_its_own_way_and_then_no_more)
{
    mo_parallel_use(backwards);
    CHECK_EQ(counted(ITEMS, 7).calls, ITEMS);
    CHECK_EQ(way_grain, 7);
    CHECK_EQ(counted(0, 7).calls, 0);
    mo_parallel_use(NULL);
    CHECK_EQ(counted(ITEMS, 7).calls, 1);
}

/* ---- a torch of two threads -------------------------------------------------------------------------------------- */

static const char fake_torch[] =
    "#include <pthread.h>\n"
    "#include <stdint.h>\n"
    "typedef void range(int64_t, int64_t, void *);\n"
    "typedef struct job { int64_t begin, end; range *f; void *user; } job;\n"
    "int32_t status; uint32_t threads = 2; int64_t last_grain; unsigned loops;\n"
    "static void *run(void *p) { job *j = p; j->f(j->begin, j->end, j->user); return 0; }\n"
    "int32_t torch_get_num_threads(uint32_t *out) { *out = threads; return status; }\n"
    "int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, range *f, void *user) {\n"
    "    last_grain = grain; loops++;\n"
    "    if (status) return status;\n"
    "    job j = {begin, begin + (end - begin) / 2, f, user};\n"
    "    pthread_t other; pthread_create(&other, 0, run, &j);\n"
    "    f(j.end, end, user);\n"
    "    pthread_join(other, 0); return 0; }\n";

static void *load_torch(const char *source, int flags)
{
    const char *path = make_library("libtorch_cpu.so", "libtorch_cpu.so", source);
    void *library = dlopen(path, RTLD_NOW | flags);
    unlink(path);
    CHECK(library);
    return library;
}

static void finds_it_when_it_comes(void)
{
    CHECK_EQ(counted(ITEMS, 1).calls, 1); /* looked, and there was none */
    void *torch = load_torch(fake_torch, RTLD_LOCAL);
    int64_t *grain = dlsym(torch, "last_grain");
    unsigned *loops = dlsym(torch, "loops");

    const tally t = counted(ITEMS, 10);
    CHECK_EQ(t.calls, 2);
    CHECK(t.elsewhere);
    CHECK_EQ(*grain, 10);
    CHECK_EQ(mo_parallel_threads(), 2);
    *(uint32_t *)dlsym(torch, "threads") = 5;
    CHECK_EQ(mo_parallel_threads(), 5);
    CHECK_EQ(counted(ITEMS, 0).calls, 2);
    CHECK_EQ(*grain, 1);
    CHECK_EQ(*loops, 2);
    CHECK_EQ(counted(10, 10).calls, 1); /* too few for a thread: torch is not asked */
    CHECK_EQ(counted(1, 0).calls, 1);
    CHECK_EQ(*loops, 2);
    mo_parallel_use(backwards);
    CHECK_EQ(counted(ITEMS, 10).calls, ITEMS);
    mo_parallel_use(NULL);
    CHECK_EQ(counted(ITEMS, 10).calls, 2);
}

TEST(torch_is_found_when_it_comes_and_its_threads_are_used)
{
    CHECK_CHILD(finds_it_when_it_comes);
}

static void finds_what_is_global(void)
{
    void *library = dlopen(make_library("other", "libother.so", fake_torch), RTLD_NOW | RTLD_GLOBAL);
    CHECK(library && !is_loaded("libtorch_cpu.so"));
    CHECK_EQ(counted(ITEMS, 1).calls, 2);
}

TEST(a_torch_of_another_name_is_found_where_its_symbols_are_global)
{
    CHECK_CHILD(finds_what_is_global);
}

static void works_alone_in_an_older_torch(void)
{
    void *torch = load_torch("int torch_parallel_for(void) { __builtin_trap(); }", RTLD_LOCAL);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(counted(ITEMS, 1).calls, 1);
        CHECK_EQ(mo_parallel_threads(), 1);
    }
    dlclose(torch);
    CHECK(!is_loaded("libtorch_cpu.so")); /* looking holds nothing */
}

TEST(a_torch_that_lacks_one_of_the_two_is_none)
{
    CHECK_CHILD(works_alone_in_an_older_torch);
}

static void does_it_alone_where_torch_fails(void)
{
    void *torch = load_torch(fake_torch, RTLD_LOCAL);
    *(int32_t *)dlsym(torch, "status") = 1;
    const tally t = counted(ITEMS, 1);
    CHECK_EQ(t.calls, 1);
    CHECK(!t.elsewhere);
    CHECK_EQ(mo_parallel_threads(), 1);
}

TEST(where_torch_fails_the_caller_does_all_once)
{
    CHECK_CHILD(does_it_alone_where_torch_fails);
}

static void child_works_alone(void)
{
    const tally t = counted(ITEMS, 1);
    CHECK_EQ(t.calls, 1);
    CHECK_EQ(mo_parallel_threads(), 1);
}

static void forks_a_user_of_the_pool(void)
{
    load_torch(fake_torch, RTLD_LOCAL);
    CHECK_EQ(counted(ITEMS, 1).calls, 2);
    CHECK_CHILD(child_works_alone);
    CHECK_EQ(counted(ITEMS, 1).calls, 2); /* the parent goes on as before */
}

TEST(a_forked_child_does_without_the_pool_whose_threads_it_has_not)
{
    CHECK_CHILD(forks_a_user_of_the_pool);
}

/* ---- many threads look at once --------------------------------------------------------------------------------- */

static void *look(void *user)
{
    tally *t = user;
    t->caller = pthread_self();
    mo_parallel_for(ITEMS, 1, count_items, t);
    return NULL;
}

static void looks_from_many_threads(void)
{
    static tally tallies[8];
    pthread_t threads[8];
    load_torch(fake_torch, RTLD_LOCAL);
    for (int i = 0; i < 8; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, look, &tallies[i]), 0);
    for (int i = 0; i < 8; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < 8; i++) {
        CHECK_EQ(tallies[i].calls, 2);
        for (int k = 0; k < ITEMS; k++)
            CHECK_EQ(tallies[i].done[k], 1);
    }
}

TEST(many_threads_may_look_at_once)
{
    CHECK_CHILD(looks_from_many_threads);
}

TEST_MAIN
