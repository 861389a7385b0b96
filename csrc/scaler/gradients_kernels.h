/* What gradients_cpu.c asks of an instruction set: to run over one dense piece of a gradient. gradients_generic.c is the
 * specification; each of the others has the same bits for the same piece, and a machine that cannot run it never calls it.
 *
 *     tops    the largest |x| as bits, NaN above infinity: integers compare as the numbers do
 *     sums    of y * y, every element into one lane, in an order that depends on nothing but the count
 *
 * 16-bit elements and fp32 are squared in fp32. That is exact enough in blocks: 1024 elements go to 64 lanes, sixteen
 * each, those to 16 lanes, and these are added in fp64: at most 15 + 2 additions and the square itself, each off by 2^-24, so
 * that the sum is off by 18 * 2^-24 of itself and the norm by half of that, 0.54e-6, for every input, as long as no square
 * vanishes or overflows. A block where one could, for a lane's largest |y| is below 2^-48 (but not 0) or not below 2^60, is
 * summed again, in fp64 (mo_gradients_careful). At 2^-48 what its 63 lesser elements can lose, even where subnormals are flushed,
 * is 63 * 2^-126, less than 2^-24 of the 2^-96 that is kept, and half of that in the norm: with the result's own rounding to
 * fp32 0.63e-6 in all.
 * fp64 is squared and added in fp64: where that overflows or vanishes, the norm does so in fp32 too.
 *
 * A NaN keeps what it can of its payload, as in the processor's multiplication and its conversion to fp16; as bf16 each is 0x7FC0.
 * (torch stores that for a single bf16, and 0xFFFF out of a vector.) Where the scale is NaN too, either may be kept. */
#ifndef MO_GRADIENTS_KERNELS_H
#define MO_GRADIENTS_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "../kernels/chunk.cuh"
#include "base/isa.h"

enum {
    MO_GRADIENTS_BLOCK = 1024, /* elements; a piece that is not a gradient's last is a multiple of it */
};

/* Begins as zeros; pieces of any kinds may follow each other. */
typedef struct mo_gradients_lanes {
    double sums[16] __attribute__((aligned(64))); /* fp64 elements: the first eight */
    double careful;                               /* of the blocks that were summed again */
    uint32_t tops[16] __attribute__((aligned(64)));
    uint64_t wide_tops[8] __attribute__((aligned(64))); /* of fp64 elements */
} mo_gradients_lanes;

/* x: a multiple of its element's size. inv_scale: for the kernels that store. */
typedef void mo_gradients_run(mo_gradients_lanes *lanes, void *x, size_t count, float inv_scale);

enum { MO_RUN_STORE = 1, MO_RUN_NORM = 2, MO_RUNS = 4 }; /* tops are always found */

typedef struct mo_gradients_kernels {
    mo_gradients_run *run[MO_FLOAT_COUNT][MO_RUNS];
} mo_gradients_kernels;

extern const mo_gradients_kernels mo_gradients_generic;
#if defined(__x86_64__)
extern const mo_gradients_kernels mo_gradients_avx2, mo_gradients_avx512;
#endif

/* The sum of squares of at most a block, in fp64, for fp32 and the 16-bit kinds. */
double mo_gradients_careful(mo_float kind, const void *x, size_t count);

/* The table of an instruction set. isa <= mo_isa_best(). */
const mo_gradients_kernels *mo_gradients_kernels_of(mo_isa isa);

/* For tests: this table, or with NULL the one that MEMOPT_ISA or the processor says, which is asked anew. */
void mo_gradients_use(const mo_gradients_kernels *kernels);

#endif
