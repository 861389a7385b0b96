/* Call stacks, each kept once, so that an event of a trace names one by a number of 32 bits.
 *
 *     stack = frames, innermost first       frame = (file, function, line)       texts, frames and stacks are numbered
 *     from 1 in order of first appearance; number 0: none
 *
 * One table for the process, under one lock, which only grows (until mo_trace_stacks_clear): a program has few places
 * that allocate. The lock is a leaf: nothing is called under it.
 *
 * Who makes a stack of what runs (csrc/python, for Python) does so before the allocator takes any lock, and leaves the
 * number with the thread, from where mo_trace_put takes it. */
#ifndef MO_TRACE_STACKS_H
#define MO_TRACE_STACKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* Frames of a stack that are kept, the innermost; torch keeps as many as there are, a program that recurses has no
 * more to say behind this. */
#define MO_TRACE_MAX_FRAMES 128

/* text[0..length) as a number. 0 where there is no host memory. */
uint32_t mo_trace_text_number(const char *text, size_t length);

uint32_t mo_trace_frame_number(uint32_t file, uint32_t function, uint32_t line);

/* count <= MO_TRACE_MAX_FRAMES frames, innermost first; 0 for none. */
uint32_t mo_trace_stack_number(const uint32_t *frames, size_t count);

typedef struct mo_trace_frame {
    const char *file, *function; /* stay until mo_trace_stacks_clear() */
    uint32_t line;
} mo_trace_frame;

/* The frames of a stack, innermost first, into out[MO_TRACE_MAX_FRAMES]; how many. 0 for an unknown number. */
size_t mo_trace_stack_frames(uint32_t stack, mo_trace_frame *out);

/* Stacks that are kept. */
size_t mo_trace_stack_count(void);

/* Forgets all: no number that was given before means anything. Nobody may be using the table. */
void mo_trace_stacks_clear(void);

/* ---- the thread's own ------------------------------------------------------------------------------------------ */

/* What mo_trace_put writes into the next records of this thread. */
uint32_t mo_trace_stack_of_thread(void);
void mo_trace_set_stack_of_thread(uint32_t stack);

/* Who makes stacks: called by the allocation hook, without any lock of ours; NULL: nobody. Returns when the collector
 * before it runs on no thread any more (a second at most in a forked child, whose other threads are gone). */
typedef uint32_t (*mo_trace_collector)(void);
void mo_trace_collect_by(mo_trace_collector collector);

/* At the start of a request: the thread's stack is the collector's, or none. Costs one load where there is none. */
void mo_trace_collect(void);

#endif
