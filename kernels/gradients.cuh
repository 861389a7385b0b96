/* The work of one thread of the gradients kernel (gradients.cu describes the operation as a whole). Plain C apart from
 * the macros: gcc compiles it for the C tests, and within gradients.cu for the simulated device, which runs the kernel
 * whole (csrc/simcuda/grid.h).
 *
 * The norm. Squares of 32 or 64 bytes' worth of elements (what a thread has loaded at a time) are summed in fp32, as a
 * tree of seven roundings at most, so within 7 * 2^-24 = 4.2e-7 of their sum; all above that is in fp64. A sum that fp32
 * does not hold well, because squares overflowed or vanished (IN_RANGE), is made again from the same registers in fp64.
 * fp64's own numbers are squared as if none were beyond 2^480 or, but 0, below 2^-500: so 2^40 squares neither overflow
 * nor vanish. It cannot be seen, since the norm is written in fp32, times a scale in fp32: one element beyond 2^480 makes it
 * infinite with any scale (2^480 * 2^-149 > 2^128), and 2^40 below 2^-500 are nothing with any (2^-480 * 2^128 < 2^-150) and
 * beside any that are something. With a scale of 0 or infinity it matters only that the sum is neither. */
#ifndef MO_GRADIENTS_CUH
#define MO_GRADIENTS_CUH

#include "chunk.cuh"
#include "float_bits.cuh"

#ifdef __CUDACC__
#define MO_SQRT(x)      sqrt(x)
#define MO_ABSOLUTE(x)  fabs(x)
#define MO_ABSOLUTEF(x) fabsf(x)
#else
#define MO_SQRT(x)      __builtin_sqrt(x)
#define MO_ABSOLUTE(x)  __builtin_fabs(x)
#define MO_ABSOLUTEF(x) __builtin_fabsf(x)
#endif

/* What is done, or'ed; csrc/scaler/gradients.h tells what each means. */
enum {
    MO_GRADIENTS_CHECK = 1,
    MO_GRADIENTS_STORE = 2,
    MO_GRADIENTS_NORM = 4,
    MO_GRADIENTS_MAXIMUM = 8 /* the norm's kind */
};

/* The kernel's argument. Addresses are of fp32 on the device, norm64's of an fp64, 0 where there is none. */
typedef struct mo_gradients_launch {
    unsigned long long table; /* mo_gradients_head, mo_chunk[chunks], then room for double[grid] */
    unsigned long long inv_scale, found_inf, norm, norm64, clip, factor;
    double max_norm;
    unsigned chunks, passes;
} mo_gradients_launch;

/* 0 between launches: the last block puts it back, so that a graph may be replayed and a table used again. */
typedef struct MO_ALIGNED(16) mo_gradients_head {
    unsigned blocks_done;
} mo_gradients_head;

MO_BODY mo_gradients_head *mo_gradients_head_of(mo_gradients_launch launch)
{
    return (mo_gradients_head *)mo_global(launch.table);
}

MO_BODY const mo_chunk *mo_gradients_chunks(mo_gradients_launch launch)
{
    return (const mo_chunk *)mo_global(launch.table + sizeof(mo_gradients_head));
}

/* One sum a block. */
MO_BODY double *mo_gradients_partials(mo_gradients_launch launch)
{
    return (double *)mo_global(launch.table + sizeof(mo_gradients_head) +
                               launch.chunks * (unsigned long long)sizeof(mo_chunk));
}

MO_BODY float mo_gradients_scale(mo_gradients_launch launch)
{
    return launch.inv_scale ? *(const float *)mo_global(launch.inv_scale) : 1.0f;
}

/* ---- sums: of squares, or the maximum of magnitudes, which once it is NaN stays so -------------------------- */

MO_BODY double mo_larger(double a, double b)
{
    return b > a || b != b ? b : a;
}

MO_BODY double mo_gradients_add(double a, double b, unsigned passes)
{
    return passes & MO_GRADIENTS_MAXIMUM ? mo_larger(a, b) : a + b;
}

