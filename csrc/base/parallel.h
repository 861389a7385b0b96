/* A loop over items on the threads of the program that memopt runs in.
 *
 * Under torch those are torch's own, by torch_parallel_for of libtorch's C ABI (found at run time), so that there is one
 * pool and torch.set_num_threads() is obeyed; without it, or where the work is small, the calling thread does all.
 *
 *     body is called with disjoint [begin, end) that together are [0, count), on any threads, in any order
 *
 * so what is computed must not depend on how the items were dealt out. */
#ifndef MO_PARALLEL_H
#define MO_PARALLEL_H

#include <stddef.h>

typedef void (*mo_parallel_body)(void *user, size_t begin, size_t end);

/* Returns when every item is done. grain: fewer items than this are not worth a thread. Call without the GIL. */
void mo_parallel_for(size_t count, size_t grain, mo_parallel_body body, void *user);

/* How many threads share a large loop; 1 without torch. */
unsigned mo_parallel_threads(void);

/* Another way to deal out items, for tests (NULL: back to the above). */
typedef void (*mo_parallel_way)(size_t count, size_t grain, mo_parallel_body body, void *user);
void mo_parallel_use(mo_parallel_way way);

#endif
