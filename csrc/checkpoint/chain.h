/* A chain of stages, as activation checkpointing sees it: what each stage keeps for its backward, how long it
 * takes, and what it needs while it runs.
 *
 *     a[i]   bytes of the input of stage i; a[0] is the chain's own, held by the caller and never counted
 *     d[i]   bytes of the gradient of a[i]; d[n] is the seed's
 *
 * n stages, numbered from 0; the last one is the loss. A stage can be run forwards in full in several ways, its
 * *options*; 0 is its own, and what running it without keeping anything takes. Of each:
 *
 *     saved >= a[i + 1]          what is kept until the backward, the output within it
 *     forward, backward          seconds; remake: of a forward in full right before its own backward
 *     forward_overhead, backward_overhead    bytes more while that runs
 *
 * An input may be put away, off the device, until it is wanted: put and get are the seconds by which that makes the
 * step longer. a[0] never is.
 *
 * A chain owns its arrays and never changes once it is made; any number of threads may read it. */
#ifndef MO_CHAIN_H
#define MO_CHAIN_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

#define MO_CHAIN_MAX_STAGES  4096
#define MO_CHAIN_MAX_OPTIONS 64                  /* of a stage */
#define MO_CHAIN_MAX_BYTES   ((uint64_t)1 << 60) /* of all sizes together: so no sum of them overflows */

typedef struct mo_chain_option {
    uint64_t saved, forward_overhead, backward_overhead; /* bytes */
    double forward, backward, remake;                    /* seconds */
} mo_chain_option;

typedef struct mo_chain_stage {
    uint64_t output;     /* a[i + 1] */
    uint64_t input_grad; /* d[i] */
    double put, get;     /* seconds, of a[i]; put is infinite where it cannot be put away */
    uint32_t option_count;
    mo_chain_option *options; /* option_count >= 1 */
} mo_chain_stage;

typedef struct mo_chain {
    uint32_t length;      /* n >= 1 */
    uint64_t input;       /* a[0] */
    uint64_t output_grad; /* d[n] */
    mo_chain_stage *stages;
    mo_chain_option *options; /* the stages' one after the other */
} mo_chain;

/* Room for `length` stages with `options` options in all, zeroed; the caller fills it in, hands out chain->options to
 * the stages in order, and asks mo_chain_check(). MO_INVALID for more than the limits above, MO_NO_HOST_MEMORY. */
mo_status mo_chain_open(size_t length, size_t options, mo_detail *detail, mo_chain *out);

/* Zeroed is fine. */
void mo_chain_close(mo_chain *chain);

/* The inequalities above, finite and not negative times, the limits. MO_INVALID says which stage, and the mend. */
mo_status mo_chain_check(const mo_chain *chain, mo_detail *detail);

static inline bool mo_chain_puts(const mo_chain *chain, size_t i)
{
    return i && isfinite(chain->stages[i].put);
}

/* a[i], 0 <= i <= n. */
static inline uint64_t mo_chain_input(const mo_chain *chain, size_t i)
{
    return i ? chain->stages[i - 1].output : chain->input;
}

/* d[i], 0 <= i <= n. */
static inline uint64_t mo_chain_grad(const mo_chain *chain, size_t i)
{
    return i < chain->length ? chain->stages[i].input_grad : chain->output_grad;
}

#endif
