/* What torch calls when memopt's allocator is its current one (torch.cuda.memory.change_current_allocator). torch calls
 * from any thread, mostly without the GIL, with no pointer of ours, and after the interpreter has ended; so what is
 * kept here is process-wide and lives for ever: for each device the pool that requests go to,
 *
 *     device in use = a request, a limit or a private pool has named it       (until then no context is made on it)
 *
 * memopt_malloc and memopt_free are found by name, and are the only symbols beside the module's own that leave the
 * library. The others are given to torch by address. All signatures are torch's; nothing checks them but this comment
 * and the tests with torch.
 *
 * Only malloc, base, fraction and begin_pool throw, as their last act, with no lock held. The others run in
 * destructors: what goes wrong there is counted. In a forked child none enters the pool or the driver: malloc, fraction
 * and begin_pool throw, and the others count the call and answer. */
#ifndef MO_TORCH_HOOKS_H
#define MO_TORCH_HOOKS_H

#include <sys/types.h> // ssize_t

#include "alloc/pool.h"
#include "alloc/stream_filter.h"

/* Device memory, or torch.OutOfMemoryError (the text begins "CUDA out of memory"), or RuntimeError where the driver
 * fails otherwise. Size 0 gives NULL. */
__attribute__((visibility("default"))) void *memopt_malloc(ssize_t size, int device, void *stream);

/* NULL is fine. size and stream are not looked at: the pool knows them better. */
__attribute__((visibility("default"))) void memopt_free(void *address, ssize_t size, int device,
                                                        void *stream);

/* torch initialises CUDA and has memopt as its current allocator: from now on mo_torch_hooks_current(). */
void mo_torch_hook_init(int devices);

/* torch.cuda.empty_cache(): what is free goes back to the device, on every device in use. */
void mo_torch_hook_reset(void);

/* torch.cuda.set_per_process_memory_fraction: at most that part of the device's memory, and of memory_budget at most
 * all. RuntimeError where the device cannot be asked. */
void mo_torch_hook_fraction(double fraction, int device);

/* The block that holds an address, and its size in bytes. An address of nobody's comes back as it is, and size too. */
void *mo_torch_hook_base(void *address, size_t *size);

/* Tensor.record_stream. No device comes with it. */
void mo_torch_hook_record_stream(void *address, void *stream);

/* A private pool: begin (once for each capture or use; a pool may be begun several times) sends it the requests of the
 * streams that filter accepts, end stops that, and release says that its memory may be anyone's: release once for each
 * begin. What is captured replays its addresses, so the pool's memory stays where it is. */
void mo_torch_hook_begin_pool(int device, mo_arena_id id, const mo_stream_filter *filter);
void mo_torch_hook_end_pool(int device, mo_arena_id id);
void mo_torch_hook_release_pool(int device, mo_arena_id id);

/* The other hooks, each by the name of torch's function that takes its address (on torch's CUDAAllocator object):
 *
 *     const mo_torch_hook *h = mo_torch_hooks();   while (h->setter) …
 */
typedef struct mo_torch_hook {
    const char *setter;
    void (*hook)(void); /* of whatever signature */
} mo_torch_hook;
const mo_torch_hook *mo_torch_hooks(void);

/* Whether torch allocates through memopt: it has initialised CUDA with memopt's allocator as the current one. */
bool mo_torch_hooks_current(void);

/* The part of a device's memory that torch was told to use at most, 1 where it was told nothing. */
double mo_torch_hooks_fraction(int device);

/* Who is told of each out of memory before memopt_malloc throws it, or NULL: called in the thread that asked, with no
 * lock of ours held; it may allocate and free, and is not told of what fails within itself. total is 0 where the device
 * did not say. One that is replaced may still be running in another thread. */
typedef void (*mo_torch_observer)(int device, size_t wanted, size_t total, size_t free_bytes);
void mo_torch_hooks_observe(mo_torch_observer observer);

/* What was counted where nothing could be thrown. What a pool refused is in its own mo_stats. */
typedef struct mo_torch_hook_counts {
    uint64_t in_child; /* calls in a forked child */
    uint64_t foreign_frees,
        foreign_streams; /* frees, record_streams of addresses that no pool was asked about */
    uint64_t unbalanced; /* ends and releases of pools that were not begun */
    uint64_t failed;     /* what the driver refused */
} mo_torch_hook_counts;
mo_torch_hook_counts mo_torch_hooks_read(void);

#endif
