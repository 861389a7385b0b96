/* Granules for a request: which can be had, from where, in what order; and bringing them together as spare ones.
 *
 *     spare      nobody's already
 *     created    while what is held stays within the slack, or within a budget that was set
 *     stolen     out of free blocks elsewhere, of huge ones first: of the largest few the one that has been free longest,
 *                from its end, so that its head stays joined to what it lies beside
 *
 * Memory may go to a request where its stream waits for nobody, or is made to (MO_EFFORT_JOIN): on the device. Where
 * granules cannot be mapped twice, and for a stream under capture, the memory's last use must be over on the host. */
#ifndef MO_GATHER_H
#define MO_GATHER_H

#include "alloc/pool_parts.h"

/* A range of addresses for the request that holds no live block: free memory, and holes whose slots need granules. */
typedef struct mo_site {
    mo_span *span;
    mo_address at;
    size_t slot,
        count;    /* the slots that hold all of its holes; those among them that are owned need nothing */
    size_t need;  /* slots that need a granule */
    size_t calls; /* of them: those where one must be mapped, twice where another must be unmapped first */
} mo_site;

/* Whether this effort may make the request's stream wait. */
static inline bool mo_joins(const mo_request *request, mo_effort effort)
{
    return effort >= MO_EFFORT_JOIN && !request->apart;
}

/* Whether a stale slot of the site can have its granule back, for nothing: it is spare, or all of it lies in a free block
 * outside the site. The block, where there is one. */
bool mo_switchable(const mo_pool *pool, const mo_request *request, const mo_site *site, const mo_slot *slot,
                   mo_block **block);

/* A spare granule for the request, or NULL. */
mo_granule *mo_usable_spare(const mo_pool *pool, const mo_request *request, bool join);

/* How many of `need` granules are to be created and how many stolen; the others are spare. False: not with this effort. */
bool mo_gather_plan(mo_pool *pool, const mo_request *request, const mo_site *site, size_t need,
                    mo_effort effort, size_t *create, size_t *take);

/* Brings them together, as spare granules. MO_NO_DEVICE_MEMORY where there are fewer than the plan assumed. */
mo_status mo_gather(mo_pool *pool, const mo_request *request, const mo_site *site, mo_effort effort,
                    size_t create, size_t take, mo_detail *detail);

#endif
