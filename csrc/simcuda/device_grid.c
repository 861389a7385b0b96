#include "grid.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { WARP = 32, STACK = 256 << 10, BLOCKS_AT_ONCE = 5 };

/* ---- fibers -------------------------------------------------------------------------------------------------------------- */

/* Sanitizers follow a switch of stacks only where it is the C library's, which asks the kernel each time. */
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
typedef void *context;

void sim_grid_switch(context *save, context *to);
__asm__(".text\n"
        ".globl sim_grid_switch\n"
        ".hidden sim_grid_switch\n"
        ".type sim_grid_switch, @function\n"
        "sim_grid_switch:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rsp, (%rdi)\n"
        "mov (%rsi), %rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\n"
        "ret\n"
        ".size sim_grid_switch, . - sim_grid_switch\n");

static void context_make(context *made, char *end, void (*begin)(void))
{
    void **top = (void **)end;

    *--top = NULL; /* where begin() would return to: never; and the stack is aligned as after a call */
    *--top = (void *)begin;
    for (int callee_saved = 0; callee_saved < 6; callee_saved++)
        *--top = NULL;
    *made = top;
}
#else
#include <ucontext.h>
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

typedef struct context {
    ucontext_t at;
    void *followed; /* by ThreadSanitizer */
} context;

static void sim_grid_switch(context *save, context *to)
{
#if defined(__SANITIZE_THREAD__)
    save->followed = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(to->followed, 0);
#endif
    swapcontext(&save->at, &to->at);
}

static void context_make(context *made, char *end, void (*begin)(void))
{
    getcontext(&made->at);
    made->at.uc_stack.ss_sp = end - STACK / 2;
    made->at.uc_stack.ss_size = STACK / 2;
    made->at.uc_link = NULL;
    makecontext(&made->at, begin, 0);
#if defined(__SANITIZE_THREAD__)
    made->followed = __tsan_create_fiber(0);
#endif
}
#endif

static void context_end(context *ended)
{
    (void)ended;
#if defined(__SANITIZE_THREAD__)
    __tsan_destroy_fiber(ended->followed);
#endif
}

/* ---- the grid that runs ---------------------------------------------------------------------------------------------------- */

typedef enum thread_state { READY, AT_BARRIER, AT_SHUFFLE, ENDED } thread_state;

typedef struct thread {
    sim_place place;
    context at;
    char *stack; /* once it has run */
    struct block *block;
    thread_state state;
    int line;       /* where it waits */
    int predicate;  /* of a barrier, then the result */
    unsigned mask;  /* of a shuffle */
    uint64_t value; /* then the result */
    unsigned by;
    enum { DOWN, XOR, ORDER } kind;
} thread;

typedef struct block {
    unsigned index, ended;
    unsigned turn, first, step; /* of the round that is under way: thread first + turn * step */
    char *shared;
    thread threads[];
} block;

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

static struct {
    const sim_grid *grid;
    uint64_t random;
    block *live[BLOCKS_AT_ONCE];
    unsigned live_count;
    block *loaded; /* whose shared memory is in place */
    thread *self;
    context main;
    char **stacks; /* for use again */
    size_t stack_count, stack_room;
    char *why;
    size_t room;
    bool failed;
} run;

sim_place *sim_here;

extern char __start_sim_shared[] __attribute__((visibility("hidden"), weak));
extern char __stop_sim_shared[] __attribute__((visibility("hidden"), weak));

static size_t shared_size(void)
{
    return (size_t)(__stop_sim_shared - __start_sim_shared);
}

static uint32_t draw(uint32_t below)
{
    run.random = run.random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((run.random >> 32) * below >> 32);
}

__attribute__((format(printf, 1, 2))) static void fail(const char *format, ...)
{
    va_list arguments;

    if (run.failed)
        return;
    run.failed = true;
    va_start(arguments, format);
    vsnprintf(run.why, run.room, format, arguments);
    va_end(arguments);
}

