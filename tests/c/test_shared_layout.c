#include "shared_fixture.h"

#include <stddef.h>

/* A container's bytes, to be broken. */
static uint8_t *copied(mo_shared_kind kind, size_t *size)
{
    mo_shared_mapping mapping;
    uint8_t *copy;

    shared_view(kind, 20, 20, &mapping);
    *size = mapping.size;
    copy = malloc(mapping.size);
    CHECK(copy != NULL);
    memcpy(copy, mapping.bytes, mapping.size);
    mo_shared_unmap(&mapping);
    return copy;
}

TEST(items_lie_one_behind_the_other)
{
    mo_shared_mapping mapping;
    mo_shared_view v = shared_view(MO_SHARED_STRINGS, 1000, 1000, &mapping);
    mo_shared_span span, last = {0, MO_SHARED_DATA};
    char text[32];

    CHECK_EQ(v.count, 1000);
    CHECK_EQ(v.width, 4);
    for (uint64_t i = 0; i < v.count; last = span, i++) {
        CHECK(mo_shared_item(&v, i, &span));
        CHECK_EQ(span.begin, last.end);
        snprintf(text, sizeof text, "s%" PRIu64, i);
        CHECK_EQ(span.end - span.begin, strlen(text));
        CHECK(memcmp(v.base + span.begin, text, strlen(text)) == 0);
    }
    CHECK_EQ(last.end, v.data_end);
    mo_shared_unmap(&mapping);
}

TEST(a_container_of_nothing_is_one)
{
    for (mo_shared_kind kind = MO_SHARED_STRINGS; kind <= MO_SHARED_DICT; kind++) {
        mo_shared_mapping mapping;
        mo_shared_view v = shared_view(kind, 0, 1, &mapping);
        uint64_t entry;
        CHECK_EQ(v.count, 0);
        CHECK_EQ(v.kind, kind);
        CHECK(kind != MO_SHARED_DICT ||
              mo_shared_find(&v, (const uint8_t *)"x", 1, &entry) == MO_SHARED_ABSENT);
        mo_shared_unmap(&mapping);
    }
    CHECK_STR(mo_shared_kind_name(MO_SHARED_LIST), "list");
}

TEST(each_field_of_the_header_is_believed_only_where_it_fits)
{
    static const size_t fields[] = {offsetof(mo_shared_header, magic), offsetof(mo_shared_header, version),
                                    offsetof(mo_shared_header, size),  offsetof(mo_shared_header, data_end),
                                    offsetof(mo_shared_header, table), offsetof(mo_shared_header, width),
                                    offsetof(mo_shared_header, index), offsetof(mo_shared_header, count)};
    size_t size;

    for (mo_shared_kind kind = MO_SHARED_STRINGS; kind <= MO_SHARED_DICT; kind++) {
        uint8_t *bytes = copied(kind, &size);
        mo_shared_header *h = (mo_shared_header *)bytes;
        const mo_shared_header good = *h;
        mo_shared_view view;
        CHECK_EQ(mo_shared_attach(bytes, size, NULL, &view), MO_OK);
        for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
            for (int high = 0; high < 2; high++) {
                const uint64_t large = high ? UINT64_MAX / 4 : 1u << 20;
                *h = good;
                memcpy(bytes + fields[i], &large, fields[i] == offsetof(mo_shared_header, version) ? 4 : 8);
                CHECK_EQ(mo_shared_attach(bytes, size, NULL, &view), MO_CORRUPT); /* by the sum */
                h->sum = mo_shared_header_sum(h);
                CHECK_EQ(mo_shared_attach(bytes, size, NULL, &view), MO_CORRUPT); /* and by itself */
            }
        *h = good;
        h->slots = kind == MO_SHARED_DICT ? h->slots - 1 : 8;
        h->sum = mo_shared_header_sum(h);
        CHECK_EQ(mo_shared_attach(bytes, size, NULL, &view), MO_CORRUPT);
        *h = good;
        for (size_t cut = 0; cut < size; cut += cut < 200 ? 1 : 61)
            CHECK_EQ(mo_shared_attach(bytes, cut, NULL, &view), MO_CORRUPT);
        free(bytes);
    }
}

TEST(another_version_is_said_to_be_one)
{
    size_t size;
    uint8_t *bytes = copied(MO_SHARED_LIST, &size);
    mo_shared_view view;
    mo_detail detail;

    ((mo_shared_header *)bytes)->version = 7;
    CHECK_EQ(mo_shared_attach(bytes, size, &detail, &view), MO_CORRUPT);
    CHECK(strstr(detail.text, "version 7"));
    free(bytes);
}

TEST(a_damaged_table_is_noticed_item_by_item)
{
    size_t size;
    uint8_t *bytes = copied(MO_SHARED_STRINGS, &size);
    mo_shared_view v;
    mo_shared_span span;
    uint32_t *table;

    CHECK_EQ(mo_shared_attach(bytes, size, NULL, &v), MO_OK);
    table = (uint32_t *)(bytes + (v.table - v.base));
    table[5] = UINT32_MAX;
    CHECK(!mo_shared_item(&v, 4, &span) && !mo_shared_item(&v, 5, &span));
    CHECK(mo_shared_item(&v, 3, &span) && mo_shared_item(&v, 6, &span));
    table[5] = 0;
    CHECK(!mo_shared_item(&v, 4, &span) && !mo_shared_item(&v, 5, &span));
    free(bytes);
}

TEST_MAIN
