/* What a grid of simcuda/grid.h does to memory: accesses that nothing orders by PTX's rules, or that lie outside every buffer, are not
 * aligned to their size, or store to what is only read. Kernels name their accesses by the calls that gcc's -fsanitize=thread makes,
 * which are answered here, or by kernel_touch().
 *
 * Vector clocks: a barrier orders the threads of a block; fence, atomic, atomic, fence order two threads; __syncwarp orders a warp; a
 * shuffle orders nothing. */
#include "simcuda/grid.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct buffer {
    char name[32];
    uintptr_t at;
    size_t size;
    bool read_only;
} buffer;

typedef enum strength { PLAIN, VOLATILE, ATOMIC } strength;

typedef struct touch {
    uint32_t thread, time;
    const char *from;
    strength strong;
} touch;

/* Who touched a byte last, by its address, and in shared memory by its block too. */
typedef struct cell {
    uint64_t key; /* 0: none */
    touch write;
    bool written;
    unsigned read_count, read_room;
    touch *reads; /* since then, by thread; from NULL: none */
} cell;

typedef struct publication {
    const void *address;
    uint32_t *clock;
} publication;

enum { BUFFERS = 64, PUBLICATIONS = 8, REPORT = 8192, TOLD = 256, MOST_ACCESSES = 1 << 24 };

extern const char __ehdr_start[] __attribute__((visibility("hidden")));
extern const char _end[] __attribute__((visibility("hidden")));

static buffer buffers[BUFFERS];
static unsigned buffer_count;
/* Each thread's clocks: what is before it, what its last fence released, what its atomics brought. */
enum { SEEN, RELEASED, BROUGHT, CLOCKS };
static uint32_t *clocks[CLOCKS];
static unsigned threads;
static publication published[PUBLICATIONS];
static unsigned published_count;
static cell *cells;
static size_t cell_count, cell_room;
static char report[REPORT];
static size_t report_length;
static struct {
    const char *first, *second;
    const char *kind;
} told[TOLD];
static unsigned told_count;
static double give_way;
static uint64_t random_state, accesses, moved[2][5];
static const sim_grid *running;

static uint32_t *clock_of(int which, unsigned thread)
{
    return clocks[which] + (size_t)thread * threads;
}

static void join(uint32_t *to, const uint32_t *from)
{
    for (unsigned i = 0; i < threads; i++)
        if (to[i] < from[i])
            to[i] = from[i];
}

static void copy(uint32_t *to, const uint32_t *from)
{
    memcpy(to, from, threads * sizeof *to);
}

static void *needed(void *memory)
{
    if (!memory)
        abort();
    return memory;
}

/* ---- bytes ----------------------------------------------------------------------------------------------------------------- */

static cell *cell_at(cell *in, size_t room, uint64_t key)
{
    size_t i = (size_t)(key * 0x9E3779B97F4A7C15u >> 20) & (room - 1);

    while (in[i].key && in[i].key != key)
        i = (i + 1) & (room - 1);
    return &in[i];
}

static cell *cell_of(uint64_t key)
{
    cell *found;

    if (2 * cell_count >= cell_room) {
        const size_t room = cell_room ? 2 * cell_room : 1 << 14;
        cell *grown = needed(calloc(room, sizeof *grown));
        for (size_t i = 0; i < cell_room; i++)
            if (cells[i].key)
                *cell_at(grown, room, cells[i].key) = cells[i];
        free(cells);
        cells = grown;
        cell_room = room;
    }
    found = cell_at(cells, cell_room, key);
    if (!found->key) {
        found->key = key;
        cell_count++;
    }
    return found;
}

static const buffer *buffer_of(uintptr_t at)
{
    for (unsigned i = 0; i < buffer_count; i++)
        if (at - buffers[i].at < buffers[i].size)
            return &buffers[i];
    return NULL;
}

/* Once for each pair of places in the text. */
static void tell(const char *kind, touch first, touch second, uintptr_t at)
{
    const buffer *of = buffer_of(at);

    for (unsigned i = 0; i < told_count; i++)
        if (told[i].kind == kind && told[i].first == first.from && told[i].second == second.from)
            return;
    if (told_count == TOLD || REPORT - report_length < 200)
        return;
    told[told_count].kind = kind;
    told[told_count].first = first.from;
    told[told_count++].second = second.from;
    report_length += (size_t)snprintf(report + report_length, REPORT - report_length,
                                      "%s: %s, threads %u and %u, at %#zx and %#zx\n", kind,
                                      of                               ? of->name
                                      : sim_grid_is_shared((void *)at) ? "shared memory"
                                                                       : "no buffer",
                                      first.thread, second.thread, (size_t)(first.from - __ehdr_start),
                                      (size_t)(second.from - __ehdr_start));
}

static bool is_ordered(touch before, unsigned thread)
{
    return before.thread == thread || before.time <= clock_of(SEEN, thread)[before.thread];
}

