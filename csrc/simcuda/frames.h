/* Physical device memory: frames of 2 MiB out of one sparse memory file a device.
 *
 *     used = frames whose byte is set = context frames + sum of count over live sim_frames + lost frames
 *     used <= limit <= total
 *
 * Lost are frames that the host would not unmap or not empty when they were freed: no other piece may have
 * them, as it would share them or find old bytes there. They stay taken, and show in a leak test.
 *
 * cudaMalloc and cuMemCreate take frames from the same store, so that both see one truth about what is free.
 * The file is sparse and mapped with MAP_NORESERVE: a device may claim more than the host has, as long as its
 * memory is not touched. A piece of physical memory is freed when its handles and its mappings are all gone.
 */
#ifndef SIM_FRAMES_H
#define SIM_FRAMES_H

#include "driver/cuda_types.h"

#include <stdbool.h>

#define SIM_FRAME ((size_t)2 << 20) /* bytes; the granularity of every device since Pascal */

typedef struct sim_store {
    int device, file;
    size_t total, limit; /* frames: of the file; that may be used now */
    size_t used, peak;
    size_t hint;          /* where the next search begins */
    unsigned char *taken; /* a byte a frame */
} sim_store;

typedef struct sim_frames {
    sim_store *store;
    uint64_t handle;                /* cuMemCreate's, 0 where there is none */
    CUmemAllocationProp properties; /* as cuMemCreate got them */
    unsigned handles;               /* cuMemCreate and cuMemRetainAllocationHandle, minus cuMemRelease */
    unsigned mappings;
    bool lost; /* it may be mapped where no table knows: its frames are never free again */
    size_t count;
    size_t index[]; /* frame numbers, in the order of the piece's bytes */
} sim_frames;

/* false when the host has no memory for it. */
bool sim_store_open(sim_store *store, int device, size_t frames, size_t used);

/* In a child after fork(), of a parent that has taken nothing yet: memory of its own. false where the host has none. */
bool sim_store_of_child(sim_store *store);

/* A piece with no reference yet, contiguous in the file where possible; NULL when the limit does not allow it
 * (the caller counts it) or the host is out of memory. */
sim_frames *sim_frames_take(sim_store *store, size_t count);

/* Gives the piece back if nothing refers to it any more; its contents are gone. */
void sim_frames_release(sim_frames *frames);

/* Maps the first `count` frames at an address reserved by the caller and adds a mapping, or changes nothing. With
 * stale_aliases (control.h) each mapping but the first maps a copy, of the frames as they are now, that ends with it. A child after fork() gets none of it, as a GPU's memory is not there either. Where the host refuses even to
 * undo what it did, the piece's frames are lost. */
bool sim_frames_map(sim_frames *frames, size_t count, uintptr_t at, int protection);

/* Ends the mapping of `count` frames at `at`, leaving addresses that fault, and releases the piece. Where the
 * host refuses, its frames are lost. */
void sim_frames_unmap(sim_frames *frames, size_t count, uintptr_t at);

/* Addresses for `size` bytes at a power of two `alignment` >= SIM_FRAME, all of them faulting; 0 when there
 * are none. `wanted` is a hint. */
uintptr_t sim_addresses_reserve(size_t size, size_t alignment, uintptr_t wanted);
void sim_addresses_free(uintptr_t at, size_t size);

#endif
