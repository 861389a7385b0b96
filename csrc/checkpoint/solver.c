#include "checkpoint/solver.h"

#include <inttypes.h>
#include <math.h>

#include "base/hostmem.h"
#include "checkpoint/table.h"

/* How far away an input is made again by default. On chains of 20 to 30 stages a bound of 8 costs less than a
 * thousandth of what no bound gains; 4 costs up to three thousandths. */
#define DEFAULT_WINDOW 8

enum { BLOCKS = MO_TABLE_BLOCKS };

/* A move of a part, with what it goes on to. NULL: no such part. */
typedef struct option {
    const mo_move *move;
    const mo_entry *left, *right;
    uint64_t least; /* bytes, or MO_SOLVER_NEVER */
} option;

/* Of a function that is not done yet. */
typedef struct progress {
    float starts[BLOCKS]; /* seconds of each block's first slot; infinitely little where it has none */
    option least; /* the option that gave entry.least, until it is put in entry.at_least; or move NULL */
} progress;

struct mo_solver {
    mo_moves moves;
    mo_table table;
    size_t from; /* parts that begin at this stage or later are done */
    const mo_relax_kernels *kernels;
    double *forward;
    progress *progress; /* of the parts that begin at one stage, by t and `right` */
    mo_move *list;
};

static option option_of(const mo_move *move, uint64_t base, const mo_entry *left, const mo_entry *right)
{
    option o = {move, left, right, base + move->need};

    if (move->alone > o.least)
        o.least = move->alone;
    if (left)
        o.least = left->least == MO_SOLVER_NEVER       ? MO_SOLVER_NEVER
                  : left->least + move->less > o.least ? left->least + move->less
                                                       : o.least;
    if (right && right->least > o.least)
        o.least = right->least;
    return o;
}

/* Its seconds with m bytes, as mo_relax() sums them. */
static float value_of_option(const mo_table *table, const option *o, uint64_t m)
{
    const float left = o->left ? mo_table_value(table, o->left, m - o->move->less) : 0;
    const float right = o->right ? mo_table_value(table, o->right, m) : 0;

    return o->move->seconds + (left + right);
}

/* ---- filling in -------------------------------------------------------------------------------------------------- */

static void begin_entry(const mo_table *table, mo_entry *entry, progress *p)
{
    p->least.move = NULL;
    mo_table_begin(table, entry);
    for (size_t b = 0; b < BLOCKS; b++)
        p->starts[b] = b << table->block_bits <= table->last ? INFINITY : -INFINITY;
}

/* Notes the starts of the blocks that slots of [begin, end) are in. */
static void note_starts(const mo_table *table, const float *array, size_t begin, size_t end, progress *p)
{
    for (size_t b = begin >> table->block_bits; b << table->block_bits < end; b++)
        p->starts[b] = array[b << table->block_bits];
}

/* array[k] = min(array[k], the option with the bytes of slot k), begin <= k < end, where the left part's slot is k
 * - shift. */
static void relax(const mo_solver *solver, const option *o, float *array, size_t shift, size_t begin,
                  size_t end, progress *p)
{
    const mo_table *table = &solver->table;
    const float *left = o->left ? mo_table_array(table, o->left) + (begin - shift) : NULL;
    const float *right = o->right ? mo_table_array(table, o->right) + begin : NULL;
    const float seconds = o->move->seconds;

    /* The same slots of the next part that this move reaches, most of which will be wanted next. */
    for (size_t k = 0; left && k < end - begin; k += 16)
        __builtin_prefetch(left + table->width + k);
    if (left || right)
        solver->kernels->relax(array + begin, left ? left : right, left ? right : NULL, seconds, end - begin);
    for (size_t k = begin; !left && !right && k < end; k++)
        array[k] = seconds < array[k] ? seconds : array[k];
    note_starts(table, array, begin, end, p);
}

/* The least slot with the bytes for the option. */
static size_t first_slot(const mo_table *table, const option *o, size_t shift)
{
    size_t slot = o->right ? o->right->first : 0;

    /* The left part's least bytes and `less` may fit in one slot less than they take apart. */
    if (o->left && o->left->first + shift > slot + 1)
        slot = o->left->first + shift - 1;
    if (mo_table_bytes(table, slot) < o->least && mo_table_bytes(table, ++slot) < o->least)
        slot = mo_table_slot(table, o->least); /* running takes more than the parts do */
    return slot;
}

/* An option against all slots for which it has the bytes. Functions only fall, so in a block of slots an option is
 * no less than with its parts' seconds at the block's end, and the array no more than at its start: most blocks are
 * passed over. */
