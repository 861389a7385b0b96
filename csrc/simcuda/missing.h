/* Which functions were called that the simulated libraries do not have.
 *
 * Every stub of every library reports itself here (sim_cuda.so holds the one list), so that a test or a
 * report can say "this script used cusparseSpGEMM_copy, which is not simulated" instead of showing a bare
 * status code. Names live for ever; the list is a mutex-guarded array that is appended to and never
 * reordered.
 */
#ifndef SIM_MISSING_H
#define SIM_MISSING_H

#include <stddef.h>

/* name is copied by pointer: it must outlive the process's use of the library, as a symbol table's strings
 * do. */
void simcuda_missing_add(const char *name);

/* Writes "name count\n" for every stub called so far, in order of first call, cut at whole lines to fit size
 * bytes with the closing NUL; returns the bytes that the whole text needs, closing NUL included. out may be
 * NULL when size is 0. */
size_t simcuda_missing(char *out, size_t size);

#endif
