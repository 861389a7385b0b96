/* Physical memory: granules, each a handle of its own, all of one size, and the slots of the address space where they are
 * mapped.
 *
 *     slot      one granule's worth of a span's addresses; at most one granule is mapped there
 *     view      a mapping of a granule in a slot; a granule may have several (double_map)
 *     owner     the one slot whose addresses stand for the granule's memory, or none: then the granule is spare
 *     stale     a slot that maps a granule which it does not own: addresses that nobody may be given until it does
 *
 *     granules = owned + spare           held bytes = granules * size
 *     owner of g is a view of g          slot s is owned  <=>  s.granule and s.granule.owner == s
 *
 * When memory moves, the old mapping stays: work already queued goes on under the old address, and a step that repeats
 * finds the granule mapped where it needs it, for no call at all (`switched`). A stale view is unmapped only when what
 * used it is over on the host. Without double_map it must be over, and is unmapped, before the granule moves.
 *
 * On a GPU a mapping that aliases another is coherent from one kernel to the next (CUDA Programming Guide, "Virtual
 * Aliasing Support"); here nothing is ever read through the one that was written through the other.
 *
 * No locks: the pool's. */
#ifndef MO_GRANULES_H
#define MO_GRANULES_H

#include "alloc/block.h"

typedef struct mo_granule mo_granule;
typedef struct mo_slot mo_slot;

struct mo_slot {
    mo_granule *granule;  /* what is mapped here, NULL: nothing */
    mo_granule *latest;   /* what was mapped here last, maybe another thing by now: a hint (mo_slot_follow) */
    mo_slot *next_view;   /* of the same granule */
    mo_span *span;        /* set when something is first mapped */
    mo_last_use last_use; /* what may still use the mapping; owned: as of the last frees in it (zone.h) */
    bool granted;         /* the mapping is accessible */
};

struct mo_granule {
    mo_physical handle; /* 0: suspended */
    mo_slot *owner;     /* NULL: spare */
    mo_slot *views;
    mo_granule *previous, *next; /* among the spare ones */
    mo_last_use last_use;        /* what may still have used it when it last was spare */
};

typedef struct mo_granules {
    mo_driver *driver;
    size_t size; /* bytes of a granule: a multiple of driver->granularity, from the pool's opening on */
    size_t count, spare_count, stale_count;
    mo_granule *spare;  /* doubly linked by previous and next */
    mo_granule *unused; /* structs without memory, linked by next */
    void *chunks;
    uint64_t calls; /* of the driver: create, release, map, unmap, grant; and of segments */
} mo_granules;

static inline bool mo_slot_owned(const mo_slot *slot)
{
    return slot->granule && slot->granule->owner == slot;
}

/* Where the memory lies now that was in this slot last, as far as is known; else NULL. */
static inline mo_slot *mo_slot_follow(const mo_slot *slot)
{
    return slot->latest ? slot->latest->owner : NULL;
}

/* A new spare granule; MO_NO_DEVICE_MEMORY where the device has no more. */
mo_status mo_granule_create(mo_granules *granules, mo_detail *detail);

/* Gives a spare granule without views back to the device. Where the driver refuses, that is reported, and the granule
 * is forgotten all the same. */
mo_status mo_granule_release(mo_granules *granules, mo_granule *granule, mo_detail *detail);

/* Maps `granule` in an empty slot at `address`, not yet accessible. */
mo_status mo_granule_map(mo_granules *granules, mo_granule *granule, mo_span *span, mo_slot *slot,
                         mo_address address, mo_detail *detail);
/* Makes `count` mapped slots, the first of them at `address`, accessible. */
mo_status mo_granules_grant(mo_granules *granules, mo_slot *slots, mo_address address, size_t count,
                            mo_detail *detail);
/* Empties a slot that does not own its granule. What used the view must be over. */
mo_status mo_granule_unmap(mo_granules *granules, mo_slot *slot, mo_address address, mo_detail *detail);

/* The slot's granule becomes spare; its view goes stale. use: what may still use it. */
void mo_granule_disown(mo_granules *granules, mo_slot *slot, mo_last_use use);
/* A spare granule becomes the slot's own, where it is mapped already. */
void mo_granule_own(mo_granules *granules, mo_slot *slot);

/* The owning slot keeps its addresses and its granule, which gives its memory back (count falls); no other view may be
 * left. And gets new memory, of undefined content. A call that fails has changed nothing. */
mo_status mo_granule_suspend(mo_granules *granules, mo_slot *slot, mo_address address, mo_detail *detail);
mo_status mo_granule_restore(mo_granules *granules, mo_slot *slot, mo_address address, mo_detail *detail);
/* The granule of a suspended slot is dropped; the slot is empty and nobody's. */
void mo_granule_forget(mo_granules *granules, mo_slot *slot);

/* Forgets all, after the handles were released; frees the structs. */
void mo_granules_close(mo_granules *granules);

#endif
