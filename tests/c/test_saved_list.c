#include "checkpoint/saved_list.h"

#include "base/hostmem.h"
#include "test.h"

#define FLOAT32 (2u << 24 | 32u << 16 | 1u)

static mo_form form(int32_t dimensions, const int64_t *sizes)
{
    return (mo_form){1, 0, FLOAT32, dimensions, sizes};
}

TEST(records_keep_their_forms_while_the_list_grows)
{
    mo_saved_list list = {0};
    int64_t sizes[64];

    for (size_t i = 0; i < 1000; i++) {
        const mo_form f = form((int32_t)(i % 65) - 1, sizes);
        size_t index = 77;

        for (size_t d = 0; d < 64; d++)
            sizes[d] = (int64_t)(i * 64 + d);
        CHECK_EQ(mo_saved_append(&list, &f, &index), MO_OK);
        CHECK_EQ(index, i);
    }
    for (size_t i = 0; i < 1000; i++) {
        const mo_form kept = mo_saved_form(&list, i);

        CHECK_EQ(kept.dimensions, (int32_t)(i % 65) - 1);
        for (int32_t d = 0; d < kept.dimensions; d++)
            CHECK_EQ(kept.sizes[d], (int64_t)(i * 64) + d);
        CHECK(!list.records[i].holder && !list.records[i].described);
    }
    mo_saved_free(&list);
    CHECK_EQ(mo_host_live(), 0);
}

TEST(forms_are_equal_where_all_of_them_is)
{
    static const int64_t sizes[] = {2, 3}, others[] = {2, 4};
    const mo_form f = form(2, sizes);
    mo_form g = f;

    CHECK(mo_form_equal(&f, &g));
    g.sizes = others;
    CHECK(!mo_form_equal(&f, &g));
    g = f, g.dimensions = 1;
    CHECK(!mo_form_equal(&f, &g));
    g = f, g.dtype++;
    CHECK(!mo_form_equal(&f, &g));
    g = f, g.device_type++;
    CHECK(!mo_form_equal(&f, &g));
    g = f, g.device_index++;
    CHECK(!mo_form_equal(&f, &g));
}

TEST(numbers_have_no_sizes_and_no_form_equals_nothing)
{
    const mo_form number = form(0, NULL), none = form(-1, NULL);

    CHECK(mo_form_equal(&number, &number));
    CHECK(!mo_form_equal(&none, &none));
    CHECK(!mo_form_equal(&number, &none));
}

TEST(a_failed_append_changes_nothing)
{
    static const int64_t sizes[] = {5, 6, 7};
    const mo_form f = form(3, sizes);

    bool failed = true;

    for (uint64_t after = 0; failed; after++) {
        mo_saved_list list = {0};
        size_t index, appended = 0;

        failed = false;
        mo_host_fail_after(after);
        for (size_t i = 0; i < 100; i++) {
            const size_t before = list.count, numbers = list.size_count;

            if (mo_saved_append(&list, &f, &index) == MO_OK) {
                CHECK_EQ(index, appended++);
            } else {
                failed = true;
                CHECK_EQ(list.count, before);
                CHECK_EQ(list.size_count, numbers);
            }
        }
        mo_host_fail_never();
        CHECK(after < 6 ? failed : after < 20); /* both tables grow, several times */
        for (size_t i = 0; i < list.count; i++) {
            const mo_form kept = mo_saved_form(&list, i);

            CHECK(mo_form_equal(&kept, &f));
        }
        CHECK_EQ(mo_saved_append(&list, &f, &index), MO_OK);
        CHECK_EQ(index, appended);
        mo_saved_free(&list);
    }
    CHECK_EQ(mo_host_live(), 0);
}

TEST_MAIN
