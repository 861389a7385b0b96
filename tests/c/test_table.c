#include "checkpoint/table.h"

#include <math.h>

#include "base/hostmem.h"
#include "chain_fixture.h"

static mo_table table_of(const mo_chain *chain, mo_solver_level level, uint64_t budget, size_t slots)
{
    const mo_moves moves = {.chain = chain, .level = level, .window = 2, .most_options = 2};
    mo_table table;
    mo_detail detail;

    if (mo_table_open(&moves, budget, slots, &detail, &table))
        TEST_FAIL("%s", detail.text);
    return table;
}

static mo_chain six_stages(uint64_t unit)
{
    uint64_t random = 5;
    mo_chain chain = chain_random(&random, 6, 2, unit);

    chain.output_grad = unit; /* so that the unit is the divisor */
    return chain;
}

TEST(slots_are_steps_down_from_the_budget)
{
    mo_chain chain = six_stages(1);
    mo_table table = table_of(&chain, MO_SOLVE_PERSISTENT, 1234, 100);

    CHECK_EQ(table.unit, 13); /* the divisor, 1, would be more slots than 100 */
    CHECK_EQ(table.last, 94);
    CHECK_EQ(mo_table_bytes(&table, table.last), 1234);
    CHECK_EQ(mo_table_bytes(&table, 0), 1234 - 94 * 13);
    for (uint64_t bytes = 0; bytes <= 1234; bytes++) {
        const size_t slot = mo_table_slot(&table, bytes);
        CHECK(mo_table_bytes(&table, slot) >= bytes);
        CHECK(slot == 0 || mo_table_bytes(&table, slot - 1) < bytes);
        CHECK(mo_table_shift(&table, bytes) * table.unit >= bytes);
    }
    mo_table_close(&table);
    mo_chain_close(&chain);
}

TEST(where_the_common_divisor_fits_nothing_is_rounded)
{
    mo_chain chain = six_stages(1 << 20);
    mo_table table = table_of(&chain, MO_SOLVE_PERSISTENT, (uint64_t)50 * (1 << 20) + 77, 100);

    CHECK_EQ(table.unit, 1 << 20);
    CHECK_EQ(table.offset, 0);
    CHECK_EQ(table.last, 50);
    mo_table_close(&table);
    table = table_of(&chain, MO_SOLVE_PERSISTENT, 0, 100);
    CHECK_EQ(table.last, 0);
    mo_table_close(&table);
    mo_chain_close(&chain);
}

static bool is_there(const mo_chain *chain, mo_solver_level level, uint8_t kind, size_t s)
{
    return kind == MO_PART_O || (kind == MO_PART_P ? mo_chain_puts(chain, s) : level == MO_SOLVE_FULL);
}

/* Every function has an entry of its own, and there are no others. puts: two inputs can be put away. */
static void check_entries(mo_solver_level level, bool puts, size_t expected)
{
    mo_chain chain = six_stages(1);
    if (puts)
        chain.stages[2].put = chain.stages[4].put = 1;
    mo_table table = table_of(&chain, level, 40, 100);
    size_t count = 0, most = 0;

    for (uint16_t s = 0; s < 6; s++)
        for (uint16_t t = s; t < 6; t++)
            for (uint8_t kind = MO_PART_O; kind <= MO_PART_H; kind++)
                for (uint8_t option = 0;
                     option < (is_there(&chain, level, kind, s) ? kind == MO_PART_Q ? 2 : 1 : 0); option++)
                    for (uint8_t right = 0; right < mo_table_pair(&table, s, t)->rights; right++) {
                        mo_entry *entry = mo_table_entry(&table, (mo_part){kind, option, right, s, t});
                        CHECK_EQ(entry->first, 0);
                        entry->first = 1; /* taken */
                        count++;
                        most = mo_size_min((size_t)(entry - table.entries), SIZE_MAX) > most
                                   ? (size_t)(entry - table.entries)
                                   : most;
                    }
    CHECK_EQ(count, expected);
    CHECK_EQ(most, expected - 1);
    mo_table_close(&table);
    mo_chain_close(&chain);
}

TEST(every_function_has_an_entry)
{
    const size_t pairs = 6 * 7 / 2, band = 6 + 5 + 4;

    check_entries(MO_SOLVE_PERSISTENT, false, pairs);
    check_entries(MO_SOLVE_DEFAULT, false, pairs + 2 * band);
    check_entries(MO_SOLVE_FULL, false, 4 * (pairs + 2 * band));
    check_entries(MO_SOLVE_PERSISTENT, true, pairs + 4 + 2);
    check_entries(MO_SOLVE_DEFAULT, true, pairs + 2 * band + 4 + 2 + 2 * (3 + 2));
    check_entries(MO_SOLVE_FULL, true, 4 * (pairs + 2 * band) + 4 + 2 + 2 * (3 + 2));
}

TEST(a_value_is_that_of_the_slot_below_or_of_the_least_bytes)
{
    mo_chain chain = six_stages(1);
    mo_table table = table_of(&chain, MO_SOLVE_DEFAULT, 1234, 100);
    mo_entry *entry = mo_table_entry(&table, (mo_part){.kind = MO_PART_O, .s = 1, .t = 3});
    const size_t first = mo_table_slot(&table, 700);

    CHECK(!mo_table_find(&table, (mo_part){0}));
    mo_table_begin(&table, entry);
    entry->least = 700;
    entry->at_least = 9;
    for (size_t k = first; k <= table.last; k++)
        mo_table_array(&table, entry)[k] = k < 90 ? 8 : 7;
    mo_table_end(&table, entry);
    CHECK_EQ(entry->first, first);
    CHECK(isinf(mo_table_value(&table, entry, 699)));
    CHECK(mo_table_value(&table, entry, 700) == 9);
    CHECK(mo_table_value(&table, entry, mo_table_bytes(&table, first) - 1) == 9);
    CHECK(mo_table_value(&table, entry, mo_table_bytes(&table, first)) == 8);
    CHECK(mo_table_value(&table, entry, mo_table_bytes(&table, 90) - 1) == 8);
    CHECK(mo_table_value(&table, entry, 1234) == 7);
    for (size_t b = 0; b < MO_TABLE_BLOCKS; b++) { /* blocks of 8 slots, of 95 */
        const float end = mo_table_ends(&table, entry)[b];
        CHECK(b > 11 || b * 8 + 7 < first ? isinf(end) : end == (b < 11 ? 8 : 7));
        CHECK(isinf(mo_table_ends(&table, entry)[(ptrdiff_t)b - MO_TABLE_BLOCKS]));
    }
    mo_table_begin(&table, entry);
    mo_table_end(&table, entry);
    CHECK_EQ(entry->first, table.width);
    mo_table_close(&table);
    mo_chain_close(&chain);
}

TEST(without_host_memory_nothing_is_left)
{
    mo_chain chain = six_stages(1);
    const mo_moves moves = {.chain = &chain, .level = MO_SOLVE_FULL, .window = 6, .most_options = 2};
    const size_t before = mo_host_live();

    for (uint64_t after = 0; after < 4; after++) {
        mo_table table;
        mo_host_fail_after(after);
        const mo_status status = mo_table_open(&moves, 40, 100, NULL, &table);
        mo_host_fail_never();
        CHECK_EQ(status, MO_NO_HOST_MEMORY);
        mo_table_close(&table);
        CHECK_EQ(mo_host_live(), before);
    }
    mo_chain_close(&chain);
}

TEST_MAIN
