/* What one thread does in the unscale kernel; see unscale.cu for the operation as a whole. Plain C below the
 * MO_BODY macro: the simulated device runs this text too (csrc/simcuda/kernel_bodies.c), index arithmetic and
 * all, one "thread" after another.
 *
 * Semantics, element by element, those of torch._amp_foreach_non_finite_check_and_unscale_:
 *     found |= x is infinite or NaN                                  (before scaling: an overflow here is not
 * found) x     := inv_scale == 1 ? x : round(wide(x) * inv_scale)       wide: fp64 for fp64, else fp32 torch
 * stores x also where inv_scale == 1; the bits are the same, so here nothing is stored. */
#ifndef MO_UNSCALE_CUH
#define MO_UNSCALE_CUH

#include "chunk.cuh"
#include "float_bits.cuh"

/* Loads that a thread starts before it uses the first: a block of 256 threads has 16 KiB on their way, which
 * covers the latency of device memory (Little's law: 3.3 TB/s * 0.7 us / 132 SMs = 18 KiB an SM) with two
 * blocks an SM; registers allow eight. */
#define MO_UNSCALE_IN_FLIGHT 4

/* One element given and returned as its bits. The test of the exponent is the same for every format: all
 * ones. */
MO_BODY unsigned long long mo_unscale_bits(mo_float kind, unsigned long long bits, float inv_scale,
                                           unsigned *found)
{
    const unsigned low = (unsigned)bits;

    switch (kind) {
    case MO_F64:
        *found |= (~bits & 0x7FF0000000000000ull) == 0;
        return mo_double_bits(mo_double_from_bits(bits) * inv_scale);
    case MO_F32:
        *found |= (~low & 0x7F800000u) == 0;
        return mo_float_bits(mo_float_from_bits(low) * inv_scale);
    case MO_F16:
        *found |= (~low & 0x7C00u) == 0;
        return mo_f16_from_float(mo_f16_to_float(low) * inv_scale);
    default:
        *found |= (~low & 0x7F80u) == 0;
        return mo_bf16_from_float(mo_bf16_to_float(low) * inv_scale);
    }
}

/* The elements of a 64-bit word: one, two or four, the first in the lowest bits. */
MO_BODY unsigned long long mo_unscale_word(mo_float kind, unsigned long long word, float inv_scale,
                                           unsigned *found)
{
    unsigned long long result = 0;
    unsigned shift;

    if (kind == MO_F64)
        return mo_unscale_bits(kind, word, inv_scale, found);
    if (kind == MO_F32) {
        for (shift = 0; shift < 64; shift += 32)
            result |= mo_unscale_bits(kind, word >> shift & 0xFFFFFFFFu, inv_scale, found) << shift;
        return result;
    }
    for (shift = 0; shift < 64; shift += 16)
        result |= mo_unscale_bits(kind, word >> shift & 0xFFFFu, inv_scale, found) << shift;
    return result;
}

/* One element in memory, for the few that lie outside the 16-byte grid. */
MO_BODY void mo_unscale_single(mo_float kind, unsigned long long address, float inv_scale, unsigned *found)
{
    if (kind == MO_F64) {
        unsigned long long *x = (unsigned long long *)mo_global(address);
        const unsigned long long bits = mo_unscale_bits(kind, *x, inv_scale, found);
        if (inv_scale != 1.0f)
            *x = bits;
    } else if (kind == MO_F32) {
        unsigned *x = (unsigned *)mo_global(address);
        const unsigned bits = (unsigned)mo_unscale_bits(kind, *x, inv_scale, found);
        if (inv_scale != 1.0f)
            *x = bits;
    } else {
        unsigned short *x = (unsigned short *)mo_global(address);
        const unsigned short bits = (unsigned short)mo_unscale_bits(kind, *x, inv_scale, found);
        if (inv_scale != 1.0f)
            *x = bits;
    }
}

/* The share of thread number `thread` of `threads` (at least 14, the most single elements a chunk can have)
 * in one chunk. Sets *found to 1 if it saw an element that is not finite, else leaves it. */
MO_BODY void mo_unscale_thread(mo_float kind, mo_chunk chunk, unsigned thread, unsigned threads,
                               float inv_scale, unsigned *found)
{
    const unsigned size = mo_float_size(kind);
    const mo_split split = mo_chunk_split(chunk, size);
    mo_vector *const vectors = (mo_vector *)mo_global(chunk.address + (unsigned long long)split.head * size);
    unsigned first, k;

#ifdef __CUDACC__
#pragma unroll 1 /* the body is long enough already */
#endif
    for (first = thread; first < split.vectors; first += MO_UNSCALE_IN_FLIGHT * threads) {
        mo_vector held[MO_UNSCALE_IN_FLIGHT];
#ifdef __CUDACC__
#pragma unroll
#endif
        for (k = 0; k < MO_UNSCALE_IN_FLIGHT; k++)
            if (first + k * threads < split.vectors)
                held[k] = vectors[first + k * threads];
#ifdef __CUDACC__
#pragma unroll
#endif
        for (k = 0; k < MO_UNSCALE_IN_FLIGHT; k++)
            if (first + k * threads < split.vectors) {
                held[k].word[0] = mo_unscale_word(kind, held[k].word[0], inv_scale, found);
                held[k].word[1] = mo_unscale_word(kind, held[k].word[1], inv_scale, found);
                if (inv_scale != 1.0f)
                    vectors[first + k * threads] = held[k];
            }
    }
    if (thread < split.head + split.tail) {
        const unsigned element =
            thread < split.head ? thread : chunk.count - split.tail + (thread - split.head);
        mo_unscale_single(kind, chunk.address + (unsigned long long)element * size, inv_scale, found);
    }
}

#endif
