/* The vectors of factored second moments on the CPU (kernels/factored.cuh), for update_cpu.c. */
#ifndef MO_FACTORED_H
#define MO_FACTORED_H

#include "optim/update.h"
#include "optim/update_kernels.h"

/* Brings a parameter's vectors up to date. 1 / mean of R. */
float mo_factored_average_cpu(const mo_update_kernels *kernels, const mo_update_job *job, size_t parameter,
                              const mo_adam_termsf *terms, float stored);

/* The second moments of elements [begin, begin + n). */
void mo_factored_moments(const mo_update_kernels *kernels, const mo_parameter *a, float inverse, size_t begin,
                         size_t n, float *v);

#endif