/* Infinity stays infinite, NaN NaN, and 0 stays 0. */
MO_BODY double mo_square_of_double(double x)
{
    const double magnitude = MO_ABSOLUTE(x);

    if (magnitude > 0x1p480 && magnitude <= 0x1.fffffffffffffp1023)
        return 0x1p960;
    return magnitude > 0 && magnitude < 0x1p-500 ? 0x1p-1000 : x * x;
}

/* The norm that a whole sum stands for. */
MO_BODY double mo_gradients_norm(double sum, unsigned passes)
{
    return passes & MO_GRADIENTS_MAXIMUM ? sum : MO_SQRT(sum);
}

/* ---- elements, by 64-bit words: one, two or four, the first in the lowest bits ---------------------------- */

/* Not 0 where an element is infinite or NaN, which is where all bits of its exponent are set: then a carry leaves the
 * exponent into the place of the sign, and never further. */
MO_BODY unsigned long long mo_word_not_finite(mo_float kind, unsigned long long word)
{
    switch (kind) {
    case MO_F64:
        return ((word & 0x7FF0000000000000ull) + 0x0010000000000000ull) & 0x8000000000000000ull;
    case MO_F32:
        return ((word & 0x7F8000007F800000ull) + 0x0080000000800000ull) & 0x8000000080000000ull;
    case MO_F16:
        return ((word & 0x7C007C007C007C00ull) + 0x0400040004000400ull) & 0x8000800080008000ull;
    default:
        return ((word & 0x7F807F807F807F80ull) + 0x0080008000800080ull) & 0x8000800080008000ull;
    }
}

/* The element that begins at bit `shift` as an fp32; not of fp64. */
MO_BODY float mo_word_lane(mo_float kind, unsigned long long word, unsigned shift)
{
    if (kind == MO_F32)
        return mo_float_from_bits((unsigned)(word >> shift));
    return kind == MO_F16 ? mo_f16_to_float((unsigned)(word >> shift) & 0xFFFFu)
                          : mo_bf16_to_float((unsigned)(word >> shift) & 0xFFFFu);
}

/* Every element x := round(wide(x) * scale), where wide is fp64 for fp64, else fp32. */
MO_BODY unsigned long long mo_word_scaled(mo_float kind, unsigned long long word, float scale)
{
    unsigned long long result = 0;
    unsigned shift;

    if (kind == MO_F64)
        return mo_double_bits(mo_double_from_bits(word) * (double)scale);
    MO_UNROLL
    for (shift = 0; shift < 64; shift += 32) {
        const float x = mo_word_lane(kind, word, shift) * scale;
        const float y = kind == MO_F32 ? 0 : mo_word_lane(kind, word, shift + 16) * scale;
        const unsigned bits = kind == MO_F32   ? mo_float_bits(x)
                              : kind == MO_F16 ? mo_f16_pair(x, y)
                                               : mo_bf16_pair(x, y);
        result |= (unsigned long long)bits << shift;
    }
    return result;
}

/* The elements' squares in fp32; not of fp64. */
MO_BODY float mo_word_squares(mo_float kind, unsigned long long word)
{
    const unsigned step = 8 * mo_float_size(kind);
    const float a = mo_word_lane(kind, word, 0), b = mo_word_lane(kind, word, step);

    if (kind == MO_F32)
        return a * a + b * b;
    const float c = mo_word_lane(kind, word, 2 * step & 63), d = mo_word_lane(kind, word, 3 * step & 63);
    return (a * a + b * b) + (c * c + d * d);
}

/* The same in fp64, and fp64 itself. */
MO_BODY double mo_word_squares_wide(mo_float kind, double sum, unsigned long long word)
{
    unsigned shift;

    if (kind == MO_F64)
        return sum + mo_square_of_double(mo_double_from_bits(word));
    MO_UNROLL
    for (shift = 0; shift < 64; shift += 8 * mo_float_size(kind)) {
        const double x = (double)mo_word_lane(kind, word, shift);
        sum += x * x;
    }
    return sum;
}

MO_BODY double mo_word_maximum(mo_float kind, double maximum, unsigned long long word)
{
    float largest = 0, x;
    unsigned shift;

    if (kind == MO_F64)
        return mo_larger(maximum, MO_ABSOLUTE(mo_double_from_bits(word)));
    MO_UNROLL
    for (shift = 0; shift < 64; shift += 8 * mo_float_size(kind)) {
        x = MO_ABSOLUTEF(mo_word_lane(kind, word, shift));
        largest = x > largest || x != x ? x : largest;
    }
    return mo_larger(maximum, (double)largest);
}

