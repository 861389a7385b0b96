/* Python stacks by number: each is kept once, as the code that ran and where in it. Taking one makes no Python object but
 * what the interpreter makes of its frames, and runs no Python. All with the GIL. */
#ifndef MO_PY_CODE_STACKS_H
#define MO_PY_CODE_STACKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "python/module.h"

typedef struct mo_code_stacks mo_code_stacks;

/* Frames of a stack that can be kept. */
#define MO_CODE_STACKS_MOST 128

/* Of each stack the `depth` innermost frames are kept, MO_CODE_STACKS_MOST at most. NULL with an exception. */
mo_code_stacks *mo_code_stacks_open(size_t depth);
void mo_code_stacks_close(mo_code_stacks *stacks);

/* The number of what this thread runs: 0 for nothing, or without host memory. An exception that is under way stays. */
uint32_t mo_code_stacks_here(mo_code_stacks *stacks);

/* Frame k of a stack, 0 the innermost; the code is borrowed. False past the outermost. */
bool mo_code_stacks_frame(const mo_code_stacks *stacks, uint32_t number, size_t k, PyObject **code,
                          int *line);

/* Of stack number `from` (1 at least) and all after it: a list of tuples (code, line, code, line, …), innermost first. NULL
 * with an exception. */
PyObject *mo_code_stacks_list(const mo_code_stacks *stacks, size_t from);

#endif
