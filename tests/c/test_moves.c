#include "checkpoint/moves.h"

#include "base/hostmem.h"
#include "chain_fixture.h"

enum { STAGES = 6 };

typedef struct fixture {
    mo_chain chain;
    double forward[STAGES + 1];
    mo_moves moves;
    mo_move *list;
    mo_step *steps;
} fixture;

static fixture fixture_of(mo_solver_level level, size_t window)
{
    uint64_t random = 7;
    fixture f = {.chain = chain_random(&random, STAGES, 2, 1)};

    for (size_t i = 0; i < STAGES; i++)
        f.forward[i + 1] = f.forward[i] + f.chain.stages[i].options[0].forward;
    f.moves = (mo_moves){.level = level, .window = window, .most_options = 2};
    f.list = mo_host_calloc(2 + STAGES * 4, sizeof *f.list);
    f.steps = mo_host_calloc(STAGES + 5, sizeof *f.steps);
    return f;
}

static void tie(fixture *f)
{
    f->moves.chain = &f->chain;
    f->moves.forward = f->forward;
    CHECK_EQ(mo_moves_most(&f->moves), 2 + STAGES * 4);
    CHECK_EQ(mo_moves_most_steps(&f->moves), STAGES + 5);
}

static void end(fixture *f)
{
    mo_host_free(f->list);
    mo_host_free(f->steps);
    mo_chain_close(&f->chain);
}

static size_t count_of(const mo_move *list, size_t count, mo_move_kind kind)
{
    size_t found = 0;

    for (size_t i = 0; i < count; i++)
        found += list[i].kind == kind;
    return found;
}

TEST(each_level_adds_moves_to_the_one_before)
{
    const mo_part part = {.kind = MO_PART_O, .s = 1, .t = STAGES - 1};

    fixture f = fixture_of(MO_SOLVE_PERSISTENT, STAGES);
    tie(&f);
    size_t count = mo_moves_list(&f.moves, part, f.list);
    CHECK_EQ(count, 2 + 4); /* two options, j = 2..5 */
    CHECK_EQ(count_of(f.list, count, MO_FIRST), 2);
    f.moves.level = MO_SOLVE_DEFAULT;
    f.moves.window = 3;
    count = mo_moves_list(&f.moves, part, f.list);
    CHECK_EQ(count_of(f.list, count, MO_KEEP), 4);
    CHECK_EQ(count_of(f.list, count, MO_TRICK), 3 * 2);
    CHECK_EQ(count_of(f.list, count, MO_AGAIN), 0);
    f.moves.level = MO_SOLVE_FULL;
    f.moves.window = STAGES;
    count = mo_moves_list(&f.moves, part, f.list);
    CHECK_EQ(count_of(f.list, count, MO_TRICK), 4 * 2);
    CHECK_EQ(count_of(f.list, count, MO_AGAIN), 4);
    end(&f);
}

TEST(a_single_stage_has_leaves_but_h)
{
    fixture f = fixture_of(MO_SOLVE_FULL, STAGES);
    tie(&f);

    CHECK_EQ(mo_moves_leaves(&f.moves, (mo_part){MO_PART_O, 0, 0, 2, 2}, f.list), 2);
    CHECK_EQ(mo_moves_leaves(&f.moves, (mo_part){MO_PART_O, 0, 2, 2, 2}, f.list), 1);
    CHECK_EQ(f.list[0].option, 1);
    CHECK(f.list[0].seconds == (float)f.chain.stages[2].options[1].backward);
    CHECK_EQ(mo_moves_leaves(&f.moves, (mo_part){MO_PART_Q, 1, 0, 2, 2}, f.list), 1);
    CHECK_EQ(mo_moves_leaves(&f.moves, (mo_part){MO_PART_Q, 1, 1, 2, 2}, f.list), 0);
    CHECK_EQ(mo_moves_leaves(&f.moves, (mo_part){MO_PART_H, 0, 0, 2, 2}, f.list), 0);
    end(&f);
}

/* The steps of a move as text, "fck 1 O(3,5) 5 …". */
static const char *text_of(const fixture *f, mo_part part, const mo_move *move, uint64_t m)
{
    static char text[400];
    const size_t count = mo_move_write(&f->moves, part, move, m, f->steps);
    size_t at = 0;

    CHECK(count <= STAGES + 5);
    text[0] = 0;
    for (size_t i = 0; i < count; i++) {
        const mo_step *step = &f->steps[i];
        if (step->part.kind == MO_PART_NONE)
            at += (size_t)snprintf(text + at, sizeof text - at, "%s %u/%u, ", mo_op_name(step->action.op),
                                   (unsigned)step->action.stage, (unsigned)step->action.option);
        else
            at += (size_t)snprintf(text + at, sizeof text - at, "%c%u/%u(%u,%u;-%u), ",
                                   " OPQH"[step->part.kind], (unsigned)step -> part.option,
                                   (unsigned)step->part.right, (unsigned)step->part.s, (unsigned)step->part.t,
                                   (unsigned)(m - step->bytes));
    }
    return text;
}

