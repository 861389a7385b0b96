/* A mutex that knows whether it is held, so that a function named …_locked can assert it:
 *
 *     MO_ASSERT(mo_lock_held(&pool->lock));
 *
 * Where assertions are not compiled in nobody asks, and nothing is noted. A thread that already holds it must not take
 * it again. A fork while another thread holds it leaves the child's copy locked for ever: the child of a fork makes no
 * calls that lock (see driver_cuda.h). */
#ifndef MO_LOCK_H
#define MO_LOCK_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/assert.h"

typedef struct mo_lock {
    pthread_mutex_t mutex;
    atomic_uintptr_t holder; /* the holder's pthread_self(), 0 when free */
} mo_lock;

#define MO_LOCK_INIT                                                                                         \
    {                                                                                                        \
        PTHREAD_MUTEX_INITIALIZER, 0                                                                         \
    }

/* For mo_lock_held(). */
static inline void mo_lock_note(mo_lock *lock, uintptr_t holder)
{
#if MO_LEVEL > 0
    atomic_store_explicit(&lock->holder, holder, memory_order_relaxed);
#else
    (void)lock, (void)holder;
#endif
}

static inline bool mo_lock_held(mo_lock *lock)
{
    return atomic_load_explicit(&lock->holder, memory_order_relaxed) == (uintptr_t)pthread_self();
}

static inline void mo_lock_take(mo_lock *lock)
{
    MO_ASSERT(!mo_lock_held(lock));
    pthread_mutex_lock(&lock->mutex);
    mo_lock_note(lock, (uintptr_t)pthread_self());
}

static inline void mo_lock_give(mo_lock *lock)
{
    MO_ASSERT(mo_lock_held(lock));
    mo_lock_note(lock, 0);
    pthread_mutex_unlock(&lock->mutex);
}

/* As pthread_cond_wait(): the lock is free while this waits, held again when it returns, which may be for no reason. */
static inline void mo_lock_wait(mo_lock *lock, pthread_cond_t *changed)
{
    MO_ASSERT(mo_lock_held(lock));
    mo_lock_note(lock, 0);
    pthread_cond_wait(changed, &lock->mutex);
    mo_lock_note(lock, (uintptr_t)pthread_self());
}

#endif
