#include "data/shared_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/hostmem.h"
#include "base/size.h"
#include "base/units.h"

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE)

static atomic_uint_least64_t calls;
static atomic_uint_least64_t fail_from = UINT64_MAX;
static atomic_int fail_code;

void mo_shared_fail_after(uint64_t after, int code)
{
    atomic_store(&fail_code, code);
    atomic_store(&fail_from, atomic_load(&calls) + after);
}

void mo_shared_fail_never(void)
{
    atomic_store(&fail_from, UINT64_MAX);
}

/* Asked before each system call that can fail. */
static bool refused(void)
{
    if (atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed) <
        atomic_load_explicit(&fail_from, memory_order_relaxed))
        return false;
    errno = atomic_load(&fail_code);
    return true;
}

/* What a failed call is called in a message, and the mend where one is known. */
static mo_status failed(mo_detail *detail, const char *what, uint64_t size)
{
    const int code = errno;
    char text[MO_SIZE_TEXT];

    mo_format_size(size, text);
    if (code == ENOSPC || code == ENOMEM || code == EDQUOT)
        return mo_fail(detail, MO_IO, code,
                       "no space for %s of shared memory (%s: %s): free memory, raise the container's "
                       "memory limit, or share less",
                       text, what, strerror(code));
    if (code == EFBIG)
        return mo_fail(detail, MO_IO, code,
                       "shared memory of %s exceeds this process's limit on file sizes: raise the limit "
                       "with `ulimit -f`",
                       text);
    if (code == EMFILE || code == ENFILE)
        return mo_fail(detail, MO_IO, code,
                       "%s: %s: each shared container holds one open file: raise the limit with `ulimit -n`",
                       what, strerror(code));
    return mo_fail(detail, MO_IO, code, "%s of shared memory, %s: %s", what, text, strerror(code));
}

