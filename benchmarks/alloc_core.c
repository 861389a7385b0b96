/* What an alloc and its free take in the allocator's core, on the model device; bench_alloc_core.py runs this, and
 * `make build/c/bench/alloc_core` compiles it with the flags of the extension.
 *
 *     alloc_core PATTERN LIVE THREADS SEED       LIVE blocks stay live meanwhile, a share of them each thread's
 *
 *         again      a block, and its free at once: torch.empty and del
 *         replace    any one of the LIVE is freed, and one of its size made: nothing of it is in the cache
 *         step       forward makes BATCH blocks, of which every other dies young; backward frees the rest in reverse
 *
 * Three contenders, each with live blocks of its own: malloc (a yardstick: it touches the memory and needs no order
 * across streams, so every size is a SHARE-th), memopt, and memopt with the trace ring on. Each line of standard input
 * is answered by one:
 *
 *     time CONTENDER PAIRS    nanoseconds a pair: CPU time of one thread; wall time of all that was done, of several
 *     each CONTENDER PAIRS    p50 p99 p99.9 of single pairs, nanoseconds by the processor's clock, less its own cost
 *     calls CONTENDER         create, release, map, unmap and grant calls of the device so far
 *
 * Whatever fails ends the process with a sentence. */
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef __x86_64__
#include <x86intrin.h>
#endif

#include "alloc/pool.h"
#include "alloc/trace_ring.h"
#include "driver/model_device.h"

enum {
    BATCH = 1024, /* blocks of a step */
    SIZES = 4096,
    SHARE = 512, /* malloc's part of each size */
    MOST_THREADS = 64,
    MOST_LIVE = 1 << 20,
    MOST_PAIRS = 1 << 24,
    RING = 1 << 16,
};

static const size_t CAPACITY = (size_t)1 << 44, GRANULARITY = 2u << 20;

typedef enum pattern { AGAIN, REPLACE, STEP, PATTERNS } pattern;
static const char *const pattern_names[] = {"again", "replace", "step"};

typedef struct contender {
    const char *name;
    bool traced;
    mo_pool *pool; /* NULL: malloc */
    mo_model_device device;
    uintptr_t *live;
} contender;

static contender contenders[] = {
    {.name = "malloc"}, {.name = "memopt"}, {.name = "memopt, ring on", .traced = true}};
enum { CONTENDERS = sizeof contenders / sizeof *contenders };

static size_t sizes[SIZES]; /* log-uniform, 512 bytes to 4 MiB */
static pattern work;
static size_t live_count, thread_count;
static uint64_t seed;
static double nanoseconds_a_tick;
static uint64_t ticks_of_clock;

