/* A request on its way through the pool: how far its placement may go, and the site that it is given. */
#ifndef MO_REQUEST_H
#define MO_REQUEST_H

#include "alloc/pool_parts.h"

typedef struct mo_request {
    mo_arena *arena;
    mo_zone *zone;
    size_t size, requested; /* bytes, rounded and as asked */
    unsigned stream;        /* its number */
    bool captured;
    bool apart;     /* beside free memory that cannot be waited for (a capture uses it): joins none of it */
    bool predicted; /* the step repeats: what is mapped now will be wanted again */
} mo_request;

/* How far a placement may go; each includes what stands before it. */
typedef enum mo_effort {
    MO_EFFORT_SWITCH, /* granules that are mapped there already, spare ones, new ones within the slack */
    MO_EFFORT_MOVE,   /* granules that are free elsewhere */
    MO_EFFORT_JOIN,   /* … and the stream is made to wait for others */
    MO_EFFORT_CREATE, /* new ones as far as the budget goes */
} mo_effort;

/* Whether this effort may make the request's stream wait. */
static inline bool mo_joins(const mo_request *request, mo_effort effort)
{
    return effort >= MO_EFFORT_JOIN && !request->apart;
}

/* A range of addresses for the request that holds no live block: free memory, and holes whose slots need granules. */
typedef struct mo_site {
    mo_span *span;
    mo_address at;
    size_t slot,
        count;    /* the slots that hold all of its holes; those among them that are owned need nothing */
    size_t need;  /* slots that need a granule */
    size_t calls; /* of them: those where one must be mapped, twice where another must be unmapped first */
} mo_site;

#endif