mo_status mo_shared_writer_open(mo_shared_budget *budget, mo_detail *detail, mo_shared_writer *out)
{
    mo_shared_writer w = {.fd = -1, .owner = getpid(), .budget = budget};

    w.buffer = mo_host_alloc(MO_SHARED_BUFFER);
    if (!w.buffer)
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no memory for a buffer of 1 MiB");
    w.capacity = MO_SHARED_BUFFER;
    w.fd = refused() ? -1 : memfd_create("memopt-shared", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (w.fd < 0) {
        const mo_status status = failed(detail, "memfd_create", 0);
        mo_host_free(w.buffer);
        return status;
    }
    *out = w;
    return MO_OK;
}

void mo_shared_writer_local(mo_shared_writer *out)
{
    *out = (mo_shared_writer){.fd = -1};
}

/* All of it at a place, past interrupts and short writes. */
static mo_status write_at(const mo_shared_writer *w, uint64_t at, const uint8_t *bytes, size_t size,
                          mo_detail *detail)
{
    if (getpid() != w->owner)
        return mo_fail(detail, MO_IO, ECHILD,
                       "this process was forked while a shared container was being built: only the process "
                       "that began can continue");
    while (size) {
        const ssize_t n = refused() ? -1 : pwrite(w->fd, bytes, size, (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            if (!n)
                errno = ENOSPC;
            return failed(detail, "pwrite", at + size);
        }
        at += (uint64_t)n;
        bytes += n;
        size -= (size_t)n;
    }
    return MO_OK;
}

/* More bytes in the file, within the budget. */
static mo_status take(const mo_shared_writer *w, size_t size, mo_detail *detail)
{
    mo_shared_budget *budget = w->budget;
    char text[MO_SIZE_TEXT];

    if (w->written > (uint64_t)INT64_MAX - size)
        return mo_fail(detail, MO_OVERFLOW, 0, "shared memory of more than 8 EiB");
    if (!budget)
        return MO_OK;
    if (size > budget->limit - budget->used) {
        mo_format_size(budget->limit, text);
        return mo_fail(detail, MO_IO, ENOSPC,
                       "this needs more than the %s that can be used without running out of memory: free "
                       "memory, raise the container's memory limit, or share less",
                       text);
    }
    budget->used += size;
    return MO_OK;
}

mo_status mo_shared_flush(mo_shared_writer *w, mo_detail *detail)
{
    mo_status status;

    if (w->fd < 0 || !w->used)
        return MO_OK;
    status = take(w, w->used, detail);
    if (!status)
        status = write_at(w, w->written, w->buffer, w->used, detail);
    if (status)
        return status;
    w->written += w->used;
    w->used = 0;
    return MO_OK;
}

/* Room in the buffer of a writer to private memory. */
static mo_status grow(mo_shared_writer *w, size_t size, mo_detail *detail)
{
    size_t wanted, doubled = w->capacity * 2;
    uint8_t *buffer = NULL;

    if (mo_add_ok(w->used, size, &wanted)) {
        wanted = wanted < 256 ? 256 : wanted < doubled ? doubled : wanted;
        buffer = mo_host_realloc(w->buffer, wanted);
    }
    if (!buffer)
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no memory for a key of %zu bytes", size);
    w->buffer = buffer;
    w->capacity = wanted;
    return MO_OK;
}

mo_status mo_shared_write(mo_shared_writer *w, const void *bytes, size_t size, mo_detail *detail)
{
    mo_status status = MO_OK;

    if (size > w->capacity - w->used)
        status = w->fd < 0 ? grow(w, size, detail) : mo_shared_flush(w, detail);
    if (status)
        return status;
    if (size > w->capacity - w->used) { /* larger than the buffer, which is empty: past it */
        status = take(w, size, detail);
        if (!status)
            status = write_at(w, w->written, bytes, size, detail);
        w->written += status ? 0 : size;
        return status;
    }
    if (size)
        memcpy(w->buffer + w->used, bytes, size);
    w->used += size;
    return MO_OK;
}

mo_status mo_shared_write_padding(mo_shared_writer *w, size_t alignment, mo_detail *detail)
{
    static const uint8_t zeros[64];

    MO_ASSERT(mo_is_power_of_two(alignment) && alignment <= sizeof zeros);
    return mo_shared_write(w, zeros, (size_t)(-mo_shared_writer_size(w) & (alignment - 1)), detail);
}

mo_status mo_shared_rewrite(mo_shared_writer *w, uint64_t at, const void *bytes, size_t size,
                            mo_detail *detail)
{
    MO_ASSERT(at <= w->written && size <= w->written - at);
    return write_at(w, at, bytes, size, detail);
}

mo_status mo_shared_extend(mo_shared_writer *w, size_t size, mo_detail *detail)
{
    mo_status status = mo_shared_flush(w, detail);
    int code;

    if (!status && size)
        status = take(w, size, detail);
    if (status || !size)
        return status;
    if (getpid() != w->owner)
        return write_at(w, 0, NULL, 0, detail);
    do
        code = refused() ? errno : posix_fallocate(w->fd, (off_t)w->written, (off_t)size);
    while (code == EINTR);
    if (code) {
        errno = code;
        return failed(detail, "fallocate", w->written + size);
    }
    w->written += size;
    return MO_OK;
}

mo_status mo_shared_read_back(const mo_shared_writer *w, uint64_t at, void *bytes, size_t size,
                              mo_detail *detail)
{
    uint8_t *to = bytes;

    MO_ASSERT(at <= w->written && size <= w->written - at);
    while (size) {
        const ssize_t n = refused() ? -1 : pread(w->fd, to, size, (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            if (!n)
                errno = EIO;
            return failed(detail, "pread", at + size);
        }
        at += (uint64_t)n;
        to += n;
        size -= (size_t)n;
    }
    return MO_OK;
}

void mo_shared_forget(const mo_shared_writer *w, uint64_t end)
{
    const uint64_t page = 4096, whole = end / page * page;

    /* Where the system cannot, the pages go with the file. */
    if (whole)
        (void)!fallocate(w->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)whole);
}

mo_status mo_shared_seal(mo_shared_writer *w, mo_detail *detail, int *fd)
{
    const mo_status status = mo_shared_flush(w, detail);

    if (status)
        return status;
    if (refused() || fcntl(w->fd, F_ADD_SEALS, SEALS) < 0)
        return failed(detail, "sealing", w->written);
    *fd = w->fd;
    w->fd = -1;
    mo_shared_writer_close(w);
    return MO_OK;
}

void mo_shared_writer_close(mo_shared_writer *w)
{
    if (w->fd >= 0)
        close(w->fd);
    w->fd = -1;
    mo_host_free(w->buffer);
    w->buffer = NULL;
    w->used = w->capacity = 0;
}

static mo_status map(int fd, size_t size, int protection, int flags, mo_detail *detail,
                     mo_shared_mapping *out)
{
    void *bytes = refused() ? MAP_FAILED : mmap(NULL, size, protection, flags, fd, 0);

    if (bytes == MAP_FAILED)
        return failed(detail, "mmap", size);
    *out = (mo_shared_mapping){bytes, size};
    return MO_OK;
}

mo_status mo_shared_map(int fd, bool privately, mo_detail *detail, mo_shared_mapping *out)
{
    struct stat file;
    const int seals = fcntl(fd, F_GET_SEALS);

    if (seals < 0 && errno == EBADF)
        return failed(detail, "a file descriptor", 0);
    if (seals < 0 || (seals & SEALS) != SEALS)
        return mo_fail(
            detail, MO_CORRUPT, 0,
            "file descriptor %d is not sealed memory: that of a shared container cannot be changed or "
            "shortened",
            fd);
    if (refused() || fstat(fd, &file) < 0)
        return failed(detail, "fstat", 0);
    if (file.st_size <= 0)
        return mo_fail(detail, MO_CORRUPT, 0, "the memory of file descriptor %d is empty", fd);
    /* MAP_SHARED of what is sealed against writing is refused before Linux 6.7, for reading too. */
    return map(fd, (size_t)file.st_size, privately ? PROT_READ | PROT_WRITE : PROT_READ,
               MAP_PRIVATE | MAP_NORESERVE, detail, out);
}

mo_status mo_shared_map_writer(mo_shared_writer *w, mo_detail *detail, mo_shared_mapping *out)
{
    mo_status status = mo_shared_flush(w, detail);

    if (!status)
        status = map(w->fd, (size_t)w->written, PROT_READ | PROT_WRITE, MAP_SHARED, detail, out);
    if (!status) /* in a child of a fork it would keep the memory from being sealed */
        (void)madvise(out->bytes, out->size, MADV_DONTFORK);
    return status;
}

void mo_shared_unmap(mo_shared_mapping *mapping)
{
    if (mapping->bytes)
        munmap(mapping->bytes, mapping->size);
    *mapping = (mo_shared_mapping){0};
}