static _Noreturn __attribute__((format(printf, 1, 2))) void stop(const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    fputs("alloc_core: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(2);
}

static void *must(void *block)
{
    if (!block)
        stop("out of host memory");
    return block;
}

static uint64_t random_number(uint64_t *state) /* splitmix64 */
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* ---- clocks --------------------------------------------------------------------------------------------------- */

static uint64_t nanoseconds(clockid_t clock)
{
    struct timespec t;

    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Not before what came before it in the program is done. */
static inline uint64_t ticks(void)
{
#ifdef __x86_64__
    _mm_lfence();
    const uint64_t now = __rdtsc();
    _mm_lfence();
    return now;
#else
    return nanoseconds(CLOCK_MONOTONIC);
#endif
}

static void calibrate(void)
{
    const uint64_t from = nanoseconds(CLOCK_MONOTONIC), first = ticks();
    uint64_t to;

    do
        to = nanoseconds(CLOCK_MONOTONIC);
    while (to - from < 50000000);
    nanoseconds_a_tick = (double)(to - from) / (double)(ticks() - first);
    ticks_of_clock = UINT64_MAX;
    for (int i = 0; i < 10000; i++) {
        const uint64_t start = ticks(), took = ticks() - start;
        if (took < ticks_of_clock)
            ticks_of_clock = took;
    }
}

/* ---- the contenders ------------------------------------------------------------------------------------------- */

static inline uintptr_t make(contender *c, size_t size)
{
    mo_detail said;
    mo_address address = 0;

    if (!c->pool)
        return (uintptr_t)must(malloc(size / SHARE));
    if (mo_pool_alloc(c->pool, size, NULL, &said, &address))
        stop("%s: %zu bytes: %s", c->name, size, said.text);
    return address;
}

static inline void drop(contender *c, uintptr_t block)
{
    mo_detail said;

    if (!c->pool)
        free((void *)block);
    else if (mo_pool_free(c->pool, block, &said))
        stop("%s: %s", c->name, said.text);
}

static size_t size_of_live(size_t i)
{
    return sizes[i * 2654435761u % SIZES];
}

static void open_contender(contender *c)
{
    const mo_pool_settings settings = {.slack = 20, .double_map = true, .recall = true};
    mo_detail said;
    mo_trace *ring;

    if (c != contenders) {
        mo_model_device_open(&c->device, CAPACITY, GRANULARITY);
        if (mo_pool_open(&c->device.table, &settings, &said, &c->pool))
            stop("%s", said.text);
    }
    if (c->traced) {
        if (mo_trace_open(RING, &said, &ring))
            stop("%s", said.text);
        mo_pool_trace(c->pool, ring);
    }
    c->live = must(malloc(live_count * sizeof *c->live));
    for (size_t i = 0; i < live_count; i++)
        c->live[i] = make(c, size_of_live(i));
}

static contender *contender_named(const char *name)
{
    for (int i = 0; i < CONTENDERS; i++)
        if (!strcmp(contenders[i].name, name))
            return &contenders[i];
    stop("no contender \"%s\"", name);
}

/* ---- the work ------------------------------------------------------------------------------------------------- */

typedef struct worker {
    pthread_t thread;
    pthread_barrier_t *barrier;
    contender *on;
    size_t pairs, from, to; /* its own of the live blocks */
    uint64_t random, cpu, start, end;
    uint32_t *each; /* ticks of each pair, or NULL: no clock is read in between */
} worker;

static inline uint64_t begin(const worker *w)
{
    return w->each ? ticks() : 0;
}

static inline uint32_t since(const worker *w, uint64_t start)
{
    if (!w->each)
        return 0;
    const uint64_t took = ticks() - start;
    const uint64_t net = took > ticks_of_clock ? took - ticks_of_clock : 0;
    return net > UINT32_MAX / 2 ? UINT32_MAX / 2 : (uint32_t)net;
}

static uint32_t timed_drop(worker *w, uintptr_t block)
{
    const uint64_t start = begin(w);

    drop(w->on, block);
    return since(w, start);
}

static uintptr_t timed_make(worker *w, size_t size, uint32_t *took)
{
    const uint64_t start = begin(w);
    const uintptr_t block = make(w->on, size);

    *took = since(w, start);
    return block;
}

static void note(worker *w, size_t pair, uint32_t took)
{
    if (w->each)
        w->each[pair] = took;
}

static void do_again(worker *w)
{
    for (size_t i = 0; i < w->pairs; i++) {
        uint32_t took;
        const uintptr_t block = timed_make(w, sizes[(w->from + i) % SIZES], &took);
        note(w, i, took + timed_drop(w, block));
    }
}

static void do_replace(worker *w)
{
    for (size_t i = 0; i < w->pairs; i++) {
        const size_t at = w->from + random_number(&w->random) % (w->to - w->from);
        uint32_t took;
        const uint32_t dropped = timed_drop(w, w->on->live[at]);
        w->on->live[at] = timed_make(w, size_of_live(at), &took);
        note(w, i, took + dropped);
    }
}

static void do_steps(worker *w)
{
    uintptr_t blocks[BATCH];
    uint32_t took[BATCH];

    for (size_t done = 0; done < w->pairs; done += BATCH) {
        for (size_t i = 0; i < BATCH; i++) {
            blocks[i] = timed_make(w, sizes[i % SIZES], &took[i]);
            if (i & 1)
                note(w, done + i - 1, took[i - 1] + timed_drop(w, blocks[i - 1]));
        }
        for (size_t i = BATCH; i-- > 0;)
            if (i & 1)
                note(w, done + i, took[i] + timed_drop(w, blocks[i]));
    }
}

static void *run_worker(void *user)
{
    static void (*const doing[])(worker *) = {do_again, do_replace, do_steps};
    worker *w = user;

    pthread_barrier_wait(w->barrier);
    const uint64_t cpu = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
    w->start = nanoseconds(CLOCK_MONOTONIC);
    doing[work](w);
    w->end = nanoseconds(CLOCK_MONOTONIC);
    w->cpu = nanoseconds(CLOCK_THREAD_CPUTIME_ID) - cpu;
    return NULL;
}

/* `pairs` (rounded up, a share each) by all threads; returns how many, and the first worker's in *workers. */
static size_t run(contender *c, size_t pairs, uint32_t *each, worker *workers)
{
    const size_t whole = thread_count * (work == STEP ? BATCH : 1),
                 share = (pairs + whole - 1) / whole * whole / thread_count;
    pthread_barrier_t barrier;

    pthread_barrier_init(&barrier, NULL, (unsigned)thread_count);
    for (size_t t = 0; t < thread_count; t++) {
        workers[t] = (worker){
            .barrier = &barrier,
            .on = c,
            .pairs = share,
            .from = live_count * t / thread_count,
            .to = live_count * (t + 1) / thread_count,
            .random = seed + t,
            .each = each ? each + t * share : NULL,
        };
        if (t && pthread_create(&workers[t].thread, NULL, run_worker, &workers[t]))
            stop("a thread could not be started");
    }
    run_worker(&workers[0]);
    for (size_t t = 1; t < thread_count; t++)
        pthread_join(workers[t].thread, NULL);
    pthread_barrier_destroy(&barrier);
    return share * thread_count;
}

/* ---- answers -------------------------------------------------------------------------------------------------- */

static void answer_time(contender *c, size_t pairs)
{
    worker workers[MOST_THREADS];
    const size_t count = run(c, pairs, NULL, workers);
    uint64_t start = UINT64_MAX, end = 0;

    for (size_t t = 0; t < thread_count; t++) {
        start = workers[t].start < start ? workers[t].start : start;
        end = workers[t].end > end ? workers[t].end : end;
    }
    printf("%.3f\n", (double)(thread_count == 1 ? workers[0].cpu : end - start) / (double)count);
}

static int compare(const void *left, const void *right)
{
    const uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;

    return a < b ? -1 : a > b;
}

static void answer_each(contender *c, size_t pairs)
{
    worker workers[MOST_THREADS];
    uint32_t *each = must(malloc((pairs + thread_count * BATCH) * sizeof *each));

    memset(each, 0,
           (pairs + thread_count * BATCH) * sizeof *each); /* its page faults are not the allocator's */
    const size_t count = run(c, pairs, each, workers);
    qsort(each, count, sizeof *each, compare);
    printf("%.1f %.1f %.1f\n", each[count / 2] * nanoseconds_a_tick,
           each[count - 1 - count / 100] * nanoseconds_a_tick,
           each[count - 1 - count / 1000] * nanoseconds_a_tick);
    free(each);
}

static void answer_calls(contender *c)
{
    const uint64_t *calls = c->device.calls;

    printf("%" PRIu64 "\n", calls[MO_MODEL_DEVICE_create] + calls[MO_MODEL_DEVICE_release] +
                                calls[MO_MODEL_DEVICE_map] + calls[MO_MODEL_DEVICE_unmap] +
                                calls[MO_MODEL_DEVICE_grant]);
}

static void answer(char *line)
{
    char name[64];
    size_t pairs = 0;

    if (sscanf(line, "calls %63[^\n]", name) == 1) {
        answer_calls(contender_named(name));
        return;
    }
    if ((sscanf(line, "time %zu %63[^\n]", &pairs, name) != 2 &&
         sscanf(line, "each %zu %63[^\n]", &pairs, name) != 2) ||
        !pairs || pairs > MOST_PAIRS)
        stop("not understood: %s", line);
    if (line[0] == 't')
        answer_time(contender_named(name), pairs);
    else
        answer_each(contender_named(name), pairs);
}

static size_t number(const char *text, size_t least, size_t most, const char *what)
{
    char *end;
    const unsigned long long value = strtoull(text, &end, 10);

    if (!*text || *end || value < least || value > most)
        stop("%s is %zu to %zu, not \"%s\"", what, least, most, text);
    return (size_t)value;
}

int main(int argc, char **argv)
{
    char line[128];

    if (argc != 5)
        stop("usage: alloc_core again|replace|step LIVE THREADS SEED");
    while (work < PATTERNS && strcmp(argv[1], pattern_names[work]) != 0)
        work++;
    if (work == PATTERNS)
        stop("no pattern \"%s\"", argv[1]);
    thread_count = number(argv[3], 1, MOST_THREADS, "THREADS");
    live_count = number(argv[2], thread_count, MOST_LIVE, "LIVE");
    seed = number(argv[4], 0, SIZE_MAX, "SEED");
    uint64_t random = seed;
    for (size_t i = 0; i < SIZES; i++) { /* an octave, and a part of it */
        const uint64_t drawn = random_number(&random);
        const size_t octave = (size_t)512 << drawn % 13;
        sizes[i] = octave + (drawn >> 32) % octave;
    }
    calibrate();
    for (int i = 0; i < CONTENDERS; i++)
        open_contender(&contenders[i]);
    while (fgets(line, sizeof line, stdin)) {
        answer(line);
        fflush(stdout);
    }
    return 0;
}