static void try_slots(const mo_solver *solver, const option *o, float *array, size_t shift, progress *p)
{
    const mo_table *table = &solver->table;
    static const float nothing[BLOCKS] = {0};
    const size_t last = table->last, size = (size_t)1 << table->block_bits;
    const float *left = o->left ? mo_table_ends(table, o->left) - (shift >> table->block_bits) : nothing;
    const float *right = o->right ? mo_table_ends(table, o->right) : nothing;
    size_t from = first_slot(table, o, shift), k;
    uint32_t wins;

    /* The one slot, if any, that has the bytes for the left part's least and not for its first slot. */
    for (; o->left && from <= last && from < o->left->first + shift; from++) {
        const float value = value_of_option(table, o, mo_table_bytes(table, from));
        for (k = from; k <= last && value < array[k]; k++)
            array[k] = value; /* so that the array falls, which passing over asks for */
        note_starts(table, array, from, k, p);
    }
    if (from > last)
        return;
    wins = solver->kernels->reach(p->starts, left, right, o->move->seconds);
    wins &= ~(uint32_t)0 << (from >> table->block_bits);
    while (wins) {
        const unsigned block = (unsigned)__builtin_ctz(wins),
                       blocks = (unsigned)__builtin_ctz(~(wins >> block));
        const size_t begin = block * size < from ? from : block * size;
        relax(solver, o, array, shift, begin, mo_size_min((block + blocks) * size, last + 1), p);
        wins &= ~(uint32_t)0 << (block + blocks);
    }
}

static progress *progress_of(const mo_solver *solver, size_t t, size_t right)
{
    return &solver->progress[t * (solver->moves.most_options + 1u) + right];
}

/* Puts the seconds of the option that needs the fewest bytes where they belong. */
static void settle(const mo_table *table, mo_entry *e, progress *p)
{
    if (p->least.move && e->least <= table->budget)
        e->at_least = value_of_option(table, &p->least, e->least);
    p->least.move = NULL;
}

static void try_option(const mo_solver *solver, const option *o, mo_entry *e, size_t shift, progress *p)
{
    const mo_table *table = &solver->table;

    if (o->least < e->least) {
        e->least = o->least;
        p->least = *o;
    } else if (o->least == e->least && o->least <= table->budget) {
        settle(table, e, p);
        const float value = value_of_option(table, o, o->least);
        if (value < e->at_least)
            e->at_least = value;
    }
    if (o->least <= table->budget)
        try_slots(solver, o, mo_table_array(table, e), shift, p);
}

/* Every move of it was made. */
static mo_entry *end_entry(const mo_solver *solver, mo_part part)
{
    mo_entry *e = mo_table_entry(&solver->table, part);

    if (!e->done) {
        settle(&solver->table, e, progress_of(solver, part.t, part.right));
        mo_table_end(&solver->table, e);
    }
    return e;
}

static void try_leaves(const mo_solver *solver, mo_part part)
{
    const mo_table *table = &solver->table;
    const size_t count = mo_moves_leaves(&solver->moves, part, solver->list);

    for (size_t i = 0; i < count; i++) {
        const mo_move *move = &solver->list[i];
        const uint64_t base = mo_moves_base(&solver->moves, part.t, part.right);
        const mo_part left = mo_move_left(move, part.t, part.right);
        const option o = option_of(move, base, mo_table_find(table, left), NULL);
        try_option(solver, &o, mo_table_entry(table, part), mo_table_shift(table, move->less),
                   progress_of(solver, part.t, part.right));
    }
    end_entry(solver, part);
}

/* One move, for all parts that it reaches. */
static void try_move(const mo_solver *solver, mo_part part, const mo_move *move)
{
    const mo_table *table = &solver->table;
    const mo_moves *moves = &solver->moves;
    /* A part is done when it is asked for as a right part: all its own moves came before. */
    const mo_entry *right = move->right.kind == MO_PART_NONE ? NULL : end_entry(solver, move->right);
    const size_t shift = mo_table_shift(table, move->less);

    for (size_t t = mo_move_reach(move, 0); t < moves->chain->length; t++) {
        const size_t rights = mo_table_pair(table, part.s, t)->rights;
        part.t = (uint16_t)t;
        for (size_t r = 0; r < rights; r++) {
            if (t < mo_move_reach(move, r))
                continue;
            const mo_part left = mo_move_left(move, t, r);
            const option o = option_of(move, mo_moves_base(moves, t, r), mo_table_find(table, left), right);
            part.right = (uint8_t)r;
            try_option(solver, &o, mo_table_entry(table, part), left.kind == MO_PART_NONE ? 0 : shift,
                       progress_of(solver, t, r));
        }
    }
}

