#include "shared_fixture.h"

#include <dirent.h>

static int open_files(void)
{
    DIR *folder = opendir("/proc/self/fd");
    int count = 0;

    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

TEST(equal_contents_are_equal_bytes)
{
    for (mo_shared_kind kind = MO_SHARED_STRINGS; kind <= MO_SHARED_DICT; kind++) {
        mo_shared_mapping one, two;
        shared_view(kind, 3000, 3000, &one);
        shared_view(kind, 3000, 3000, &two);
        CHECK(one.size == two.size && memcmp(one.bytes, two.bytes, one.size) == 0);
        mo_shared_unmap(&one);
        mo_shared_unmap(&two);
    }
}

/* Larger than the buffer and than a piece of the table. */
TEST(many_items_are_all_there)
{
    const uint64_t count = 200000;
    mo_shared_mapping mapping;

    for (mo_shared_kind kind = MO_SHARED_STRINGS; kind <= MO_SHARED_DICT; kind++) {
        mo_shared_view v = shared_view(kind, count, count, &mapping);
        CHECK_EQ(v.count, count);
        for (uint64_t i = 0; i < count; i += 37) {
            char text[32];
            mo_shared_span span;
            mo_shared_key key;
            const size_t n = (size_t)snprintf(text, sizeof text, "s%" PRIu64, i);
            if (kind == MO_SHARED_DICT) {
                CHECK(mo_shared_read_key(&v, i, &key, NULL));
                CHECK(key.size == n + 2 && memcmp(key.canonical + 2, text, n) == 0);
                continue;
            }
            CHECK(mo_shared_item(&v, i, &span));
            CHECK(memcmp(v.base + span.end - n, text, n) == 0);
        }
        mo_shared_unmap(&mapping);
    }
}

TEST(the_nth_failure_of_memory_or_a_call_leaves_nothing)
{
    const size_t before = mo_host_live();
    const int files = open_files();
    mo_detail detail;
    int fd;

    for (mo_shared_kind kind = MO_SHARED_STRINGS; kind <= MO_SHARED_DICT; kind++)
        for (int calls = 0; calls < 2; calls++)
            for (uint64_t after = 0;; after++) {
                if (calls)
                    mo_shared_fail_after(after, after % 2 ? ENOSPC : EIO);
                else
                    mo_host_fail_after(after);
                const mo_status status = shared_made(kind, 150000, 150000, &detail, &fd);
                mo_shared_fail_never();
                mo_host_fail_never();
                if (!status) {
                    close(fd);
                    CHECK(after > 2); /* it was made to fail at all */
                    break;
                }
                CHECK_EQ(status, calls ? MO_IO : MO_NO_HOST_MEMORY);
                CHECK_EQ(detail.status, status);
                CHECK_EQ(mo_host_live(), before);
                CHECK_EQ(open_files(), files);
            }
    CHECK_EQ(mo_host_live(), before);
    CHECK_EQ(open_files(), files);
}

TEST(the_buffers_are_all_that_a_build_takes)
{
    mo_shared_builder b;

    CHECK_EQ(mo_shared_builder_open(MO_SHARED_STRINGS, 0, NULL, &b), MO_OK);
    for (int i = 0; i < 500000; i++) {
        CHECK_EQ(mo_shared_builder_item(&b, NULL), MO_OK);
        CHECK_EQ(mo_shared_write(&b.data, "0123456789abcdef", 16, NULL), MO_OK);
    }
    CHECK_EQ(b.data.capacity + b.places.capacity, 2 * MO_SHARED_BUFFER);
    mo_shared_builder_close(&b);
}

TEST(a_limit_is_of_data_and_places_together)
{
    mo_shared_builder b;
    mo_detail detail = {.text = ""};
    mo_status status = MO_OK;
    uint64_t i = 0;

    CHECK_EQ(mo_shared_builder_open(MO_SHARED_STRINGS, 4 << 20, NULL, &b), MO_OK);
    for (; i < 1000000 && !status; i++) {
        status = mo_shared_builder_item(&b, &detail);
        if (!status)
            status = mo_shared_write(&b.data, "01234567", 8, &detail);
    }
    CHECK_EQ(status, MO_IO);
    CHECK_EQ(detail.code, ENOSPC);
    CHECK(strstr(detail.text, "4.00 MiB"));
    CHECK(i > 200000 && i < 400000);
    mo_shared_builder_close(&b);
}

TEST_MAIN
