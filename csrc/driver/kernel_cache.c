#include "driver/kernel_cache.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/hostmem.h"

/* As it lies in the file, in the machine's byte order: a cache directory is not carried between machines, and
 * one that is has a foreign magic. */
typedef struct file_header {
    uint64_t magic;
    uint32_t format;
    uint32_t key_size;
    uint64_t image_size;
    uint64_t hash;     /* of the four fields above, the key and the image */
    uint64_t reserved; /* 0 */
} file_header;

_Static_assert(sizeof(file_header) == MO_CACHE_HEADER_SIZE, "the header has no padding");

#define MAGIC  0x736C6E72656B6F6Du /* "mokernls" in a hex dump */
#define FORMAT 1

/* A file's name, a dot, a process's number and a small one. */
#define MO_CACHE_FRESH_MAX 80

const char *mo_cache_finding_name(mo_cache_finding finding)
{
    static const char *const names[] = {"off", "missing", "hit", "damaged", "unreadable"};
    return (unsigned)finding < MO_CACHE_FINDING_COUNT ? names[finding] : "?";
}

uint64_t mo_cache_hash(uint64_t state, const void *bytes, size_t size)
{
    const unsigned char *b = bytes;
    for (size_t i = 0; i < size; i++)
        /* The analyzer does not follow the bytes of a uint64_t past its first:
         * NOLINTNEXTLINE(clang-analyzer-core.UndefinedBinaryOperatorResult) */
        state = (state ^ b[i]) * 0x100000001B3u;
    return state;
}

static uint64_t file_hash(const file_header *header, const void *key, const void *image)
{
    uint64_t hash = mo_cache_hash(MO_CACHE_HASH_START, header, offsetof(file_header, hash));
    hash = mo_cache_hash(hash, &header->reserved, sizeof header->reserved);
    hash = mo_cache_hash(hash, key, header->key_size);
    return mo_cache_hash(hash, image, header->image_size);
}

mo_status mo_cache_path(const char *directory, const char *key, char out[MO_CACHE_PATH_MAX],
                        mo_detail *detail)
{
    const size_t key_size = strlen(key);
    int length;

    if (key_size > MO_CACHE_KEY_MAX)
        return mo_fail(detail, MO_INVALID, 0, "a kernel's cache key of %zu bytes is longer than %d", key_size,
                       MO_CACHE_KEY_MAX);
    length = snprintf(out, MO_CACHE_PATH_MAX, "%s/%016llx.kernels", directory,
                      (unsigned long long)mo_cache_hash(MO_CACHE_HASH_START, key, key_size));
    if (length < 0 || length >= MO_CACHE_PATH_MAX)
        return mo_fail(detail, MO_INVALID, ENAMETOOLONG, "the cache directory's path is too long: %.200s…",
                       directory);
    return MO_OK;
}

/* Of a path that mo_cache_path made. */
static const char *file_name(const char *path)
{
    return strrchr(path, '/') + 1;
}

static void close_keeping_errno(int fd)
{
    const int error = errno;
    close(fd);
    errno = error;
}

/* All of size bytes, or false with errno (0 where the file ended early). */
static bool read_all(int fd, void *out, size_t size)
{
    char *to = out;
    while (size > 0) {
        ssize_t got = read(fd, to, size);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            if (got == 0)
                errno = 0;
            return false;
        }
        to += got;
        size -= (size_t)got;
    }
    return true;
}

static bool write_all(int fd, const void *from, size_t size)
{
    const char *at = from;
    while (size > 0) {
        ssize_t put = write(fd, at, size);
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            return false;
        at += put;
        size -= (size_t)put;
    }
    return true;
}

/* Why what is open is not to be trusted, or NULL. An image is code: nobody else may have put it there. */
static const char *distrusted(const struct stat *about)
{
    if (about->st_uid != geteuid())
        return "it belongs to another user";
    if (about->st_mode & (S_IWGRP | S_IWOTH))
        return "it is writable by others";
    return NULL;
}

/* The directory, opened, or -1 with *why, a text, or NULL for errno. A link in its place is not followed; links above it
 * are the user's own affair. */
