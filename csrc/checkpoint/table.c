#include "checkpoint/table.h"

#include <inttypes.h>
#include <math.h>
#include <unistd.h>

#include "base/hostmem.h"
#include "base/units.h"

/* ---- bytes and slots --------------------------------------------------------------------------------------------- */

static uint64_t common_divisor(uint64_t a, uint64_t b)
{
    while (b) {
        const uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Of every size that is ever counted; 0 where all are 0. */
static uint64_t divisor_of(const mo_chain *chain)
{
    uint64_t divisor = chain->output_grad;

    for (size_t i = 0; i < chain->length; i++) {
        const mo_chain_stage *stage = &chain->stages[i];
        divisor = common_divisor(divisor, common_divisor(stage->output, stage->input_grad));
        for (size_t k = 0; k < stage->option_count; k++) {
            divisor = common_divisor(divisor, stage->options[k].saved);
            divisor = common_divisor(divisor, stage->options[k].forward_overhead);
            divisor = common_divisor(divisor, stage->options[k].backward_overhead);
        }
    }
    return divisor;
}

/* Down from the budget; or, where that is exact, up from 0 in steps of the divisor. */
static void choose_slots(mo_table *table, uint64_t divisor, size_t slots)
{
    if (divisor && table->budget / divisor <= slots) {
        table->unit = divisor;
    } else {
        table->unit = table->budget ? mo_ceil_div(table->budget, slots) : 1;
        table->offset = table->budget % table->unit;
    }
    table->last = (size_t)(table->budget / table->unit);
    table->width = table->last + 1;
    while (table->width > (size_t)MO_TABLE_BLOCKS << table->block_bits)
        table->block_bits++;
}

/* ---- its life ---------------------------------------------------------------------------------------------------- */

/* Where each function's entry is; returns how many there are. */
static size_t lay_out(const mo_table *table, const mo_moves *moves)
{
    const mo_chain_stage *stages = moves->chain->stages;
    size_t count = 0;

    for (size_t s = 0; s < table->stages; s++)
        for (size_t t = s; t < table->stages; t++) {
            const bool waits = moves->level != MO_SOLVE_PERSISTENT && t - s <= moves->window;
            mo_pair *pair = mo_table_pair(table, s, t);
            pair->index = count;
            pair->rights = waits ? 1 + stages[t].option_count : 1;
            pair->puts = mo_chain_puts(moves->chain, s);
            pair->kinds = 1u + pair->puts + (moves->level == MO_SOLVE_FULL ? 1 + stages[s].option_count : 0);
            count += (size_t)pair->rights * pair->kinds;
        }
    return count;
}

mo_status mo_table_open(const mo_moves *moves, uint64_t budget, size_t slots, mo_detail *detail,
                        mo_table *out)
{
    /* The system would grant what fills the machine, and then end somebody. */
    const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    const size_t most = pages > 0 && page > 0 ? (size_t)pages / 2 * (size_t)page : SIZE_MAX / 2;
    const size_t stages = moves->chain->length;
    size_t count = 0, cells = 0, bytes = 0;
    char text[MO_SIZE_TEXT];

    *out = (mo_table){.stages = stages, .budget = budget};
    choose_slots(out, divisor_of(moves->chain), slots);
    out->pairs = mo_host_calloc(stages * (stages + 1) / 2, sizeof *out->pairs);
    if (out->pairs)
        count = lay_out(out, moves);
    if (!mo_mul_ok(count, out->width, &cells) || !mo_mul_ok(cells, sizeof *out->seconds, &bytes))
        bytes = SIZE_MAX;
    if (bytes > most)
        return mo_fail(
            detail, MO_INVALID, 0,
            "a chain of %zu stages with %zu slots needs tables of %s: give fewer slots, or another "
            "level",
            stages, out->last, mo_format_size(bytes, text));
    if (out->pairs) {
        out->seconds = mo_host_calloc_dense(cells, sizeof *out->seconds);
        out->entries = mo_host_calloc(count, sizeof *out->entries);
        out->ends = mo_host_calloc(count, (size_t)2 * MO_TABLE_BLOCKS * sizeof *out->ends);
    }
    if (!out->seconds || !out->entries || !out->ends)
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory for the tables of %zu stages", stages);
    return MO_OK;
}

void mo_table_close(mo_table *table)
{
    mo_host_free(table->pairs);
    mo_host_free(table->entries);
    mo_host_free(table->seconds);
    mo_host_free(table->ends);
    *table = (mo_table){0};
}

/* ---- entries ----------------------------------------------------------------------------------------------------- */

void mo_table_begin(const mo_table *table, mo_entry *entry)
{
    float *array = mo_table_array(table, entry);

    *entry = (mo_entry){.least = MO_SOLVER_NEVER, .at_least = INFINITY};
    for (size_t k = 0; k < table->width; k++)
        array[k] = INFINITY;
}

void mo_table_end(const mo_table *table, mo_entry *entry)
{
    const float *array = mo_table_array(table, entry);
    float *ends = mo_table_ends(table, entry);

    entry->done = true;
    entry->first = entry->least > table->budget ? table->width : mo_table_slot(table, entry->least);
    for (size_t b = 0; b < MO_TABLE_BLOCKS; b++) {
        const size_t end = mo_size_min(((b + 1) << table->block_bits) - 1, table->last);
        ends[b] = b << table->block_bits <= table->last ? array[end] : INFINITY;
        ends[(ptrdiff_t)b - MO_TABLE_BLOCKS] = INFINITY;
    }
}

float mo_table_value(const mo_table *table, const mo_entry *entry, uint64_t m)
{
    MO_ASSERT(entry->done && m <= table->budget);
    if (m < entry->least)
        return INFINITY;
    if (m < mo_table_bytes(table, entry->first))
        return entry->at_least;
    return mo_table_array(table, entry)[(m - table->offset) / table->unit];
}
