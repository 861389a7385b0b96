/* The two functions that torch finds by name (torch.cuda.memory.CUDAPluggableAllocator): the only symbols, beside
 * the module's own, that leave the library. torch calls them from any thread, without the GIL, with no pointer of
 * ours, and after the interpreter has ended. Their signatures are torch's; nothing checks them but this comment. */
#ifndef MO_TORCH_HOOKS_H
#define MO_TORCH_HOOKS_H

#include <sys/types.h> // ssize_t

/* Device memory, or torch.OutOfMemoryError (the text begins "CUDA out of memory"), or RuntimeError where the driver
 * fails otherwise or the stream is being captured into a graph. The throw is its last act. Size 0 gives NULL. */
__attribute__((visibility("default"))) void *memopt_malloc(ssize_t size, int device, void *stream);

/* Runs in destructors, so it never throws: what the driver refuses is counted (mo_passthrough_stats). */
__attribute__((visibility("default"))) void memopt_free(void *address, ssize_t size, int device,
                                                        void *stream);

#endif
