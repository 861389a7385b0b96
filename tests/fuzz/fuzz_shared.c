/* Shared containers on damaged memory. The first byte of the input says which of three whole ones is taken and whether its
 * header's sum is made right again; every three bytes after it change one: two for the place, one for the value. What is
 * attached is then read in full. The input is read as a value by itself too. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/hostmem.h"
#include "data/shared_builder.h"
#include "data/shared_values.h"
#include "random_input.h"

FUZZ_SEEDS(FUZZ_SEED("\x00"), FUZZ_SEED("\x01"), FUZZ_SEED("\x02"), FUZZ_SEED("\x80\x18\x00\x05"),
           FUZZ_SEED("\x81\x80\x00\x0a"), FUZZ_SEED("\x82\x20\x00\xff\x50\x00\x01"),
           FUZZ_SEED("\x82\x28\x00\x70"), FUZZ_SEED("\x0a\x03\x00\x01\x02"),
           FUZZ_SEED("\x0e\x01\x07\x01k\x08\x02xy"), FUZZ_SEED("\x0f\x02\x00\x03xyz"),
           FUZZ_SEED("\x03\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
           FUZZ_SEED("\x09\x01\x09\x01\x09\x01\x09\x00"),
           FUZZ_SEED("\x04\x05-0x1f\x05\0\0\0\0\0\0\xf0?\x81\x20\x01\x00\x21\x01\x00"))

enum { ITEMS = 9, LARGEST = 2048 };

static struct {
    uint8_t bytes[LARGEST];
    size_t size;
} whole[3];

static mo_status add(mo_shared_builder *b, int i)
{
    static const uint8_t block[40];
    const uint8_t key[3] = {MO_SHARED_STR, 1, (uint8_t)('a' + i)};
    const mo_shared_key entry = {key, sizeof key, NULL, 0};
    mo_status status =
        b->kind == MO_SHARED_DICT ? mo_shared_builder_key(b, &entry, NULL) : mo_shared_builder_item(b, NULL);

    if (status)
        return status;
    if (b->kind == MO_SHARED_STRINGS)
        return mo_shared_write(&b->data, "text", (size_t)(i % 5), NULL);
    if (i % 3 == 0)
        return mo_shared_put_int(&b->data, i * 1000, NULL);
    if (i % 3 == 1)
        status = mo_shared_put_leaf(&b->data, 1, NULL);
    if (!status)
        status = mo_shared_put_container(&b->data, MO_SHARED_DICT_VALUE, 1, NULL);
    if (!status)
        status = mo_shared_put_bytes(&b->data, MO_SHARED_STR, "key", 3, NULL);
    if (!status)
        status = mo_shared_put_float(&b->data, 1.5, NULL);
    return status || i % 3 != 1 ? status : mo_shared_put_block(&b->data, block, sizeof block, NULL);
}

static void make_whole(void)
{
    for (int k = 0; k < 3; k++) {
        mo_shared_builder b;
        mo_shared_mapping mapping;
        int fd;
        FUZZ_CHECK(!mo_shared_builder_open((mo_shared_kind)(k + 1), 0, NULL, &b));
        for (int i = 0; i < ITEMS; i++)
            FUZZ_CHECK(!add(&b, i));
        FUZZ_CHECK(!mo_shared_builder_finish(&b, NULL, &fd));
        FUZZ_CHECK(!mo_shared_map(fd, false, NULL, &mapping) && mapping.size <= LARGEST);
        memcpy(whole[k].bytes, mapping.bytes, mapping.size);
        whole[k].size = mapping.size;
        mo_shared_unmap(&mapping);
        close(fd);
    }
}

/* How many items or entries can be read. */
static uint64_t walk(const mo_shared_view *v)
{
    uint64_t good = 0, entry, sum = 0;
    mo_shared_span span;
    mo_shared_cursor c;
    mo_shared_key key;

    for (uint64_t i = 0; i < v->count; i++) {
        if (v->kind == MO_SHARED_DICT) {
            if (!mo_shared_read_key(v, i, &key, &c) || !mo_shared_skip(&c) ||
                !mo_shared_entry(v, i, true, &span))
                continue;
            FUZZ_CHECK(mo_shared_find(v, key.canonical, key.size, &entry) != MO_SHARED_FOUND ||
                       entry < v->count);
        } else if (!mo_shared_item(v, i, &span)) {
            continue;
        }
        FUZZ_CHECK(span.begin >= MO_SHARED_DATA && span.begin <= span.end && span.end <= v->size);
        for (uint64_t at = span.begin; at < span.end; at++)
            sum += v->base[at];
        c = (mo_shared_cursor){v->base, span.begin, span.end};
        good += v->kind == MO_SHARED_STRINGS || mo_shared_skip(&c);
    }
    return good + (sum & 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    mo_shared_cursor value = {data, 0, size};
    mo_detail detail = {.text = ""};
    mo_shared_view view;

    mo_shared_skip(&value);
    if (!whole[0].size)
        make_whole();
    if (!size)
        return 0;
    const int k = (data[0] & 127) % 3;
    uint8_t *copy =
        malloc(whole[k].size); /* of just this size, so that a sanitizer sees the first byte past it */
    if (!copy)
        abort();
    memcpy(copy, whole[k].bytes, whole[k].size);
    for (size_t at = 1; at + 3 <= size; at += 3)
        copy[(data[at] | (size_t)data[at + 1] << 8) % whole[k].size] = data[at + 2];
    if (data[0] & 128)
        ((mo_shared_header *)copy)->sum = mo_shared_header_sum((mo_shared_header *)copy);
    const mo_status status = mo_shared_attach(copy, whole[k].size, &detail, &view);
    FUZZ_CHECK(!status || (status == MO_CORRUPT && detail.text[0]));
    if (!status) {
        const uint64_t good = walk(&view);
        FUZZ_CHECK(size >= 4 || good == ITEMS);
    }
    FUZZ_CHECK(mo_host_live() == 0);
    free(copy);
    return 0;
}
