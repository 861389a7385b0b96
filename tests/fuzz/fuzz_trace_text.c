/* mo_trace_text_parse on any bytes: what it takes holds the equations of trace_text.h, and comes back from the writer as
 * the same trace; what it refuses it refuses with the number of a line that is there. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/trace_text.h"
#include "base/hostmem.h"
#include "random_input.h"

FUZZ_SEEDS(FUZZ_SEED("a 1 2 3\nf 1 3\n"), FUZZ_SEED("a 0 512 0 1 2\nr 0 4\ns\nw 0 4\nf 0 4\n"),
           FUZZ_SEED("# text\n\n  s # step\r\na 18446744073709551615 9223372036854775807 7\n"),
           FUZZ_SEED("a 1 2 3\na 2 2 3\na 1 2 3\n"), FUZZ_SEED("a 1 1 0 64"), FUZZ_SEED("f 1 2"),
           FUZZ_SEED("a 1 9223372036854775807 0\na 2 1 0\n"), FUZZ_SEED("a 1 2 3\nf 1 3\nf 1 3"),
           FUZZ_SEED("w 1"), FUZZ_SEED("s\0s\n"), FUZZ_SEED("a\t1\t2\t3\t0\t9\nr 1 1\nr 1 2\nr 1 3\ns\ns\n"))

static void check_equations(const mo_trace_text *t)
{
    uint32_t born = 0, steps = 0;

    for (uint32_t i = 0; i < t->event_count; i++) {
        const mo_trace_event *e = &t->events[i];
        FUZZ_CHECK(!i || e->line > t->events[i - 1].line);
        FUZZ_CHECK(e->op == MO_TRACE_STEP || e->stream < t->stream_count);
        FUZZ_CHECK(e->op != MO_TRACE_WAIT || e->other < t->stream_count);
        steps += e->op == MO_TRACE_STEP;
        if (e->op == MO_TRACE_WAIT || e->op == MO_TRACE_STEP)
            continue;
        FUZZ_CHECK(e->block < t->block_count);
        const mo_trace_block *b = &t->blocks[e->block];
        if (e->op == MO_TRACE_ALLOC) {
            FUZZ_CHECK(e->block == born++ && b->born == i && b->stream == e->stream);
        } else {
            FUZZ_CHECK(b->born < i && b->died >= i);
            FUZZ_CHECK(e->op != MO_TRACE_FREE || b->died == i);
        }
    }
    FUZZ_CHECK(born == t->block_count && steps == t->steps);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    mo_detail detail = {.text = ""};
    mo_trace_text t, again;
    char *text;
    size_t length, lines = 1;
    unsigned line;

    /* A copy of just this size, so that a sanitizer sees the first byte read past it. */
    char *copy = malloc(size ? size : 1);
    if (!copy)
        abort();
    memcpy(copy, data, size);
    for (size_t i = 0; i < size; i++)
        lines += data[i] == '\n';
    const mo_status status = mo_trace_text_parse(copy, size, &detail, &t);
    if (status) {
        FUZZ_CHECK(status == MO_INVALID);
        FUZZ_CHECK(sscanf(detail.text, "line %u: ", &line) == 1 && line >= 1 && line <= lines);
    } else {
        check_equations(&t);
        FUZZ_CHECK(mo_trace_text_live_peak(&t, 0, NULL) <= INT64_MAX);
        FUZZ_CHECK(!mo_trace_text_write(&t, NULL, &text, &length));
        FUZZ_CHECK(!mo_trace_text_parse(text, length, NULL, &again));
        FUZZ_CHECK(again.event_count == t.event_count && again.block_count == t.block_count);
        for (uint32_t i = 0; i < t.event_count; i++)
            FUZZ_CHECK(again.events[i].op == t.events[i].op && again.events[i].block == t.events[i].block &&
                       again.events[i].stream == t.events[i].stream &&
                       again.events[i].other == t.events[i].other);
        for (uint32_t i = 0; i < t.block_count; i++)
            FUZZ_CHECK(again.blocks[i].id == t.blocks[i].id && again.blocks[i].size == t.blocks[i].size &&
                       again.blocks[i].device == t.blocks[i].device &&
                       again.blocks[i].pool == t.blocks[i].pool);
        mo_host_free(text);
        mo_trace_text_clear(&again);
        mo_trace_text_clear(&t);
    }
    FUZZ_CHECK(mo_host_live() == 0);
    free(copy);
    return 0;
}