static unsigned number_of(const thread *t)
{
    return t->place.block.x * run.grid->threads + t->place.thread.x;
}

static void wait_here(void)
{
    sim_grid_switch(&run.self->at, &run.main);
}

static void thread_main(void)
{
    run.grid->kernel(run.grid->argument);
    run.self->state = ENDED;
    run.self->block->ended++;
    wait_here();
    abort(); /* nobody goes on with a thread that has ended */
}

static char *stack_take(void)
{
    void *fresh;

    if (run.stack_count > 0)
        return run.stacks[--run.stack_count];
    fresh = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return fresh == MAP_FAILED ? NULL : fresh;
}

static void stack_put(char *stack)
{
    if (run.stack_count == run.stack_room) {
        const size_t room = run.stack_room ? 2 * run.stack_room : 64;
        char **grown = realloc(run.stacks, room * sizeof *grown);
        if (!grown) {
            munmap(stack, STACK);
            return;
        }
        run.stacks = grown;
        run.stack_room = room;
    }
    run.stacks[run.stack_count++] = stack;
}

static void thread_end(thread *t)
{
    context_end(&t->at);
    stack_put(t->stack);
    t->stack = NULL;
}

static void go(thread *t)
{
    block *b = t->block;

    if (run.loaded != b) {
        if (run.loaded)
            memcpy(run.loaded->shared, __start_sim_shared, shared_size());
        memcpy(__start_sim_shared, b->shared, shared_size());
        run.loaded = b;
    }
    if (!t->stack) {
        t->stack = stack_take();
        if (!t->stack) {
            fail("no memory for the stack of a thread");
            return;
        }
        /* Tops lie apart, for equal ones would share a few lines of the cache. */
        context_make(&t->at, t->stack + STACK - t->place.thread.x % 64 * 192, thread_main);
    }
    run.self = t;
    sim_here = &t->place;
    sim_grid_switch(&run.main, &t->at);
    run.self = NULL;
    if (t->state == ENDED)
        thread_end(t);
}

/* ---- what threads wait for ----------------------------------------------------------------------------------------------------- */

int sim_barrier(int line, int predicate)
{
    thread *t = run.self;

    t->state = AT_BARRIER;
    t->line = line;
    t->predicate = predicate != 0;
    wait_here();
    return t->predicate;
}

static uint64_t exchange(int line, unsigned mask, uint64_t value, unsigned by, int kind)
{
    thread *t = run.self;

    t->state = AT_SHUFFLE;
    t->line = line;
    t->mask = mask;
    t->value = value;
    t->by = by;
    t->kind = kind;
    wait_here();
    return t->value;
}

uint64_t sim_shuffle(int line, unsigned mask, uint64_t value, unsigned by, bool exclusive_or)
{
    return exchange(line, mask, value, by, exclusive_or ? XOR : DOWN);
}

void sim_warp_barrier(int line)
{
    exchange(line, 0xFFFFFFFFu, 0, 0, ORDER);
}

void sim_fence(void)
{
    if (run.grid->watch)
        run.grid->watch->fence(number_of(run.self));
    wait_here();
}

unsigned sim_atomic_add(unsigned *at, unsigned by)
{
    unsigned before;

    wait_here();
    if (run.grid->watch)
        run.grid->watch->atomic(number_of(run.self), at);
    before = *at;
    *at = before + by;
    wait_here();
    return before;
}

