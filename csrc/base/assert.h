/* Assertions in three prices, switched by MO_LEVEL at build time:
 *
 *     level 1   MO_ASSERT      O(1)
 *     level 2   MO_CHECK       walks one structure
 *     level 3   MO_CHECK_ALL   walks the whole heap
 *
 * A wheel is built at level 0, where none is compiled in: a library must not end its user's process. The C
 * tests and the checking build (`make MO_LEVEL=3`) run them all. */
#ifndef MO_ASSERT_H
#define MO_ASSERT_H

#ifndef MO_LEVEL
#define MO_LEVEL 0
#endif

#if MO_LEVEL > 0
#include <stdio.h>
#include <stdlib.h>

#define MO_ASSERT_AT(level, condition)                                                                       \
    do {                                                                                                     \
        if (MO_LEVEL >= (level) && !(condition)) {                                                           \
            fprintf(stderr, "memopt: %s:%d: broken invariant: %s\n", __FILE__, __LINE__, #condition);        \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)
#else
/* The condition is still seen by the compiler, so that it cannot rot, and never evaluated. */
#define MO_ASSERT_AT(level, condition) ((void)sizeof((condition) ? 1 : 0))
#endif

#define MO_ASSERT(condition)    MO_ASSERT_AT(1, condition)
#define MO_CHECK(condition)     MO_ASSERT_AT(2, condition)
#define MO_CHECK_ALL(condition) MO_ASSERT_AT(3, condition)

#endif
