#include "checkpoint/chain.h"

#include <inttypes.h>

#include "base/hostmem.h"

mo_status mo_chain_open(size_t length, size_t options, mo_detail *detail, mo_chain *out)
{
    *out = (mo_chain){0};
    if (!length || length > MO_CHAIN_MAX_STAGES)
        return mo_fail(detail, MO_INVALID, 0, "a chain must have 1 to %d stages, not %zu",
                       MO_CHAIN_MAX_STAGES, length);
    if (options < length || options > length * MO_CHAIN_MAX_OPTIONS)
        return mo_fail(detail, MO_INVALID, 0, "%zu options in all for %zu stages: each must have 1 to %d",
                       options, length, MO_CHAIN_MAX_OPTIONS);
    out->stages = mo_host_calloc(length, sizeof *out->stages);
    out->options = mo_host_calloc(options, sizeof *out->options);
    if (!out->stages || !out->options) {
        mo_chain_close(out);
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory for a chain of %zu stages", length);
    }
    out->length = (uint32_t)length;
    return MO_OK;
}

void mo_chain_close(mo_chain *chain)
{
    mo_host_free(chain->stages);
    mo_host_free(chain->options);
    *chain = (mo_chain){0};
}

static bool is_time(double seconds)
{
    return isfinite(seconds) && seconds >= 0;
}

/* Adds without passing the limit: a sum that does is stuck above it. */
static void add_up(uint64_t *total, uint64_t bytes)
{
    *total = bytes > MO_CHAIN_MAX_BYTES || *total > MO_CHAIN_MAX_BYTES ? UINT64_MAX : *total + bytes;
}

static mo_status check_option(const mo_chain_stage *stage, size_t i, size_t k, mo_detail *detail)
{
    const mo_chain_option *option = &stage->options[k];

    if (option->saved < stage->output)
        return mo_fail(detail, MO_INVALID, 0,
                       "stage %zu, option %zu: saved_bytes %" PRIu64 " is less than output_bytes %" PRIu64
                       ": what a stage saves includes its output",
                       i, k, option->saved, stage->output);
    if (!is_time(option->forward) || !is_time(option->backward) || !is_time(option->remake))
        return mo_fail(
            detail, MO_INVALID, 0,
            "stage %zu, option %zu: forward_seconds %g, backward_seconds %g, remake_seconds %g must "
            "be finite and not negative",
            i, k, option->forward, option->backward, option->remake);
    return MO_OK;
}

mo_status mo_chain_check(const mo_chain *chain, mo_detail *detail)
{
    uint64_t total = 0;

    add_up(&total, chain->input);
    add_up(&total, chain->output_grad);
    for (size_t i = 0; i < chain->length; i++) {
        const mo_chain_stage *stage = &chain->stages[i];
        if (!stage->option_count || stage->option_count > MO_CHAIN_MAX_OPTIONS)
            return mo_fail(detail, MO_INVALID, 0, "stage %zu has %" PRIu32 " options: expected 1 to %d", i,
                           stage->option_count, MO_CHAIN_MAX_OPTIONS);
        if (!(stage->put >= 0) || !is_time(stage->get))
            return mo_fail(
                detail, MO_INVALID, 0,
                "stage %zu: put_input_seconds %g, get_input_seconds %g must be finite and not negative", i,
                stage->put, stage->get);
        add_up(&total, stage->output);
        add_up(&total, stage->input_grad);
        for (size_t k = 0; k < stage->option_count; k++) {
            mo_status status = check_option(stage, i, k, detail);
            if (status)
                return status;
            add_up(&total, stage->options[k].saved);
            add_up(&total, stage->options[k].forward_overhead);
            add_up(&total, stage->options[k].backward_overhead);
        }
    }
    if (total > MO_CHAIN_MAX_BYTES)
        return mo_fail(detail, MO_INVALID, 0,
                       "the sizes of this chain exceed 2**60 bytes together: give sizes in bytes");
    return MO_OK;
}
