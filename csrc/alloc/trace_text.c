#include "alloc/trace_text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/hostmem.h"
#include "base/size.h"

_Static_assert(MO_MAX_DEVICES <= 64, "mo_trace_text_live_peak has a bit for each device");

/* Where the parser is, and what it has so far. `index` finds a block by its id: open addressing, a power of two of
 * entries (block + 1, 0: empty), at most half of them taken. */
typedef struct parser {
    const char *at, *line_end, *end;
    uint32_t line;
    mo_trace_text trace;
    size_t event_room, block_room;
    uint32_t *index;
    size_t index_size;
    size_t live; /* bytes, <= INT64_MAX, so that no sum of sizes overflows anywhere */
    mo_detail *detail;
} parser;

static mo_status no_memory(parser *p)
{
    return mo_fail(p->detail, MO_NO_HOST_MEMORY, 0, "no host memory for the trace's line %" PRIu32, p->line);
}

/* A longer array, twice as long each time. */
static bool grow(void **array, size_t *room, size_t size)
{
    const size_t wanted = *room ? 2 * *room : 256;
    size_t bytes;
    void *fresh = mo_mul_ok(wanted, size, &bytes) ? mo_host_realloc(*array, bytes) : NULL;

    if (!fresh)
        return false;
    *array = fresh;
    *room = wanted;
    return true;
}

/* ---- ids --------------------------------------------------------------------------------------------------- */

/* The entry of an id: its own, or the empty one where it belongs. */
static uint32_t *entry_of(const parser *p, uint64_t id)
{
    /* Fibonacci hashing: ids that count up spread evenly. */
    size_t i = (size_t)(id * UINT64_C(0x9E3779B97F4A7C15) >> 32) & (p->index_size - 1);

    while (p->index[i] && p->trace.blocks[p->index[i] - 1].id != id)
        i = (i + 1) & (p->index_size - 1);
    return &p->index[i];
}

static bool grow_index(parser *p)
{
    const size_t size = p->index_size ? 2 * p->index_size : 512;
    uint32_t *fresh = mo_host_calloc(size, sizeof *fresh);

    if (!fresh)
        return false;
    mo_host_free(p->index);
    p->index = fresh;
    p->index_size = size;
    for (uint32_t b = 0; b < p->trace.block_count; b++)
        *entry_of(p, p->trace.blocks[b].id) = b + 1;
    return true;
}

/* ---- fields ------------------------------------------------------------------------------------------------ */

static void skip_blanks(parser *p)
{
    while (p->at < p->line_end && (*p->at == ' ' || *p->at == '\t'))
        p->at++;
}

/* Nothing but a comment is left of the line. */
static bool at_end(parser *p)
{
    skip_blanks(p);
    return p->at == p->line_end || *p->at == '#';
}

static mo_status number(parser *p, const char *what, uint64_t most, uint64_t *out)
{
    uint64_t value = 0;

    if (at_end(p))
        return mo_fail(p->detail, MO_INVALID, 0, "line %" PRIu32 ": the %s is missing", p->line, what);
    const char *start = p->at;
    while (p->at < p->line_end && *p->at >= '0' && *p->at <= '9') {
        const unsigned digit = (unsigned)(*p->at++ - '0');
        if (value > (most - digit) / 10)
            return mo_fail(p->detail, MO_INVALID, 0, "line %" PRIu32 ": the %s exceeds %" PRIu64, p->line,
                           what, most);
        value = value * 10 + digit;
    }
    if (p->at == start || (p->at < p->line_end && *p->at != ' ' && *p->at != '\t' && *p->at != '#'))
        return mo_fail(p->detail, MO_INVALID, 0, "line %" PRIu32 ": the %s is not a decimal integer", p->line,
                       what);
    *out = value;
    return MO_OK;
}

static mo_status stream_number(parser *p, uint32_t *out)
{
    mo_trace_text *t = &p->trace;
    uint64_t name = 0;
    mo_status status = number(p, "stream", UINT64_MAX, &name);

    if (status)
        return status;
    for (uint32_t i = 0; i < t->stream_count; i++)
        if (t->streams[i] == name) {
            *out = i;
            return MO_OK;
        }
    if (t->stream_count == MO_TRACE_MAX_STREAMS)
        return mo_fail(p->detail, MO_INVALID, 0, "line %" PRIu32 ": more than %d streams in one trace",
                       p->line, MO_TRACE_MAX_STREAMS);
    t->streams[ *out = t->stream_count++] = name;
    return MO_OK;
}

