#include "shared_fixture.h"

#include <float.h>

static mo_shared_writer local(void)
{
    mo_shared_writer w;

    mo_shared_writer_local(&w);
    return w;
}

static mo_shared_cursor over(const mo_shared_writer *w)
{
    return (mo_shared_cursor){w->buffer, 0, w->used};
}

TEST(numbers_come_back)
{
    static const int64_t ints[] = {0, 1, -1, 63, 64, -64, -65, 127, 128, 1 << 20, INT64_MAX, INT64_MIN};
    static const double reals[] = {0.0, -0.0, 1.5, DBL_MAX, -DBL_MIN};
    mo_shared_writer w = local();
    mo_shared_value v;

    for (size_t i = 0; i < sizeof ints / sizeof *ints; i++)
        CHECK_EQ(mo_shared_put_int(&w, ints[i], NULL), MO_OK);
    for (size_t i = 0; i < sizeof reals / sizeof *reals; i++)
        CHECK_EQ(mo_shared_put_complex(&w, reals[i], -reals[i], NULL), MO_OK);
    mo_shared_cursor c = over(&w);
    for (size_t i = 0; i < sizeof ints / sizeof *ints; i++) {
        CHECK(mo_shared_read(&c, &v) && v.tag == MO_SHARED_INT);
        CHECK_EQ(v.integer, ints[i]);
    }
    for (size_t i = 0; i < sizeof reals / sizeof *reals; i++) {
        const double minus = -reals[i];
        CHECK(mo_shared_read(&c, &v) && v.tag == MO_SHARED_COMPLEX);
        CHECK(memcmp(&v.real, &reals[i], 8) == 0 && memcmp(&v.imaginary, &minus, 8) == 0);
    }
    CHECK(!mo_shared_read(&c, &v)); /* that was all */
    mo_shared_writer_close(&w);
}

/* [None, {"k": b"xy"}, leaf 3 of (2.5,) with 70 bytes] */
static mo_shared_writer nested(void)
{
    static const uint8_t block[70] = {9};
    mo_shared_writer w = local();

    CHECK_EQ(mo_shared_put_container(&w, MO_SHARED_LIST_VALUE, 3, NULL), MO_OK);
    CHECK_EQ(mo_shared_put_tag(&w, MO_SHARED_NONE, NULL), MO_OK);
    CHECK_EQ(mo_shared_put_container(&w, MO_SHARED_DICT_VALUE, 1, NULL), MO_OK);
    CHECK_EQ(mo_shared_put_bytes(&w, MO_SHARED_STR, "k", 1, NULL), MO_OK);
    CHECK_EQ(mo_shared_put_bytes(&w, MO_SHARED_BYTES, "xy", 2, NULL), MO_OK);
    CHECK_EQ(mo_shared_put_leaf(&w, 3, NULL), MO_OK);
    CHECK_EQ(mo_shared_put_container(&w, MO_SHARED_TUPLE, 1, NULL), MO_OK);
    CHECK_EQ(mo_shared_put_float(&w, 2.5, NULL), MO_OK);
    CHECK_EQ(mo_shared_put_block(&w, block, sizeof block, NULL), MO_OK);
    return w;
}

TEST(containers_and_leaves_are_read_in_order)
{
    mo_shared_writer w = nested();
    mo_shared_cursor c = over(&w), whole = c;
    mo_shared_value v;
    mo_shared_span block;

    CHECK(mo_shared_read(&c, &v) && v.tag == MO_SHARED_LIST_VALUE && v.length == 3);
    CHECK(mo_shared_read(&c, &v) && v.tag == MO_SHARED_NONE);
    CHECK(mo_shared_read(&c, &v) && v.tag == MO_SHARED_DICT_VALUE && v.length == 1);
    CHECK(mo_shared_read(&c, &v) && v.tag == MO_SHARED_STR && v.length == 1 && *v.bytes == 'k');
    CHECK(mo_shared_read(&c, &v) && v.tag == MO_SHARED_BYTES && v.length == 2);
    CHECK(mo_shared_read(&c, &v) && v.tag == MO_SHARED_LEAF && v.leaf == 3);
    CHECK(mo_shared_read(&c, &v) && v.tag == MO_SHARED_TUPLE && v.length == 1);
    CHECK(mo_shared_read(&c, &v) && v.tag == MO_SHARED_FLOAT && v.real == 2.5);
    CHECK(mo_shared_read_block(&c, &block));
    CHECK_EQ(block.begin % MO_SHARED_ALIGNMENT, 0);
    CHECK_EQ(block.end - block.begin, 70);
    CHECK_EQ(c.at, c.end);
    CHECK(mo_shared_skip(&whole));
    CHECK_EQ(whole.at, whole.end);
    mo_shared_writer_close(&w);
}

TEST(each_shorter_one_is_refused)
{
    mo_shared_writer w = nested();

    for (size_t cut = 0; cut < w.used; cut++) {
        uint8_t *exact = malloc(cut ? cut : 1); /* so that a sanitizer sees a byte too far */
        CHECK(exact != NULL);
        memcpy(exact, w.buffer, cut);
        mo_shared_cursor c = {exact, 0, cut};
        CHECK(!mo_shared_skip(&c));
        free(exact);
    }
    mo_shared_writer_close(&w);
}

TEST(counts_lengths_and_depths_that_cannot_be_are_refused)
{
    static const uint8_t many[] = {MO_SHARED_TUPLE, 5, 0, 0, 0, 0};
    static const uint8_t pairs[] = {MO_SHARED_DICT_VALUE, 2, 0, 0, 0};
    static const uint8_t longer[] = {MO_SHARED_STR, 3, 'a', 'b'};
    static const uint8_t endless[] = {MO_SHARED_INT, 255, 255, 255, 255, 255, 255, 255, 255, 255, 2};
    static const uint8_t padded[] = {MO_SHARED_INT, 0x80, 0};
    static const uint8_t unknown[] = {MO_SHARED_TAGS};
    static const struct {
        const uint8_t *bytes;
        size_t size;
    } cases[] = {{many, sizeof many},       {pairs, sizeof pairs},   {longer, sizeof longer},
                 {endless, sizeof endless}, {padded, sizeof padded}, {unknown, sizeof unknown}};
    uint8_t deep[2 * MO_SHARED_MOST_DEPTH + 20];

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mo_shared_cursor c = {cases[i].bytes, 0, cases[i].size};
        CHECK(!mo_shared_skip(&c));
    }
    for (size_t i = 0; i < sizeof deep; i += 2) {
        deep[i] = MO_SHARED_TUPLE;
        deep[i + 1] = 1;
    }
    deep[sizeof deep - 2] = deep[sizeof deep - 1] = MO_SHARED_NONE;
    mo_shared_cursor c = {deep, 0, sizeof deep - 1};
    CHECK(!mo_shared_skip(&c));
    c = (mo_shared_cursor){deep, 20, sizeof deep - 1};
    CHECK(mo_shared_skip(&c));
}

TEST_MAIN
