#include "data/private_mapping.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "test.h"

enum { SIZE = 10000 };

TEST(what_is_written_stays_in_the_mapping_which_outlives_the_descriptor)
{
    FILE *file = tmpfile();
    const int fd = fileno(file);
    char written[SIZE], back[SIZE];
    mo_private_mapping one, other;

    for (int i = 0; i < SIZE; i++)
        written[i] = (char)(i * 7);
    CHECK_EQ(pwrite(fd, written, SIZE, 0), SIZE);
    CHECK_EQ(mo_private_map(fd, SIZE, NULL, &one), MO_OK);
    CHECK_EQ(mo_private_map(fd, SIZE, NULL, &other), MO_OK);
    memset(one.bytes, 1, SIZE);
    CHECK_EQ(pread(fd, back, SIZE, 0), SIZE);
    fclose(file);
    CHECK(memcmp(back, written, SIZE) == 0 && memcmp(other.bytes, written, SIZE) == 0);
    CHECK_EQ(one.bytes[SIZE - 1], 1);
    mo_private_unmap(&one);
    mo_private_unmap(&one);
    mo_private_unmap(&other);
}

TEST(what_cannot_be_mapped_is_an_error_with_its_number)
{
    mo_private_mapping mapping;
    mo_detail detail;

    CHECK_EQ(mo_private_map(-1, 1, &detail, &mapping), MO_IO);
    CHECK_EQ(detail.code, EBADF);
    CHECK(strstr(detail.text, "file descriptor -1"));
    CHECK_EQ(mo_private_map(0, 0, &detail, &mapping), MO_INVALID);
}

TEST_MAIN
