/* The solver's recurrence, written once. A part of a chain, one of the functions of solver.h at (s, t), begins with
 * one of several *moves*: some operations, then what is left, which is the sum of two parts that are shorter, or of
 * O at the same (s, t):
 *
 *     seconds + left(m - less) + right(m)          possible for m >= max(base + need, alone)
 *
 * with base the bytes that wait at the part's right end. The moves of (kind, option, s) are the same for every t
 * and every `right`, but for how far they reach. The solver takes their least over all m; on the way back the same
 * list says which it was, and mo_move_write() the operations. */
#ifndef MO_MOVES_H
#define MO_MOVES_H

#include "checkpoint/solver.h"

typedef enum mo_part_kind { MO_PART_NONE, MO_PART_O, MO_PART_P, MO_PART_Q, MO_PART_H } mo_part_kind;

/* One of the functions, at (s, t). */
typedef struct mo_part {
    uint8_t kind;   /* mo_part_kind; NONE: nothing is to be done, in no time */
    uint8_t option; /* of Q: the one that makes s[s] */
    uint8_t right;  /* 0, or 1 + the option that made s[t] */
    uint16_t s, t;
} mo_part;

typedef enum mo_move_kind { MO_LEAF, MO_STAY, MO_FIRST, MO_KEEP, MO_TRICK, MO_AGAIN } mo_move_kind;

typedef struct mo_move {
    uint8_t kind;   /* mo_move_kind */
    uint8_t option; /* of what it saves */
    uint16_t j;     /* of keep, trick, again */
    float seconds;
    uint64_t need, alone, less; /* bytes */
    mo_part left;               /* t and right: those of the part */
    mo_part right;
} mo_move;

typedef struct mo_moves {
    const mo_chain *chain;
    mo_solver_level level;
    size_t window;         /* j - s of trick and again is this at most */
    const double *forward; /* [i]: seconds of running 0..i-1 */
    uint32_t most_options; /* of any stage */
} mo_moves;

/* Bytes that are there all the time at the right end: the gradient of a[t + 1], and s[t] if it waits. */
uint64_t mo_moves_base(const mo_moves *moves, size_t t, size_t right);

/* How many moves there are at most, of any part. */
size_t mo_moves_most(const mo_moves *moves);

/* The moves of a part of one stage; and those with (kind, option, s) in common, of all parts of several. In out;
 * returns how many. The latter come by j, and for each j in the order in which their right parts can be known:
 * keep, trick, again. */
size_t mo_moves_leaves(const mo_moves *moves, mo_part part, mo_move *out);
size_t mo_moves_list(const mo_moves *moves, mo_part part, mo_move *out);

/* The first t to which a move of mo_moves_list() reaches, for parts with this `right`. */
size_t mo_move_reach(const mo_move *move, size_t right);

/* A move's left part, for a part that ends at (t, right). */
static inline mo_part mo_move_left(const mo_move *move, size_t t, size_t right)
{
    mo_part left = move->left;

    if (left.kind == MO_PART_NONE || left.s > t)
        return (mo_part){0};
    left.t = (uint16_t)t;
    left.right = (uint8_t)right;
    return left;
}

/* What is done one after the other: operations, and parts for which a move is still to be chosen. */
typedef struct mo_step {
    mo_part part; /* MO_PART_NONE: `action` */
    uint64_t bytes;
    mo_action action;
} mo_step;

/* The most steps that mo_move_write() makes of a part of this chain. */
size_t mo_moves_most_steps(const mo_moves *moves);

/* A part's move with m bytes, in steps; returns how many. No more than two of them come after the left part. */
size_t mo_move_write(const mo_moves *moves, mo_part part, const mo_move *move, uint64_t m, mo_step *out);

#endif
