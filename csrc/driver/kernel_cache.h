/* Compiled kernel images on disk: one file an image, in a directory that the caller names, so that a machine
 * compiles once and not once a process.
 *
 *     file = header | key text | image          header: magic, format, lengths, checksum of all the rest
 *
 * The key is the whole text that the image depends on (source, architecture, compiler, options, memopt's
 * version); its hash names the file and the text itself is compared. A file that is cut, altered, of another
 * format or of another key is MO_CACHE_DAMAGED: as good as missing, and replaced by the next store. Any
 * single changed byte is seen: each step of the checksum (FNV-1a, 64 bits) maps different states to different
 * states.
 *
 * An image is code that the device runs. So the directory and the file are opened without following a link in their
 * place, and serve only where they belong to the process's user and nobody else may write to them.
 *
 * Files appear whole: written beside their name, synced, renamed. Processes that store at the same time each
 * succeed and the last one stays; a reader has what it opened. No locks, in the process or on disk. */
#ifndef MO_KERNEL_CACHE_H
#define MO_KERNEL_CACHE_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef enum mo_cache_finding {
    MO_CACHE_OFF,     /* no directory was named */
    MO_CACHE_MISSING, /* no such file */
    MO_CACHE_HIT,
    MO_CACHE_DAMAGED,    /* a file is there that is not this image, whole */
    MO_CACHE_UNREADABLE, /* it cannot be opened or read, or must not be trusted: rights, another owner, a link, a
                            directory of that name, an I/O error */
    MO_CACHE_FINDING_COUNT
} mo_cache_finding;

/* "off", "missing", "hit", "damaged", "unreadable" */
const char *mo_cache_finding_name(mo_cache_finding finding);

/* The length of the fixed part of a file, and of the longest key. */
#define MO_CACHE_HEADER_SIZE 40
#define MO_CACHE_KEY_MAX     1024
#define MO_CACHE_IMAGE_MAX   ((size_t)64 << 20) /* a length above it is damage: real images are about 0.1 MB */
#define MO_CACHE_PATH_MAX    4096

/* FNV-1a over size bytes, from a first or a former state. */
#define MO_CACHE_HASH_START 0xCBF29CE484222325u
uint64_t mo_cache_hash(uint64_t state, const void *bytes, size_t size);

/* The file of a key: DIRECTORY/<16 hex digits>.kernels. MO_INVALID where the key or the path is too long. */
mo_status mo_cache_path(const char *directory, const char *key, char out[MO_CACHE_PATH_MAX],
                        mo_detail *detail);

/* Looks for key's image. MO_OK with *finding; on MO_CACHE_HIT *out is the image, for mo_host_free, else NULL,
 * and on DAMAGED and UNREADABLE *detail says why. Only MO_NO_HOST_MEMORY and MO_INVALID are failures. */
mo_status mo_cache_load(const char *directory, const char *key, mo_cache_finding *finding, void **out,
                        size_t *out_size, mo_detail *detail);

/* Stores an image, making the directory (mode 0700) and its parents as needed; replaces what is there. MO_IO
 * with the path and the reason where that cannot be, or the directory is not the user's own: the cache is a
 * convenience, the caller goes on without it. */
mo_status mo_cache_store(const char *directory, const char *key, const void *image, size_t size,
                         mo_detail *detail);

#endif
