/* The last births and deaths of blocks of memory, and what lived before them.
 *
 *     written = events so far             kept = the last min(written, capacity) of them
 *     before  = blocks that were born before the first kept event and had not died by then
 *     living  = blocks that are born and not dead
 *     live    = their bytes                peak    = the most that live has been since the peak was last reset
 *
 * So nothing that lives is ever forgotten, however many events are. An address has one living block: a birth there ends
 * the block before. The ring grows as it fills; where there is no host memory for that, it stays as large as it is. No
 * locks: the owner's. */
#ifndef MO_LIFE_LOG_H
#define MO_LIFE_LOG_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* As the columns of a recording are: all 64 bits wide. */
typedef struct mo_life_event {
    int64_t birth; /* 1, or 0 for a death */
    int64_t address, size;
    int64_t time_us;       /* CLOCK_REALTIME */
    int64_t stack, module; /* of a birth: the owner's numbers, 0 for none */
} mo_life_event;

typedef struct mo_life_block {
    int64_t address, size, stack, module;
    int64_t serial; /* of the birth: no other block of this log has it */
} mo_life_block;

typedef struct mo_life_log mo_life_log;

/* Keeps up to `capacity` events, 1 at least. MO_NO_HOST_MEMORY. */
mo_status mo_life_open(size_t capacity, mo_detail *detail, mo_life_log **out);
/* NULL is fine. */
void mo_life_close(mo_life_log *log);

/* The block's serial; 0 where there was no host memory: then the block is not known, and its death none. */
int64_t mo_life_born(mo_life_log *log, int64_t address, int64_t size, int64_t stack, int64_t module);

/* A block that was there before the log: as mo_life_born, but no event. Only while there are no events. */
int64_t mo_life_adopt(mo_life_log *log, int64_t address, int64_t size);

/* The block at an address, if its serial is this one (0: whichever it is), is dead. False where there is none. */
int mo_life_died(mo_life_log *log, int64_t address, int64_t serial);

/* Bytes of the living block that begins at an address, 0 for none. */
int64_t mo_life_size(const mo_life_log *log, int64_t address);

/* Bytes. */
int64_t mo_life_live(const mo_life_log *log);
int64_t mo_life_peak(const mo_life_log *log);
/* The peak is what lives now. */
void mo_life_reset_peak(mo_life_log *log);

int64_t mo_life_written(const mo_life_log *log);
size_t mo_life_kept(const mo_life_log *log);
size_t mo_life_before_count(const mo_life_log *log);
/* Copies the kept events, oldest first, and the blocks from before, in no order. */
void mo_life_events(const mo_life_log *log, mo_life_event *out);
void mo_life_before(const mo_life_log *log, mo_life_block *out);

#endif
