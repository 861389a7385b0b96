/* Memory without a name that processes share: written once, front to back, through a buffer; then sealed, and from then on
 * only read.
 *
 *     it is a memfd, so nothing is left of it when the last process that has it ends, however that ends
 *     sealed: nobody can write to it or shorten it, so no reader ever meets a SIGBUS or bytes that change
 *
 * It is written by pwrite(2), not through a mapping: where there is no room that is an error, and not a signal, and the
 * writer's own memory stays at one buffer whatever its size. A memfd does not count in /dev/shm's size; it counts as
 * shared memory of the control group (a container's memory limit). */
#ifndef MO_SHARED_MEMORY_H
#define MO_SHARED_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/status.h"

#define MO_SHARED_BUFFER ((size_t)1 << 20) /* bytes of a writer's buffer */

/* Bytes that the files of one build may take together. */
typedef struct mo_shared_budget {
    uint64_t limit, used;
} mo_shared_budget;

/* size = written + used. With fd == -1 nothing is written: all stays in the buffer, which grows. */
typedef struct mo_shared_writer {
    int fd;
    pid_t owner; /* a child of a fork shares the file, and must not write to it */
    uint8_t *buffer;
    size_t used, capacity;
    uint64_t written;
    mo_shared_budget *budget; /* NULL: no limit */
} mo_shared_writer;

/* A new, empty memory. On failure there is nothing to close. */
mo_status mo_shared_writer_open(mo_shared_budget *budget, mo_detail *detail, mo_shared_writer *out);

/* A writer to private memory. */
void mo_shared_writer_local(mo_shared_writer *out);

static inline uint64_t mo_shared_writer_size(const mo_shared_writer *w)
{
    return w->written + w->used;
}

/* MO_IO: no room, or the budget is used up, or this is not the process that opened it. What was written before stays. */
mo_status mo_shared_write(mo_shared_writer *w, const void *bytes, size_t size, mo_detail *detail);

/* Zero bytes up to the next multiple of a power of two <= 64. */
mo_status mo_shared_write_padding(mo_shared_writer *w, size_t alignment, mo_detail *detail);

/* What is in the buffer goes to the file. */
mo_status mo_shared_flush(mo_shared_writer *w, mo_detail *detail);

/* Bytes at a place that has been written to the file before. */
mo_status mo_shared_rewrite(mo_shared_writer *w, uint64_t at, const void *bytes, size_t size,
                            mo_detail *detail);

/* Zero bytes on the end, each page of them there, so that they can be mapped and written to. Flushes first. */
mo_status mo_shared_extend(mo_shared_writer *w, size_t size, mo_detail *detail);

/* [at, at + size) of the file from its start; the bytes are there. */
mo_status mo_shared_read_back(const mo_shared_writer *w, uint64_t at, void *bytes, size_t size,
                              mo_detail *detail);

/* Gives the whole pages of [0, end) back to the system; they read as zero then. */
void mo_shared_forget(const mo_shared_writer *w, uint64_t end);

/* Flushes and seals; *fd is the caller's, and the writer closed. On failure the writer is as it was. */
mo_status mo_shared_seal(mo_shared_writer *w, mo_detail *detail, int *fd);

/* Closed already, or {0} with fd -1, is fine. */
void mo_shared_writer_close(mo_shared_writer *w);

typedef struct mo_shared_mapping {
    uint8_t *bytes;
    size_t size;
} mo_shared_mapping;

/* The sealed memory behind fd, which stays the caller's. Read-only; or `privately` writable: pages that are written to
 * become this process's own, and nobody else sees them. MO_CORRUPT: not such a memory. */
mo_status mo_shared_map(int fd, bool privately, mo_detail *detail, mo_shared_mapping *out);

/* The writer's own file, writable, to be unmapped before it is sealed. */
mo_status mo_shared_map_writer(mo_shared_writer *w, mo_detail *detail, mo_shared_mapping *out);

void mo_shared_unmap(mo_shared_mapping *mapping);

/* Lets `after` more system calls pass, then fails every one with `code`, until mo_shared_fail_never(). For tests. */
void mo_shared_fail_after(uint64_t after, int code);
void mo_shared_fail_never(void);

#endif
