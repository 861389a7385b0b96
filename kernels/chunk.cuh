/* The unit of work of a multi-tensor kernel: a run of elements of one tensor, processed by one block. The
 * host cuts tensors into chunks (csrc/scaler/chunk_table.h), uploads the table, and launches one block a
 * chunk; so a launch is the same for one tensor of 10^9 elements and for 10^5 tensors of ten, of whatever types.
 *
 * Compiled by nvcc, by NVRTC and, as C11, by gcc and clang: the table's layout is written down once. */
#ifndef MO_CHUNK_CUH
#define MO_CHUNK_CUH

#ifdef __CUDACC__ /* nvcc and NVRTC, which has no standard headers: none is used below */
/* Not static: nvcc puts a hash of its source's path into the names of what is. */
#define MO_BODY           __device__ __forceinline__
#define MO_ALIGNED(bytes) __align__(bytes)
#define MO_ENTRY          extern "C"
#define MO_UNROLL         _Pragma("unroll")
#define MO_NOT_UNROLLED   _Pragma("unroll 1")
#else
#define MO_BODY           static inline
#define MO_ALIGNED(bytes) __attribute__((aligned(bytes)))
#define MO_ENTRY          static
#define MO_UNROLL
#define MO_NOT_UNROLLED
#endif

/* The element types that the kernels know, in the order in which kernels are listed. */
typedef enum mo_float { MO_F32, MO_F16, MO_BF16, MO_F64, MO_FLOAT_COUNT } mo_float;

/* 16 bytes, so that an entry is one load and the table an array without holes. */
typedef struct MO_ALIGNED(16) mo_chunk {
    unsigned long long address; /* of the first element, a multiple of the element's size */
    unsigned count;             /* elements, at least one */
    unsigned kind;              /* of the elements: a mo_float */
} mo_chunk;

MO_BODY unsigned mo_float_size(mo_float kind)
{
    return kind == MO_F64 ? 8 : kind == MO_F32 ? 4 : 2;
}

/* Sixteen bytes: the widest load and store that one thread can make. */
typedef struct MO_ALIGNED(16) mo_vector {
    unsigned long long word[2];
} mo_vector;

typedef struct MO_ALIGNED(8) mo_eight_bytes {
    unsigned word[2];
} mo_eight_bytes;

/* A word of any four bytes of two words, numbered from the lowest: 0 to 3 are a's, 4 to 7 are b's. The lowest digit of `which`
 * names the lowest byte. */
MO_BODY unsigned mo_bytes(unsigned a, unsigned b, unsigned which)
{
#ifdef __CUDACC__
    return __byte_perm(a, b, which);
#else
    const unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned word = 0, k;

    for (k = 0; k < 4; k++)
        word |= (unsigned)(both >> (which >> 4 * k & 7) * 8 & 0xFF) << 8 * k;
    return word;
#endif
}

/* The address as a pointer. A number could point into any memory space; saying "global" makes the compiler
 * emit ld.global for what would else be a generic load. (Generic and global addresses are equal numbers.) */
MO_BODY void *mo_global(unsigned long long address)
{
#ifdef __CUDACC__
    return __cvta_global_to_generic(address);
#else
    return (void *)address;
#endif
}

/* How a chunk lies on the 16-byte grid: `head` single elements, `vectors` whole vectors, `tail` single
 * elements. head + vectors * (16 / size) + tail == count        head, tail < 16 / size       (all three may
 * be 0) */
typedef struct mo_split {
    unsigned head, vectors, tail;
} mo_split;

MO_BODY mo_split mo_chunk_split(mo_chunk chunk, unsigned size)
{
    const unsigned lanes = 16 / size;
    const unsigned to_grid = ((16 - (unsigned)(chunk.address & 15)) & 15) / size;
    mo_split split;

    split.head = to_grid < chunk.count ? to_grid : chunk.count;
    split.vectors = (chunk.count - split.head) / lanes;
    split.tail = chunk.count - split.head - split.vectors * lanes;
    return split;
}

/* Sixteen bytes by one store: nvcc makes of a struct of words one for some architectures, four for others. */
MO_BODY void mo_store_words(unsigned long long address, unsigned a, unsigned b, unsigned c, unsigned d)
{
#ifdef __CUDACC__
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
#else
    const mo_vector words = {{(unsigned long long)b << 32 | a, (unsigned long long)d << 32 | c}};
    *(mo_vector *)mo_global(address) = words;
#endif
}

#endif
