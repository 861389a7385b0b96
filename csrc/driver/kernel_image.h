/* The kernels that this library carries: what nvcc made of them, and their source for NVRTC. Both are files
 * that kernels/build_kernels.py wrote, taken in by the assembler; they live as long as the library. */
#ifndef MO_KERNEL_IMAGE_H
#define MO_KERNEL_IMAGE_H

#include <stddef.h>

typedef struct mo_kernel_image {
    const void *fatbin; /* 16-byte aligned */
    size_t fatbin_size; /* 0: built without nvcc */
    const char *source; /* one translation unit; source[source_size] == 0 */
    size_t source_size;
} mo_kernel_image;

mo_kernel_image mo_kernel_image_get(void);

#endif
