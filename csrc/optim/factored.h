/* The vectors of factored second moments on the CPU (kernels/factored.cuh), for update_cpu.c. */
#ifndef MO_FACTORED_H
#define MO_FACTORED_H

#include "optim/update.h"
#include "optim/update_kernels.h"

/* A parameter of the job whose second moment is factored. */
typedef struct mo_factored_row {
    const mo_parameter *a;
    const mo_adam_termsf *terms;
    float inverse; /* 1 / mean of R: what mo_factored_averages() finds */
    /* Its own: */
    float *sums;
    size_t before; /* rows of tiles of those before it in its round */
} mo_factored_row;

/* Brings the vectors of a round's parameters up to date; their gradients are multiplied by `stored` first. */
void mo_factored_averages(const mo_update_kernels *kernels, const mo_update_job *job, mo_factored_row *rows,
                          size_t count, float stored);

/* The second moments of elements [begin, begin + n). */
void mo_factored_moments(const mo_update_kernels *kernels, const mo_factored_row *row, size_t begin, size_t n,
                         float *v);

#endif
