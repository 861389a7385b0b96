/* A grid of CUDA threads on one thread of the host: a kernel's text runs whole, with its blocks, warps, shared memory, barriers,
 * shuffles and atomics. Each CUDA thread is a fiber, which runs until it waits for others; blocks and threads take their turns in a
 * random order that the seed decides, several blocks at a time, and shared memory begins with random bytes. So an order that is right
 * by luck is found out; what only weak memory would show is the business of a watch (below).
 *
 * Barriers that threads of a block reach in different places, shuffles with a lane that is gone and threads that wait for ever end the
 * run with a text. One grid at a time runs in a process; others wait. */
#ifndef SIM_GRID_H
#define SIM_GRID_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Each library that has a grid has its own, with the shared memory of its own kernels. */
#pragma GCC visibility push(hidden)

typedef struct sim_index {
    unsigned x, y, z;
} sim_index;

typedef struct sim_place {
    sim_index thread, block, block_size, grid_size;
} sim_place;

/* Told of what orders memory, on the thread of the host that runs the grid. Threads are counted through the grid. */
typedef struct sim_grid_watch {
    void (*begin)(unsigned threads);
    void (*barrier)(const unsigned *threads, size_t count);
    void (*exchange)(const unsigned *threads, size_t count,
                     bool orders); /* a shuffle, or __syncwarp, which orders memory */
    void (*fence)(unsigned thread);
    void (*atomic)(unsigned thread, const void *address);
} sim_grid_watch;

typedef struct sim_grid {
    void (*kernel)(const void *argument);
    const void *argument;
    unsigned blocks, threads; /* threads of a block: a multiple of 32, at most 1024 */
    unsigned first,
        some; /* where some is not 0, that many blocks run, from number `first` on: of a large grid */
    uint64_t seed;
    const sim_grid_watch *watch; /* or NULL */
} sim_grid;

/* Runs to the end, or until it cannot go on: then false, and why. */
bool sim_grid_run(const sim_grid *grid, char *why, size_t room);

/* ---- for the kernel ---------------------------------------------------------------------------------------------------- */
extern sim_place *sim_here; /* the place of the thread that runs */

int sim_barrier(int line, int predicate); /* any thread's predicate */
uint64_t sim_shuffle(int line, unsigned mask, uint64_t value, unsigned by, bool exclusive_or);
void sim_warp_barrier(int line);
void sim_fence(void);
unsigned sim_atomic_add(unsigned *at, unsigned by);

/* ---- for a watch ------------------------------------------------------------------------------------------------------- */
unsigned sim_grid_thread(void); /* the one that runs, counted through the grid */
bool sim_grid_is_running(void);
bool sim_grid_is_shared(const void *address);
bool sim_grid_is_stack(const void *address); /* of the thread that runs */
void sim_grid_give_way(void);                /* lets others run first */
/* The thread that runs does nothing more, and the run is over. */
_Noreturn void sim_grid_stop(const char *why);

#pragma GCC visibility pop

#endif
