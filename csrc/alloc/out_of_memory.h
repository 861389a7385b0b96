/* The text of an out-of-memory error: from plain numbers to sentences, with nothing asked of a device or a pool.
 *
 * It begins as torch's own, word for word and number for number (users and libraries match on it):
 *
 *     CUDA out of memory. Tried to allocate 600.00 MiB. GPU 0 has a total capacity of 1024.00 MiB of which 424.00 MiB
 *     is free.
 *
 * and goes on with what torch does not know: what lies free and how, who still uses it, and what would help. Each
 * sentence is there only where it says something; advice comes last and is always there. */
#ifndef MO_OUT_OF_MEMORY_H
#define MO_OUT_OF_MEMORY_H

#include "driver/driver.h"

#define MO_PENDING_SHOWN 4 /* streams, those with the most bytes */

typedef struct mo_pending {
    mo_stream stream;
    size_t bytes; /* free, and work on this stream may still use them */
} mo_pending;

/* Bytes, but for the last ones. 0 stands for "nothing" and for "not known" alike, except where it is said. */
typedef struct mo_out_of_memory {
    int device;
    size_t wanted;                  /* as asked for */
    size_t total_bytes, free_bytes; /* of the device; total 0: it did not say */
    size_t budget;                  /* most that may be held; 0: none */
    size_t held, live, requested;   /* physical memory of ours; of it in live blocks; asked for by them */
    size_t largest_free;            /* as it lies */
    size_t largest_allocatable;     /* with free memory moved together */
    size_t pending_bytes;           /* free, but some stream may still use it */
    size_t stale_bytes;             /* addresses that still map memory which lives elsewhere now */
    double external, internal;      /* fragmentation, 0 to 1: pool.h */
    size_t pending_streams;         /* entries of pending[] that are meant, at most MO_PENDING_SHOWN */
    mo_pending pending[MO_PENDING_SHOWN];
} mo_out_of_memory;

/* Writes at most capacity bytes, always terminated; 1024 (mo_detail) hold any. capacity > 0. */
void mo_out_of_memory_text(char *text, size_t capacity, const mo_out_of_memory *facts);

#define MO_TORCH_SIZE_TEXT 32

/* Bytes in torch's own format, two decimals and the unit below: "512 bytes", "1.50 KiB", "1024.00 MiB", "2.00 GiB". */
const char *mo_torch_size(size_t bytes, char out[MO_TORCH_SIZE_TEXT]);

#endif
