/* What a kernel image contains: enough of fatbins, ELF cubins and PTX to answer as a driver does.
 *
 * A loader gets a pointer without a length, so the formats' own sizes are believed. An image may be a fatbin
 * (nvcc --fatbin), nvcc's wrapper around one, an ELF cubin, or PTX text. Compressed members of a fatbin can
 * not be looked into: an image with one that fits is taken to contain every name. */
#ifndef SIM_IMAGES_H
#define SIM_IMAGES_H

#include "driver/cuda_types.h"

#include <stdbool.h>

typedef enum sim_image_format { SIM_IMAGE_OPAQUE, SIM_IMAGE_ELF, SIM_IMAGE_PTX } sim_image_format;

typedef struct sim_image {
    sim_image_format format;
    char *bytes; /* a copy of the member chosen, NUL-terminated; NULL for OPAQUE */
    size_t size;
} sim_image;

/* Chooses what a device of compute capability `cc` (times ten) would run and copies it, as the caller may
 * free the image once it is loaded. INVALID_IMAGE for what is none of the formats, NO_BINARY_FOR_GPU when
 * nothing in it fits, INVALID_PTX for text that does not say .version. */
CUresult sim_image_open(const void *image, int cc, sim_image *out);
void sim_image_close(sim_image *image);

/* Of the machine code or PTX that such a device would run of a fatbin, the architecture it was made for: of 80 and
 * 86 a device of 89 runs 86. 0 where nothing in it fits, -1 for what is no fatbin. */
int sim_image_architecture(const void *image, int cc);

bool sim_image_has_kernel(const sim_image *image, const char *name);
/* Size in bytes of a global variable, 0 when there is none of the name (or it can't be known). */
size_t sim_image_global(const sim_image *image, const char *name);

#endif
