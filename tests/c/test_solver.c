/* The solver against the paper's recurrence, written as it stands; and what every level promises, on random chains.
 * That the schedules are as good as any, tests/unit/checkpoint/test_chain_oracle.py asks. */
#include "checkpoint/solver.h"

#include <math.h>

#include "base/hostmem.h"
#include "chain_fixture.h"

static mo_solver *solved(const mo_chain *chain, uint64_t budget, size_t slots, mo_solver_level level)
{
    mo_solver *solver = NULL;
    mo_detail detail;

    if (mo_solver_open(chain, budget, slots, level, &detail, &solver))
        TEST_FAIL("%s", detail.text);
    while (mo_solver_advance(solver))
        continue;
    CHECK(!mo_solver_advance(solver));
    return solver;
}

/* Seconds and peak of the schedule for a budget. */
static mo_replay_totals totals_of(const mo_solver *solver, const mo_chain *chain, uint64_t budget)
{
    mo_schedule schedule;
    mo_replay_totals totals;
    mo_detail detail;

    if (mo_solver_schedule(solver, budget, &detail, &schedule) ||
        mo_schedule_replay(chain, schedule.actions, schedule.count, &detail, NULL, &totals))
        TEST_FAIL("%s", detail.text);
    mo_schedule_clear(&schedule);
    return totals;
}

/* ---- the paper's recurrence -------------------------------------------------------------------------------------- */

/* puts: a[s] is counted in m, and may be put away. */
static double persistent(const mo_chain *c, size_t s, size_t t, uint64_t m, bool puts)
{
    const uint64_t own = puts ? mo_chain_input(c, s) : 0;
    const double away = puts ? c->stages[s].put + c->stages[s].get : 0;
    const uint64_t d = mo_chain_grad(c, s), d1 = mo_chain_grad(c, s + 1), dt = mo_chain_grad(c, t + 1);
    uint64_t need = 0;
    double best = puts && m >= own ? persistent(c, s, t, m - own, false) : INFINITY, ran = 0;

    for (size_t k = 0; k < c->stages[s].option_count; k++) {
        const mo_chain_option *o = &c->stages[s].options[k];
        const uint64_t forward = own + dt + o->saved + o->forward_overhead,
                       backward = own + d1 + o->saved + d + o->backward_overhead;
        if (m < forward || m < backward || (puts && s == t))
            continue;
        best = fmin(best,
                    s == t ? o->remake + o->backward
                           : o->forward + o->backward + away + persistent(c, s + 1, t, m - o->saved, false));
    }
    for (size_t j = s + 1; j <= t; j++) {
        const uint64_t kept = j > s + 1 ? mo_chain_input(c, j - 1) : own, a = mo_chain_input(c, j);
        const bool next = mo_chain_puts(c, j);
        const uint64_t running = dt + kept + a + c->stages[j - 1].options[0].forward_overhead;
        need = running > need ? running : need;
        ran += c->stages[j - 1].options[0].forward;
        if (m >= need && m >= a)
            best = fmin(best, ran + away + persistent(c, j, t, next ? m : m - a, next) +
                                  persistent(c, s, j - 1, m, puts));
    }
    return best;
}

TEST(the_persistent_level_is_the_papers_recurrence)
{
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(60, 3000); round++) {
        mo_chain chain = chain_random(&random, 1 + chain_up_to(&random, 5), 1 + chain_up_to(&random, 2), 1);
        const uint64_t budget = chain_plenty(&chain) * (1 + chain_up_to(&random, 9)) / 10;
        if (round % 2)
            chain_put_some(&random, &chain);
        mo_solver *solver = solved(&chain, budget, 500, MO_SOLVE_PERSISTENT);
        const double wanted = persistent(&chain, 0, chain.length - 1, budget, false);
        CHECK((mo_solver_least(solver) <= budget) == isfinite(wanted));
        if (isfinite(wanted))
            CHECK(totals_of(solver, &chain, budget).seconds == wanted);
        mo_solver_close(solver);
        mo_chain_close(&chain);
    }
}

/* ---- what every level promises ----------------------------------------------------------------------------------- */

