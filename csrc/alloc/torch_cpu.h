/* Every allocation that torch makes on the CPU, seen at its allocator: while one is watched, an allocator of ours stands
 * where torch looks for its own (c10::SetAllocator), asks torch's, and gives the block a deleter that tells of its death.
 * So what kernels take to work in is seen, whatever thread asks, and no operation goes another way than without.
 *
 *     a block of ours = its deleter is ours <=> it was asked for while one watched
 *     its memory is torch's, and goes back to torch's deleter, also long after nobody watches any more
 *
 * torch's storages keep our allocator and deleter for as long as they like: both stay for ever (base/pin.h). In C, by
 * the C++ ABI (Itanium's) of c10::Allocator and c10::DataPtr, which torch 2.10 to 2.15 have alike, and which is tried
 * before it is relied on. */
#ifndef MO_TORCH_CPU_H
#define MO_TORCH_CPU_H

#include "alloc/life_log.h"

/* What is asked of torch. */
typedef struct mo_torch_cpu {
    void *(*get_allocator)(const int8_t *device_type);
    void (*set_allocator)(int8_t device_type, void *allocator, uint8_t priority);
} mo_torch_cpu;

/* Looks them up in the libc10.so that is loaded. MO_NO_LIBRARY, MO_NO_SYMBOL. */
mo_status mo_torch_cpu_find(mo_torch_cpu *out, mo_detail *detail);

/* Which stack and module the calling thread runs, for a birth; called without any lock of ours. */
typedef void (*mo_torch_cpu_where)(int64_t *stack, int64_t *module);

/* From now on births and deaths go into the log, until mo_torch_cpu_stop(). MO_UNSUPPORTED where torch's allocator is not
 * as it is known, MO_INVALID where one watches already. where may be NULL. */
mo_status mo_torch_cpu_watch(const mo_torch_cpu *torch, mo_life_log *log, mo_torch_cpu_where where,
                             mo_detail *detail);

/* Returns when no thread uses the log any more. Nothing where nobody watches. */
void mo_torch_cpu_stop(void);

/* True while one watches; in a forked child nobody does. */
int mo_torch_cpu_watched(void);

/* The log, for what the watcher itself notes or reads: between the two nothing else is put. NULL where nobody watches,
 * and then there is nothing to unlock. Nothing of torch's may be called in between. */
mo_life_log *mo_torch_cpu_lock_log(void);
void mo_torch_cpu_unlock_log(void);

/* Births on the calling thread are not noted between the two, which nest. */
void mo_torch_cpu_pause(void);
void mo_torch_cpu_resume(void);

#endif
