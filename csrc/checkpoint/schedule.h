/* A schedule: the operations of one training step over a chain, in order, and what they take.
 *
 * The state is a set of inputs a[i] (a[0] is always there), a set of saved sets s[i], each made by an option and
 * holding a[i + 1] within it, and one gradient, at first the seed d[n]:
 *
 *     fnone i        needs a[i] or s[i - 1]; makes a[i + 1]; frees a[i]
 *     fck i          the same, but a[i] is kept
 *     fall i         the same, but what is made is s[i], by an option; seconds: its forward, or its remake where
 *                    bwd i is next
 *     bwd i          needs s[i], the gradient of a[i + 1], and a[i] or s[i - 1]; makes the gradient of a[i]; frees
 * s[i],
 *                    a[i] and the gradient of a[i + 1]; by the option that made s[i]
 *     drop_input i   frees a[i]        drop_saved i   frees s[i]
 *     put_input i    needs a[i] other than in s[i - 1]; frees it, and has it off the device
 *     get_input i    needs a[i] off the device; makes it again
 *
 * Nothing is freed of a[0], nor of an a[i] that lives in s[i - 1] alone. While an operation runs, what it makes,
 * what it frees and its overhead are all there:
 *
 *     peak = max over the operations of (bytes before + bytes made + overhead)        a[0] not counted
 *
 * The last operation is bwd 0. */
#ifndef MO_SCHEDULE_H
#define MO_SCHEDULE_H

#include "checkpoint/chain.h"

/*    op                  its name */
#define MO_OP_LIST(X)                                                                                        \
    X(MO_OP_FNONE, "fnone")                                                                                  \
    X(MO_OP_FCK, "fck")                                                                                      \
    X(MO_OP_FALL, "fall")                                                                                    \
    X(MO_OP_BWD, "bwd")                                                                                      \
    X(MO_OP_DROP_INPUT, "drop_input")                                                                        \
    X(MO_OP_DROP_SAVED, "drop_saved")                                                                        \
    X(MO_OP_PUT_INPUT, "put_input")                                                                          \
    X(MO_OP_GET_INPUT, "get_input")

#define MO_OP_ENUM(name, text) name,
typedef enum mo_op { MO_OP_LIST(MO_OP_ENUM) MO_OP_COUNT } mo_op;
#undef MO_OP_ENUM

/* "fnone", …; "?" for a number that is no op. */
const char *mo_op_name(mo_op op);

typedef struct mo_action {
    uint8_t op;     /* mo_op */
    uint8_t option; /* of fall and bwd; else 0 */
    uint32_t stage; /* 0 <= stage < n; of drop_input up to n */
} mo_action;

/* Actions in an array that grows. Zeroed is an empty one. */
typedef struct mo_schedule {
    mo_action *actions;
    size_t count, capacity;
} mo_schedule;

/* MO_NO_HOST_MEMORY: the schedule is as it was. */
mo_status mo_schedule_add(mo_schedule *schedule, mo_op op, uint32_t stage, uint32_t option,
                          mo_detail *detail);

void mo_schedule_clear(mo_schedule *schedule);

typedef struct mo_moment {
    double seconds;  /* that the action takes */
    uint64_t during; /* bytes while it runs */
    uint64_t after;  /* bytes once it is over */
} mo_moment;

typedef struct mo_replay_totals {
    double seconds;
    uint64_t peak;
    size_t peak_at; /* the first action that reaches it */
} mo_replay_totals;

/* Runs `count` actions in numbers. moments: NULL, or one an action. MO_INVALID says which action cannot be done,
 * and why; *out is then as it was. */
mo_status mo_schedule_replay(const mo_chain *chain, const mo_action *actions, size_t count, mo_detail *detail,
                             mo_moment *moments, mo_replay_totals *out);

#endif
