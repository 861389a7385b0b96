/* What a torch.cuda.MemPool takes its memory from. torch knows such an allocator by two addresses, calls them with no
 * pointer of ours, and asks for whole segments (2 MiB, 20 MiB, or more) that it carves up itself. So each arena that
 * torch takes from has an alloc function of its own, one of MO_SEGMENT_SOURCES; the free function is the same for all,
 * since an address says where it is from.
 *
 *     open sources = opened - closed <= MO_SEGMENT_SOURCES
 *     the function of a source that is not open gives NULL
 *
 * torch calls them from any thread, without the GIL, under its own device mutex, and after the interpreter has ended:
 * they call neither Python nor torch and never throw. Out of NULL torch makes its own exception. */
#ifndef MO_SEGMENT_SOURCE_H
#define MO_SEGMENT_SOURCE_H

#include <sys/types.h> // ssize_t

#include "alloc/pool.h"

/* Arenas that torch can take segments from at one time: a function each. */
#define MO_SEGMENT_SOURCES 64

typedef void *(*mo_segment_alloc)(ssize_t size, int device, void *stream);

/* From now on a function gives segments of the arena; *source is its number. The pool, that of the device for good, and
 * the arena are open, and the caller keeps them so. MO_UNSUPPORTED where all functions are taken. */
mo_status mo_segment_source_open(mo_pool *pool, int device, mo_arena_id arena, mo_detail *detail,
                                 unsigned *source);

/* From now on its function gives NULL, until it is opened again; live segments stay. */
void mo_segment_source_close(unsigned source);

/* The same function each time for one number. */
mo_segment_alloc mo_segment_source_function(unsigned source);

/* Gives a segment back to its device's pool, whether its source is open or not, and what is free there back to the
 * device, but for what an arena has reserved. What is no segment the pool refuses, and counts. */
void mo_segment_free(void *address, ssize_t size, int device, void *stream);

#endif
