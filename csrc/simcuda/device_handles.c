#include "handles.h"

#include "device.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

/* A handle is tag | generation << 28 | slot << 4. */
static const uint64_t tag = (uint64_t)0x0C0D << 48;
enum { GENERATION_SHIFT = 28, GENERATIONS = 1 << 19, SLOT_SHIFT = 4, SLOTS = 1 << 24 };

typedef struct slot {
    sim_kind kind;
    uint32_t generation;
    uint32_t next_free; /* slot number plus one; 0 ends the list */
    void *object;
} slot;

static slot *slots;
static uint32_t capacity, used, first_free;

static uint64_t handle_of(uint32_t index)
{
    return tag | (uint64_t)slots[index].generation << GENERATION_SHIFT | (uint64_t)index << SLOT_SHIFT;
}

uint64_t sim_handle_new(sim_kind kind, void *object)
{
    uint32_t index;

    if (first_free) {
        index = first_free - 1;
        first_free = slots[index].next_free;
    } else {
        if (used == capacity) {
            uint32_t more = capacity ? 2 * capacity : 256;
            slot *grown = more <= SLOTS ? realloc(slots, more * sizeof *grown) : NULL;
            if (!grown)
                return 0;
            slots = grown;
            capacity = more;
        }
        index = used++;
        slots[index].generation = 0;
    }
    slots[index].generation = (slots[index].generation + 1) % GENERATIONS;
    slots[index].kind = kind;
    slots[index].object = object;
    return handle_of(index);
}

static slot *live(uint64_t handle)
{
    uint64_t index = handle >> SLOT_SHIFT & (SLOTS - 1);

    if (index >= used || slots[index].kind == SIM_FREE_SLOT || handle_of((uint32_t)index) != handle)
        return NULL;
    return &slots[index];
}

/* The number was handed out once, and its slot is free or another object's now. */
static bool destroyed(uint64_t handle)
{
    return handle >> 48 == tag >> 48 && !(handle & ((1 << SLOT_SHIFT) - 1)) &&
           (handle >> SLOT_SHIFT & (SLOTS - 1)) < used && !live(handle);
}

static void trap(uint64_t handle, const char *what)
{
    const sim_call *call = sim_self()->call;

    if (!call) /* not a program's call: the control interface's, or the device's own */
        return;
    fprintf(stderr, "simulated CUDA device: %s was given %#" PRIx64 ", the handle of a destroyed %s\n",
            call->name, handle, what);
    abort();
}

void *sim_handle_get(uint64_t handle, sim_kind kind)
{
    slot *found = live(handle);

    if (sim_dead_handles && (kind == SIM_KIND_STREAM || kind == SIM_KIND_EVENT) && destroyed(handle))
        trap(handle, kind == SIM_KIND_STREAM ? "stream" : "event");
    return found && found->kind == kind ? found->object : NULL;
}

void sim_handle_drop(uint64_t handle)
{
    slot *found = live(handle);

    if (!found)
        return;
    found->kind = SIM_FREE_SLOT;
    found->object = NULL;
    found->next_free = first_free;
    first_free = (uint32_t)(found - slots) + 1;
}
