/* A torch of our own: an allocator by C++'s ABI, whose blocks are counted, and the place where torch looks for it. */
#include "alloc/torch_cpu.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/hostmem.h"
#include "test.h"

typedef struct pointer {
    void *data;
    void (*free)(void *);
    void *context;
    int8_t device_type, device_index;
} pointer;

typedef struct functions {
    void (*destroy)(void *), (*destroy_and_free)(void *);
    pointer *(*allocate)(pointer *out, void *self, size_t size);
    bool (*is_simple)(const void *self, const pointer *p);
    void (*(*raw_deleter)(const void *self))(void *);
    void (*copy_data)(const void *self, void *to, const void *from, size_t count);
} functions;

static atomic_long blocks;
static int strange; /* the context is another than the data */

static void nothing(void *self)
{
    (void)self;
}

static void give_back(void *block)
{
    if (block)
        atomic_fetch_sub(&blocks, 1);
    free(block);
}

static pointer *give(pointer *out, void *self, size_t size)
{
    (void)self;
    *out = (pointer){size ? malloc(size) : NULL, give_back, NULL, 0, -1};
    out->context = strange ? NULL : out->data;
    atomic_fetch_add(&blocks, out->data != NULL);
    return out;
}

static bool simple(const void *self, const pointer *p)
{
    (void)self;
    return p->data == p->context;
}

static void (*its_deleter(const void *self))(void *)
{
    (void)self;
    return give_back;
}

static void copy(const void *self, void *to, const void *from, size_t count)
{
    (void)self;
    memcpy(to, from, count);
}

static struct {
    ptrdiff_t offset;
    const void *type_info;
    functions f;
} table = {0, "a type", {nothing, nothing, give, simple, its_deleter, copy}};
static struct allocator {
    const functions *f;
} theirs = {&table.f}, others = {&table.f};
static _Atomic(struct allocator *) there = &theirs;
static uint8_t there_priority = 3;

static void *get(const int8_t *type)
{
    CHECK_EQ(*type, 0);
    return there;
}

static void set(int8_t type, void *allocator, uint8_t priority)
{
    if (type == 0 && priority >= there_priority) {
        there = allocator;
        there_priority = priority;
    }
}

static const mo_torch_cpu torch = {get, set};

static pointer ask(size_t size)
{
    struct allocator *from = there;
    pointer p;

    from->f->allocate(&p, from, size);
    return p;
}

static void drop(pointer p)
{
    p.free(p.context);
}

static void somewhere(int64_t *stack, int64_t *module)
{
    *stack = 7;
    *module = 9;
}

TEST(births_and_deaths_are_noted_and_the_memory_is_torchs)
{
    mo_life_log *log = NULL;
    mo_life_event events[3];

    CHECK_EQ(mo_life_open(10, NULL, &log), MO_OK);
    const pointer before = ask(10);
    CHECK_EQ(mo_torch_cpu_watch(&torch, log, somewhere, NULL), MO_OK);
    CHECK(mo_torch_cpu_watched() && there != &theirs);
    const pointer none = ask(0), block = ask(100), late = ask(200);
    CHECK(block.data == block.context && block.free == there->f->raw_deleter(there));
    CHECK(there->f->is_simple(there, &block));
    memset(block.data, 1, 100);
    there->f->copy_data(there, late.data, block.data, 100);
    CHECK(!memcmp(late.data, block.data, 100));
    drop(none);
    drop(before); /* nobody had seen it */
    drop(block);
    CHECK_EQ(mo_life_written(log), 3);
    mo_life_events(log, events);
    CHECK(events[0].birth && events[0].size == 100 && events[0].stack == 7 && events[0].module == 9);
    CHECK_EQ(events[0].address, (int64_t)(intptr_t)block.data);
    CHECK(events[1].birth && events[1].size == 200);
    CHECK(!events[2].birth && events[2].address == events[0].address && events[2].size == 100);
    mo_torch_cpu_stop();
    CHECK(there == &theirs && there_priority == 3 && !mo_torch_cpu_watched());
    mo_torch_cpu_stop();
    mo_life_close(log);
    drop(late); /* long after */
    CHECK_EQ(atomic_load(&blocks), 0);
}

TEST(a_block_of_the_watch_before_is_not_of_this_one_unless_it_is_told)
{
    mo_life_log *log = NULL;

    CHECK_EQ(mo_life_open(10, NULL, &log), MO_OK);
    CHECK_EQ(mo_torch_cpu_watch(&torch, log, NULL, NULL), MO_OK);
    const pointer a = ask(10), b = ask(20);
    mo_torch_cpu_stop();
    mo_life_close(log);
    CHECK_EQ(mo_life_open(10, NULL, &log), MO_OK);
    CHECK_EQ(mo_torch_cpu_watch(&torch, log, NULL, NULL), MO_OK);
    CHECK(mo_torch_cpu_lock_log() == log);
    CHECK(mo_life_adopt(log, (int64_t)(intptr_t)b.data, 20) > 0);
    mo_torch_cpu_unlock_log();
    drop(a);
    CHECK_EQ(mo_life_written(log), 0);
    drop(b);
    CHECK_EQ(mo_life_written(log), 1);
    mo_torch_cpu_stop();
    CHECK(!mo_torch_cpu_lock_log());
    mo_life_close(log);
    CHECK_EQ(atomic_load(&blocks), 0);
}