static const mo_move *move_of(const fixture *f, mo_part part, mo_move_kind kind, size_t j, size_t option)
{
    const size_t count = mo_moves_list(&f->moves, part, f->list);

    for (size_t i = 0; i < count; i++)
        if (f->list[i].kind == kind && f->list[i].j == j && f->list[i].option == option)
            return &f->list[i];
    TEST_FAIL("no move %d with j %zu, option %zu", (int)kind, j, option);
}

TEST(moves_are_the_operations_that_the_recurrence_says)
{
    const mo_part o = {.kind = MO_PART_O, .right = 1, .s = 1, .t = 5}, q = {MO_PART_Q, 1, 0, 1, 5},
                  h = {MO_PART_H, 0, 0, 1, 5};
    char wanted[400];
    fixture f = fixture_of(MO_SOLVE_FULL, STAGES);
    tie(&f);
    const mo_chain *c = &f.chain;
    const unsigned a1 = (unsigned)mo_chain_input(c, 1), a2 = (unsigned)mo_chain_input(c, 2),
                   a3 = (unsigned)mo_chain_input(c, 3);

    snprintf(wanted, sizeof wanted, "fall 1/1, O0/1(2,5;-%u), bwd 1/1, ",
             (unsigned)c->stages[1].options[1].saved);
    CHECK_STR(text_of(&f, o, move_of(&f, o, MO_FIRST, 0, 1), 1000), wanted);
    snprintf(wanted, sizeof wanted, "fall 1/1, drop_input 1/0, O0/0(2,5;-%u), ",
             (unsigned)c->stages[1].options[1].saved);
    CHECK_STR(text_of(&f, q, move_of(&f, q, MO_FIRST, 0, 1), 1000), wanted);
    snprintf(wanted, sizeof wanted, "fnone 1/0, O0/0(2,5;-%u), ", a2);
    CHECK_STR(text_of(&f, h, move_of(&f, h, MO_FIRST, 0, 0), 1000), wanted);
    snprintf(wanted, sizeof wanted, "fck 1/0, fnone 2/0, O0/1(3,5;-%u), O0/0(1,2;-0), ", a3);
    CHECK_STR(text_of(&f, o, move_of(&f, o, MO_KEEP, 3, 0), 1000), wanted);
    snprintf(wanted, sizeof wanted, "fck 1/0, fnone 2/0, O0/0(3,5;-%u), Q1/0(1,2;-0), ", a1 + a3);
    CHECK_STR(text_of(&f, q, move_of(&f, q, MO_KEEP, 3, 0), 1000), wanted);
    CHECK_STR(text_of(&f, o, move_of(&f, o, MO_TRICK, 3, 1), 1000),
              "fck 1/0, fnone 2/0, Q1/1(3,5;-0), O0/2(1,3;-0), ");
    CHECK_STR(text_of(&f, o, move_of(&f, o, MO_AGAIN, 3, 0), 1000),
              "fck 1/0, fnone 2/0, H0/1(3,5;-0), O0/0(1,3;-0), ");
    f.moves.level = MO_SOLVE_DEFAULT;
    snprintf(wanted, sizeof wanted,
             "fck 1/0, fnone 2/0, fall 3/1, drop_input 3/0, O0/1(4,5;-%u), O0/2(1,3;-0), ",
             (unsigned)c->stages[3].options[1].saved);
    CHECK_STR(text_of(&f, o, move_of(&f, o, MO_TRICK, 3, 1), 1000), wanted);
    end(&f);
}

