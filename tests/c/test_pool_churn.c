#include "base/assert.h"
#include "pool_fixture.h"

/* A pool that works without end: what it holds on the host stays what it was when it had seen everything. Where every
 * operation is followed by a walk through the whole pool (MO_LEVEL 3) there are few of them; the long form, on modules
 * as a wheel has them, is 10^9 operations, or as many as ten minutes allow. */

enum {
    SLOTS = MO_LEVEL ? 128 : 4096,
    SHORT = MO_LEVEL ? 20 * 1000 : 2 * 1000 * 1000,
    LONG = MO_LEVEL ? 200 * 1000 : 1000 * 1000 * 1000,
    SETTLED = 20 * 1000 * 1000,
};

static size_t resident_bytes(void)
{
    size_t pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file);
    CHECK_EQ(fscanf(file, "%*u %zu", &pages), 1);
    fclose(file);
    return pages * 4096;
}

TEST(churn_without_end_grows_nothing_on_the_host)
{
    static mo_address live[SLOTS];
    const mo_stream streams[] = {A, B, C};
    const uint64_t operations = (uint64_t)test_rounds(SHORT, LONG);
    const uint64_t settled = operations < SETTLED ? operations / 4 : SETTLED;
    const time_t end = time(NULL) + 600;
    uint64_t random = test_seed(), i, refused = 0;
    size_t blocks_then = 0, bytes_then = 0, freed;

    memset(live, 0, sizeof live);
    open_pool((size_t)8 << 30, GRANULE, plain_settings);
    device.watched = false; /* what it would note grows itself */
    for (i = 0; i < operations; i++) {
        const uint64_t r = test_random(&random);
        mo_address *slot = &live[r % SLOTS];
        const size_t most = (size_t)1 << (9 + (r >> 12) % (r >> 20 & 7 ? 12 : 16)); /* a few to 16 MiB */
        if (*slot) {
            if (r >> 59 == 0)
                CHECK_EQ(mo_pool_record_stream(pool, *slot, streams[(r >> 32) % 3], NULL), MO_OK);
            CHECK_EQ(mo_pool_free(pool, *slot, NULL), MO_OK);
            *slot = 0;
        } else if (mo_pool_alloc(pool, 1 + (r >> 24) % most, streams[(r >> 56) % 3], NULL, slot)) {
            refused++;
            *slot = 0;
        }
        if (i % 256 == 0)
            for (int k = 0; k < 3; k++)
                finish(streams[k]);
        if (i % (1 << 20) == 0 && i) {
            CHECK_OK(mo_pool_check(pool, &said));
            if (time(NULL) >= end)
                break;
        }
        if (i == settled) {
            blocks_then = mo_host_live();
            bytes_then = resident_bytes();
        }
    }
    printf("# %" PRIu64 " operations; host blocks %zu, then %zu; resident %zu KiB, then %zu\n", i,
           blocks_then, mo_host_live(), bytes_then / KIB, resident_bytes() / KIB);
    CHECK(i > settled && refused == 0);
    CHECK(mo_host_live() <= blocks_then + 8); /* tables that grow once more, if at all */
#ifndef __SANITIZE_ADDRESS__                  /* which keeps what was freed, to catch its use */
    CHECK(resident_bytes() <= bytes_then + 8 * MIB);
#endif
    for (size_t k = 0; k < SLOTS; k++)
        CHECK_OK(mo_pool_free(pool, live[k], &said));
    CHECK_OK(mo_pool_trim(pool, 0, &said, &freed));
    close_pool();
}

TEST_MAIN
