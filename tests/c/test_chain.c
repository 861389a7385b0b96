#include "chain_fixture.h"

#include <math.h>

#include "base/hostmem.h"

static mo_chain two_stages(void)
{
    uint64_t random = 1;

    return chain_random(&random, 2, 2, 1);
}

static void check_refused(const mo_chain *chain, const char *words)
{
    mo_detail detail = {0};

    CHECK_EQ(mo_chain_check(chain, &detail), MO_INVALID);
    if (!strstr(detail.text, words))
        TEST_FAIL("\"%s\" does not say \"%s\"", detail.text, words);
}

TEST(inputs_and_gradients_are_those_of_the_ends_too)
{
    mo_chain chain = two_stages();

    CHECK_EQ(mo_chain_input(&chain, 0), chain.input);
    CHECK_EQ(mo_chain_input(&chain, 2), chain.stages[1].output);
    CHECK_EQ(mo_chain_grad(&chain, 1), chain.stages[1].input_grad);
    CHECK_EQ(mo_chain_grad(&chain, 2), chain.output_grad);
    mo_chain_close(&chain);
}

TEST(what_makes_no_sense_is_refused_by_stage)
{
    mo_chain chain = two_stages();
    mo_chain_option *option = &chain.stages[1].options[1], good = *option;

    option->saved = chain.stages[1].output - 1;
    check_refused(&chain, "stage 1, option 1: saved_bytes");
    *option = good;
    option->forward = NAN;
    check_refused(&chain, "stage 1, option 1: forward_seconds nan");
    *option = good;
    option->backward = -1;
    check_refused(&chain, "backward_seconds -1");
    *option = good;
    option->remake = INFINITY;
    check_refused(&chain, "remake_seconds inf");
    *option = good;
    chain.stages[1].put = NAN;
    check_refused(&chain, "stage 1: put_input_seconds nan");
    chain.stages[1].put = 1;
    chain.stages[1].get = -1;
    check_refused(&chain, "get_input_seconds -1");
    chain.stages[1].get = INFINITY;
    check_refused(&chain, "get_input_seconds inf");
    chain.stages[1].get = 1;
    CHECK(mo_chain_puts(&chain, 1));
    chain.stages[0].put = 1;
    CHECK(!mo_chain_puts(&chain, 0)); /* the caller's */
    chain.stages[0].option_count = 0;
    check_refused(&chain, "stage 0 has 0 options");
    chain.stages[0].option_count = MO_CHAIN_MAX_OPTIONS + 1;
    check_refused(&chain, "stage 0 has 65 options");
    chain.stages[0].option_count = 2;
    option->forward_overhead = UINT64_MAX;
    check_refused(&chain, "2**60");
    option->forward_overhead = MO_CHAIN_MAX_BYTES / 2;
    option->backward_overhead = MO_CHAIN_MAX_BYTES / 2 + 1;
    check_refused(&chain, "2**60");
    *option = good;
    CHECK_EQ(mo_chain_check(&chain, NULL), MO_OK);
    mo_chain_close(&chain);
}

TEST(counts_have_limits)
{
    mo_chain chain;
    mo_detail detail;

    CHECK_EQ(mo_chain_open(0, 0, &detail, &chain), MO_INVALID);
    CHECK_EQ(mo_chain_open(MO_CHAIN_MAX_STAGES + 1, MO_CHAIN_MAX_STAGES + 1, &detail, &chain), MO_INVALID);
    CHECK_EQ(mo_chain_open(2, 1, &detail, &chain), MO_INVALID);
    CHECK_EQ(mo_chain_open(2, 2 * MO_CHAIN_MAX_OPTIONS + 1, &detail, &chain), MO_INVALID);
    mo_chain_close(&chain);
}

TEST(without_host_memory_nothing_is_left)
{
    const size_t before = mo_host_live();
    mo_chain chain;

    for (uint64_t after = 0; after < 2; after++) {
        mo_host_fail_after(after);
        const mo_status status = mo_chain_open(3, 3, NULL, &chain);
        mo_host_fail_never();
        CHECK_EQ(status, MO_NO_HOST_MEMORY);
        CHECK_EQ(mo_host_live(), before);
    }
}

TEST_MAIN