TEST(moves_put_an_input_away_and_get_it_back)
{
    const mo_part o = {.kind = MO_PART_O, .s = 1, .t = 5},
                  p = {.kind = MO_PART_P, .right = 1, .s = 2, .t = 5};
    char wanted[400];
    fixture f = fixture_of(MO_SOLVE_FULL, STAGES);
    tie(&f);
    mo_chain *c = &f.chain;
    c->stages[2].put = 3;
    c->stages[2].get = 4;
    c->stages[4].put = 1;
    const unsigned a2 = (unsigned)mo_chain_input(c, 2), a3 = (unsigned)mo_chain_input(c, 3),
                   saved = (unsigned)c->stages[2].options[1].saved;

    CHECK_STR(text_of(&f, o, move_of(&f, o, MO_KEEP, 2, 0), 1000), "fck 1/0, P0/0(2,5;-0), O0/0(1,1;-0), ");
    snprintf(wanted, sizeof wanted, "fck 1/0, fnone 2/0, O0/0(3,5;-%u), O0/0(1,2;-0), ", a3);
    CHECK_STR(text_of(&f, o, move_of(&f, o, MO_KEEP, 3, 0), 1000), wanted);
    snprintf(wanted, sizeof wanted, "O0/1(2,5;-%u), ", a2);
    CHECK_STR(text_of(&f, p, move_of(&f, p, MO_STAY, 0, 0), 1000), wanted);
    snprintf(wanted, sizeof wanted, "fall 2/1, put_input 2/0, O0/1(3,5;-%u), get_input 2/0, bwd 2/1, ",
             saved);
    CHECK_STR(text_of(&f, p, move_of(&f, p, MO_FIRST, 0, 1), 1000), wanted);
    CHECK_STR(text_of(&f, p, move_of(&f, p, MO_KEEP, 4, 0), 1000),
              "fck 2/0, put_input 2/0, fnone 3/0, P0/1(4,5;-0), get_input 2/0, P0/0(2,3;-0), ");
    CHECK_STR(text_of(&f, p, move_of(&f, p, MO_TRICK, 4, 1), 1000),
              "fck 2/0, put_input 2/0, fnone 3/0, Q1/1(4,5;-0), get_input 2/0, P0/2(2,4;-0), ");
    CHECK_STR(text_of(&f, p, move_of(&f, p, MO_AGAIN, 4, 0), 1000),
              "fck 2/0, put_input 2/0, fnone 3/0, H0/1(4,5;-0), get_input 2/0, P0/0(2,4;-0), ");

    const mo_move *first = move_of(&f, p, MO_FIRST, 0, 1), *keep;
    const mo_chain_option *option = &c->stages[2].options[1];
    CHECK(first->seconds == (float)(option->forward + option->backward + 7));
    CHECK_EQ(first->need, a2 + saved + option->forward_overhead);
    CHECK_EQ(first->alone,
             a2 + mo_chain_grad(c, 3) + saved + mo_chain_grad(c, 2) + option->backward_overhead);
    keep = move_of(&f, p, MO_KEEP, 3, 0);
    CHECK(keep->seconds == (float)(c->stages[2].options[0].forward + 7));
    CHECK_EQ(keep->need, a2 + a3 + c->stages[2].options[0].forward_overhead);
    CHECK_EQ(mo_moves_leaves(&f.moves, (mo_part){MO_PART_P, 0, 1, 2, 2}, f.list), 1);
    CHECK_EQ(f.list[0].less, a2);
    end(&f);
}

TEST(a_move_reaches_what_has_something_left_to_do)
{
    const mo_part part = {.kind = MO_PART_O, .s = 1, .t = STAGES - 1};
    fixture f = fixture_of(MO_SOLVE_FULL, STAGES);
    tie(&f);

    CHECK_EQ(mo_move_reach(move_of(&f, part, MO_FIRST, 0, 0), 0), 2);
    CHECK_EQ(mo_move_reach(move_of(&f, part, MO_KEEP, 3, 0), 1), 3);
    CHECK_EQ(mo_move_reach(move_of(&f, part, MO_TRICK, 3, 0), 0), 3);
    CHECK_EQ(mo_move_reach(move_of(&f, part, MO_TRICK, 3, 0), 1), 4);
    CHECK_EQ(mo_move_reach(move_of(&f, part, MO_AGAIN, 3, 0), 0), 4);
    CHECK_EQ(mo_move_left(move_of(&f, part, MO_KEEP, 3, 0), 4, 1).t, 4);
    f.moves.level = MO_SOLVE_DEFAULT;
    CHECK_EQ(mo_move_left(move_of(&f, part, MO_TRICK, 3, 0), 3, 0).kind, MO_PART_NONE);
    end(&f);
}

TEST(the_base_is_the_gradient_and_what_waits)
{
    fixture f = fixture_of(MO_SOLVE_FULL, STAGES);
    tie(&f);

    CHECK_EQ(mo_moves_base(&f.moves, 2, 0), f.chain.stages[3].input_grad);
    CHECK_EQ(mo_moves_base(&f.moves, 5, 0), f.chain.output_grad);
    CHECK_EQ(mo_moves_base(&f.moves, 2, 2),
             f.chain.stages[3].input_grad + f.chain.stages[2].options[1].saved);
    end(&f);
}

TEST_MAIN
