/* The engines' own bookkeeping memory. Everything below csrc/python allocates through here, so that a test can
 * let the N-th request fail for N = 0, 1, 2 … and see that nothing leaks and nothing is half done.
 *
 *     live = requests granted - blocks freed          (a test ends with the live it began with)
 *
 * Thread safe. No size is rounded, nothing is aligned beyond malloc's 16 bytes. */
#ifndef MO_HOSTMEM_H
#define MO_HOSTMEM_H

#include <stddef.h>
#include <stdint.h>

/* Uninitialised bytes, or NULL. A size of 0 gives a block that can be freed. */
void *mo_host_alloc(size_t size);

/* count * size zero bytes, or NULL (also where the product does not fit). */
void *mo_host_calloc(size_t count, size_t size);

/* The same for a table that will be used all over, in no order: where it is megabytes, the system is asked for huge pages,
 * without which looking up an address's page takes as long as what is read from it. */
void *mo_host_calloc_dense(size_t count, size_t size);

/* As realloc; on NULL the old block is still there, unchanged. */
void *mo_host_realloc(void *block, size_t size);

/* NULL is fine. */
void mo_host_free(void *block);

/* Blocks that are allocated and not yet freed. */
size_t mo_host_live(void);

/* Lets `after` more requests pass and then fails every one, until mo_host_fail_never(). For tests. */
void mo_host_fail_after(uint64_t after);
void mo_host_fail_never(void);

/* Called on each simulated failure; does nothing. A place for a breakpoint. */
void mo_host_fault(void);

#endif
