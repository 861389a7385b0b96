#include "transfer/packing.h"

#include <string.h>

#include "base/parallel.h"
#include "test.h"

enum { SIZE = 1000, PIECES = 4 };

static const mo_packed pieces[PIECES] = {{NULL, 0, 1}, {NULL, 64, 300}, {NULL, 364, 36}, {NULL, 448, 500}};
static char source[PIECES][SIZE];
static size_t step; /* bytes of a range */

static void in_steps(size_t count, size_t grain, mo_parallel_body body, void *user)
{
    CHECK_EQ(grain, MO_PACK_GRAIN);
    for (size_t end = count; end > 0; end -= end < step ? end : step) /* in any order: backwards */
        body(user, end < step ? 0 : end - step, end);
}

TEST(what_is_packed_is_in_its_place_however_the_ranges_are_dealt_out)
{
    char to[SIZE], expected[SIZE];
    mo_packed filled[PIECES];

    memcpy(filled, pieces, sizeof filled);
    memset(expected, 'x', sizeof expected);
    for (size_t i = 0; i < PIECES; i++) {
        for (size_t b = 0; b < filled[i].size; b++)
            source[i][b] = (char)(31 * i + 7 * b);
        filled[i].from = source[i];
        memcpy(expected + filled[i].offset, source[i], filled[i].size);
    }
    mo_parallel_use(in_steps);
    for (step = 1; step <= SIZE; step++)
        for (size_t count = 0; count <= PIECES; count++) {
            const size_t end = count ? filled[count - 1].offset + filled[count - 1].size : 0;
            memset(to, 'x', sizeof to);
            mo_pack(to, filled, count);
            CHECK_EQ(memcmp(to, expected, end), 0);
            for (size_t b = end; b < SIZE; b++)
                CHECK_EQ(to[b], 'x');
        }
    mo_parallel_use(NULL);
}

TEST_MAIN
