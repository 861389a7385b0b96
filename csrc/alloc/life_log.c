#include "alloc/life_log.h"

#include <string.h>
#include <time.h>

#include "base/hostmem.h"

enum { FIRST_EVENTS = 1024, FIRST_PLACES = 1024 };

/* Blocks by address: open addressing, at most half full; address 0: empty. */
typedef struct blocks {
    mo_life_block *places;
    size_t capacity; /* a power of two, or 0 */
    size_t count;
} blocks;

struct mo_life_log {
    mo_life_event *events; /* event n lies at n % room, once room is all there will be */
    size_t room, capacity;
    int64_t written, serials;
    int64_t live, peak; /* bytes */
    blocks living, before;
};

/* ---- blocks by address ---------------------------------------------------------------------------------------- */

/* Fibonacci hashing: the upper half of the product depends on every bit of the address. */
static size_t home(const blocks *b, int64_t address)
{
    return (size_t)(((uint64_t)address * 0x9E3779B97F4A7C15u) >> 32) & (b->capacity - 1);
}

/* The block's place, or the empty one where it would go. NULL where there are no places at all. */
static mo_life_block *place_of(const blocks *b, int64_t address)
{
    size_t i;

    if (!b->capacity)
        return NULL;
    for (i = home(b, address); b->places[i].address && b->places[i].address != address;)
        i = (i + 1) & (b->capacity - 1);
    return &b->places[i];
}

/* Room for one more. 0 where there is no host memory. */
static int reserve(blocks *b)
{
    blocks larger = {.capacity = b->capacity ? 2 * b->capacity : FIRST_PLACES, .count = b->count};

    if (2 * (b->count + 1) <= b->capacity)
        return 1;
    larger.places = mo_host_calloc(larger.capacity, sizeof *larger.places);
    if (!larger.places)
        return 0;
    for (size_t i = 0; i < b->capacity; i++)
        if (b->places[i].address)
            *place_of(&larger, b->places[i].address) = b->places[i];
    mo_host_free(b->places);
    *b = larger;
    return 1;
}

/* 0 where there is no host memory. */
static int put(blocks *b, const mo_life_block *block)
{
    mo_life_block *place = place_of(b, block->address);

    if (!place || !place->address) {
        if (!reserve(b))
            return 0;
        place = place_of(b, block->address);
        b->count++;
    }
    *place = *block;
    return 1;
}

/* Whoever was pushed past the gap by it moves back into it. */
static void empty(blocks *b, mo_life_block *place)
{
    const size_t mask = b->capacity - 1;
    size_t gap = (size_t)(place - b->places);

    for (size_t i = (gap + 1) & mask; b->places[i].address; i = (i + 1) & mask)
        if (((i - home(b, b->places[i].address)) & mask) >= ((i - gap) & mask)) {
            b->places[gap] = b->places[i];
            gap = i;
        }
    b->places[gap] = (mo_life_block){0};
    b->count--;
}

/* ---- events --------------------------------------------------------------------------------------------------- */

/* What the oldest event said becomes part of what was before. A block for which there is no host memory is forgotten. */
static void retire(mo_life_log *log, const mo_life_event *event)
{
    mo_life_block *place;

    if (event->birth) {
        put(&log->before, &(mo_life_block){event->address, event->size, event->stack, event->module, 0});
        return;
    }
    place = place_of(&log->before, event->address);
    if (place && place->address)
        empty(&log->before, place);
}

/* Where the next event goes. */
static mo_life_event *next(mo_life_log *log)
{
    mo_life_event *slot;

    if ((size_t)log->written >= log->room && log->room < log->capacity) {
        const size_t twice = log->room < log->capacity / 2 ? 2 * log->room : log->capacity;
        mo_life_event *larger = mo_host_realloc(log->events, twice * sizeof *larger);

        if (larger)
            log->events = larger;
        else
            log->capacity = log->room; /* it has not wrapped yet, and may from now on */
        log->room = larger ? twice : log->room;
    }
    slot = &log->events[(size_t)log->written % log->room];
    if ((size_t)log->written >= log->room)
        retire(log, slot);
    log->written++;
    return slot;
}

