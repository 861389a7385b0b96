#include "data/private_mapping.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

mo_status mo_private_map(int fd, size_t size, mo_detail *detail, mo_private_mapping *out)
{
    void *bytes;

    if (!size)
        return mo_fail(detail, MO_INVALID, 0, "0 bytes cannot be mapped");
    /* Nothing is reserved: few of the pages, if any, will ever be written to. */
    bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
    if (bytes == MAP_FAILED)
        return mo_fail(detail, MO_IO, errno, "mapping %zu bytes of file descriptor %d failed: %s", size, fd,
                       strerror(errno));
    *out = (mo_private_mapping){bytes, size};
    return MO_OK;
}

void mo_private_unmap(mo_private_mapping *mapping)
{
    if (mapping->bytes)
        munmap(mapping->bytes, mapping->size);
    *mapping = (mo_private_mapping){0};
}
