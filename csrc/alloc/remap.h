/* Moving granules to a site. A slot of it gets
 *
 *     its own granule back    where the view there is stale, and the granule is spare or free elsewhere: no call of the driver
 *     a spare one             mapped beside its old mapping (double_map), or after that is unmapped; supply.h collects them
 *
 * A stale view is unmapped where its place is wanted for another granule, or where there are too many; never before what
 * used it is over. */
#ifndef MO_REMAP_H
#define MO_REMAP_H

#include "alloc/request.h"

/* Whether a stale slot of the site can have its granule back, for nothing: it is spare, or all of it lies in a free block
 * outside the site. The block, where there is one. */
bool mo_remap_switchable(const mo_pool *pool, const mo_request *request, const mo_site *site,
                         const mo_slot *slot, mo_block **block);

/* What it takes to have memory in a slot that is not owned: 0, where it can be switched back; else calls of the driver, by
 * their price. -1: it cannot be had, since what used the view there is not over. */
int mo_remap_price(const mo_pool *pool, const mo_request *request, const mo_site *site, const mo_slot *slot);

/* Every slot of the site gets a granule, and its holes become free memory. MO_NO_DEVICE_MEMORY where this effort is not
 * enough. MO_NOT_READY: a stale view of the site is in use. Granules that were switched back stay where they are then. */
mo_status mo_remap_site(mo_pool *pool, const mo_request *request, const mo_site *site, mo_effort effort,
                        mo_detail *detail);

/* The free block that holds [address, address + size) of the zone, where that takes no call of the driver and no wait:
 * free as it is, or after switching granules back. NULL otherwise. */
mo_block *mo_remap_at(mo_pool *pool, const mo_request *request, mo_address address);

/* Where the memory that was at an address of the zone lies now, if that is elsewhere in the zone; else 0. */
mo_address mo_remap_follow(const mo_zone *zone, mo_address address);

/* Unmaps a stale view. MO_NOT_READY while it may be in use. */
mo_status mo_unmap_stale(mo_pool *pool, mo_slot *slot, mo_detail *detail);

/* The same for all views of a spare granule: before it is released, or mapped elsewhere where that may not be twice. */
mo_status mo_unmap_views(mo_pool *pool, mo_granule *granule, mo_detail *detail);

/* Stale views cost page tables and addresses. Where there are many, some of this zone's that are over go, on the slow path
 * and a few at a time, so that no request pays for all. */
void mo_unmap_some_stale(mo_pool *pool, mo_zone *zone);

#endif
