#include "checkpoint/schedule.h"

#include <inttypes.h>
#include <stdbool.h>
#include <string.h>

#include "base/hostmem.h"

const char *mo_op_name(mo_op op)
{
#define NAME(name, text) text,
    static const char *const names[] = {MO_OP_LIST(NAME)};
#undef NAME
    return (unsigned)op < MO_OP_COUNT ? names[op] : "?";
}

mo_status mo_schedule_add(mo_schedule *schedule, mo_op op, uint32_t stage, uint32_t option, mo_detail *detail)
{
    if (schedule->count == schedule->capacity) {
        const size_t capacity = schedule->capacity ? 2 * schedule->capacity : 64;
        mo_action *actions = mo_host_realloc(schedule->actions, capacity * sizeof *actions);
        if (!actions)
            return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory for a schedule of %zu operations",
                           capacity);
        schedule->actions = actions;
        schedule->capacity = capacity;
    }
    schedule->actions[schedule->count++] = (mo_action){(uint8_t)op, (uint8_t)option, stage};
    return MO_OK;
}

void mo_schedule_clear(mo_schedule *schedule)
{
    mo_host_free(schedule->actions);
    *schedule = (mo_schedule){0};
}

/* ---- the state that actions change -------------------------------------------------------------------------- */

enum { NOT_SAVED = 0xFF }; /* MO_CHAIN_MAX_OPTIONS is far below */

typedef struct state {
    const mo_chain *chain;
    bool *input;    /* a[i] is there in its own right; i <= n; never of a[0], which is there always */
    bool *away;     /* a[i] is off the device */
    uint8_t *saved; /* the option of s[i], or NOT_SAVED */
    size_t next;    /* bwd next - 1 is the next one possible; the gradient is that of a[next] */
    uint64_t bytes;
} state;

static bool has_input(const state *s, size_t i)
{
    return !i || s->input[i] || s->saved[i - 1] != NOT_SAVED;
}

static void make_input(state *s, size_t i)
{
    s->input[i] = true;
    s->bytes += mo_chain_input(s->chain, i);
}

static void free_input(state *s, size_t i)
{
    if (s->input[i])
        s->bytes -= mo_chain_input(s->chain, i);
    s->input[i] = false;
}

static void free_saved(state *s, size_t i)
{
    s->bytes -= s->chain->stages[i].options[s->saved[i]].saved;
    s->saved[i] = NOT_SAVED;
}

/* Without keeping anything a stage runs in its own way. */
static uint32_t option_of(const mo_action *action)
{
    return action->op == MO_OP_FALL || action->op == MO_OP_BWD ? action->option : 0;
}

/* Why the action cannot be done now; NULL where it can. */
static const char *objection(const state *s, const mo_action *action)
{
    const size_t i = action->stage, stages = s->chain->length;

    if (action->op >= MO_OP_COUNT)
        return "there is no such operation";
    if (i >= stages && !(action->op == MO_OP_DROP_INPUT && i == stages))
        return "there is no such stage";
    if (action->op == MO_OP_DROP_INPUT)
        return !i                ? "the chain's own input belongs to its caller"
               : has_input(s, i) ? NULL
                                 : "this input does not exist";
    if (action->op == MO_OP_PUT_INPUT)
        return !mo_chain_puts(s->chain, i) ? "this input cannot be put away"
               : s->input[i]               ? NULL
                                           : "this input does not exist in its own right";
    if (action->op == MO_OP_GET_INPUT)
        return !s->away[i]       ? "this input was not put away"
               : has_input(s, i) ? "this input exists already"
                                 : NULL;
    if (option_of(action) >= s->chain->stages[i].option_count)
        return "the stage has no such option";
    if (action->op == MO_OP_DROP_SAVED)
        return s->saved[i] != NOT_SAVED ? NULL : "nothing is saved for this stage";
    if (!has_input(s, i))
        return "the input of the stage does not exist";
    if (action->op == MO_OP_BWD)
        return i + 1 != s->next                ? "the gradient of the stage's output does not exist"
               : s->saved[i] == NOT_SAVED      ? "nothing is saved for this stage"
               : s->saved[i] != action->option ? "the saved tensors were made with another option"
                                               : NULL;
    if (action->op == MO_OP_FALL)
        return s->saved[i] == NOT_SAVED ? NULL : "the stage is already saved";
    return has_input(s, i + 1) ? "the stage's output already exists" : NULL;
}

