/* Python stacks by number: each is kept once, as the code that ran and where in it. Taking one makes no Python object but
 * what the interpreter makes of its frames, and runs no Python. All with the GIL. */
#ifndef MO_PY_CODE_STACKS_H
#define MO_PY_CODE_STACKS_H

#include <stddef.h>
#include <stdint.h>

#include "python/module.h"

typedef struct mo_code_stacks mo_code_stacks;

/* NULL with an exception. */
mo_code_stacks *mo_code_stacks_open(void);
void mo_code_stacks_close(mo_code_stacks *stacks);

/* The number of what this thread runs, its 64 innermost frames: 0 for nothing, or without host memory. An exception that is
 * under way stays. */
uint32_t mo_code_stacks_here(mo_code_stacks *stacks);

/* Of stack number `from` (1 at least) and all after it: a list of tuples (code, line, code, line, …), innermost first. NULL
 * with an exception. */
PyObject *mo_code_stacks_list(const mo_code_stacks *stacks, size_t from);

#endif
