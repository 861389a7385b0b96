/* A C++ exception of torch's, thrown from C. torch does not look at what a pluggable allocator returns: NULL would
 * become a tensor at address 0. So a failed allocation must leave memopt_malloc as a c10::OutOfMemoryError, which
 * Python sees as torch.OutOfMemoryError.
 *
 * The pieces (exception memory, type, constructor) are looked up in the libraries that torch has loaded: its ABI,
 * the Itanium C++ ABI and libstdc++'s std::string, none of it at build time. */
#ifndef MO_TORCH_THROW_H
#define MO_TORCH_THROW_H

#include "base/status.h"

/* Looks the pieces up, once a process; MO_NO_LIBRARY (torch is not loaded) or MO_NO_SYMBOL says which is missing.
 * Called before torch is given the allocator, so that it is never found out in the middle of an allocation. */
mo_status mo_torch_throw_prepare(mo_detail *detail);

/* Throws torch.OutOfMemoryError(text). The caller holds no lock and no resource: no cleanup of C runs. Where
 * prepare() has not succeeded it throws std::runtime_error(text), which torch turns into a RuntimeError. */
void mo_torch_throw_out_of_memory(const char *text) __attribute__((noreturn));

/* Throws torch's plain error (RuntimeError) likewise: the driver is unusable, the device is not there. */
void mo_torch_throw_error(const char *text) __attribute__((noreturn));

#endif
