/* Whether this process is a child, by fork(), of one that was using CUDA. CUDA does not work there, and any lock may be
 * one that a thread of the parent held and nobody will give back. So whoever takes a lock that may be held while CUDA
 * works asks first:
 *
 *     if (mo_forked())
 *         return mo_forked_refuse("cuInit(0)", detail);
 *     mo_forked_watch();
 *     mo_lock_take(&lock); … mo_lock_give(&lock);
 *     if (nothing of CUDA is in use after all)
 *         mo_forked_unwatch();
 *
 *     forked = at the fork, watches - unwatches > 0
 *
 * A parent that only found that there is no driver leaves its children free to look for themselves. Thread safe. */
#ifndef MO_FORKED_H
#define MO_FORKED_H

#include <stdbool.h>

#include "base/status.h"

/* Children that are forked from now on are told apart, until as many calls of mo_forked_unwatch. */
void mo_forked_watch(void);
void mo_forked_unwatch(void);

/* True in a child of a process that watched, and in that child's children. */
bool mo_forked(void);

/* MO_DRIVER, CUDA_ERROR_NOT_INITIALIZED and what to do about it; `call` says what was asked for. */
mo_status mo_forked_refuse(const char *call, mo_detail *detail);

#endif
