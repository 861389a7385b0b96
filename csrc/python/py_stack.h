/* The Python stack of a request, for traces. Switched on by the user only, since it takes the GIL at every request: before
 * any lock of memopt's, on a thread for which torch has released it. Off again before the interpreter finalises: a thread
 * that asks for the GIL then never comes back. */
#ifndef MO_PY_STACK_H
#define MO_PY_STACK_H

#include "python/module.h"

/* From now on, until mo_py_stack_stop() or the interpreter's exit. -1 with an exception, and then nothing has changed. */
int mo_py_stack_collect(void);
/* Returns when no thread is collecting any more. Both with the GIL. */
void mo_py_stack_stop(void);

#endif
