/* A file that has no name, so that nothing is left of it however the process ends; written and read whole ranges at a
 * time, past the page cache where the file system takes that (O_DIRECT): what is put on a disk to save host memory
 * would else fill it as cache.
 *
 * What a call leaves undone is done by the next (a short write or read, EINTR). An error says what was done where, and
 * what would mend it; its code is errno. A range that was never written, or was cut off, is MO_IO, too: nothing is ever
 * made up. Any thread may call. */
#ifndef MO_NAMELESS_FILE_H
#define MO_NAMELESS_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h> // ssize_t, off_t

#include "base/status.h"

#define MO_FILE_ALIGNMENT                                                                                    \
    4096 /* of addresses, offsets and sizes of a direct transfer; blocks of disks are no larger */

/* The system's calls, in errno's manner, so that a test may stand between. */
typedef struct mo_file_calls {
    int (*open)(const char *directory); /* read and write, without a name */
    int (*set_direct)(int file, bool on);
    int (*reserve)(int file, off_t at, off_t size);
    ssize_t (*write)(int file, const void *from, size_t size, off_t at);
    ssize_t (*read)(int file, void *to, size_t size, off_t at);
    int (*close)(int file);
} mo_file_calls;

extern const mo_file_calls mo_system_files;

typedef struct mo_file {
    const mo_file_calls *calls;
    int descriptor;
    bool direct; /* false from the start, or from the first transfer that the file system refused */
    char directory[512];
} mo_file;

/* directory: shorter than mo_file.directory, else MO_INVALID. MO_IO where it is none, or cannot be written to. */
mo_status mo_file_open(const char *directory, const mo_file_calls *calls, mo_file *out, mo_detail *detail);
void mo_file_close(mo_file *file);

/* Has the disk's room for a range taken now, so that no write into it finds the disk full; where the file system has no such
 * call, nothing is done. */
mo_status mo_file_reserve(mo_file *file, uint64_t at, size_t size, mo_detail *detail);

/* All of it, or MO_IO. Where the file is direct, all three are multiples of MO_FILE_ALIGNMENT. */
mo_status mo_file_write(mo_file *file, const void *from, size_t size, uint64_t at, mo_detail *detail);
mo_status mo_file_read(mo_file *file, void *to, size_t size, uint64_t at, mo_detail *detail);

#endif
