#include "alloc/stats.h"

#include "test.h"

TEST(what_is_counted_in_a_column_is_counted_in_all)
{
    mo_stats stats = {0};
    const mo_stat *all = stats.of[MO_ACTIVE_BYTES];

    mo_stat_add(&stats, MO_ACTIVE_BYTES, MO_STAT_SMALL, 512);
    mo_stat_add(&stats, MO_ACTIVE_BYTES, MO_STAT_LARGE, 4096);
    mo_stat_add(&stats, MO_ACTIVE_BYTES, MO_STAT_SMALL, -512);
    CHECK_EQ(all[MO_STAT_ALL].current, 4096);
    CHECK_EQ(all[MO_STAT_ALL].peak, 4608);
    CHECK_EQ(all[MO_STAT_ALL].allocated, 4608);
    CHECK_EQ(all[MO_STAT_ALL].freed, 512);
    CHECK_EQ(all[MO_STAT_SMALL].current, 0);
    CHECK_EQ(all[MO_STAT_SMALL].peak, 512);
    CHECK_EQ(all[MO_STAT_LARGE].peak, 4096);
    for (int kind = 0; kind < MO_STAT_KIND_COUNT; kind++)
        for (int column = 0; column < MO_STAT_COLUMN_COUNT; column++)
            CHECK(kind == MO_ACTIVE_BYTES || !stats.of[kind][column].peak);
}

TEST(the_equations_hold_after_any_sequence)
{
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(20, 2000); round++) {
        mo_stats stats = {0};
        int64_t up = 0, down = 0, value = 0, peak = 0;

        for (int n = 0; n < 1000; n++) {
            const uint64_t r = test_random(&random), what = r % 100;
            const int64_t amount = r >> 62 ? (int64_t)(r >> 8) % 5000 : -((int64_t)(r >> 8) % (1 + value));

            if (what == 0) {
                mo_stats_reset_peaks(&stats);
                peak = value;
            } else if (what == 1) {
                mo_stats_reset_accumulated(&stats);
                up = down = 0;
            }
            mo_stat_add(&stats, MO_REQUESTED_BYTES, MO_STAT_LARGE, amount);
            value += amount;
            up += amount > 0 ? amount : 0;
            down += amount < 0 ? -amount : 0;
            peak = value > peak ? value : peak;
            for (int column = 0; column < MO_STAT_COLUMN_COUNT; column += MO_STAT_LARGE) {
                const mo_stat *stat = &stats.of[MO_REQUESTED_BYTES][column];

                CHECK_EQ(stat->current, value);
                CHECK_EQ(stat->allocated, up);
                CHECK_EQ(stat->freed, down);
                CHECK_EQ(stat->peak, peak);
            }
        }
    }
}

TEST(resetting_peaks_changes_nothing_else)
{
    mo_stats stats, expected;

    memset(&stats, 0x11, sizeof stats);
    for (int kind = 0; kind < MO_STAT_KIND_COUNT; kind++)
        for (int column = 0; column < MO_STAT_COLUMN_COUNT; column++)
            stats.of[kind][column].current = kind * 10 + column;
    expected = stats;
    for (int kind = 0; kind < MO_STAT_KIND_COUNT; kind++)
        for (int column = 0; column < MO_STAT_COLUMN_COUNT; column++)
            expected.of[kind][column].peak = kind * 10 + column;
    mo_stats_reset_peaks(&stats);
    CHECK_EQ(memcmp(&stats, &expected, sizeof stats), 0);
}

TEST(resetting_what_is_accumulated_leaves_what_is_current_and_the_peaks)
{
    mo_stats stats, expected;

    memset(&stats, 0x11, sizeof stats);
    memset(&expected, 0, sizeof expected);
    for (int kind = 0; kind < MO_STAT_KIND_COUNT; kind++)
        for (int column = 0; column < MO_STAT_COLUMN_COUNT; column++) {
            expected.of[kind][column].current = stats.of[kind][column].current;
            expected.of[kind][column].peak = stats.of[kind][column].peak;
        }
    mo_stats_reset_accumulated(&stats);
    CHECK_EQ(memcmp(&stats, &expected, sizeof stats), 0);
}

TEST(keys_are_torchs)
{
    static const char *const keys[] = {
        "allocation",      "segment",        "active",       "inactive_split",
        "allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes",
        "requested_bytes"};

    CHECK_EQ(MO_STAT_KIND_COUNT, sizeof keys / sizeof *keys);
    for (int kind = 0; kind < MO_STAT_KIND_COUNT; kind++)
        CHECK_STR(mo_stat_key((mo_stat_kind)kind), keys[kind]);
}

TEST_MAIN