/* Lets all go on once every thread of the block waits. */
static void release_barrier(block *b)
{
    unsigned waiting[1024], count = 0;
    int any = 0, line = -1;

    for (unsigned i = 0; i < run.grid->threads; i++) {
        const thread *t = &b->threads[i];
        if (t->state != AT_BARRIER)
            continue;
        if (line >= 0 && line != t->line)
            fail("block %u: threads wait at two barriers, in lines %d and %d", b->index, line, t->line);
        line = t->line;
        any |= t->predicate;
        waiting[count++] = number_of(t);
    }
    if (count == 0 || count + b->ended != run.grid->threads)
        return;
    if (b->ended > 0)
        fail("block %u: %u threads have ended while others wait at the barrier in line %d", b->index,
             b->ended, line);
    if (run.grid->watch)
        run.grid->watch->barrier(waiting, count);
    for (unsigned i = 0; i < run.grid->threads; i++)
        if (b->threads[i].state == AT_BARRIER) {
            b->threads[i].predicate = any;
            b->threads[i].state = READY;
        }
}

static bool all_at_shuffle(const block *b, const thread *warp, const thread *one)
{
    for (unsigned lane = 0; lane < WARP; lane++) {
        const thread *other = &warp[lane];
        if (!(one->mask >> lane & 1))
            continue;
        if (other->state == ENDED)
            fail("block %u: a shuffle in line %d names lane %u, which has ended", b->index, one->line, lane);
        if (other->state != AT_SHUFFLE || other->line != one->line || other->mask != one->mask)
            return false;
    }
    return true;
}

/* Lets the lanes of a mask go on once all of them wait at the same shuffle. */
static void release_shuffles(block *b)
{
    for (unsigned first = 0; first < run.grid->threads; first += WARP) {
        thread *warp = &b->threads[first];
        for (unsigned i = 0; i < WARP; i++) {
            uint64_t values[WARP];
            unsigned numbers[WARP], count = 0;
            const unsigned mask = warp[i].mask;

            if (warp[i].state != AT_SHUFFLE || !all_at_shuffle(b, warp, &warp[i]))
                continue;
            for (unsigned lane = 0; lane < WARP; lane++) {
                values[lane] = warp[lane].value;
                if (mask >> lane & 1)
                    numbers[count++] = number_of(&warp[lane]);
            }
            if (run.grid->watch)
                run.grid->watch->exchange(numbers, count, warp[i].kind == ORDER);
            for (unsigned lane = 0; lane < WARP; lane++) {
                thread *t = &warp[lane];
                const unsigned from = t->kind == XOR ? lane ^ t->by : lane + t->by;
                if (!(mask >> lane & 1))
                    continue;
                if (from < WARP && !(mask >> from & 1))
                    fail("block %u: a shuffle in line %d reads lane %u, which its mask leaves out", b->index,
                         t->line, from);
                t->value = values[from < WARP ? from : lane];
                t->state = READY;
            }
        }
    }
}

/* ---- blocks ------------------------------------------------------------------------------------------------------------------------ */

static block *block_start(unsigned index)
{
    const unsigned threads = run.grid->threads;
    block *b = calloc(1, sizeof *b + threads * sizeof *b->threads);

    if (b)
        b->shared = malloc(shared_size() + 1);
    if (!b || !b->shared) {
        free(b);
        fail("no memory for a block");
        return NULL;
    }
    b->index = index;
    b->step = 1;
    for (size_t i = 0; i < shared_size(); i++)
        b->shared[i] = (char)draw(256);
    for (unsigned i = 0; i < threads; i++)
        b->threads[i] = (thread){
            .place = {{i, 0, 0}, {index, 0, 0}, {threads, 1, 1}, {run.grid->blocks, 1, 1}},
            .block = b,
        };
    return b;
}

static void block_end(block *b)
{
    for (unsigned i = 0; i < run.grid->threads; i++)
        if (b->threads[i].stack)
            thread_end(&b->threads[i]);
    if (run.loaded == b)
        run.loaded = NULL;
    free(b->shared);
    free(b);
}