/* An action to which there is no objection; next is NULL at the end. */
static mo_moment act(state *s, const mo_action *action, const mo_action *next)
{
    const size_t i = action->stage;
    const mo_chain_option *option =
        action->op == MO_OP_DROP_INPUT ? NULL : &s->chain->stages[i].options[option_of(action)];
    mo_moment moment = {0};

    switch ((mo_op)action->op) {
    case MO_OP_FNONE:
    case MO_OP_FCK:
        make_input(s, i + 1);
        moment.during = s->bytes + option->forward_overhead;
        moment.seconds = option->forward;
        if (action->op == MO_OP_FNONE)
            free_input(s, i);
        break;
    case MO_OP_FALL:
        s->saved[i] = action->option;
        s->bytes += option->saved;
        moment.during = s->bytes + option->forward_overhead;
        moment.seconds = next && next->op == MO_OP_BWD && next->stage == i ? option->remake : option->forward;
        break;
    case MO_OP_BWD:
        s->bytes += mo_chain_grad(s->chain, i);
        moment.during = s->bytes + option->backward_overhead;
        moment.seconds = option->backward;
        s->bytes -= mo_chain_grad(s->chain, i + 1);
        free_saved(s, i);
        free_input(s, i);
        s->next = i;
        break;
    case MO_OP_DROP_INPUT:
        moment.during = s->bytes;
        free_input(s, i);
        break;
    case MO_OP_PUT_INPUT:
        moment.during = s->bytes;
        moment.seconds = s->chain->stages[i].put;
        s->away[i] = true;
        free_input(s, i);
        break;
    case MO_OP_GET_INPUT:
        s->away[i] = false;
        make_input(s, i);
        moment.during = s->bytes;
        moment.seconds = s->chain->stages[i].get;
        break;
    default: /* MO_OP_DROP_SAVED */
        moment.during = s->bytes;
        free_saved(s, i);
    }
    moment.after = s->bytes;
    return moment;
}

static mo_status replay(state *s, const mo_action *actions, size_t count, mo_detail *detail,
                        mo_moment *moments, mo_replay_totals *out)
{
    mo_replay_totals totals = {.peak = s->bytes};

    for (size_t at = 0; at < count; at++) {
        const mo_action *action = &actions[at];
        const char *wrong = objection(s, action);
        if (wrong)
            return mo_fail(detail, MO_INVALID, 0, "operation %zu, %s %" PRIu32 ", cannot be done: %s", at,
                           mo_op_name(action->op), action->stage, wrong);
        const mo_moment moment = act(s, action, at + 1 < count ? action + 1 : NULL);
        totals.seconds += moment.seconds;
        if (moment.during > totals.peak) {
            totals.peak = moment.during;
            totals.peak_at = at;
        }
        if (moments)
            moments[at] = moment;
    }
    if (s->next)
        return mo_fail(detail, MO_INVALID, 0, "the schedule ends before bwd %zu", s->next - 1);
    *out = totals;
    return MO_OK;
}

mo_status mo_schedule_replay(const mo_chain *chain, const mo_action *actions, size_t count, mo_detail *detail,
                             mo_moment *moments, mo_replay_totals *out)
{
    const size_t stages = chain->length;
    state s = {.chain = chain, .next = stages, .bytes = chain->output_grad};
    mo_status status = MO_OK;

    s.input = mo_host_calloc(stages + 1, sizeof *s.input);
    s.away = mo_host_calloc(stages, sizeof *s.away);
    s.saved = mo_host_alloc(stages * sizeof *s.saved);
    if (!s.input || !s.away || !s.saved) {
        status =
            mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory to replay a chain of %zu stages", stages);
        goto fail;
    }
    memset(s.saved, NOT_SAVED, stages * sizeof *s.saved);
    status = replay(&s, actions, count, detail, moments, out);
fail:
    mo_host_free(s.input);
    mo_host_free(s.away);
    mo_host_free(s.saved);
    return status;
}
