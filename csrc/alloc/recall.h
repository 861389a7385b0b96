/* What a training step that repeats did last time: requests come in the same order, so each can be given the address it
 * had, and by then every granule is mapped where it will be needed. That is what makes a step free of driver calls.
 *
 * Nobody tells the allocator where a step begins. It keeps the sequence of requests (a signature of size, stream and
 * arena, and the address given) and follows it: while the present requests equal those at a place in the past, the next
 * one is foretold. When they part, the place is looked for again by the last MO_RECALL_CONTEXT signatures.
 *
 *     foretold request = log[place]        after a match  place = place + 1
 *
 * A prediction is a hint and never trusted: the pool takes the address only where it is free. No locks: the pool's. */
#ifndef MO_RECALL_H
#define MO_RECALL_H

#include <stdbool.h>
#include <stdint.h>

#include "driver/driver.h"

#define MO_RECALL_LOG     65536 /* requests remembered, a power of two: the longest period that is seen */
#define MO_RECALL_CONTEXT 6     /* signatures that identify a place */

typedef struct mo_recall_entry {
    mo_address address;
    uint32_t signature;
} mo_recall_entry;

typedef struct mo_recall {
    mo_recall_entry *log;
    uint32_t *places;      /* by hash of the context: where it was last, + 1 */
    uint32_t written;      /* entries so far, modulo 2^32 */
    uint32_t place;        /* of the next request, if `following` */
    uint32_t run;          /* requests foretold right since the last that was not */
    uint64_t context;      /* of the last MO_RECALL_CONTEXT signatures */
    uint64_t context_next; /* and with the one that was asked about last; its place in places[] */
    uint32_t *latest;
    bool following;
    bool matched; /* the request that was asked about last is the one at `place` */
} mo_recall;

/* MO_NO_HOST_MEMORY; then nothing will ever be foretold, which is no error. */
mo_status mo_recall_open(mo_recall *recall, mo_detail *detail);
void mo_recall_close(mo_recall *recall);

uint32_t mo_recall_signature(size_t size, unsigned stream, uint64_t arena);

/* The address that the next request had last time, if it is foretold and has this signature; else 0. */
mo_address mo_recall_foretell(mo_recall *recall, uint32_t signature);

/* What the request got. Once for each request, after mo_recall_foretell. */
void mo_recall_learn(mo_recall *recall, uint32_t signature, mo_address address);

#endif