static int open_directory(const char *directory, const char **why)
{
    struct stat about;
    const int folder = open(directory, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);

    *why = folder < 0 && errno == ELOOP ? "it is a symbolic link" : NULL;
    if (folder < 0)
        return -1;
    if (fstat(folder, &about) == 0)
        *why = S_ISDIR(about.st_mode) ? distrusted(&about) : "it is not a directory";
    else
        *why = "it cannot be examined";
    if (!*why)
        return folder;
    close(folder);
    errno = EPERM;
    return -1;
}

/* What the open file is. On MO_CACHE_HIT *out and *out_size are set; else *why is a text, or NULL for errno.
 */
static mo_status read_file(int fd, const char *key, mo_cache_finding *finding, void **out, size_t *out_size,
                           const char **why)
{
    char found_key[MO_CACHE_KEY_MAX];
    file_header header;
    struct stat about;
    char *image = NULL;

    *finding = MO_CACHE_DAMAGED;
    *why = NULL;
    if (fstat(fd, &about) != 0) {
        *finding = MO_CACHE_UNREADABLE;
        return MO_OK;
    }
    *why = S_ISREG(about.st_mode) ? distrusted(&about) : "it is not a regular file";
    if (*why) {
        *finding = MO_CACHE_UNREADABLE;
        return MO_OK;
    }
    *why = "it is shorter than a header";
    if ((uint64_t)about.st_size < sizeof header)
        return MO_OK;
    if (!read_all(fd, &header, sizeof header))
        goto unread;
    *why = "its header does not have this format";
    if (header.magic != MAGIC || header.format != FORMAT || header.key_size > MO_CACHE_KEY_MAX ||
        header.image_size == 0 || header.image_size > MO_CACHE_IMAGE_MAX)
        return MO_OK;
    *why = "its length differs from the one in its header";
    if ((uint64_t)about.st_size != sizeof header + header.key_size + header.image_size)
        return MO_OK;
    if (!read_all(fd, found_key, header.key_size))
        goto unread;
    *why = "it belongs to another key";
    if (header.key_size != strlen(key) || memcmp(found_key, key, header.key_size) != 0)
        return MO_OK;
    image = mo_host_alloc(header.image_size);
    if (!image)
        return MO_NO_HOST_MEMORY;
    if (!read_all(fd, image, header.image_size))
        goto unread;
    *why = "its checksum is wrong";
    if (header.hash != file_hash(&header, found_key, image)) {
        mo_host_free(image);
        return MO_OK;
    }
    *finding = MO_CACHE_HIT;
    *out = image;
    *out_size = header.image_size;
    return MO_OK;
unread:
    mo_host_free(image);
    *finding = errno ? MO_CACHE_UNREADABLE : MO_CACHE_DAMAGED;
    *why = errno ? NULL : "it was truncated while it was read";
    return MO_OK;
}

