/* The fastest schedule of a chain for every budget up to one, by dynamic programming over (part of the chain, bytes).
 *
 * The classical programme (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: "Optimal checkpointing for heterogeneous
 * chains") is optimal among *persistent* schedules, in which what is kept stays until its backward. This one goes
 * on: an input may be dropped and made again, or be put away and got back. Functions of (s, t, m), the least seconds
 * with m bytes:
 *
 *     O(s,t,m)   a[s] is the caller's (kept, not counted); do bwd t..s
 *     P(s,t,m)   a[s] is counted in m and may be put away; do bwd t..s; where a[s] cannot be: O(s,t; m - a[s])
 *     Q(s,t,m)   a[s] is counted in m and may go; do bwd t..s+1; leave s[s], by option k, without its input
 *     H(s,t,m)   a[s] is counted in m and may go; do bwd t..s+1; leave nothing
 *
 * each with right = 0, or right = k + 1: s[t], by option k, is there already and counted, and waits for a[t] alone.
 * The gradient of a[t + 1] is counted. With hold = 0 (O, P) or a[s] (Q, H), S(s,j) the seconds of running s..j-1:
 *
 *     first   O: fall s . O(s+1,t; m - saved) . bwd s       Q: fall s, drop_input s . O(s+1,t; m - saved)
 *             P: fall s, put s . O(s+1,t; m - saved) . get s, bwd s
 *             H: fnone s . O(s+1,t; m - a[s+1])
 *     keep    S(s,j) + P(j,t; m - hold) + same(s,j-1; m)                    a[j] waits for bwd t..j
 *     trick   S(s,j) + Q_k(j,t; m - hold) + same(s,j; m), right = k + 1     s[j] stays, a[j] is made again for bwd j
 *     again   S(s,j) + H(j,t; m - hold) + same(s,j; m)                      a[j] serves bwd t..j+1, and is made again
 *     stay    P: O(s,t; m - a[s])
 *
 * of P with put s once s has run, and get s before same(s,…). Persistent is first, keep and stay alone; the default adds
 * trick, with Q by `first` alone and j - s <= 8; full is all, j - s without a bound. Each level has the choices of the
 * one before, so none is worse.
 *
 * **Bytes and slots.** m is seen in steps of `unit` bytes down from the budget: a function is an array of seconds,
 * one a step. Below its first step stands the exact least m, in bytes, with the seconds there; so that a budget is
 * feasible if and only if it is so to the byte, and the least feasible one is known to the byte. On the way back m
 * is carried in bytes, which makes a schedule as fast as its array says, or faster. Where all sizes have a common
 * divisor with which the budget is no more than `slots` steps, that is the unit, and nothing is rounded at all.
 *
 * Seconds are single precision: choices nearer to each other than 1e-6 of the whole may be mistaken. Nothing here
 * knows threads: a solver is its caller's alone. */
#ifndef MO_SOLVER_H
#define MO_SOLVER_H

#include <stdbool.h>

#include "checkpoint/chain.h"
#include "checkpoint/schedule.h"

#define MO_SOLVER_MAX_SLOTS 1000000
#define MO_SOLVER_NEVER     UINT64_MAX

typedef enum mo_solver_level {
    MO_SOLVE_PERSISTENT,
    MO_SOLVE_DEFAULT,
    MO_SOLVE_FULL,
    MO_SOLVE_COUNT
} mo_solver_level;

typedef struct mo_solver mo_solver;

/* The tables' memory is taken here, and nothing is computed yet. The chain, which mo_chain_check() has passed, must
 * outlive the solver. budget: bytes, everything counted but a[0]; slots >= 1. MO_INVALID, MO_OVERFLOW (the tables
 * do not fit in memory's addresses), MO_NO_HOST_MEMORY, and what mo_isa_choose() says. */
mo_status mo_solver_open(const mo_chain *chain, uint64_t budget, size_t slots, mo_solver_level level,
                         mo_detail *detail, mo_solver **out);

/* Does the parts of the chain of the next length; true as long as there are more. So a caller may be asked to stop
 * in between. */
bool mo_solver_advance(mo_solver *solver);

/* NULL is fine. */
void mo_solver_close(mo_solver *solver);

/* ---- once mo_solver_advance() has said false ------------------------------------------------------------------ */

/* The least budget with which this level's choices can do the chain, to the byte; it may be more than the solver's
 * own budget. */
uint64_t mo_solver_least(const mo_solver *solver);

typedef struct mo_solver_point {
    uint64_t budget;
    float seconds;
} mo_solver_point;

/* Seconds against budget, from the least feasible budget to the solver's own: with `budget` bytes a step takes
 * `seconds` at most, and both grow strictly along the curve, seconds downwards. NULL points: only counts. */
size_t mo_solver_curve(const mo_solver *solver, mo_solver_point *points);

/* A schedule for a budget up to the solver's own, for mo_schedule_clear(). MO_INVALID below the least feasible one
 * and above the solver's own; MO_NO_HOST_MEMORY. */
mo_status mo_solver_schedule(const mo_solver *solver, uint64_t budget, mo_detail *detail, mo_schedule *out);

#endif