/* The block that an f or r line names, which must be live. */
static mo_status live_block(parser *p, uint32_t *out)
{
    uint64_t id = 0;
    mo_status status = number(p, "id", UINT64_MAX, &id);

    if (status)
        return status;
    const uint32_t found = p->index_size ? *entry_of(p, id) : 0;
    if (!found)
        return mo_fail(p->detail, MO_INVALID, 0,
                       "line %" PRIu32 ": there is no block %" PRIu64 ": no earlier line allocated it",
                       p->line, id);
    const mo_trace_block *block = &p->trace.blocks[found - 1];
    if (block->died != MO_TRACE_NEVER)
        return mo_fail(p->detail, MO_INVALID, 0,
                       "line %" PRIu32 ": block %" PRIu64 " is no longer live: line %" PRIu32 " freed it",
                       p->line, id, p->trace.events[block->died].line);
    *out = found - 1;
    return MO_OK;
}

static mo_status new_block(parser *p, mo_trace_event *event)
{
    mo_trace_text *t = &p->trace;
    mo_trace_block block = {.born = t->event_count, .died = MO_TRACE_NEVER};
    uint64_t size = 0, device = 0;
    mo_status status = number(p, "id", UINT64_MAX, &block.id);

    if (!status)
        status = number(p, "number of bytes", INT64_MAX, &size);
    if (!status)
        status = stream_number(p, &block.stream);
    if (!status && !at_end(p))
        status = number(p, "device", MO_MAX_DEVICES - 1, &device);
    if (!status && !at_end(p))
        status = number(p, "pool", UINT64_MAX, &block.pool);
    if (status)
        return status;
    if (t->block_count == p->block_room && !grow((void **)&t->blocks, &p->block_room, sizeof *t->blocks))
        return no_memory(p);
    if (p->index_size <= 2 * (size_t)t->block_count && !grow_index(p))
        return no_memory(p);
    uint32_t *entry = entry_of(p, block.id);
    if (*entry)
        return mo_fail(p->detail, MO_INVALID, 0,
                       "line %" PRIu32 ": id %" PRIu64 " was already used in line %" PRIu32 ": give every "
                       "block its own id",
                       p->line, block.id, t->events[t->blocks[*entry - 1].born].line);
    if (size > INT64_MAX - p->live)
        return mo_fail(p->detail, MO_INVALID, 0,
                       "line %" PRIu32 ": more than 2**63 - 1 bytes would be live at once", p->line);
    p->live += (size_t)size;
    block.size = (size_t)size;
    block.device = (uint32_t)device;
    t->blocks[t->block_count] = block;
    *entry = t->block_count + 1;
    event->block = t->block_count++;
    event->stream = block.stream;
    return MO_OK;
}

/* ---- lines ------------------------------------------------------------------------------------------------- */

static mo_status parse_line(parser *p)
{
    mo_trace_text *t = &p->trace;
    mo_trace_event event = {.line = p->line};
    mo_status status = MO_OK;

    if (at_end(p))
        return MO_OK;
    if (t->event_count == MO_TRACE_NEVER - 1)
        return mo_fail(p->detail, MO_OVERFLOW, 0, "line %" PRIu32 ": more events than a trace can have",
                       p->line);
    if (t->event_count == p->event_room && !grow((void **)&t->events, &p->event_room, sizeof *t->events))
        return no_memory(p);
    const char word = *p->at++;
    if (p->at < p->line_end && *p->at != ' ' && *p->at != '\t' && *p->at != '#')
        goto unknown;
    switch (word) {
    case 'a':
        event.op = MO_TRACE_ALLOC;
        status = new_block(p, &event);
        break;
    case 'f':
    case 'r':
        event.op = word == 'f' ? MO_TRACE_FREE : MO_TRACE_RECORD_STREAM;
        status = live_block(p, &event.block);
        if (!status)
            status = stream_number(p, &event.stream);
        break;
    case 'w':
        event.op = MO_TRACE_WAIT;
        status = stream_number(p, &event.stream);
        if (!status)
            status = stream_number(p, &event.other);
        break;
    case 's':
        event.op = MO_TRACE_STEP;
        break;
    default:
        goto unknown;
    }
    if (status)
        return status;
    if (!at_end(p))
        return mo_fail(p->detail, MO_INVALID, 0,
                       "line %" PRIu32 ": more fields than a line that begins "
                       "with '%c' has",
                       p->line, word);
    if (word == 'f') {
        t->blocks[event.block].died = t->event_count;
        p->live -= t->blocks[event.block].size;
    }
    t->steps += word == 's';
    t->events[t->event_count++] = event;
    return MO_OK;
unknown:
    return mo_fail(p->detail, MO_INVALID, 0,
                   "line %" PRIu32 ": a line must begin with a, f, r, w or s, or with # for a comment",
                   p->line);
}

