#include "shared_fixture.h"

static size_t key_of(uint64_t i, uint8_t out[40])
{
    const int n = snprintf((char *)out + 2, 38, "s%" PRIu64, i);

    out[0] = MO_SHARED_STR;
    out[1] = (uint8_t)n;
    return (size_t)n + 2;
}

TEST(every_key_is_found_and_no_other)
{
    static const uint64_t counts[] = {1, 2, 6, 7, 8, 100, 5000};

    for (size_t k = 0; k < sizeof counts / sizeof *counts; k++) {
        mo_shared_mapping mapping;
        mo_shared_view v = shared_view(MO_SHARED_DICT, counts[k], counts[k], &mapping);
        uint8_t key[40];
        uint64_t entry;
        CHECK_EQ(v.count, counts[k]);
        for (uint64_t i = 0; i < counts[k]; i++) {
            CHECK_EQ(mo_shared_find(&v, key, key_of(i, key), &entry), MO_SHARED_FOUND);
            CHECK_EQ(entry, i);
            CHECK_EQ(mo_shared_find(&v, key, key_of(i + counts[k], key), &entry), MO_SHARED_ABSENT);
        }
        mo_shared_unmap(&mapping);
    }
}

TEST(an_equal_key_gives_its_value_to_the_first)
{
    mo_shared_mapping mapping;
    mo_shared_view v = shared_view(MO_SHARED_DICT, 1000, 300, &mapping);
    mo_shared_value value;
    mo_shared_span span;
    mo_shared_key key;

    CHECK_EQ(v.count, 300);
    for (uint64_t i = 0; i < 300; i++) {
        uint8_t expected[40];
        const size_t size = key_of(i, expected);
        CHECK(mo_shared_read_key(&v, i, &key, NULL));
        CHECK(key.size == size && memcmp(key.canonical, expected, size) == 0);
        CHECK(mo_shared_entry(&v, i, true, &span));
        mo_shared_cursor c = {v.base, span.begin, span.end};
        CHECK(mo_shared_read(&c, &value));
        CHECK_EQ(value.integer, i < 100 ? i + 900 : i + 600);
    }
    mo_shared_unmap(&mapping);
}

TEST(a_key_that_is_not_its_canonical_form_is_itself)
{
    static const uint8_t one[] = {MO_SHARED_INT, 2}, yes[] = {MO_SHARED_TRUE};
    const mo_shared_key key = {one, sizeof one, yes, sizeof yes};
    mo_shared_builder b;
    mo_shared_mapping mapping;
    mo_shared_cursor itself;
    mo_shared_value value;
    mo_shared_key back;
    mo_shared_view v;
    uint64_t entry;
    int fd;

    CHECK_EQ(mo_shared_builder_open(MO_SHARED_DICT, 0, NULL, &b), MO_OK);
    CHECK_EQ(mo_shared_builder_key(&b, &key, NULL), MO_OK);
    CHECK_EQ(mo_shared_put_int(&b.data, 5, NULL), MO_OK);
    CHECK_EQ(mo_shared_builder_finish(&b, NULL, &fd), MO_OK);
    CHECK_EQ(mo_shared_map(fd, false, NULL, &mapping), MO_OK);
    CHECK_EQ(mo_shared_attach(mapping.bytes, mapping.size, NULL, &v), MO_OK);
    CHECK_EQ(mo_shared_find(&v, one, sizeof one, &entry), MO_SHARED_FOUND);
    CHECK(mo_shared_read_key(&v, entry, &back, &itself));
    CHECK(mo_shared_read(&itself, &value) && value.tag == MO_SHARED_TRUE);
    mo_shared_unmap(&mapping);
    close(fd);
}

TEST(slots_leave_a_quarter_free)
{
    for (uint64_t count = 0; count < 5000; count++) {
        const uint64_t slots = mo_shared_slots(count);
        CHECK(!(slots & (slots - 1)) && slots * 3 >= count * 4 && (slots == 8 || slots * 3 <= count * 8));
    }
    CHECK_EQ(mo_shared_slots(MO_SHARED_MOST_ENTRIES + 1), 0);
}

TEST(hashes_of_all_lengths_differ)
{
    static const uint8_t zeros[32];

    for (size_t a = 0; a < sizeof zeros; a++)
        for (size_t b = 0; b < a; b++)
            CHECK(mo_shared_hash(1, zeros, a) != mo_shared_hash(1, zeros, b));
    CHECK(mo_shared_hash(1, zeros, 9) != mo_shared_hash(2, zeros, 9));
}

TEST(a_damaged_index_ends_every_search)
{
    uint64_t random = test_seed(), entry;
    mo_shared_mapping mapping;
    mo_shared_view v = shared_view(MO_SHARED_DICT, 50, 50, &mapping);
    uint8_t *copy = malloc(mapping.size), key[40];

    CHECK(copy != NULL);
    for (int round = 0; round < test_rounds(200, 20000); round++) {
        memcpy(copy, mapping.bytes, mapping.size);
        uint8_t *index = copy + (v.index - v.base);
        for (uint64_t i = 0; i < v.slots * 8; i += 8) {
            const uint64_t word =
                round == 0 ? UINT64_MAX : test_random(&random) >> (test_random(&random) % 64);
            memcpy(index + i, &word, 8);
        }
        mo_shared_view broken = v;
        broken.base = copy;
        broken.table = copy + (v.table - v.base);
        broken.index = index;
        for (uint64_t i = 0; i < 60; i++)
            mo_shared_find(&broken, key, key_of(i, key), &entry);
        CHECK(round || mo_shared_find(&broken, key, key_of(1, key), &entry) == MO_SHARED_DAMAGED);
    }
    free(copy);
    mo_shared_unmap(&mapping);
}

TEST_MAIN
