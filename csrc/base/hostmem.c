#include "base/hostmem.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/size.h"

static atomic_size_t live;
static atomic_uint_least64_t requests;
static atomic_uint_least64_t fail_from = UINT64_MAX; /* index of the first request that fails */

void mo_host_fault(void)
{
    __asm__ volatile(""); /* keeps the call, and so the breakpoint */
}

static int refused(void)
{
    if (atomic_fetch_add_explicit(&requests, 1, memory_order_relaxed) <
        atomic_load_explicit(&fail_from, memory_order_relaxed))
        return 0;
    mo_host_fault();
    return 1;
}

static void *counted(void *block)
{
    if (block)
        atomic_fetch_add_explicit(&live, 1, memory_order_relaxed);
    return block;
}

void *mo_host_alloc(size_t size)
{
    return refused() ? NULL : counted(malloc(size ? size : 1));
}

void *mo_host_calloc(size_t count, size_t size)
{
    size_t total;
    if (refused() || !mo_mul_ok(count, size, &total))
        return NULL;
    return counted(calloc(1, total ? total : 1));
}

#ifdef MADV_HUGEPAGE
/* The whole huge pages in the block. A hint: where the system has none to give, nothing is lost. */
static void prefer_huge_pages(void *block, size_t size)
{
    const uintptr_t huge = (uintptr_t)2 << 20, start = (uintptr_t)block;
    const uintptr_t low = (start + huge - 1) / huge * huge, high = (start + size) / huge * huge;

    if (low < high)
        (void)madvise((void *)low, high - low, MADV_HUGEPAGE);
}
#else
static void prefer_huge_pages(void *block, size_t size)
{
    (void)block, (void)size;
}
#endif

void *mo_host_calloc_dense(size_t count, size_t size)
{
    void *block = mo_host_calloc(count, size);

    if (block)
        prefer_huge_pages(block, count * size);
    return block;
}

void *mo_host_realloc(void *block, size_t size)
{
    if (!block)
        return mo_host_alloc(size);
    return refused() ? NULL : realloc(block, size ? size : 1);
}

void mo_host_free(void *block)
{
    if (block)
        atomic_fetch_sub_explicit(&live, 1, memory_order_relaxed);
    free(block);
}

size_t mo_host_live(void)
{
    return atomic_load_explicit(&live, memory_order_relaxed);
}

void mo_host_fail_after(uint64_t after)
{
    atomic_store(&fail_from, atomic_load(&requests) + after);
}

void mo_host_fail_never(void)
{
    atomic_store(&fail_from, UINT64_MAX);
}
