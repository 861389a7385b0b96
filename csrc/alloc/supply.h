/* Granules for a request: which can be had, from where, in what order; and collecting them as spare ones.
 *
 *     spare      nobody's already
 *     created    while what is held stays within the slack, or within a budget that was set
 *     stolen     out of free blocks elsewhere, of huge ones first: of the largest few the one that has been free longest
 *                (without double_map: the largest), from its end, so that its head stays joined to what it lies beside; of
 *                the site's own block what lies before the site, from MO_EFFORT_JOIN on
 *
 * Memory may go to a request where its stream waits for nobody, or is made to (MO_EFFORT_JOIN): on the device. Where
 * granules cannot be mapped twice, and for a stream under capture, the memory's last use must be over on the host. */
#ifndef MO_SUPPLY_H
#define MO_SUPPLY_H

#include "alloc/request.h"

/* Whether memory of this use may go to the request: for a graph, whose replays come in any order, only what is over; and
 * without double_map what is unmapped must be over. */
bool mo_supply_may_have(const mo_pool *pool, const mo_request *request, mo_last_use use, bool join);
/* How many granules may leave an arena, and how many may come into it. */
size_t mo_supply_may_leave(const mo_pool *pool, const mo_arena *arena);
size_t mo_supply_may_enter(const mo_pool *pool, const mo_arena *arena);

/* A new granule within the budgets, spare. */
mo_status mo_supply_create(mo_pool *pool, mo_detail *detail);

/* A spare granule for the request, or NULL. */
mo_granule *mo_supply_spare(const mo_pool *pool, const mo_request *request, bool join);

/* How many of `need` granules are to be created and how many stolen; the others are spare. False: not with this effort. */
bool mo_supply_plan(mo_pool *pool, const mo_request *request, const mo_site *site, size_t need,
                    mo_effort effort, size_t *create, size_t *take);

/* Collects them, as spare granules. MO_NO_DEVICE_MEMORY where there are fewer than the plan assumed. */
mo_status mo_supply_collect(mo_pool *pool, const mo_request *request, const mo_site *site, mo_effort effort,
                            size_t create, size_t take, mo_detail *detail);

#endif
