#include "frames.h"

#include "device.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <fcntl.h>

/* -1 where the host refuses. */
static int open_file(size_t frames)
{
    int file = memfd_create("simulated-device", MFD_CLOEXEC);

    if (file >= 0 && ftruncate(file, (off_t)(frames * SIM_FRAME)) != 0) {
        close(file);
        return -1;
    }
    return file;
}

bool sim_store_of_child(sim_store *store)
{
    close(store->file);
    store->file = open_file(store->total);
    return store->file >= 0;
}

bool sim_store_open(sim_store *store, int device, size_t frames, size_t used)
{
    int file = open_file(frames);
    unsigned char *taken = calloc(frames, 1);

    if (file < 0 || !taken) {
        if (file >= 0)
            close(file);
        free(taken);
        return false;
    }
    memset(taken, 1, used);
    *store = (sim_store){.device = device,
                         .file = file,
                         .total = frames,
                         .limit = frames,
                         .used = used,
                         .peak = used,
                         .hint = used,
                         .taken = taken};
    return true;
}

/* First frame of a free run of `count`, searched for from the hint on and then from the start; SIZE_MAX if
 * none. */
static size_t free_run(const sim_store *store, size_t count)
{
    for (int pass = 0; pass < 2; pass++) {
        size_t run = 0, end = pass == 0 ? store->total : store->hint + count;

        if (end > store->total)
            end = store->total;
        for (size_t i = pass == 0 ? store->hint : 0; i < end; i++) {
            run = store->taken[i] ? 0 : run + 1;
            if (run == count)
                return i + 1 - count;
        }
    }
    return SIZE_MAX;
}

sim_frames *sim_frames_take(sim_store *store, size_t count)
{
    if (count == 0 || count > store->total || store->used + count > store->limit)
        return NULL;
    sim_frames *frames = malloc(sizeof *frames + count * sizeof *frames->index);
    if (!frames)
        return NULL;
    *frames = (sim_frames){.store = store, .count = count};

    size_t run = free_run(store, count);
    for (size_t i = 0, at = run == SIZE_MAX ? 0 : run; i < count; at++)
        if (!store->taken[at])
            frames->index[i++] = at;
    for (size_t i = 0; i < count; i++)
        store->taken[frames->index[i]] = 1;
    store->hint = (frames->index[count - 1] + 1) % store->total;
    store->used += count;
    if (store->used > store->peak)
        store->peak = store->used;
    return frames;
}

/* How many frames from the first-th on lie side by side in the file: one system call serves them all. */
static size_t run_length(const sim_frames *frames, size_t first, size_t end)
{
    size_t next = first + 1;

    while (next < end && frames->index[next] == frames->index[next - 1] + 1)
        next++;
    return next - first;
}

/* Gives the host memory of `count` frames back, so that they read as zeros when they are mapped again. */
static bool empty(int file, size_t first, size_t count)
{
    int result;

    do
        result = fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(first * SIM_FRAME),
                           (off_t)(count * SIM_FRAME));
    while (result != 0 && errno == EINTR);
    return result == 0;
}

void sim_frames_release(sim_frames *frames)
{
    if (frames->handles || frames->mappings)
        return;
    sim_store *store = frames->store;
    for (size_t i = 0, run; i < frames->count; i += run) {
        run = run_length(frames, i, frames->count);
        if (frames->lost || !empty(store->file, frames->index[i], run))
            continue;
        memset(store->taken + frames->index[i], 0, run);
        store->used -= run;
    }
    free(frames);
}

/* Puts addresses that fault in the place of whatever is mapped there; they stay reserved. false when the host
 * refuses, and something may be mapped there still. */
static bool block(uintptr_t at, size_t size)
{
    return mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1,
                0) != MAP_FAILED;
}

/* Memory of the mapping's own, as the frames are now. */
static bool map_copy(const sim_frames *frames, size_t count, uintptr_t at, int protection)
{
    const size_t size = count * SIM_FRAME;

    if (mmap((void *)at, size, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED)
        return false;
    for (size_t done = 0; done < size;) {
        const size_t within = done % SIM_FRAME;
        const ssize_t got = pread(frames->store->file, (char *)at + done, SIM_FRAME - within,
                                  (off_t)(frames->index[done / SIM_FRAME] * SIM_FRAME + within));
        if (got > 0)
            done += (size_t)got;
        else if (got == 0 || errno != EINTR)
            return false;
    }
    return mprotect((void *)at, size, protection) == 0;
}

bool sim_frames_map(sim_frames *frames, size_t count, uintptr_t at, int protection)
{
    const bool copied = sim_stale_aliases && frames->mappings;

    if (copied && !map_copy(frames, count, at, protection))
        goto fail;
    for (size_t i = 0, run; i < count && !copied; i += run) {
        run = run_length(frames, i, count);
        void *to = (void *)(at + i * SIM_FRAME);
        if (mmap(to, run * SIM_FRAME, protection, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, frames->store->file,
                 (off_t)(frames->index[i] * SIM_FRAME)) == MAP_FAILED)
            goto fail;
    }
    if (madvise((void *)at, count * SIM_FRAME, MADV_DONTFORK) != 0)
        goto fail;
    frames->mappings++;
    return true;
fail:
    frames->lost |= !block(at, count * SIM_FRAME);
    return false;
}

void sim_frames_unmap(sim_frames *frames, size_t count, uintptr_t at)
{
    frames->lost |= !block(at, count * SIM_FRAME);
    frames->mappings--;
    sim_frames_release(frames);
}

uintptr_t sim_addresses_reserve(size_t size, size_t alignment, uintptr_t wanted)
{
    if (size > SIZE_MAX - alignment)
        return 0;
    size_t padded = size + alignment;
    char *block_start =
        mmap((void *)wanted, padded, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (block_start == MAP_FAILED)
        return 0;
    uintptr_t start = (uintptr_t)block_start, end = start + padded;
    uintptr_t at = (start + alignment - 1) & ~(alignment - 1);
    if (at > start)
        munmap((void *)start, at - start);
    if (end > at + size)
        munmap((void *)(at + size), end - (at + size));
    return at;
}

void sim_addresses_free(uintptr_t at, size_t size)
{
    munmap((void *)at, size);
}
