#include "alloc/trace_export.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/hostmem.h"

/* A block as one of its sources knows it, the best first. */
typedef enum source { REQUESTED, LIVE, FREED, USED } source;

typedef struct known {
    uint64_t serial;
    source from;
    uint32_t block; /* of the trace */
    size_t size;
    mo_stream stream;
    mo_arena_id arena;
} known;

typedef struct exporter {
    known *blocks; /* by serial, one of each */
    size_t count;
    mo_arena_id *arenas; /* all but the general one */
    size_t arena_count;
    mo_stream *streams;
    mo_trace_text trace;
    uint32_t device;
    mo_detail *detail;
} exporter;

static int by_serial(const void *left, const void *right)
{
    const known *a = left, *b = right;

    if (a->serial != b->serial)
        return a->serial < b->serial ? -1 : 1;
    return (int)a->from - (int)b->from;
}

static known *find(const exporter *x, uint64_t serial)
{
    size_t low = 0, high = x->count;

    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (x->blocks[middle].serial < serial)
            low = middle + 1;
        else
            high = middle;
    }
    return low < x->count && x->blocks[low].serial == serial ? &x->blocks[low] : NULL;
}

/* All blocks that anything is known of, by serial, from the best source. */
static void gather(exporter *x, const mo_trace_record *records, size_t count, const mo_block_view *live,
                   size_t live_count)
{
    size_t unique = 0;

    for (size_t i = 0; i < count; i++) {
        const mo_trace_record *r = &records[i];
        if (r->op <= MO_TRACE_RECORD_STREAM)
            x->blocks[x->count++] = (known){
                .serial = r->serial,
                .from = r->op == MO_TRACE_ALLOC  ? REQUESTED
                        : r->op == MO_TRACE_FREE ? FREED
                                                 : USED,
                .size = r->size,
                .stream = r->stream,
                .arena = r->arena,
            };
    }
    for (size_t i = 0; i < live_count; i++)
        if (live[i].state == MO_BLOCK_LIVE)
            x->blocks[x->count++] = (known){
                .serial = live[i].serial,
                .from = LIVE,
                .size = live[i].requested,
                .stream = live[i].stream,
                .arena = live[i].arena,
            };
    qsort(x->blocks, x->count, sizeof *x->blocks, by_serial);
    for (size_t i = 0; i < x->count; i++)
        if (!unique || x->blocks[unique - 1].serial != x->blocks[i].serial)
            x->blocks[unique++] = x->blocks[i];
    x->count = unique;
}

/* The index of a stream; its number is its place among those that are not the default one. */
static mo_status stream_index(exporter *x, mo_stream stream, uint32_t *out)
{
    mo_trace_text *t = &x->trace;
    uint64_t others = 0;

    for (uint32_t i = 0; i < t->stream_count; i++) {
        if (x->streams[i] == stream) {
            *out = i;
            return MO_OK;
        }
        others += x->streams[i] != NULL;
    }
    if (t->stream_count == MO_TRACE_MAX_STREAMS)
        return mo_fail(x->detail, MO_INVALID, 0, "more than %d streams in one trace", MO_TRACE_MAX_STREAMS);
    x->streams[t->stream_count] = stream;
    t->streams[t->stream_count] = stream ? others + 1 : 0;
    *out = t->stream_count++;
    return MO_OK;
}

static uint64_t pool_number(exporter *x, mo_arena_id arena)
{
    if (!arena.first && !arena.second)
        return 0;
    for (size_t i = 0; i < x->arena_count; i++)
        if (x->arenas[i].first == arena.first && x->arenas[i].second == arena.second)
            return i + 1;
    x->arenas[x->arena_count++] = arena;
    return x->arena_count;
}

static mo_trace_event *next_event(exporter *x, mo_trace_op op)
{
    mo_trace_event *e = &x->trace.events[x->trace.event_count++];

    *e = (mo_trace_event){.op = (uint8_t)op, .line = x->trace.event_count};
    return e;
}