TEST(who_pauses_is_not_noted_and_what_was_is)
{
    mo_life_log *log = NULL;

    CHECK_EQ(mo_life_open(10, NULL, &log), MO_OK);
    CHECK_EQ(mo_torch_cpu_watch(&torch, log, NULL, NULL), MO_OK);
    const pointer noted = ask(10);
    mo_torch_cpu_pause();
    mo_torch_cpu_pause();
    mo_torch_cpu_resume();
    const pointer own = ask(20);
    drop(noted);
    mo_torch_cpu_resume();
    CHECK_EQ(mo_life_written(log), 2);
    drop(own);
    CHECK_EQ(mo_life_written(log), 2);
    mo_torch_cpu_stop();
    mo_life_close(log);
}

TEST(an_allocator_that_is_not_as_it_is_known_is_left_alone)
{
    mo_life_log *log = NULL;
    mo_detail detail;
    mo_torch_cpu looked_up;

    CHECK_EQ(mo_life_open(10, NULL, &log), MO_OK);
    strange = 1;
    CHECK_EQ(mo_torch_cpu_watch(&torch, log, NULL, &detail), MO_UNSUPPORTED);
    CHECK(there == &theirs && !mo_torch_cpu_watched());
    strange = 0;
    CHECK_EQ(atomic_exchange(&blocks, 0), 1); /* the one that was tried: how it goes back is not known */
    CHECK_EQ(mo_torch_cpu_watch(&torch, log, NULL, NULL), MO_OK);
    CHECK_EQ(mo_torch_cpu_watch(&torch, log, NULL, &detail), MO_INVALID);
    mo_torch_cpu_stop();
    there = &others; /* blocks of the first would go back to the second */
    CHECK_EQ(mo_torch_cpu_watch(&torch, log, NULL, &detail), MO_UNSUPPORTED);
    CHECK(there == &others);
    there = &theirs;
    mo_life_close(log);
    CHECK_EQ(mo_torch_cpu_find(&looked_up, &detail), MO_NO_LIBRARY);
    CHECK(strstr(detail.text, "import torch first"));
}

static void *churn(void *seed)
{
    unsigned state = (unsigned)(uintptr_t)seed;
    pointer held[16] = {{0}};

    for (int n = 0; n < 4000; n++) {
        pointer *p = &held[state % 16];

        state = state * 1103515245u + 12345u;
        if (p->data) {
            drop(*p);
            p->data = NULL;
        } else
            *p = ask(1 + state % 500);
    }
    for (int i = 0; i < 16; i++)
        if (held[i].data)
            drop(held[i]);
    return NULL;
}

TEST(threads_ask_while_watches_come_and_go)
{
    pthread_t threads[4];

    for (uintptr_t i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, churn, (void *)(i + 1)), 0);
    for (int n = 0; n < 50; n++) {
        mo_life_log *log = NULL;

        CHECK_EQ(mo_life_open(300, NULL, &log), MO_OK);
        CHECK_EQ(mo_torch_cpu_watch(&torch, log, somewhere, NULL), MO_OK);
        for (int k = 0; k < 20; k++)
            if (mo_torch_cpu_lock_log()) {
                CHECK(mo_life_kept(log) <= 300);
                mo_torch_cpu_unlock_log();
            }
        mo_torch_cpu_stop();
        mo_life_close(log);
    }
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    CHECK_EQ(atomic_load(&blocks), 0);
}

TEST(the_child_of_a_fork_is_not_watched_and_can_watch)
{
    mo_life_log *log = NULL;
    int status;

    CHECK_EQ(mo_life_open(10, NULL, &log), MO_OK);
    CHECK_EQ(mo_torch_cpu_watch(&torch, log, NULL, NULL), MO_OK);
    const pointer block = ask(10);
    CHECK(mo_torch_cpu_lock_log() == log); /* as another thread may hold it */
    const pid_t child = fork();
    if (!child) {
        int good = !mo_torch_cpu_watched() && !mo_torch_cpu_lock_log();

        drop(block);
        good = good && mo_torch_cpu_watch(&torch, log, NULL, NULL) == MO_OK;
        drop(ask(5));
        mo_torch_cpu_stop();
        _exit(good ? 0 : 1);
    }
    mo_torch_cpu_unlock_log();
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    drop(block);
    CHECK_EQ(mo_life_written(log), 2);
    mo_torch_cpu_stop();
    mo_life_close(log);
}

TEST_MAIN