/* Turns of some threads of the block, in an order that is drawn for each round of all; or what its threads wait for. */
static void block_go(block *b)
{
    static const unsigned steps[] = {1, 5, 7, 11, 13, 17, 19, 23, 29, 31};
    const unsigned threads = run.grid->threads;
    unsigned ready = 0;

    for (unsigned turns = 1 + draw(threads); b->turn < threads && turns > 0; b->turn++) {
        thread *t = &b->threads[(b->first + b->turn * b->step) % threads];
        if (t->state != READY)
            continue;
        turns--;
        for (unsigned times = 1 + draw(4); times > 0 && t->state == READY && !run.failed; times--)
            go(t);
    }
    if (b->turn < threads)
        return;
    b->turn = 0;
    b->first = draw(threads);
    do
        b->step = steps[draw(sizeof steps / sizeof *steps)];
    while (b->step > 1 && threads % b->step == 0);
    for (unsigned pass = 0; pass < 2 && ready == 0; pass++) {
        if (pass > 0) {
            release_barrier(b);
            release_shuffles(b);
        }
        for (unsigned i = 0; i < threads; i++)
            ready += b->threads[i].state == READY;
    }
    if (ready == 0 && b->ended < threads)
        fail("block %u: %u threads have ended, and the others wait forever", b->index, b->ended);
}

static void run_blocks(unsigned *order, unsigned count)
{
    unsigned next = 0;

    for (unsigned i = 0; i < count; i++)
        order[i] = run.grid->first + i;
    for (unsigned i = count; i > 1; i--) {
        const unsigned other = draw(i), index = order[i - 1];
        order[i - 1] = order[other];
        order[other] = index;
    }
    while (!run.failed && (next < count || run.live_count > 0)) {
        unsigned k;
        while (next < count && run.live_count < BLOCKS_AT_ONCE) {
            block *fresh = block_start(order[next++]);
            if (!fresh)
                return;
            run.live[run.live_count++] = fresh;
        }
        k = draw(run.live_count);
        block_go(run.live[k]);
        if (run.live[k]->ended == run.grid->threads) {
            block_end(run.live[k]);
            run.live[k] = run.live[--run.live_count];
        }
    }
}

bool sim_grid_run(const sim_grid *grid, char *why, size_t room)
{
    const unsigned count = grid->some ? grid->some : grid->blocks;
    unsigned *order;
    bool failed;

    if (grid->blocks == 0 || grid->first > grid->blocks - count || count > grid->blocks ||
        grid->threads == 0 || grid->threads % WARP || grid->threads > 1024) {
        snprintf(why, room, "a grid of %u blocks of %u threads", grid->blocks, grid->threads);
        return false;
    }
    pthread_mutex_lock(&one_at_a_time);
    run.grid = grid;
    run.random = (grid->seed + 1) * 0x9E3779B97F4A7C15u;
    run.why = why;
    run.room = room;
    run.failed = false;
    run.loaded = NULL;
    if (grid->watch)
        grid->watch->begin(grid->blocks * grid->threads);
    order = malloc(count * sizeof *order);
    if (order)
        run_blocks(order, count);
    else
        fail("no memory for the order of %u blocks", count);
    free(order);
    while (run.live_count > 0)
        block_end(run.live[--run.live_count]);
    run.grid = NULL;
    failed = run.failed;
    pthread_mutex_unlock(&one_at_a_time);
    return !failed;
}

/* ---- for a watch ---------------------------------------------------------------------------------------------------------------------- */

unsigned sim_grid_thread(void)
{
    return number_of(run.self);
}

bool sim_grid_is_running(void)
{
    return run.self != NULL;
}

bool sim_grid_is_shared(const void *address)
{
    return (const char *)address >= __start_sim_shared && (const char *)address < __stop_sim_shared;
}

bool sim_grid_is_stack(const void *address)
{
    return (uintptr_t)address - (uintptr_t)run.self->stack < STACK ||
           (uintptr_t)address - (uintptr_t)run.self < sizeof *run.self;
}

void sim_grid_give_way(void)
{
    wait_here();
}

void sim_grid_stop(const char *why)
{
    fail("%s", why);
    wait_here();
    abort(); /* no thread has a turn once the run has failed */
}
