#include "transfer/nameless_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- the system's calls ------------------------------------------------------------------------------------------- */

static int system_open(const char *directory)
{
    char name[600];
    int file = open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);

    if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL))
        return file;
    /* A file system without: the name is gone before anything is written. */
    snprintf(name, sizeof name, "%s/memopt-XXXXXX", directory);
    file = mkostemp(name, O_CLOEXEC);
    if (file >= 0)
        unlink(name);
    return file;
}

static int system_set_direct(int file, bool on)
{
    const int flags = fcntl(file, F_GETFL);
    return flags < 0 ? -1 : fcntl(file, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT);
}

static int system_reserve(int file, off_t at, off_t size)
{
    return fallocate(file, 0, at, size);
}

const mo_file_calls mo_system_files = {system_open, system_set_direct, system_reserve, pwrite, pread, close};

/* ---- errors ---------------------------------------------------------------------------------------------------------- */

static const char *mend(int code)
{
    switch (code) {
    case ENOSPC:
    case EDQUOT:
        return "the disk is full: give a directory with more space";
    case EFBIG:
        return "the file would exceed the size limit: raise the limit (ulimit -f) or give another directory";
    case ENOENT:
    case ENOTDIR:
        return "give a directory that exists";
    case EACCES:
    case EPERM:
    case EROFS:
        return "give a writable directory";
    default:
        return "the disk or its file system is faulty: give a directory on another disk";
    }
}

static mo_status failed(const mo_file *file, const char *what, size_t size, uint64_t at, int code,
                        mo_detail *detail)
{
    return mo_fail(detail, MO_IO, code, "%s %zu bytes at %llu of a file in %s: %s; %s", what, size,
                   (unsigned long long)at, file->directory, strerror(code), mend(code));
}

/* ---- a file ------------------------------------------------------------------------------------------------------------ */

mo_status mo_file_open(const char *directory, const mo_file_calls *calls, mo_file *out, mo_detail *detail)
{
    mo_file file = {.calls = calls};

    if (strlen(directory) >= sizeof file.directory)
        return mo_fail(detail, MO_INVALID, 0, "a directory's name of %zu bytes: at most %zu",
                       strlen(directory), sizeof file.directory - 1);
    memcpy(file.directory, directory, strlen(directory) + 1);
    do
        file.descriptor = calls->open(directory);
    while (file.descriptor < 0 && errno == EINTR);
    if (file.descriptor < 0) {
        const int code = errno;
        return mo_fail(detail, MO_IO, code, "creating a file in %s: %s; %s", directory, strerror(code),
                       mend(code));
    }
    file.direct = calls->set_direct(file.descriptor, true) == 0;
    *out = file;
    return MO_OK;
}

void mo_file_close(mo_file *file)
{
    file->calls->close(file->descriptor); /* there is nothing to keep: what it says is of no use */
}

/* Whether a transfer that failed is to be tried again: interrupted, or refused for being direct, which it is no more. */
static bool again(mo_file *file, int code)
{
    if (code == EINTR)
        return true;
    if (code != EINVAL || !file->direct)
        return false;
    file->direct = false;
    return file->calls->set_direct(file->descriptor, false) == 0;
}

/* Of what was transferred, as much as the next direct transfer may begin behind. */
static size_t whole_blocks(const mo_file *file, size_t done, size_t left)
{
    return file->direct && done < left ? done & ~(size_t)(MO_FILE_ALIGNMENT - 1) : done;
}

mo_status mo_file_reserve(mo_file *file, uint64_t at, size_t size, mo_detail *detail)
{
    int failure;

    do
        failure = file->calls->reserve(file->descriptor, (off_t)at, (off_t)size);
    while (failure && errno == EINTR);
    if (!failure || errno == EOPNOTSUPP || errno == ENOSYS)
        return MO_OK;
    return failed(file, "reserving", size, at, errno, detail);
}

mo_status mo_file_write(mo_file *file, const void *from, size_t size, uint64_t at, mo_detail *detail)
{
    const char *left = from;

    while (size) {
        const ssize_t done = file->calls->write(file->descriptor, left, size, (off_t)at);
        const size_t kept = done > 0 ? whole_blocks(file, (size_t)done, size) : 0;
        if (done < 0 && again(file, errno))
            continue;
        if (!kept) /* a disk that takes nothing, and does not say why, is full */
            return failed(file, "writing", size, at, done < 0 ? errno : ENOSPC, detail);
        left += kept;
        size -= kept;
        at += kept;
    }
    return MO_OK;
}

mo_status mo_file_read(mo_file *file, void *to, size_t size, uint64_t at, mo_detail *detail)
{
    char *left = to;

    while (size) {
        const ssize_t done = file->calls->read(file->descriptor, left, size, (off_t)at);
        const size_t kept = done > 0 ? whole_blocks(file, (size_t)done, size) : 0;
        if (done < 0 && again(file, errno))
            continue;
        if (done < 0)
            return failed(file, "reading", size, at, errno, detail);
        if (!kept)
            return mo_fail(
                detail, MO_IO, EIO,
                "reading %zu bytes at %llu of a file in %s: it ends before the bytes that were written "
                "there; it was truncated, or the disk is faulty",
                size, (unsigned long long)at, file->directory);
        left += kept;
        size -= kept;
        at += kept;
    }
    return MO_OK;
}
