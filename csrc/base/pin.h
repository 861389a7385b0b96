/* Keeps this shared library in memory until the process ends. torch calls our hooks after Python has ended, and
 * an interpreter that unloads its modules must not take the code away from under a freeing thread. */
#ifndef MO_PIN_H
#define MO_PIN_H

#include "base/status.h"

/* Once is enough, more is harmless. MO_NO_LIBRARY if the loader refuses (never seen). */
mo_status mo_pin_library(mo_detail *detail);

#endif
