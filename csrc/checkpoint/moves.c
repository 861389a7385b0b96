#include "checkpoint/moves.h"

#include "base/assert.h"

static uint64_t most(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static const mo_chain_option *option_of(const mo_moves *moves, size_t stage, size_t k)
{
    return &moves->chain->stages[stage].options[k];
}

static uint32_t options_of(const mo_moves *moves, size_t stage)
{
    return moves->chain->stages[stage].option_count;
}

/* Seconds of running s..j-1. */
static double run(const mo_moves *moves, size_t s, size_t j)
{
    return moves->forward[j] - moves->forward[s];
}

/* Bytes that a part holds at its left end, beyond what its caller counts. */
static uint64_t hold_of(const mo_moves *moves, mo_part part)
{
    return part.kind == MO_PART_O || part.kind == MO_PART_P ? 0 : mo_chain_input(moves->chain, part.s);
}

/* Seconds of putting away a part's input, and of getting it back. */
static double away(const mo_moves *moves, mo_part part)
{
    const mo_chain_stage *stage = &moves->chain->stages[part.s];

    return part.kind == MO_PART_P ? stage->put + stage->get : 0;
}

static mo_part part_of(mo_part_kind kind, size_t option, size_t right, size_t s, size_t t)
{
    return (mo_part){(uint8_t)kind, (uint8_t)option, (uint8_t)right, (uint16_t)s, (uint16_t)t};
}

uint64_t mo_moves_base(const mo_moves *moves, size_t t, size_t right)
{
    return mo_chain_grad(moves->chain, t + 1) + (right ? option_of(moves, t, right - 1)->saved : 0);
}

size_t mo_moves_most(const mo_moves *moves)
{
    return moves->most_options + (size_t)moves->chain->length * (moves->most_options + 2);
}

static mo_move stay(const mo_moves *moves, mo_part part)
{
    return (mo_move){.kind = MO_STAY,
                     .less = mo_chain_input(moves->chain, part.s),
                     .left = part_of(MO_PART_O, 0, 0, part.s, 0)};
}

/* H has no leaf: of nothing to do nothing is left. */
size_t mo_moves_leaves(const mo_moves *moves, mo_part part, mo_move *out)
{
    const size_t s = part.s;
    const uint64_t grad = mo_chain_grad(moves->chain, s);
    size_t count = 0;

    if (part.kind == MO_PART_O && part.right) {
        const mo_chain_option *option = option_of(moves, s, part.right - 1u);
        out[count++] = (mo_move){.kind = MO_LEAF,
                                 .option = (uint8_t)(part.right - 1),
                                 .seconds = (float)option->backward,
                                 .need = grad + option->backward_overhead};
    } else if (part.kind == MO_PART_O) {
        for (size_t k = 0; k < options_of(moves, s); k++) {
            const mo_chain_option *option = option_of(moves, s, k);
            const uint64_t during = most(option->forward_overhead, grad + option->backward_overhead);
            out[count++] = (mo_move){.kind = MO_LEAF,
                                     .option = (uint8_t)k,
                                     .seconds = (float)(option->remake + option->backward),
                                     .need = option->saved + during};
        }
    } else if (part.kind == MO_PART_P) {
        out[count++] = stay(moves, part);
    } else if (part.kind == MO_PART_Q && !part.right) {
        const mo_chain_option *option = option_of(moves, s, part.option);
        out[count++] =
            (mo_move){.kind = MO_LEAF,
                      .option = part.option,
                      .seconds = (float)option->forward,
                      .need = mo_chain_input(moves->chain, s) + option->saved + option->forward_overhead};
    }
    return count;
}

static size_t list_first(const mo_moves *moves, mo_part part, mo_move *out)
{
    const size_t s = part.s;
    const uint64_t input = part.kind == MO_PART_O ? 0 : mo_chain_input(moves->chain, s); /* while s runs */
    mo_move move = {.kind = MO_FIRST, .left = part_of(MO_PART_O, 0, 0, s + 1, 0)};
    size_t count = 0;

    if (part.kind == MO_PART_H) {
        const mo_chain_option *option = option_of(moves, s, 0);
        move.seconds = (float)option->forward;
        move.less = mo_chain_input(moves->chain, s + 1);
        move.need = input + move.less + option->forward_overhead;
        out[count++] = move;
        return count;
    }
    for (size_t k = 0; k < options_of(moves, s); k++) {
        const mo_chain_option *option = option_of(moves, s, k);
        if (part.kind == MO_PART_Q && k != part.option)
            continue;
        move.option = (uint8_t)k;
        move.less = option->saved;
        move.seconds = (float)option->forward;
        move.need = input + option->saved + option->forward_overhead;
        if (part.kind != MO_PART_Q) {
            move.seconds = (float)(option->forward + option->backward + away(moves, part));
            move.alone = input + mo_chain_grad(moves->chain, s + 1) + option->saved +
                         mo_chain_grad(moves->chain, s) + option->backward_overhead;
        }
        out[count++] = move;
    }
    return count;
}

/* Trick at j; running there needs `there`. */
static size_t list_tricks(const mo_moves *moves, mo_part part, size_t j, uint64_t there, mo_move *out)
{
    const uint64_t hold = hold_of(moves, part);
    size_t count = 0;

    for (size_t k = 0; k < options_of(moves, j); k++) {
        const mo_chain_option *option = option_of(moves, j, k);
        mo_move move = {.kind = MO_TRICK,
                        .option = (uint8_t)k,
                        .j = (uint16_t)j,
                        .seconds = (float)(run(moves, part.s, j) + away(moves, part)),
                        .need = there,
                        .less = hold,
                        .left = part_of(MO_PART_Q, k, 0, j, 0),
                        .right = part_of(part.kind, part.option, k + 1, part.s, j)};
        if (moves->level != MO_SOLVE_FULL) { /* Q by `first` alone, written out */
            move.seconds = (float)(run(moves, part.s, j) + away(moves, part) + option->forward);
            move.need = most(there, hold + mo_chain_input(moves->chain, j) + option->saved +
                                        option->forward_overhead);
            move.less = hold + option->saved;
            move.left = part_of(MO_PART_O, 0, 0, j + 1, 0);
        }
        out[count++] = move;
    }
    return count;
}

size_t mo_moves_list(const mo_moves *moves, mo_part part, mo_move *out)
{
    const mo_chain *chain = moves->chain;
    const size_t s = part.s;
    const uint64_t hold = hold_of(moves, part);
    uint64_t need = 0;
    size_t count = list_first(moves, part, out);

    if (part.kind == MO_PART_P)
        out[count++] = stay(moves, part);
    for (size_t j = s + 1; j < chain->length; j++) {
        const double seconds = run(moves, s, j) + away(moves, part);
        const bool is_own = j > s + 1 || part.kind == MO_PART_P; /* a[j-1]; else it is counted elsewhere */
        const bool puts = mo_chain_puts(chain, j);
        need = most(need, hold + (is_own ? mo_chain_input(chain, j - 1) : 0) + mo_chain_input(chain, j) +
                              option_of(moves, j - 1, 0)->forward_overhead);
        out[count++] = (mo_move){.kind = MO_KEEP,
                                 .j = (uint16_t)j,
                                 .seconds = (float)seconds,
                                 .need = need,
                                 .less = hold + (puts ? 0 : mo_chain_input(chain, j)),
                                 .left = part_of(puts ? MO_PART_P : MO_PART_O, 0, 0, j, 0),
                                 .right = part_of(part.kind, part.option, 0, s, j - 1)};
        if (moves->level == MO_SOLVE_PERSISTENT || j - s > moves->window)
            continue;
        count += list_tricks(moves, part, j, need, out + count);
        if (moves->level == MO_SOLVE_FULL)
            out[count++] = (mo_move){.kind = MO_AGAIN,
                                     .j = (uint16_t)j,
                                     .seconds = (float)seconds,
                                     .need = need,
                                     .less = hold,
                                     .left = part_of(MO_PART_H, 0, 0, j, 0),
                                     .right = part_of(part.kind, part.option, 0, s, j)};
    }
    MO_ASSERT(count <= mo_moves_most(moves));
    return count;
}

size_t mo_move_reach(const mo_move *move, size_t right)
{
    if (move->kind == MO_FIRST)
        return move->left.s;
    if (move->kind == MO_STAY)
        return move->left.s + 1u; /* of one stage it is a leaf */
    /* To leave s[j] where it is there already, or nothing, there must be something beyond it. */
    return move->j + (size_t)(move->kind == MO_AGAIN || (move->kind == MO_TRICK && right));
}

/* ---- as operations ----------------------------------------------------------------------------------------------- */

size_t mo_moves_most_steps(const mo_moves *moves)
{
    /* Running s..j-1, what is saved, dropped, put and got, two parts. */
    return (size_t)moves->chain->length + 5;
}

static mo_step act(mo_op op, size_t stage, size_t option)
{
    return (mo_step){.action = {(uint8_t)op, (uint8_t)option, (uint32_t)stage}};
}

size_t mo_move_write(const mo_moves *moves, mo_part part, const mo_move *move, uint64_t m, mo_step *out)
{
    const mo_part left = mo_move_left(move, part.t, part.right);
    const size_t s = part.s, k = move->option;
    const bool begins = move->kind == MO_LEAF || move->kind == MO_FIRST;
    const bool puts = part.kind == MO_PART_P && move->kind != MO_STAY;
    size_t count = 0;

    if (begins) {
        if (part.kind == MO_PART_H)
            out[count++] = act(MO_OP_FNONE, s, 0);
        else if (move->kind == MO_FIRST || part.kind == MO_PART_Q || !part.right)
            out[count++] = act(MO_OP_FALL, s, k);
        if (part.kind == MO_PART_Q)
            out[count++] = act(MO_OP_DROP_INPUT, s, 0);
    } else if (move->kind != MO_STAY) {
        out[count++] = act(MO_OP_FCK, s, 0);
    }
    if (puts)
        out[count++] = act(MO_OP_PUT_INPUT, s, 0);
    for (size_t i = s + 1; i < move->j; i++)
        out[count++] = act(MO_OP_FNONE, i, 0);
    if (move->kind == MO_TRICK && moves->level != MO_SOLVE_FULL) {
        out[count++] = act(MO_OP_FALL, move->j, k);
        out[count++] = act(MO_OP_DROP_INPUT, move->j, 0);
    }
    if (left.kind != MO_PART_NONE)
        out[count++] = (mo_step){.part = left, .bytes = m - move->less};
    if (puts)
        out[count++] = act(MO_OP_GET_INPUT, s, 0);
    if (move->right.kind != MO_PART_NONE)
        out[count++] = (mo_step){.part = move->right, .bytes = m};
    if (begins && (part.kind == MO_PART_O || part.kind == MO_PART_P))
        out[count++] = act(MO_OP_BWD, s, k);
    return count;
}
