/* Small shared containers, and ways to break them. */
#ifndef SHARED_FIXTURE_H
#define SHARED_FIXTURE_H

#include "test.h"

#include <errno.h>
#include <unistd.h>

#include "base/hostmem.h"
#include "data/shared_builder.h"
#include "data/shared_values.h"

/* "s0", "s1" …, as strings, as a list's str, or as the keys of a dict with their numbers as values. Keys repeat after
 * `distinct`. On failure there is nothing to close. */
__attribute__((unused)) static mo_status shared_made(mo_shared_kind kind, uint64_t count, uint64_t distinct,
                                                     mo_detail *detail, int *fd)
{
    mo_shared_builder b;
    mo_status status = mo_shared_builder_open(kind, 0, detail, &b);
    char text[32], key[64];

    if (status)
        return status;
    for (uint64_t i = 0; i < count && !status; i++) {
        const size_t n = (size_t)snprintf(text, sizeof text, "s%" PRIu64, i % distinct);
        if (kind == MO_SHARED_DICT) {
            key[0] = MO_SHARED_STR;
            key[1] = (char)n;
            memcpy(key + 2, text, n);
            const mo_shared_key whole = {(const uint8_t *)key, n + 2, NULL, 0};
            status = mo_shared_builder_key(&b, &whole, detail);
            if (!status)
                status = mo_shared_put_int(&b.data, (int64_t)i, detail);
            continue;
        }
        status = mo_shared_builder_item(&b, detail);
        if (!status)
            status = kind == MO_SHARED_STRINGS ? mo_shared_write(&b.data, text, n, detail)
                                               : mo_shared_put_bytes(&b.data, MO_SHARED_STR, text, n, detail);
    }
    if (!status)
        status = mo_shared_builder_finish(&b, detail, fd);
    mo_shared_builder_close(&b);
    return status;
}

/* The same, mapped and attached; the descriptor is closed. */
__attribute__((unused)) static mo_shared_view shared_view(mo_shared_kind kind, uint64_t count,
                                                          uint64_t distinct, mo_shared_mapping *mapping)
{
    mo_shared_view view;
    mo_detail detail = {.text = ""};
    int fd;

    if (shared_made(kind, count, distinct, &detail, &fd) || mo_shared_map(fd, false, &detail, mapping) ||
        mo_shared_attach(mapping->bytes, mapping->size, &detail, &view))
        TEST_FAIL("%s", detail.text);
    close(fd);
    return view;
}

/* Everything that can be read of a memory is read: of a damaged one it must end, within its bytes. */
__attribute__((unused)) static uint64_t shared_walk(const mo_shared_view *v)
{
    uint64_t good = 0, entry;
    mo_shared_span span;
    mo_shared_cursor c;
    mo_shared_key key;

    for (uint64_t i = 0; i < v->count && i < 10000; i++) {
        if (v->kind == MO_SHARED_DICT) {
            if (!mo_shared_read_key(v, i, &key, &c) || !mo_shared_skip(&c) ||
                !mo_shared_entry(v, i, true, &span))
                continue;
            good += mo_shared_find(v, key.canonical, key.size, &entry) == MO_SHARED_FOUND;
        } else if (!mo_shared_item(v, i, &span)) {
            continue;
        }
        c = (mo_shared_cursor){v->base, span.begin, span.end};
        if (v->kind == MO_SHARED_STRINGS)
            for (uint64_t at = span.begin; at < span.end; at++)
                good += v->base[at] == 's';
        else
            good += mo_shared_skip(&c);
    }
    return good;
}

#endif