/* All parts of one kind that begin at s. */
static void fill(const mo_solver *solver, mo_part part)
{
    const mo_table *table = &solver->table;
    const size_t stages = solver->moves.chain->length;
    size_t count;

    for (size_t t = part.s; t < stages; t++)
        for (size_t r = 0; r < mo_table_pair(table, part.s, t)->rights; r++) {
            part.t = (uint16_t)t;
            part.right = (uint8_t)r;
            begin_entry(table, mo_table_entry(table, part), progress_of(solver, t, r));
            if (t == part.s)
                try_leaves(solver, part);
        }
    part.right = 0;
    count = (size_t)part.s + 1 < stages ? mo_moves_list(&solver->moves, part, solver->list) : 0;
    for (size_t i = 0; i < count; i++)
        try_move(solver, part, &solver->list[i]);
    for (size_t t = part.s; t < stages; t++)
        for (size_t r = 0; r < mo_table_pair(table, part.s, t)->rights; r++) {
            part.t = (uint16_t)t;
            part.right = (uint8_t)r;
            end_entry(solver, part);
        }
}

bool mo_solver_advance(mo_solver *solver)
{
    mo_part part;

    if (!solver->from)
        return false;
    part = (mo_part){.kind = MO_PART_O, .s = (uint16_t)--solver->from};
    fill(solver, part);
    part.kind = MO_PART_P;
    if (mo_chain_puts(solver->moves.chain, part.s))
        fill(solver, part);
    if (solver->moves.level == MO_SOLVE_FULL) {
        part.kind = MO_PART_Q;
        for (; part.option < solver->moves.chain->stages[part.s].option_count; part.option++)
            fill(solver, part);
        part.kind = MO_PART_H;
        part.option = 0;
        fill(solver, part);
    }
    return solver->from > 0;
}

/* ---- its life ---------------------------------------------------------------------------------------------------- */

static mo_status take_moves(mo_solver *solver, const mo_chain *chain, mo_solver_level level,
                            mo_detail *detail)
{
    const size_t stages = chain->length;

    solver->forward = mo_host_calloc(stages + 1, sizeof *solver->forward);
    if (!solver->forward)
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory to solve a chain of %zu stages", stages);
    solver->moves = (mo_moves){.chain = chain, .level = level, .forward = solver->forward};
    solver->moves.window = level == MO_SOLVE_DEFAULT ? DEFAULT_WINDOW : stages;
    for (size_t i = 0; i < stages; i++) {
        solver->forward[i + 1] = solver->forward[i] + chain->stages[i].options[0].forward;
        if (chain->stages[i].option_count > solver->moves.most_options)
            solver->moves.most_options = chain->stages[i].option_count;
    }
    solver->progress = mo_host_calloc(stages, (solver->moves.most_options + 1u) * sizeof *solver->progress);
    solver->list = mo_host_calloc(mo_moves_most(&solver->moves), sizeof *solver->list);
    if (!solver->progress || !solver->list)
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory to solve a chain of %zu stages", stages);
    solver->from = stages;
    return MO_OK;
}

mo_status mo_solver_open(const mo_chain *chain, uint64_t budget, size_t slots, mo_solver_level level,
                         mo_detail *detail, mo_solver **out)
{
    mo_solver *solver;
    mo_status status;

    if (!slots || slots > MO_SOLVER_MAX_SLOTS)
        return mo_fail(detail, MO_INVALID, 0, "slots=%zu: expected 1 to %d", slots, MO_SOLVER_MAX_SLOTS);
    solver = mo_host_calloc(1, sizeof *solver);
    if (!solver)
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory to solve a chain");
    if (budget > MO_CHAIN_MAX_BYTES)
        budget = MO_CHAIN_MAX_BYTES; /* which holds all there is */
    status = mo_relax_get(&solver->kernels, detail);
    if (!status)
        status = take_moves(solver, chain, level, detail);
    if (!status)
        status = mo_table_open(&solver->moves, budget, slots, detail, &solver->table);
    if (status)
        mo_solver_close(solver);
    else
        *out = solver;
    return status;
}

void mo_solver_close(mo_solver *solver)
{
    if (!solver)
        return;
    mo_table_close(&solver->table);
    mo_host_free(solver->forward);
    mo_host_free(solver->progress);
    mo_host_free(solver->list);
    mo_host_free(solver);
}

