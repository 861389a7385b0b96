/* Chains for the tests of csrc/checkpoint: small whole numbers, times `unit` bytes. */
#ifndef CHAIN_FIXTURE_H
#define CHAIN_FIXTURE_H

#include "checkpoint/chain.h"
#include "test.h"

static inline uint64_t chain_up_to(uint64_t *random, uint64_t most)
{
    return test_random(random) % (most + 1);
}

/* `stages` stages with `options` ways each, whose inputs stay, for mo_chain_close(). */
static inline mo_chain chain_random(uint64_t *random, size_t stages, size_t options, uint64_t unit)
{
    mo_chain chain;
    mo_detail detail;

    if (mo_chain_open(stages, stages * options, &detail, &chain))
        TEST_FAIL("%s", detail.text);
    chain.input = (1 + chain_up_to(random, 5)) * unit;
    chain.output_grad = chain_up_to(random, 3) * unit;
    for (size_t i = 0; i < stages; i++) {
        mo_chain_stage *stage = &chain.stages[i];
        const double forward = (double)chain_up_to(random, 9);
        stage->output = (1 + chain_up_to(random, 5)) * unit;
        stage->input_grad = chain_up_to(random, 6) * unit;
        stage->put = INFINITY;
        stage->option_count = (uint32_t)options;
        stage->options = chain.options + i * options;
        for (size_t k = 0; k < options; k++)
            stage->options[k] = (mo_chain_option){
                .saved = stage->output + chain_up_to(random, 8) * unit,
                .forward_overhead = chain_up_to(random, 2) * unit,
                .backward_overhead = chain_up_to(random, 2) * unit,
                .forward = forward + (double)(k ? chain_up_to(random, 3) : 0),
                .backward = 2 * forward + (double)chain_up_to(random, 3),
                .remake = forward / 2,
            };
    }
    if (mo_chain_check(&chain, &detail))
        TEST_FAIL("%s", detail.text);
    return chain;
}

/* Has some of the inputs put away for a few seconds. */
static inline void chain_put_some(uint64_t *random, mo_chain *chain)
{
    for (size_t i = 0; i < chain->length; i++)
        if (chain_up_to(random, 1)) {
            chain->stages[i].put = (double)chain_up_to(random, 2);
            chain->stages[i].get = (double)chain_up_to(random, 4);
        }
}

/* What keeping everything takes, and more. */
static inline uint64_t chain_plenty(const mo_chain *chain)
{
    uint64_t bytes = chain->output_grad;

    for (size_t i = 0; i < chain->length; i++) {
        bytes += chain->stages[i].input_grad;
        for (size_t k = 0; k < chain->stages[i].option_count; k++)
            bytes += chain->stages[i].options[k].saved + chain->stages[i].options[k].forward_overhead +
                     chain->stages[i].options[k].backward_overhead;
    }
    return bytes;
}

#endif
