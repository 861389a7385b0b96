/* What a training step that repeats did last time: requests come in the same order, so each can be given the address it
 * had, and by then every granule is mapped where it will be needed. That is what makes a step free of driver calls.
 *
 * Nobody tells the allocator where a step begins. It keeps the sequence of requests (a signature of size, stream and
 * arena, and the address given) and follows it: while the present requests equal those at a place in the past, the next
 * one is predicted. When they part, the place is looked for again by the last MO_STEP_PREDICTOR_CONTEXT signatures.
 *
 *     predicted request = log[place]        after a match  place = place + 1
 *
 * A prediction is a hint and never trusted: the pool takes the address only where it is free. No locks: the pool's. */
#ifndef MO_STEP_PREDICTOR_H
#define MO_STEP_PREDICTOR_H

#include <stdbool.h>
#include <stdint.h>

#include "driver/driver.h"

#define MO_STEP_PREDICTOR_LOG     65536 /* requests remembered, a power of two: the longest period that is seen */
#define MO_STEP_PREDICTOR_CONTEXT 6     /* signatures that identify a place */

typedef struct mo_step_predictor_entry {
    mo_address address;
    uint32_t signature;
} mo_step_predictor_entry;

typedef struct mo_step_predictor {
    mo_step_predictor_entry *log;
    uint32_t *places;      /* by hash of the context: where it was last, + 1 */
    uint32_t written;      /* entries so far, modulo 2^32 */
    uint32_t place;        /* of the next request, if `following` */
    uint32_t run;          /* requests predicted right since the last that was not */
    uint64_t context;      /* of the last MO_STEP_PREDICTOR_CONTEXT signatures */
    uint64_t context_next; /* and with the one that was asked about last; its place in places[] */
    uint32_t *latest;
    bool following;
    bool matched; /* the request that was asked about last is the one at `place` */
} mo_step_predictor;

/* MO_NO_HOST_MEMORY; then nothing will ever be predicted, which is no error. */
mo_status mo_step_predictor_open(mo_step_predictor *predictor, mo_detail *detail);
void mo_step_predictor_close(mo_step_predictor *predictor);

uint32_t mo_step_predictor_signature(size_t size, unsigned stream, uint64_t arena);

/* The address that the next request had last time, if it is predicted and has this signature; else 0. */
mo_address mo_step_predictor_predict(mo_step_predictor *predictor, uint32_t signature);

/* What the request got. Once for each request, after mo_step_predictor_predict. */
void mo_step_predictor_learn(mo_step_predictor *predictor, uint32_t signature, mo_address address);

#endif