static void check_order(touch before, touch now, bool read_after_write, const char *race, uintptr_t at)
{
    if (is_ordered(before, now.thread) || before.strong == ATOMIC || now.strong == ATOMIC)
        return;
    if (before.strong == PLAIN || now.strong == PLAIN)
        tell(race, before, now, at);
    else if (read_after_write && !sim_grid_is_shared((void *)at))
        tell("volatile read that nothing orders after the write", before, now, at);
}

static touch *read_by(touch *reads, unsigned room, unsigned thread)
{
    unsigned i = (thread * 0x9E3779B1u >> 8) & (room - 1);

    while (reads[i].from && reads[i].thread != thread)
        i = (i + 1) & (room - 1);
    return &reads[i];
}

/* A value that all threads read has as many reads. */
static void note_read(cell *c, touch now)
{
    touch *found;

    if (2 * c->read_count >= c->read_room) {
        const unsigned room = c->read_room ? 2 * c->read_room : 2;
        touch *grown = needed(calloc(room, sizeof *grown));
        for (unsigned i = 0; i < c->read_room; i++)
            if (c->reads[i].from)
                *read_by(grown, room, c->reads[i].thread) = c->reads[i];
        free(c->reads);
        c->reads = grown;
        c->read_room = room;
    }
    found = read_by(c->reads, c->read_room, now.thread);
    c->read_count += found->from == NULL;
    *found = now;
}

static void touch_byte(uintptr_t at, bool write, touch now)
{
    const uint64_t of_block = sim_grid_is_shared((void *)at) ? (uint64_t)(sim_here->block.x + 1) << 48 : 0;
    cell *c = cell_of(at | of_block);

    if (c->written)
        check_order(c->write, now, !write, write ? "race of two writes" : "race of a write and a read", at);
    if (write) {
        for (unsigned i = 0; i < c->read_room; i++)
            if (c->reads[i].from)
                check_order(c->reads[i], now, false, "race of a read and a write", at);
        free(c->reads);
        c->reads = NULL;
        c->read_count = c->read_room = 0;
        c->write = now;
        c->written = true;
        return;
    }
    note_read(c, now);
}

static void check_place(uintptr_t at, size_t size, bool write, touch now)
{
    const buffer *of = buffer_of(at);

    if (!of || at + size > of->at + of->size) {
        tell(write ? "store out of bounds" : "load out of bounds", now, now, at);
        sim_grid_stop(""); /* it would not end well */
    }
    if (of->read_only && write)
        tell("store to what is only read", now, now, at);
    if (size <= 16 && (size & (size - 1)) == 0) {
        if (at % size) {
            tell("misaligned access", now, now, at);
            sim_grid_stop(""); /* an access of 16 bytes faults there */
        }
        moved[write][size == 1 ? 0 : size == 2 ? 1 : size == 4 ? 2 : size == 8 ? 3 : 4] += size;
    }
}

static void access_memory(uintptr_t at, size_t size, bool write, strength strong, const char *from)
{
    touch now = {.from = from, .strong = strong};

    if (!running || !sim_grid_is_running() || sim_grid_is_stack((void *)at))
        return;
    if (!sim_grid_is_shared((void *)at)) {
        const bool of_the_image = at >= (uintptr_t)__ehdr_start && at < (uintptr_t)_end;
        if (of_the_image || at - (uintptr_t)running->argument < 256)
            return;
    }
    now.thread = sim_grid_thread();
    now.time = clock_of(SEEN, now.thread)[now.thread];
    if (++accesses == MOST_ACCESSES) {
        tell("no end in sight", now, now, at);
        sim_grid_stop("");
    }
    if (!sim_grid_is_shared((void *)at))
        check_place(at, size, write, now);
    for (size_t i = 0; i < size; i++)
        touch_byte(at + i, write, now);
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    if ((double)(random_state >> 32) < give_way * 4294967296.0 && strong != ATOMIC)
        sim_grid_give_way();
}

void kernel_touch(void *at, size_t size, int write, int is_volatile);
void kernel_touch(void *at, size_t size, int write, int is_volatile)
{
    access_memory((uintptr_t)at, size, write, is_volatile ? VOLATILE : PLAIN, __builtin_return_address(0));
}

/* ---- order -------------------------------------------------------------------------------------------------------------------- */

static void on_begin(unsigned count)
{
    threads = count;
    for (int which = 0; which < CLOCKS; which++)
        clocks[which] = needed(calloc((size_t)count * count, sizeof *clocks[which]));
    for (unsigned i = 0; i < count; i++)
        clock_of(SEEN, i)[i] = 1;
}

/* What these threads did is before all that they will do. */
static void order(const unsigned *of, size_t count)
{
    uint32_t *all = needed(calloc(threads, sizeof *all));

    for (size_t i = 0; i < count; i++)
        join(all, clock_of(SEEN, of[i]));
    for (size_t i = 0; i < count; i++) {
        join(clock_of(SEEN, of[i]), all);
        clock_of(SEEN, of[i])[of[i]]++;
    }
    free(all);
}

static void on_barrier(const unsigned *of, size_t count)
{
    order(of, count);
}

static void on_exchange(const unsigned *of, size_t count, bool orders)
{
    if (orders)
        order(of, count);
}