/* Of one chain. Where its sizes do not fit the slots, levels may differ by what is rounded. */
static void check_levels(const mo_chain *chain, uint64_t budget, size_t slots, bool exact)
{
    double before = INFINITY;
    uint64_t least_before = MO_SOLVER_NEVER;

    for (mo_solver_level level = MO_SOLVE_PERSISTENT; level < MO_SOLVE_COUNT; level++) {
        mo_solver *solver = solved(chain, budget, slots, level);
        const uint64_t least = mo_solver_least(solver);
        const size_t count = mo_solver_curve(solver, NULL);
        mo_solver_point *points = mo_host_calloc(count, sizeof *points);

        CHECK(least <= least_before);
        least_before = least;
        CHECK_EQ(mo_solver_curve(solver, points), count);
        CHECK_EQ(count == 0, least > budget);
        for (size_t i = 0; i < count; i++) {
            const mo_replay_totals totals = totals_of(solver, chain, points[i].budget);
            CHECK(totals.peak <= points[i].budget);
            CHECK(totals.seconds <= (double)points[i].seconds * (1 + 1e-6));
            CHECK(!exact || totals.seconds >= (double)points[i].seconds * (1 - 1e-6));
            CHECK(i == 0
                      ? points[i].budget == least
                      : points[i].budget > points[i - 1].budget && points[i].seconds < points[i - 1].seconds);
        }
        if (count) {
            const double seconds = (double)points[count - 1].seconds;
            CHECK(!exact || seconds <= before * (1 + 1e-6));
            before = seconds;
        }
        mo_host_free(points);
        mo_solver_close(solver);
    }
}

TEST(every_point_of_the_curve_is_kept_and_no_level_is_worse_than_the_one_before)
{
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(25, 1000); round++) {
        mo_chain chain = chain_random(&random, 1 + chain_up_to(&random, 10), 1 + chain_up_to(&random, 2), 1);
        const uint64_t budget = chain_plenty(&chain) * (1 + chain_up_to(&random, 9)) / 10;
        if (round % 2)
            chain_put_some(&random, &chain);
        check_levels(&chain, budget, 1000, /* exact */ true);
        mo_chain_close(&chain);
    }
}

TEST(where_sizes_do_not_fit_the_slots_the_peak_stays_within_the_budget_too)
{
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(40, 1000); round++) {
        mo_chain chain =
            chain_random(&random, 1 + chain_up_to(&random, 10), 1 + chain_up_to(&random, 2), 1009);
        chain.stages[0].output += chain_up_to(&random, 900);
        chain.stages[0].options[0].saved += 1000;
        chain.stages[0].input_grad += chain_up_to(&random, 900);
        if (chain.stages[0].option_count == 1)
            check_levels(&chain, chain_plenty(&chain) * (1 + chain_up_to(&random, 9)) / 10,
                         1 + chain_up_to(&random, 60), /* exact */ false);
        mo_chain_close(&chain);
    }
}

TEST(the_least_budget_is_known_to_the_byte)
{
    uint64_t random = test_seed();

    for (int round = 0; round < test_rounds(25, 500); round++) {
        mo_chain chain = chain_random(&random, 1 + chain_up_to(&random, 9), 2, 997);
        chain_put_some(&random, &chain);
        for (mo_solver_level level = MO_SOLVE_PERSISTENT; level < MO_SOLVE_COUNT; level++) {
            mo_solver *none = solved(&chain, 0, 7, level), *solver;
            const uint64_t least = mo_solver_least(none);
            mo_schedule schedule = {0};
            mo_detail detail;
            CHECK(least > 0 && least < MO_SOLVER_NEVER);
            CHECK_EQ(mo_solver_schedule(none, 0, &detail, &schedule), MO_INVALID);
            CHECK_EQ(mo_solver_schedule(none, least, &detail, &schedule), MO_INVALID);
            mo_solver_close(none);
            solver = solved(&chain, least, 7, level);
            CHECK_EQ(mo_solver_least(solver), least);
            CHECK_EQ(totals_of(solver, &chain, least).peak, least);
            CHECK_EQ(mo_solver_schedule(solver, least - 1, &detail, &schedule), MO_INVALID);
            mo_solver_close(solver);
            solver = solved(&chain, least - 1, 7, level);
            CHECK_EQ(mo_solver_curve(solver, NULL), 0);
            mo_solver_close(solver);
        }
        mo_chain_close(&chain);
    }
}

