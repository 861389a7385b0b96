/* Which module's forward pass a thread runs (py_module_calls.c). */
#ifndef MO_PY_MODULE_CALLS_H
#define MO_PY_MODULE_CALLS_H

#include <stdint.h>

#include "python/module.h"

/* Of the calling thread, which needs no GIL for this; 0 for none. */
uint32_t mo_py_module_running(void);

#endif