static int64_t now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* 0 where there is no host memory. */
static int add(mo_life_log *log, const mo_life_block *block)
{
    const int64_t ended = mo_life_size(log, block->address);

    if (!put(&log->living, block))
        return 0;
    log->live += block->size - ended;
    if (log->live > log->peak)
        log->peak = log->live;
    return 1;
}

int64_t mo_life_born(mo_life_log *log, int64_t address, int64_t size, int64_t stack, int64_t module)
{
    const mo_life_block block = {address, size, stack, module, log->serials + 1};

    if (!add(log, &block))
        return 0;
    *next(log) = (mo_life_event){1, address, size, now_us(), stack, module};
    return ++log->serials;
}

int64_t mo_life_adopt(mo_life_log *log, int64_t address, int64_t size)
{
    const mo_life_block block = {address, size, 0, 0, log->serials + 1};

    if (log->written || !add(log, &block))
        return 0;
    put(&log->before, &block);
    return ++log->serials;
}

int mo_life_died(mo_life_log *log, int64_t address, int64_t serial)
{
    mo_life_block *place = place_of(&log->living, address);
    int64_t size;

    if (!place || !place->address || (serial && place->serial != serial))
        return 0;
    size = place->size;
    log->live -= size;
    empty(&log->living, place);
    *next(log) = (mo_life_event){0, address, size, now_us(), 0, 0};
    return 1;
}

int64_t mo_life_size(const mo_life_log *log, int64_t address)
{
    const mo_life_block *place = place_of(&log->living, address);

    return place && place->address ? place->size : 0;
}

/* ---- its life, and reading ------------------------------------------------------------------------------------- */

mo_status mo_life_open(size_t capacity, mo_detail *detail, mo_life_log **out)
{
    mo_life_log *log = mo_host_calloc(1, sizeof *log);

    if (!capacity) {
        mo_host_free(log);
        return mo_fail(detail, MO_INVALID, 0, "a log of 0 events: keep at least one");
    }
    if (log) {
        log->capacity = capacity;
        log->room = capacity < FIRST_EVENTS ? capacity : FIRST_EVENTS;
        log->events = mo_host_alloc(log->room * sizeof *log->events);
    }
    if (!log || !log->events) {
        mo_host_free(log);
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory for a log of %zu events", capacity);
    }
    *out = log;
    return MO_OK;
}

void mo_life_close(mo_life_log *log)
{
    if (!log)
        return;
    mo_host_free(log->living.places);
    mo_host_free(log->before.places);
    mo_host_free(log->events);
    mo_host_free(log);
}

int64_t mo_life_live(const mo_life_log *log)
{
    return log->live;
}

int64_t mo_life_peak(const mo_life_log *log)
{
    return log->peak;
}

void mo_life_reset_peak(mo_life_log *log)
{
    log->peak = log->live;
}

int64_t mo_life_written(const mo_life_log *log)
{
    return log->written;
}

size_t mo_life_kept(const mo_life_log *log)
{
    return (size_t)log->written < log->room ? (size_t)log->written : log->room;
}

size_t mo_life_before_count(const mo_life_log *log)
{
    return log->before.count;
}

void mo_life_events(const mo_life_log *log, mo_life_event *out)
{
    const size_t kept = mo_life_kept(log), first = (size_t)log->written - kept;

    for (size_t i = 0; i < kept; i++)
        out[i] = log->events[(first + i) % log->room];
}

void mo_life_before(const mo_life_log *log, mo_life_block *out)
{
    for (size_t i = 0; i < log->before.capacity; i++)
        if (log->before.places[i].address)
            *out++ = log->before.places[i];
}