static void on_fence(unsigned thread)
{
    join(clock_of(SEEN, thread), clock_of(BROUGHT, thread));
    copy(clock_of(RELEASED, thread), clock_of(SEEN, thread));
    clock_of(SEEN, thread)[thread]++;
}

static void on_atomic(unsigned thread, const void *address)
{
    unsigned i = 0;

    access_memory((uintptr_t)address, sizeof(unsigned), true, ATOMIC, __builtin_return_address(0));
    while (i < published_count && published[i].address != address)
        i++;
    if (i == PUBLICATIONS)
        abort();
    if (i == published_count)
        published[published_count++] =
            (publication){.address = address, .clock = needed(calloc(threads, sizeof(uint32_t)))};
    join(clock_of(BROUGHT, thread), published[i].clock);
    join(published[i].clock, clock_of(RELEASED, thread));
}

/* ---- a run ------------------------------------------------------------------------------------------------------------------------ */

bool kernel_buffer(const char *name, void *at, size_t size, bool read_only);
bool kernel_buffer(const char *name, void *at, size_t size, bool read_only)
{
    if (buffer_count == BUFFERS)
        return false;
    buffers[buffer_count] = (buffer){.at = (uintptr_t)at, .size = size, .read_only = read_only};
    snprintf(buffers[buffer_count++].name, sizeof buffers[0].name, "%s", name);
    return true;
}

/* Runs one grid over the buffers that were named, forgets them, and returns what was wrong: "" if nothing was. chance: of another thread's
 * turn at each access. first, some: sim_grid's. */
const char *kernel_run(void (*kernel)(const void *), const void *argument, unsigned blocks,
                       unsigned per_block, unsigned first, unsigned some, uint64_t seed, bool watched,
                       double chance);
const char *kernel_run(void (*kernel)(const void *), const void *argument, unsigned blocks,
                       unsigned per_block, unsigned first, unsigned some, uint64_t seed, bool watched,
                       double chance)
{
    static const sim_grid_watch watch = {on_begin, on_barrier, on_exchange, on_fence, on_atomic};
    const sim_grid grid = {.kernel = kernel,
                           .argument = argument,
                           .blocks = blocks,
                           .threads = per_block,
                           .first = first,
                           .some = some,
                           .seed = seed,
                           .watch = watched ? &watch : NULL};
    char why[200];

    report_length = told_count = 0;
    report[0] = 0;
    accesses = 0;
    memset(moved, 0, sizeof moved);
    give_way = chance;
    random_state = seed;
    running = watched ? &grid : NULL;
    if (!sim_grid_run(&grid, why, sizeof why))
        snprintf(report + report_length, REPORT - report_length, "%s", why);
    running = NULL;
    for (size_t i = 0; i < cell_room; i++)
        free(cells[i].reads);
    free(cells);
    cells = NULL;
    cell_count = cell_room = 0;
    for (unsigned i = 0; i < published_count; i++)
        free(published[i].clock);
    published_count = buffer_count = 0;
    for (int which = 0; which < CLOCKS; which++) {
        free(clocks[which]);
        clocks[which] = NULL;
    }
    return report;
}

/* Bytes of the last run that were read, then written, by accesses of 1, 2, 4, 8 and 16 bytes. */
const uint64_t *kernel_moved(void);
const uint64_t *kernel_moved(void)
{
    return moved[0];
}

/* ---- the calls of -fsanitize=thread -------------------------------------------------------------------------------------------------- */

#define FROM __builtin_return_address(0)
#define ANSWER(name, write, strong, size)                                                                    \
    void __tsan_##name(void *at);                                                                            \
    void __tsan_##name(void *at)                                                                             \
    {                                                                                                        \
        access_memory((uintptr_t)at, size, write, strong, FROM);                                             \
    }
#define ANSWERS(size)                                                                                        \
    ANSWER(read##size, false, PLAIN, size)                                                                   \
    ANSWER(write##size, true, PLAIN, size)                                                                   \
    ANSWER(unaligned_read##size, false, PLAIN, size)                                                         \
    ANSWER(unaligned_write##size, true, PLAIN, size)                                                         \
    ANSWER(volatile_read##size, false, VOLATILE, size)                                                       \
    ANSWER(volatile_write##size, true, VOLATILE, size)
ANSWERS(1)
ANSWERS(2)
ANSWERS(4)
ANSWERS(8)
ANSWERS(16)

#define RANGE(name, write)                                                                                   \
    void __tsan_##name(void *at, size_t size);                                                               \
    void __tsan_##name(void *at, size_t size)                                                                \
    {                                                                                                        \
        access_memory((uintptr_t)at, size, write, PLAIN, FROM);                                              \
    }
RANGE(read_range, false)
RANGE(write_range, true)

void __tsan_init(void);
void __tsan_init(void)
{
}
void __tsan_func_entry(void *from);
void __tsan_func_entry(void *from)
{
    (void)from;
}
void __tsan_func_exit(void);
void __tsan_func_exit(void)
{
}
