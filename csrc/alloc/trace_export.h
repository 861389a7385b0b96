/* What a ring kept of a pool's events, as a trace that can be written down and replayed: requests, frees, record_streams
 * and steps. Where granules went is the allocator's own affair, and so are its waits: a replay finds its own.
 *
 *     a block's id is its serial number
 *     a block whose request the ring no longer has begins the trace: it was live before
 *     streams and pools are numbered in order of appearance; 0 is the default stream, and the general pool */
#ifndef MO_TRACE_EXPORT_H
#define MO_TRACE_EXPORT_H

#include "alloc/trace_text.h"

/* records: of one device, in order. live: its blocks (mo_pool_blocks), read before the records were; those that are live
 * and not in the records were there before them. *out is for mo_trace_text_clear(). MO_INVALID where a block is freed
 * twice, or used after it, which no pool records. */
mo_status mo_trace_export(const mo_trace_record *records, size_t count, const mo_block_view *live,
                          size_t live_count, mo_detail *detail, mo_trace_text *out);

#endif
