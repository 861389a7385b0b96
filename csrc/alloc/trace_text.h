/* The plain form of a trace: what a program asked of the allocator, a line of decimal integers an event.
 *
 *     a <id> <bytes> <stream> [<device> [<pool>]]   a request, bytes as they were asked for
 *     f <id> <stream>                               its end; the block's last use was on that stream
 *     r <id> <stream>                               the block is used on that stream too (record_stream)
 *     w <stream> <stream>                           the second waits for all that the first was given so far
 *     s                                             end of a step
 *     # …                                           to the end of the line: a comment
 *
 * Fields are parted by blanks and tabs; empty lines say nothing; lines may end as in DOS. An id names one block of the
 * whole trace: it is never used again. Device and pool are 0 where they are not said; pool 0 is the general one.
 *
 * In memory ids and streams are replaced by indexes, counted from 0 in order of appearance, so that who runs a trace
 * needs arrays only:
 *
 *     events[i].block < block_count      events[i].stream, .other < stream_count
 *     blocks[b].born < blocks[b].died    (died = MO_TRACE_NEVER: live at the end)
 *
 * A mo_trace_text is its owner's alone; nothing here locks. */
#ifndef MO_TRACE_TEXT_H
#define MO_TRACE_TEXT_H

#include "alloc/trace_ring.h"

#define MO_TRACE_NEVER UINT32_MAX

/* More streams than any program has: a bound on what a damaged file can cost. */
#define MO_TRACE_MAX_STREAMS 4096

typedef struct mo_trace_event {
    uint8_t op;     /* MO_TRACE_ALLOC … MO_TRACE_STEP */
    uint32_t line;  /* counted from 1 */
    uint32_t block; /* of ALLOC, FREE, RECORD_STREAM */
    uint32_t stream;
    uint32_t other; /* of WAIT: the stream that waits for `stream` */
} mo_trace_event;

typedef struct mo_trace_block {
    uint64_t id;
    size_t size;
    uint32_t device;
    uint32_t stream;
    uint64_t pool;
    uint32_t born, died; /* events */
} mo_trace_block;

typedef struct mo_trace_text {
    mo_trace_event *events;
    mo_trace_block *blocks;
    uint64_t *streams; /* the numbers they had */
    uint32_t event_count, block_count, stream_count;
    uint32_t steps;
} mo_trace_text;

/* text[0..length) to events. MO_INVALID with "line N: …" for what the format does not allow; MO_OVERFLOW for a trace of
 * 2**32 - 1 events or more. *out is for mo_trace_text_clear(), and untouched on failure. */
mo_status mo_trace_text_parse(const char *text, size_t length, mo_detail *detail, mo_trace_text *out);

void mo_trace_text_clear(mo_trace_text *trace);

/* The trace as text that parses to the same trace, but for the lines' numbers; *out for mo_host_free(), terminated. */
mo_status mo_trace_text_write(const mo_trace_text *trace, mo_detail *detail, char **out, size_t *length);

/* The largest sum of requested bytes of a device live at once; `devices` (may be NULL): a bit for each that occurs. */
size_t mo_trace_text_live_peak(const mo_trace_text *trace, uint32_t device, uint64_t *devices);

#endif