TEST(with_plenty_everything_is_kept)
{
    uint64_t random = test_seed();
    mo_chain chain = chain_random(&random, 30, 1, 1 << 20);
    mo_solver *solver = solved(&chain, UINT64_MAX, 500, MO_SOLVE_DEFAULT);
    double plain = 0;

    for (size_t i = 0; i < chain.length; i++)
        plain +=
            chain.stages[i].options[0].backward +
            (i + 1 < chain.length ? chain.stages[i].options[0].forward : chain.stages[i].options[0].remake);
    CHECK(totals_of(solver, &chain, UINT64_MAX).seconds == plain);
    mo_solver_close(solver);
    mo_chain_close(&chain);
}

TEST(every_instruction_set_finds_the_same)
{
    uint64_t random = test_seed();
    mo_chain chain = chain_random(&random, 14, 2, 1000003);
    const uint64_t budget = chain_plenty(&chain) / 4;
    mo_solver_point points[2][600];
    size_t count[2];

    for (int best = 0; best < 2; best++) {
        CHECK_EQ(best ? unsetenv("MEMOPT_ISA") : setenv("MEMOPT_ISA", "generic", 1), 0);
        mo_solver *solver = solved(&chain, budget, 500, MO_SOLVE_FULL);
        count[best] = mo_solver_curve(solver, points[best]);
        mo_solver_close(solver);
    }
    CHECK(count[0] > 0);
    CHECK_EQ(count[0], count[1]);
    for (size_t i = 0; i < count[0]; i++)
        CHECK(points[0][i].budget == points[1][i].budget && points[0][i].seconds == points[1][i].seconds);
    mo_chain_close(&chain);
}

/* ---- refusals and failures --------------------------------------------------------------------------------------- */

TEST(slots_and_tables_have_limits)
{
    uint64_t random = 3;
    mo_chain chain = chain_random(&random, MO_CHAIN_MAX_STAGES, 1, 1);
    mo_solver *solver = NULL;
    mo_detail detail;

    CHECK_EQ(mo_solver_open(&chain, 100, 0, MO_SOLVE_DEFAULT, &detail, &solver), MO_INVALID);
    CHECK_EQ(mo_solver_open(&chain, 100, MO_SOLVER_MAX_SLOTS + 1, MO_SOLVE_DEFAULT, &detail, &solver),
             MO_INVALID);
    CHECK_EQ(mo_solver_open(&chain, (uint64_t)1 << 40, MO_SOLVER_MAX_SLOTS, MO_SOLVE_FULL, &detail, &solver),
             MO_INVALID);
    CHECK(strstr(detail.text, "fewer slots"));
    CHECK(!solver);
    mo_chain_close(&chain);
    mo_solver_close(NULL);
}

TEST(without_host_memory_nothing_is_left)
{
    uint64_t random = test_seed();
    mo_chain chain = chain_random(&random, 5, 2, 1);
    const uint64_t budget = chain_plenty(&chain);
    const size_t before = mo_host_live();
    mo_schedule schedule = {0};
    mo_status status = MO_NO_HOST_MEMORY;

    for (uint64_t after = 0; status == MO_NO_HOST_MEMORY; after++) {
        mo_solver *solver = NULL;
        CHECK(after < 20);
        mo_host_fail_after(after);
        status = mo_solver_open(&chain, budget, 100, MO_SOLVE_FULL, NULL, &solver);
        if (!status) {
            while (mo_solver_advance(solver))
                continue;
            status = mo_solver_schedule(solver, budget, NULL, &schedule);
        }
        mo_host_fail_never();
        CHECK(status == MO_OK || (status == MO_NO_HOST_MEMORY && !schedule.count));
        mo_solver_close(solver);
        if (status)
            CHECK_EQ(mo_host_live(), before);
    }
    CHECK_EQ(status, MO_OK);
    mo_schedule_clear(&schedule);
    CHECK_EQ(mo_host_live(), before);
    mo_chain_close(&chain);
}

TEST_MAIN
