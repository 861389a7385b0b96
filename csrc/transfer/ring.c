#include "transfer/ring.h"

#include <string.h>

#include "base/assert.h"
#include "base/hostmem.h"
#include "base/size.h"

static mo_slot *slot_at(const mo_ring *ring, uint64_t number)
{
    return &ring->slots[number & (ring->places - 1)];
}

void mo_ring_init(mo_ring *ring, size_t capacity, size_t alignment)
{
    MO_ASSERT(capacity && mo_is_power_of_two(alignment));
    *ring = (mo_ring){.capacity = capacity, .alignment = alignment};
}

void mo_ring_fini(mo_ring *ring)
{
    mo_host_free(ring->slots);
    *ring = (mo_ring){0};
}

static mo_status more_places(mo_ring *ring)
{
    mo_ring larger = *ring;
    larger.places = ring->places ? 2 * ring->places : 16;
    larger.slots = mo_host_calloc(larger.places, sizeof *larger.slots);
    if (!larger.slots)
        return MO_NO_HOST_MEMORY;
    for (uint64_t n = ring->first; n < ring->first + ring->count; n++)
        *slot_at(&larger, n) = *slot_at(ring, n);
    mo_host_free(ring->slots);
    *ring = larger;
    return MO_OK;
}

/* Where `size` bytes fit behind the newest slot. */
static bool find(const mo_ring *ring, size_t size, size_t *out)
{
    const mo_slot *oldest, *newest;
    size_t behind;

    if (!ring->count) {
        *out = 0;
        return size <= ring->capacity;
    }
    oldest = slot_at(ring, ring->first);
    newest = slot_at(ring, ring->first + ring->count - 1);
    behind = newest->offset + newest->size;
    if (newest->offset < oldest->offset) { /* gone on at 0 */
        *out = behind;
        return size <= oldest->offset - behind;
    }
    *out = size <= ring->capacity - behind ? behind : 0;
    return *out || size <= oldest->offset;
}

mo_status mo_ring_take(mo_ring *ring, size_t size, uint64_t *out, size_t *offset, uint64_t *after)
{
    size_t rounded, at;
    mo_status status;

    MO_ASSERT(size);
    if (!mo_align_up_ok(size, ring->alignment, &rounded) || !find(ring, rounded, &at))
        return MO_NO_HOST_MEMORY;
    if (ring->count == ring->places && (status = more_places(ring)))
        return status;
    *out = ring->first + ring->count++;
    *slot_at(ring, *out) = (mo_slot){at, rounded, /* used */ true};
    ring->held += rounded;
    if (ring->held > ring->peak)
        ring->peak = ring->held;
    *offset = at;
    *after = ring->mark;
    MO_CHECK(mo_ring_is_valid(ring));
    return MO_OK;
}

mo_status mo_ring_give(mo_ring *ring, uint64_t slot, uint64_t mark)
{
    if (slot - ring->first >= ring->count || !slot_at(ring, slot)->used)
        return MO_INVALID;
    slot_at(ring, slot)->used = false;
    if (ring->mark < mark)
        ring->mark = mark;
    while (ring->count && !slot_at(ring, ring->first + ring->count - 1)->used)
        ring->held -= slot_at(ring, ring->first + --ring->count)->size;
    while (ring->count && !slot_at(ring, ring->first)->used) {
        ring->held -= slot_at(ring, ring->first++)->size;
        ring->count--;
    }
    MO_CHECK(mo_ring_is_valid(ring));
    return MO_OK;
}

bool mo_ring_is_valid(const mo_ring *ring)
{
    size_t held = 0, wraps = 0, end = 0;
    bool valid = ring->count <= ring->places;

    for (uint64_t n = ring->first; valid && n < ring->first + ring->count; n++) {
        const mo_slot *slot = slot_at(ring, n);
        if (n > ring->first && slot->offset < end) {
            wraps++;
            valid = slot->offset == 0;
        }
        end = slot->offset + slot->size;
        held += slot->size;
        valid = valid && slot->size && slot->offset % ring->alignment == 0 && end <= ring->capacity &&
                (!wraps || end <= slot_at(ring, ring->first)->offset);
    }
    valid =
        valid && wraps <= 1 && held == ring->held && ring->held <= ring->peak && ring->peak <= ring->capacity;
    return valid && (!ring->count || (slot_at(ring, ring->first)->used &&
                                      slot_at(ring, ring->first + ring->count - 1)->used));
}
