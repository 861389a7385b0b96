#include "driver/kernel_image.h"

#ifndef MEMOPT_KERNEL_SOURCE_PATH
#error                                                                                                       \
    "MEMOPT_KERNEL_SOURCE_PATH is not set: take the macros from kernels/build_kernels.py --macros, as setup.py does"
#endif

/* name[] … name_end[], hidden; a NUL follows, which the size does not count. */
#define EMBED(name, lines)                                                                                   \
    __asm__(".pushsection .rodata, \"a\"\n"                                                                  \
            ".balign 16\n"                                                                                   \
            ".hidden " #name "\n"                                                                            \
            ".globl " #name "\n" #name ":\n" lines ".hidden " #name "_end\n"                                 \
            ".globl " #name "_end\n" #name "_end:\n"                                                         \
            ".byte 0\n"                                                                                      \
            ".popsection\n");                                                                                \
    extern const char name[] __attribute__((visibility("hidden")));                                          \
    extern const char name##_end[] __attribute__((visibility("hidden")))

EMBED(mo_embedded_source, ".incbin \"" MEMOPT_KERNEL_SOURCE_PATH "\"\n");

#ifdef MEMOPT_FATBIN_PATH
EMBED(mo_embedded_fatbin, ".incbin \"" MEMOPT_FATBIN_PATH "\"\n");
#else
EMBED(mo_embedded_fatbin, "");
#endif

/* By value: the difference of two linked symbols is no constant expression in C, and a static to fill would need a
 * lock. */
mo_kernel_image mo_kernel_image_get(void)
{
    return (mo_kernel_image){
        .fatbin = mo_embedded_fatbin,
        .fatbin_size = (size_t)(mo_embedded_fatbin_end - mo_embedded_fatbin),
        .source = mo_embedded_source,
        .source_size = (size_t)(mo_embedded_source_end - mo_embedded_source),
    };
}
