/* A file in memory, copy-on-write: what is written to it becomes this process's own and never reaches the file. It holds
 * no file descriptor, so that there may be more of them than a process may have files open. */
#ifndef MO_PRIVATE_MAPPING_H
#define MO_PRIVATE_MAPPING_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct mo_private_mapping {
    uint8_t *bytes;
    size_t size;
} mo_private_mapping;

/* The first `size` > 0 bytes of the file behind fd, which stays the caller's and may be closed. MO_IO with errno: the
 * file system cannot be mapped, or no mapping is left. The file must not be cut short meanwhile: touching what is gone
 * is a SIGBUS. */
mo_status mo_private_map(int fd, size_t size, mo_detail *detail, mo_private_mapping *out);

/* {0} is fine. */
void mo_private_unmap(mo_private_mapping *mapping);

#endif