mo_status mo_cache_load(const char *directory, const char *key, mo_cache_finding *finding, void **out,
                        size_t *out_size, mo_detail *detail)
{
    char path[MO_CACHE_PATH_MAX];
    const char *why = NULL;
    mo_status status;
    int folder, fd;

    *out = NULL;
    *out_size = 0;
    *finding = MO_CACHE_OFF;
    if (!directory || !*directory)
        return MO_OK;
    status = mo_cache_path(directory, key, path, detail);
    if (status)
        return status;
    folder = open_directory(directory, &why);
    if (folder < 0 && why) {
        *finding = MO_CACHE_UNREADABLE;
        mo_fail(detail, MO_CORRUPT, EPERM, "the kernel cache's directory %.600s is not used: %s", directory,
                why);
        return MO_OK;
    }
    fd = -1;
    if (folder >= 0) {
        /* O_NONBLOCK: a FIFO of that name must not hold us up */
        fd = openat(folder, file_name(path), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        if (fd < 0 && errno == ELOOP)
            why = "it is a symbolic link";
        close_keeping_errno(folder);
    }
    if (fd < 0 && (errno == ENOENT || errno == ENOTDIR)) {
        *finding = MO_CACHE_MISSING;
        return MO_OK;
    }
    if (fd < 0) {
        *finding = MO_CACHE_UNREADABLE;
    } else {
        status = read_file(fd, key, finding, out, out_size, &why);
        if (status)
            mo_fail(detail, status, 0, "out of host memory for the kernel image in %.600s", path);
    }
    if (!status && *finding != MO_CACHE_HIT)
        mo_fail(detail, MO_CORRUPT, why ? 0 : errno,
                "the kernel cache file %.600s cannot be used: %s; it is rebuilt", path,
                why ? why : strerror(errno));
    if (fd >= 0)
        close(fd);
    return status;
}

/* mkdir -p. False with errno. */
static bool make_directories(const char *path)
{
    char part[MO_CACHE_PATH_MAX];
    size_t length = strlen(path);

    if (length >= sizeof part) {
        errno = ENAMETOOLONG;
        return false;
    }
    memcpy(part, path, length + 1);
    for (size_t i = 1; i <= length; i++) {
        if (part[i] != '/' && part[i] != 0)
            continue;
        part[i] = 0;
        if (mkdir(part, 0700) != 0 && errno != EEXIST && errno != EISDIR && errno != EROFS)
            return false; /* one that is there on a read-only system may answer EROFS: the open below decides
                           */
        part[i] = path[i];
    }
    return true;
}

/* A new file beside name, for this user alone, whose own name is left in fresh; or -1 with errno. */
static int create_beside(int folder, const char *name, char fresh[MO_CACHE_FRESH_MAX])
{
    int fd = -1;

    /* One may be there: of a process that died, or that has our number in another namespace. */
    for (int i = 0; i < 100; i++) {
        snprintf(fresh, MO_CACHE_FRESH_MAX, "%.40s.%ld-%d", name, (long)getpid(), i);
        fd = openat(folder, fresh, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (fd >= 0 || errno != EEXIST)
            break;
    }
    return fd;
}

mo_status mo_cache_store(const char *directory, const char *key, const void *image, size_t size,
                         mo_detail *detail)
{
    file_header header = {.magic = MAGIC, .format = FORMAT};
    char path[MO_CACHE_PATH_MAX], fresh[MO_CACHE_FRESH_MAX];
    const char *step = "mkdir", *why = NULL;
    int fd = -1, folder = -1, error = 0, closed;
    bool made = false;
    mo_status status = mo_cache_path(directory, key, path, detail);

    if (status)
        return status;
    if (size == 0 || size > MO_CACHE_IMAGE_MAX)
        return mo_fail(detail, MO_INVALID, 0, "a kernel image of %zu bytes cannot be cached", size);
    header.key_size = (uint32_t)strlen(key);
    header.image_size = size;
    header.hash = file_hash(&header, key, image);

    if (!make_directories(directory))
        goto fail;
    step = "open";
    folder = open_directory(directory, &why);
    if (folder < 0)
        goto fail;
    step = "create";
    fd = create_beside(folder, file_name(path), fresh);
    if (fd < 0)
        goto fail;
    made = true;
    step = "write";
    if (!write_all(fd, &header, sizeof header) || !write_all(fd, key, header.key_size) ||
        !write_all(fd, image, size))
        goto fail;
    step = "sync"; /* before the rename: else a power cut could leave the name with no data behind it */
    if (fsync(fd) != 0)
        goto fail;
    step = "close";
    closed = close(fd);
    fd = -1;
    if (closed != 0)
        goto fail;
    step = "rename";
    if (renameat(folder, fresh, folder, file_name(path)) != 0)
        goto fail;
    /* The rename itself may be lost with the power, and then the file is missing, which is harmless. */
    fsync(folder);
    close(folder);
    return MO_OK;
fail:
    error = errno;
    if (fd >= 0)
        close(fd);
    if (made)
        unlinkat(folder, fresh, 0);
    if (folder >= 0)
        close(folder);
    return mo_fail(detail, MO_IO, error, "the compiled kernels cannot be cached in %.600s (%s: %s): %s",
                   directory, step, why ? why : strerror(error),
                   "they are compiled again in each process; set XDG_CACHE_HOME to a writable directory");
}