/* ---- a thread ------------------------------------------------------------------------------------------ */

/* Loads that a thread starts before it uses the first: a block of 256 threads has 16 KiB on their way, which
 * covers the latency of device memory (Little's law: 3.3 TB/s * 0.7 us / 132 SMs = 18 KiB an SM) with two
 * blocks an SM; registers allow more. */
#define MO_GRADIENTS_IN_FLIGHT 4

/* A sum in fp32 of at most 32 squares is right to within what they were rounded by where it is in this range: an error
 * of 2^-150 a square, from what vanishes, is less than 2^-24 of it. */
#define MO_GRADIENTS_IN_RANGE(sum) ((sum) > 0x1p-118f && (sum) < 0x1p127f)

/* What threads have seen so far. */
typedef struct mo_seen {
    unsigned long long not_finite; /* not 0: an element was infinite or NaN */
    double sum;
} mo_seen;

/* Adds what IN_FLIGHT vectors hold; unused ones hold zeros. */
MO_BODY void mo_gradients_sum(mo_float kind, unsigned passes, const mo_vector *held, mo_seen *seen)
{
    unsigned long long any = 0;
    float sum = 0;
    unsigned k;

    if (passes & MO_GRADIENTS_MAXIMUM) {
        MO_UNROLL
        for (k = 0; k < MO_GRADIENTS_IN_FLIGHT; k++) {
            seen->sum = mo_word_maximum(kind, seen->sum, held[k].word[0]);
            seen->sum = mo_word_maximum(kind, seen->sum, held[k].word[1]);
        }
        return;
    }
    if (kind != MO_F64) {
        MO_UNROLL
        for (k = 0; k < MO_GRADIENTS_IN_FLIGHT; k++) {
            sum += mo_word_squares(kind, held[k].word[0]) + mo_word_squares(kind, held[k].word[1]);
            any |= held[k].word[0] | held[k].word[1];
        }
        /* fp16's squares are all within fp32: from 2^-48 to 2^32. */
        if (kind == MO_F16 || MO_GRADIENTS_IN_RANGE(sum) || !any) {
            seen->sum += (double)sum;
            return;
        }
    }
    MO_UNROLL
    for (k = 0; k < MO_GRADIENTS_IN_FLIGHT; k++) {
        seen->sum = mo_word_squares_wide(kind, seen->sum, held[k].word[0]);
        seen->sum = mo_word_squares_wide(kind, seen->sum, held[k].word[1]);
    }
}

/* The share of thread number `thread` of `threads` in a chunk's whole vectors. */
MO_BODY void mo_gradients_vectors(mo_float kind, unsigned passes, mo_vector *vectors, unsigned count,
                                  unsigned thread, unsigned threads, float scale, mo_seen *seen)
{
    const unsigned store = passes & MO_GRADIENTS_STORE && scale != 1.0f;
    unsigned first, k;

    MO_NOT_UNROLLED /* the body is long enough already */
        for (first = thread; first < count; first += MO_GRADIENTS_IN_FLIGHT * threads)
    {
        mo_vector held[MO_GRADIENTS_IN_FLIGHT];
        MO_UNROLL
        for (k = 0; k < MO_GRADIENTS_IN_FLIGHT; k++) {
            held[k].word[0] = held[k].word[1] = 0;
            if (first + k * threads < count)
                held[k] = vectors[first + k * threads];
        }
        MO_UNROLL
        for (k = 0; k < MO_GRADIENTS_IN_FLIGHT; k++)
            seen->not_finite |=
                mo_word_not_finite(kind, held[k].word[0]) | mo_word_not_finite(kind, held[k].word[1]);
        if (store) {
            MO_UNROLL
            for (k = 0; k < MO_GRADIENTS_IN_FLIGHT; k++)
                if (first + k * threads < count) {
                    held[k].word[0] = mo_word_scaled(kind, held[k].word[0], scale);
                    held[k].word[1] = mo_word_scaled(kind, held[k].word[1], scale);
                    vectors[first + k * threads] = held[k];
                }
        }
        if (passes & MO_GRADIENTS_NORM)
            mo_gradients_sum(kind, passes, held, seen);
    }
}