static mo_status request(exporter *x, known *k)
{
    mo_trace_text *t = &x->trace;
    uint32_t stream;
    mo_status status = stream_index(x, k->stream, &stream);

    if (status)
        return status;
    k->block = t->block_count++;
    t->blocks[k->block] = (mo_trace_block){
        .id = k->serial,
        .size = k->size,
        .device = x->device,
        .stream = stream,
        .pool = pool_number(x, k->arena),
        .born = t->event_count,
        .died = MO_TRACE_NEVER,
    };
    mo_trace_event *e = next_event(x, MO_TRACE_ALLOC);
    e->block = k->block;
    e->stream = stream;
    return MO_OK;
}

/* A free or a record_stream. */
static mo_status use(exporter *x, const mo_trace_record *r)
{
    mo_trace_block *b = &x->trace.blocks[find(x, r->serial)->block];
    uint32_t stream = b->stream; /* of a free: where the block belongs, which is all that a pool is told */
    mo_status status = r->op == MO_TRACE_RECORD_STREAM ? stream_index(x, r->stream, &stream) : MO_OK;

    if (status)
        return status;
    if (b->died != MO_TRACE_NEVER)
        return mo_fail(x->detail, MO_INVALID, 0, "block %" PRIu64 " is used after it was freed", b->id);
    if (r->op == MO_TRACE_FREE)
        b->died = x->trace.event_count;
    mo_trace_event *e = next_event(x, (mo_trace_op)r->op);
    e->block = (uint32_t)(b - x->trace.blocks);
    e->stream = stream;
    return MO_OK;
}

static mo_status convert(exporter *x, const mo_trace_record *records, size_t count)
{
    mo_status status = MO_OK;

    for (size_t i = 0; i < x->count && !status; i++)
        if (x->blocks[i].from != REQUESTED)
            status = request(x, &x->blocks[i]);
    for (size_t i = 0; i < count && !status; i++) {
        const mo_trace_record *r = &records[i];
        if (r->op == MO_TRACE_ALLOC) {
            status = request(x, find(x, r->serial));
        } else if (r->op == MO_TRACE_FREE || r->op == MO_TRACE_RECORD_STREAM) {
            status = use(x, r);
        } else if (r->op == MO_TRACE_STEP) {
            next_event(x, MO_TRACE_STEP);
            x->trace.steps++;
        }
    }
    return status;
}

mo_status mo_trace_export(const mo_trace_record *records, size_t count, const mo_block_view *live,
                          size_t live_count, mo_detail *detail, mo_trace_text *out)
{
    const size_t most = count + live_count + 1;
    exporter x = {.detail = detail, .device = count ? records[0].device : 0};
    mo_trace_text *t = &x.trace;
    mo_status status;

    /* A record is an event, and of a block that the records do not begin with, one more. */
    if (most >= MO_TRACE_NEVER / 2)
        return mo_fail(detail, MO_OVERFLOW, 0, "%zu events are more than a trace can have", most);
    x.blocks = mo_host_calloc(most, sizeof *x.blocks);
    x.arenas = mo_host_calloc(most, sizeof *x.arenas);
    x.streams = mo_host_calloc(MO_TRACE_MAX_STREAMS, sizeof *x.streams);
    t->events = mo_host_calloc(2 * most, sizeof *t->events);
    t->blocks = mo_host_calloc(most, sizeof *t->blocks);
    t->streams = mo_host_calloc(MO_TRACE_MAX_STREAMS, sizeof *t->streams);
    if (!x.blocks || !x.arenas || !x.streams || !t->events || !t->blocks || !t->streams) {
        status = mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory for a trace of %zu events", count);
    } else {
        gather(&x, records, count, live, live_count);
        status = convert(&x, records, count);
    }
    mo_host_free(x.blocks);
    mo_host_free(x.arenas);
    mo_host_free(x.streams);
    if (status)
        mo_trace_text_clear(t);
    else
        *out = *t;
    return status;
}
