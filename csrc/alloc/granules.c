#include "alloc/granules.h"

#include "base/assert.h"
#include "base/hostmem.h"

#define CHUNK 512 /* structs made at a time */

typedef struct chunk {
    struct chunk *next;
    mo_granule granules[CHUNK];
} chunk;

/* ---- the spare ones ---------------------------------------------------------------------------------------- */

static void add_spare(mo_granules *granules, mo_granule *granule, mo_last_use use)
{
    granule->owner = NULL;
    granule->last_use = use;
    granule->previous = NULL;
    granule->next = granules->spare;
    if (granule->next)
        granule->next->previous = granule;
    granules->spare = granule;
    granules->spare_count++;
}

static void remove_spare(mo_granules *granules, mo_granule *granule)
{
    MO_ASSERT(!granule->owner);
    if (granule->previous)
        granule->previous->next = granule->next;
    else
        granules->spare = granule->next;
    if (granule->next)
        granule->next->previous = granule->previous;
    granules->spare_count--;
}

/* ---- handles ---------------------------------------------------------------------------------------------- */

static mo_granule *take_struct(mo_granules *granules)
{
    mo_granule *granule = granules->unused;

    if (!granule) {
        chunk *made = mo_host_calloc(1, sizeof *made);

        if (!made)
            return NULL;
        made->next = granules->chunks;
        granules->chunks = made;
        for (int i = 0; i < CHUNK; i++) {
            made->granules[i].next = granules->unused;
            granules->unused = &made->granules[i];
        }
        granule = granules->unused;
    }
    granules->unused = granule->next;
    *granule = (mo_granule){0};
    return granule;
}

static void give_struct(mo_granules *granules, mo_granule *granule)
{
    granule->owner = NULL; /* of one that was suspended */
    granule->next = granules->unused;
    granules->unused = granule;
}

mo_status mo_granule_create(mo_granules *granules, mo_detail *detail)
{
    mo_granule *granule = take_struct(granules);
    mo_status status;

    if (!granule)
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory for the allocator's table of granules");
    granules->calls++;
    status = granules->driver->create(granules->driver, granules->size, detail, &granule->handle);
    if (status) {
        give_struct(granules, granule);
        return status;
    }
    granules->count++;
    add_spare(granules, granule, (mo_last_use){0});
    return MO_OK;
}

mo_status mo_granule_release(mo_granules *granules, mo_granule *granule, mo_detail *detail)
{
    mo_status status;

    MO_ASSERT(!granule->owner && !granule->views);
    granules->calls++;
    status = granules->driver->release(granules->driver, granule->handle, detail);
    remove_spare(granules, granule);
    give_struct(granules, granule);
    granules->count--;
    return status;
}

/* ---- mappings --------------------------------------------------------------------------------------------- */

mo_status mo_granule_map(mo_granules *granules, mo_granule *granule, mo_span *span, mo_slot *slot,
                         mo_address address, mo_detail *detail)
{
    mo_status status;

    MO_ASSERT(!slot->granule);
    granules->calls++;
    status = granules->driver->map(granules->driver, address, granules->size, granule->handle, detail);
    if (status)
        return status;
    slot->granule = slot->latest = granule;
    slot->span = span;
    slot->last_use = (mo_last_use){0};
    slot->granted = false;
    slot->next_view = granule->views;
    granule->views = slot;
    granules->stale_count++; /* until it is owned */
    return MO_OK;
}

mo_status mo_granules_grant(mo_granules *granules, mo_slot *slots, mo_address address, size_t count,
                            mo_detail *detail)
{
    mo_status status;

    granules->calls++;
    status = granules->driver->grant(granules->driver, address, count * granules->size, detail);
    for (size_t i = 0; i < count && !status; i++)
        slots[i].granted = true;
    return status;
}

mo_status mo_granule_unmap(mo_granules *granules, mo_slot *slot, mo_address address, mo_detail *detail)
{
    mo_slot **view = &slot->granule->views;
    mo_status status;

    MO_ASSERT(!mo_slot_owned(slot));
    granules->calls++;
    status = granules->driver->unmap(granules->driver, address, granules->size, detail);
    if (status)
        return status;
    while (*view != slot)
        view = &(*view)->next_view;
    *view = slot->next_view;
    slot->granule = NULL;
    granules->stale_count--;
    return MO_OK;
}

void mo_granule_disown(mo_granules *granules, mo_slot *slot, mo_last_use use)
{
    MO_ASSERT(mo_slot_owned(slot));
    slot->last_use = use;
    granules->stale_count++;
    add_spare(granules, slot->granule, use);
}

void mo_granule_own(mo_granules *granules, mo_slot *slot)
{
    remove_spare(granules, slot->granule);
    slot->granule->owner = slot;
    granules->stale_count--;
}

mo_status mo_granule_suspend(mo_granules *granules, mo_slot *slot, mo_address address, mo_detail *detail)
{
    mo_granule *granule = slot->granule;
    mo_driver *driver = granules->driver;
    mo_status status;

    MO_ASSERT(mo_slot_owned(slot) && granule->views == slot && !slot->next_view);
    granules->calls++;
    status = driver->unmap(driver, address, granules->size, detail);
    if (status)
        return status;
    granules->calls++;
    status = driver->release(driver, granule->handle, detail);
    if (status) {
        granules->calls += 2;
        if (driver->map(driver, address, granules->size, granule->handle, NULL) == MO_OK)
            driver->grant(driver, address, granules->size, NULL);
        return status;
    }
    granule->handle = 0;
    granules->count--;
    return MO_OK;
}

mo_status mo_granule_restore(mo_granules *granules, mo_slot *slot, mo_address address, mo_detail *detail)
{
    mo_driver *driver = granules->driver;
    mo_physical handle = 0;
    mo_status status;

    MO_ASSERT(mo_slot_owned(slot) && !slot->granule->handle);
    granules->calls++;
    status = driver->create(driver, granules->size, detail, &handle);
    if (status)
        return status;
    granules->calls++;
    status = driver->map(driver, address, granules->size, handle, detail);
    if (!status) {
        granules->calls++;
        status = driver->grant(driver, address, granules->size, detail);
        if (status) {
            granules->calls++;
            driver->unmap(driver, address, granules->size, NULL);
        }
    }
    if (status) {
        granules->calls++;
        driver->release(driver, handle, NULL);
        return status;
    }
    slot->granule->handle = handle;
    granules->count++;
    return MO_OK;
}

void mo_granule_forget(mo_granules *granules, mo_slot *slot)
{
    slot->granule->views = NULL;
    give_struct(granules, slot->granule);
    slot->granule = NULL;
    slot->granted = false;
}

void mo_granules_close(mo_granules *granules)
{
    for (chunk *c = granules->chunks, *next; c; c = next) {
        next = c->next;
        mo_host_free(c);
    }
    granules->chunks = granules->unused = granules->spare = NULL;
    granules->count = granules->spare_count = granules->stale_count = 0;
}