/* One element, for the few that lie outside the 16-byte grid: the first of a word of which the rest is 0. */
MO_BODY void mo_gradients_single(mo_float kind, unsigned passes, unsigned long long address, float scale,
                                 mo_seen *seen)
{
    void *const at = mo_global(address);
    const unsigned store = passes & MO_GRADIENTS_STORE && scale != 1.0f;
    unsigned long long word = kind == MO_F64   ? *(unsigned long long *)at
                              : kind == MO_F32 ? *(unsigned *)at
                                               : *(unsigned short *)at;

    seen->not_finite |= mo_word_not_finite(kind, word);
    if (store) {
        word = mo_word_scaled(kind, word, scale);
        if (kind == MO_F64) {
            *(unsigned long long *)at = word;
        } else if (kind == MO_F32) {
            word &= 0xFFFFFFFFu; /* 0 times an infinite scale is NaN */
            *(unsigned *)at = (unsigned)word;
        } else {
            word &= 0xFFFFu;
            *(unsigned short *)at = (unsigned short)word;
        }
    }
    if (passes & MO_GRADIENTS_MAXIMUM)
        seen->sum = mo_word_maximum(kind, seen->sum, word);
    else if (passes & MO_GRADIENTS_NORM)
        seen->sum = mo_word_squares_wide(kind, seen->sum, word);
}

MO_BODY void mo_gradients_of_kind(mo_float kind, unsigned passes, mo_chunk chunk, unsigned thread,
                                  unsigned threads, float scale, mo_seen *seen)
{
    const unsigned size = mo_float_size(kind);
    const mo_split split = mo_chunk_split(chunk, size);

    mo_gradients_vectors(kind, passes,
                         (mo_vector *)mo_global(chunk.address + (unsigned long long)split.head * size),
                         split.vectors, thread, threads, scale, seen);
    if (thread < split.head + split.tail) {
        const unsigned element =
            thread < split.head ? thread : chunk.count - split.tail + (thread - split.head);
        mo_gradients_single(kind, passes, chunk.address + (unsigned long long)element * size, scale, seen);
    }
}

/* The share of thread number `thread` of `threads` (at least 14, the most single elements a chunk can have) in one
 * chunk. Adds what it saw to *seen; its sum is right where passes has NORM. */
MO_BODY void mo_gradients_thread(unsigned passes, mo_chunk chunk, unsigned thread, unsigned threads,
                                 float scale, mo_seen *seen)
{
    switch (chunk.kind) {
    case MO_F32:
        mo_gradients_of_kind(MO_F32, passes, chunk, thread, threads, scale, seen);
        break;
    case MO_F16:
        mo_gradients_of_kind(MO_F16, passes, chunk, thread, threads, scale, seen);
        break;
    case MO_BF16:
        mo_gradients_of_kind(MO_BF16, passes, chunk, thread, threads, scale, seen);
        break;
    default:
        mo_gradients_of_kind(MO_F64, passes, chunk, thread, threads, scale, seen);
    }
}

/* ---- the last block ------------------------------------------------------------------------------------ */

MO_BODY void mo_gradients_write(unsigned long long address, float value)
{
    if (address)
        *(float *)mo_global(address) = value;
}

/* Writes the results of a whole sum; one thread does. What was not stored has not been scaled yet. */
MO_BODY void mo_gradients_finish(mo_gradients_launch launch, double sum, float scale)
{
    const double raw = mo_gradients_norm(sum, launch.passes);
    const double norm64 = launch.passes & MO_GRADIENTS_STORE ? raw : raw * (double)scale;
    const float norm = (float)norm64;
    const double ratio = launch.max_norm / ((double)norm + 1e-6);
    const float clip = ratio > 1 ? 1.0f : (float)ratio; /* a NaN is passed on */

    if (launch.norm64)
        *(double *)mo_global(launch.norm64) = norm64;
    mo_gradients_write(launch.norm, norm);
    mo_gradients_write(launch.clip, clip);
    mo_gradients_write(launch.factor, scale * clip);
}

#endif