mo_status mo_trace_text_parse(const char *text, size_t length, mo_detail *detail, mo_trace_text *out)
{
    parser p = {.at = text, .end = text + length, .detail = detail};
    mo_status status = MO_OK;

    p.trace.streams = mo_host_alloc(MO_TRACE_MAX_STREAMS * sizeof *p.trace.streams);
    if (!p.trace.streams)
        status = no_memory(&p);
    while (!status && p.at < p.end) {
        const char *feed = memchr(p.at, '\n', (size_t)(p.end - p.at)), *next = feed ? feed + 1 : p.end;

        p.line_end = feed ? feed : p.end;
        if (p.line_end > p.at && p.line_end[-1] == '\r')
            p.line_end--;
        if (p.line == UINT32_MAX)
            status = mo_fail(detail, MO_OVERFLOW, 0, "the trace has more lines than 2**32 - 1");
        p.line++;
        if (!status)
            status = parse_line(&p);
        p.at = next;
    }
    mo_host_free(p.index);
    if (status)
        mo_trace_text_clear(&p.trace);
    else
        *out = p.trace;
    return status;
}

void mo_trace_text_clear(mo_trace_text *trace)
{
    mo_host_free(trace->events);
    mo_host_free(trace->blocks);
    mo_host_free(trace->streams);
    *trace = (mo_trace_text){0};
}

/* ---- writing ------------------------------------------------------------------------------------------------- */

/* The longest line: "a" and five numbers of at most 20 digits. */
enum { LONGEST_LINE = 1 + 5 * 21 + 1 };

static size_t write_line(const mo_trace_text *t, const mo_trace_event *e, char *out)
{
    static const char words[] = {
        [MO_TRACE_ALLOC] = 'a', [MO_TRACE_FREE] = 'f', [MO_TRACE_RECORD_STREAM] = 'r',
        [MO_TRACE_WAIT] = 'w',  [MO_TRACE_STEP] = 's',
    };
    const char word = words[e->op];
    int n = 0;

    if (e->op == MO_TRACE_STEP)
        n = sprintf(out, "s\n");
    else if (e->op == MO_TRACE_WAIT)
        n = sprintf(out, "w %" PRIu64 " %" PRIu64 "\n", t->streams[e->stream], t->streams[e->other]);
    else if (e->op != MO_TRACE_ALLOC)
        n = sprintf(out, "%c %" PRIu64 " %" PRIu64 "\n", word, t->blocks[e->block].id, t->streams[e->stream]);
    else {
        const mo_trace_block *b = &t->blocks[e->block];
        n = sprintf(out, "a %" PRIu64 " %zu %" PRIu64, b->id, b->size, t->streams[b->stream]);
        if (b->device || b->pool)
            n += sprintf(out + n, " %" PRIu32, b->device);
        if (b->pool)
            n += sprintf(out + n, " %" PRIu64, b->pool);
        n += sprintf(out + n, "\n");
    }
    return (size_t)n;
}

mo_status mo_trace_text_write(const mo_trace_text *trace, mo_detail *detail, char **out, size_t *length)
{
    char *text = NULL, line[LONGEST_LINE + 1];
    size_t used = 0, room = 0;

    for (uint32_t i = 0; i <= trace->event_count; i++) {
        if (room - used < sizeof line && !grow((void **)&text, &room, 1)) {
            mo_host_free(text);
            return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory for a trace of %" PRIu32 " events",
                           trace->event_count);
        }
        if (i == trace->event_count)
            break;
        const size_t n = write_line(trace, &trace->events[i], line);
        memcpy(text + used, line, n);
        used += n;
    }
    text[used] = 0;
    *out = text;
    *length = used;
    return MO_OK;
}

size_t mo_trace_text_live_peak(const mo_trace_text *trace, uint32_t device, uint64_t *devices)
{
    size_t live = 0, peak = 0;

    if (devices)
        *devices = 0;
    for (uint32_t i = 0; i < trace->event_count; i++) {
        const mo_trace_event *e = &trace->events[i];
        if (e->op != MO_TRACE_ALLOC && e->op != MO_TRACE_FREE)
            continue;
        const mo_trace_block *b = &trace->blocks[e->block];
        if (devices)
            *devices |= UINT64_C(1) << b->device;
        if (b->device != device)
            continue;
        live = e->op == MO_TRACE_ALLOC ? live + b->size : live - b->size;
        if (live > peak)
            peak = live;
    }
    return peak;
}