/* ---- what came out ----------------------------------------------------------------------------------------------- */

static mo_part whole(const mo_solver *solver)
{
    return (mo_part){.kind = MO_PART_O, .t = (uint16_t)(solver->moves.chain->length - 1)};
}

uint64_t mo_solver_least(const mo_solver *solver)
{
    return mo_table_entry(&solver->table, whole(solver))->least;
}

size_t mo_solver_curve(const mo_solver *solver, mo_solver_point *points)
{
    const mo_table *table = &solver->table;
    const mo_entry *e = mo_table_entry(table, whole(solver));
    const float *array = mo_table_array(table, e);
    float seconds = e->at_least;
    size_t count = 0;

    if (e->least > table->budget)
        return 0;
    if (points)
        points[count] = (mo_solver_point){e->least, seconds};
    count++;
    for (size_t k = e->first; k <= table->last; k++) {
        if (!(array[k] < seconds))
            continue;
        seconds = array[k];
        if (points)
            points[count] = (mo_solver_point){mo_table_bytes(table, k), seconds};
        count++;
    }
    return count;
}

/* The move of a part that takes the least seconds with m bytes, m being enough. */
static mo_move best_move(const mo_solver *solver, mo_part part, uint64_t m, mo_move *list)
{
    const mo_table *table = &solver->table;
    const mo_moves *moves = &solver->moves;
    const bool leaf = part.s == part.t;
    const size_t count = leaf ? mo_moves_leaves(moves, part, list) : mo_moves_list(moves, part, list);
    const uint64_t base = mo_moves_base(moves, part.t, part.right);
    const mo_move *best = list;
    float seconds = INFINITY;

    for (size_t i = 0; i < count; i++) {
        if (!leaf && part.t < mo_move_reach(&list[i], part.right))
            continue;
        const mo_part left = mo_move_left(&list[i], part.t, part.right);
        const option o =
            option_of(&list[i], base, mo_table_find(table, left), mo_table_find(table, list[i].right));
        if (o.least > m)
            continue;
        const float value = value_of_option(table, &o, m);
        if (value < seconds) {
            best = &list[i];
            seconds = value;
        }
    }
    MO_ASSERT(seconds < INFINITY);
    return *best;
}

mo_status mo_solver_schedule(const mo_solver *solver, uint64_t budget, mo_detail *detail, mo_schedule *out)
{
    const mo_table *table = &solver->table;
    const mo_moves *moves = &solver->moves;
    const uint64_t least = mo_solver_least(solver);
    /* Steps still to be done, the next one last. While the left part of a move is done no more than two of its steps
     * wait; that part is shorter, and any other as long has a greater `right`. */
    const size_t most = mo_moves_most_steps(moves), room = most + 4 * (moves->chain->length + (size_t)1);
    mo_step *todo = NULL, *steps = NULL;
    mo_move *list = NULL;
    mo_schedule schedule = {0};
    mo_status status = MO_OK;
    size_t count = 0;

    if (budget > MO_CHAIN_MAX_BYTES)
        budget = MO_CHAIN_MAX_BYTES;
    if (budget < least || budget > table->budget)
        return mo_fail(detail, MO_INVALID, 0,
                       "a budget of %" PRIu64 " bytes is not within %" PRIu64 " and %" PRIu64, budget, least,
                       table->budget);
    todo = mo_host_calloc(room, sizeof *todo);
    steps = mo_host_calloc(most, sizeof *steps);
    list = mo_host_calloc(mo_moves_most(moves), sizeof *list);
    if (!todo || !steps || !list)
        status = mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory for a schedule");
    else
        todo[count++] = (mo_step){.part = whole(solver), .bytes = budget};
    while (count && !status) {
        const mo_step step = todo[--count];
        if (step.part.kind == MO_PART_NONE) {
            status =
                mo_schedule_add(&schedule, step.action.op, step.action.stage, step.action.option, detail);
            continue;
        }
        const mo_move move = best_move(solver, step.part, step.bytes, list);
        size_t written = mo_move_write(moves, step.part, &move, step.bytes, steps);
        MO_ASSERT(written <= most && count + written <= room);
        while (written)
            todo[count++] = steps[--written];
    }
    mo_host_free(todo);
    mo_host_free(steps);
    mo_host_free(list);
    if (status)
        mo_schedule_clear(&schedule);
    else
        *out = schedule;
    return status;
}
